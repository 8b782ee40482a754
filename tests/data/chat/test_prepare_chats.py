"""`prepare --format chat`: what is written is what was said, once, in one split, or is named."""

import dataclasses
import json

import pytest
from tokenizers import Tokenizer

from data.chat.messages import canonical
from data.chat.parse import parse
from data.chat.tokens import chat_tokenizer
from data.chat.tool_traces import tool_traces
from data.errors import RequestError
from data.prepare.request import PrepareRequest
from data.prepare.run import existing, prepare
from data.prepared import TOKENIZER, load_prepared
from data.source import RowSource
from deepseek_jax.layout import decoder_slots_of
from train import prepare as program
from train.errors import UsageError

CHATS = 30


def request_of(**changes):
  fixed = {"format": "chat", "source": f"tools:5:{CHATS}", "tokenizer": "train:600"}
  fixed |= {"slots": 4000, "window": 8, "validation_share": 0.3}
  return PrepareRequest(**fixed | changes)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  return prepare(request_of(), tmp_path_factory.mktemp("chats"))


def rows_of(prepared, split):
  source = RowSource(prepared, split, replace=False, max_damaged=0)
  return [source[number].documents for number in range(len(source))]


def conversations_of(prepared, split):
  return [one for row in rows_of(prepared, split) for one in row]


def read_back(prepared, split):
  encoder = chat_tokenizer(Tokenizer.from_file(str(prepared.folder / TOKENIZER)))
  return [parse(encoder.decode(one.tokens)) for one in conversations_of(prepared, split)]


def trace(*contents, **more):
  """A JSON line: users and assistants in turn."""
  roles = ["user", "assistant"] * len(contents)
  messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
  return json.dumps({"messages": messages} | more)


def test_every_chat_is_written_as_it_was_and_into_one_split(prepared):
  parts = [read_back(prepared, name) for name in ("train", "validation")]
  assert all(len(part) > 3 for part in parts)
  written = sorted(map(str, parts[0] + parts[1]))
  assert written == sorted(str(canonical(chat)) for chat in tool_traces(5, CHATS))
  assert len(set(written)) == CHATS


def test_metadata_counts_what_the_rows_hold(prepared):
  split, whole = prepared.train, conversations_of(prepared, "train")
  assert prepared.contents == "chat"
  assert all(one.problems() == [] for one in whole)
  assert split.documents == len(whole)
  assert split.tokens == sum(len(one.tokens) for one in whole)
  assert split.targets == sum(one.loss_mask.sum() for one in whole)
  assert 0.1 * split.tokens < split.targets < 0.6 * split.tokens
  assert load_prepared(prepared.folder) == prepared


def test_a_step_with_replay_must_have_the_room_that_rows_were_packed_for(prepared):
  rows = [row for name in ("train", "validation") for row in rows_of(prepared, name)]
  taken = max(sum(decoder_slots_of(one.turns, 8) for one in row) for row in rows)
  assert prepared.decoder_slots == taken
  assert prepared.replay_problems(decoder_slots=taken, window=8) == []
  slots, window = prepared.replay_problems(decoder_slots=taken - 1, window=9)
  assert f"is {taken - 1}, but" in slots and f"take up to {taken};" in slots
  assert "prepare them again with --window 9" in window
  text = dataclasses.replace(prepared, contents="text", decoder_slots=None, window=None)
  (problem,) = text.replay_problems(decoder_slots=taken, window=8)
  assert problem == f"Replay is for chats, but {prepared.folder} holds text."


def test_rows_keep_to_the_decoder_slots_that_are_asked_for(tmp_path, prepared):
  limit = prepared.decoder_slots // 2
  fewer = prepare(request_of(decoder_slots=limit), tmp_path)
  assert fewer.decoder_slots <= limit
  assert fewer.train.targets == prepared.train.targets


def test_the_same_request_does_nothing_and_damage_is_seen(prepared, tmp_path):
  assert existing(request_of(), prepared.folder) == prepared
  with pytest.raises(RequestError, match=r"window=8.*window=9 is asked for"):
    existing(request_of(window=9), prepared.folder)
  again = prepare(request_of(), tmp_path)
  assert again.fingerprint == prepared.fingerprint
  (tmp_path / again.train.shards[0].name).write_bytes(b"")
  with pytest.raises(RequestError, match="is missing or has changed"):
    existing(request_of(), tmp_path)


def test_what_a_killed_preparation_left_is_done_again(prepared, tmp_path):
  (tmp_path / ".unfinished").touch()
  (tmp_path / "train-00007-of-00009.array_record").write_bytes(b"half")
  assert prepare(request_of(), tmp_path).fingerprint == prepared.fingerprint
  assert not list(tmp_path.glob("*-of-00009*"))


def test_parts_of_a_cut_chat_stay_in_its_split(tmp_path):
  said = lambda chat: [
    f"{chat} {'says' if n % 2 else 'asks'} {n} " + "more " * 9 for n in range(12)
  ]
  source = tmp_path / "traces.jsonl"
  source.write_text("\n".join(trace(*said(chat)) for chat in range(20)))
  chats = prepare(request_of(source=f"jsonl:{source}", slots=60), tmp_path / "out")
  first_words = []
  for name in ("train", "validation"):
    parts = read_back(chats, name)
    first_words.append({part.messages[0].content.split()[0] for part in parts})
    assert len(parts) > 2 * len(first_words[-1])
  assert first_words[0].isdisjoint(first_words[1])
  assert len(first_words[0] | first_words[1]) == 20


def test_what_is_left_out_is_counted_and_named(tmp_path, capsys):
  lines = [
    trace("a", "b"),
    trace("c", "012" * 500, "e", "f"),
    trace("g", "h").replace('"content": "h"', '"content": "h", "loss": false'),
    trace("a", "b"),
  ]
  source = tmp_path / "traces.jsonl"
  source.write_text("\n".join(lines))
  arguments = ["--format", "chat", "--source", f"jsonl:{source}", "--out", str(tmp_path / "out")]
  program.main([*arguments, "--tokenizer", "train:300", "--validation-share", "0"])
  prepared = load_prepared(tmp_path / "out")
  kept = {reason: count for reason, count in prepared.dropped.items() if count}
  assert kept == {"duplicate": 1, "without a learned answer": 1, "answers too long for a row": 1}
  assert sorted(name.split(":")[1].split()[0] for name in prepared.dropped_names) == ["2", "3"]
  printed = capsys.readouterr().out
  assert "traces.jsonl:2 answer 1: needs 506 slots of 256" in printed
  assert "traces.jsonl:3: no answer is learned" in printed
  assert [len(one.turns) for one in conversations_of(prepared, "train")] == [1, 1]


def test_bad_lines_are_all_named_with_file_line_and_reason(tmp_path):
  source = tmp_path / "traces.jsonl"
  bad = ["{", trace("a", "b", extra=1), trace("a"), trace("a", "b", reasoning_effort=101)]
  source.write_text("\n".join([trace("a", "b"), *bad, "", '{"messages": [{"role": "tool"}]}']))
  arguments = ["--format", "chat", "--source", f"jsonl:{source}", "--out", str(tmp_path / "out")]
  with pytest.raises(UsageError) as caught:
    program.main(arguments)
  begins = [f"Line {number} of {source} " for number in (2, 3, 5, 7)]
  reasons = [
    "is not JSON",
    "has the unknown key 'extra'",
    "has the reasoning_effort 101",
    "message",
  ]
  for problem, begin, reason in zip(caught.value.problems, begins, reasons, strict=True):
    assert problem.startswith(begin + reason)
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ({"format": "chats"}, "--format is 'chats', accepted are text, chat."),
    ({"window": 0}, "--window must be at least 1, got 0."),
    ({"tokenizer": "train:264"}, "265 (every byte and 9 special tokens)"),
  ],
)
def test_requests_that_cannot_be_done_say_why(changes, expected):
  (problem,) = request_of(**changes).problems()
  assert expected in problem


@pytest.mark.parametrize("source", ["python-stdlib", "tools:x", "jsonl:", "tools"])
def test_other_sources_are_refused(source, tmp_path):
  with pytest.raises(RequestError, match=r"accepted with --format chat are jsonl:PATH, tools:SEED"):
    prepare(request_of(source=source), tmp_path)


def test_text_and_chats_share_a_tokenizer_that_was_trained_with_marks(text_folder, tmp_path):
  text = {"source": f"folder:{text_folder}", "tokenizer": "train:400", "validation_share": 0.2}
  without = prepare(PrepareRequest(**text), tmp_path / "without")
  shared = prepare(PrepareRequest(**text, chat_tokens=True), tmp_path / "with")
  chats = prepare(request_of(tokenizer=str(shared.folder / TOKENIZER)), tmp_path / "chats")
  assert chats.tokenizer_sha256 == shared.tokenizer_sha256
  assert chats.vocab == shared.vocab
  refused = request_of(tokenizer=str(without.folder / TOKENIZER))
  with pytest.raises(RequestError, match="lacks tokens of the chat format: <｜System｜>, "):
    prepare(refused, tmp_path / "refused")
  assert not (tmp_path / "refused").exists()


def test_rows_that_hold_no_answer_are_no_preparation(tmp_path):
  with pytest.raises(
    RequestError, match=r"No training answer is learned: tools:5#\d+ answer 1: needs"
  ):
    prepare(request_of(slots=50), tmp_path)
