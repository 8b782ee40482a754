"""Replay in the pipeline: drawn by row and epoch alone, in steps of two shapes, rows of two sizes.

Legend: S encoder slots, T decoder slots, W window.
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from data.config import DataConfig, ReplayConfig
from data.conversation import Conversation
from data.errors import DataError
from data.pipeline import Batch, Pipeline, open_pipeline, open_validation
from data.prepare.shards import OPTIONS
from data.prepared import Shard, file_sha256, save_prepared
from data.replay import Place, draw_hits, is_replayed, pack_conversations
from data.rows import decode_row, encode_conversations, token_dtype
from deepseek_jax.layout import NO_HIT, decoder_slots_of

S, T, W, HITS = 128, 72, 8, 3
REPLAY = ReplayConfig(
  share=0.5, decoder_slots=T, hit_share=0.75, max_hits=HITS, hit_multiple=2, border_share=0.5
)


def conversation(rng, vocab=200) -> Conversation:
  turns, end = [], 0
  for _ in range(rng.integers(1, 4)):
    begin = end + int(rng.integers(1, 20))
    end = begin + int(rng.integers(1, 6))
    turns.append((begin, end))
  mask = np.zeros(end + int(rng.integers(0, 3)), bool)
  for begin, last in turns:
    mask[begin:last] = rng.random(last - begin) < 0.9
  return Conversation(rng.integers(0, vocab, len(mask)).astype(np.int32), mask, tuple(turns))


def conversations(count=200, seed=0) -> list[Conversation]:
  rng = np.random.default_rng(seed)
  return [conversation(rng) for _ in range(count)]


def packed(count=200) -> list[list[Conversation]]:
  return list(pack_conversations(conversations(count), slots=S, decoder_slots=T, window=W))


@pytest.fixture(scope="module")
def folder(prepared, tmp_path_factory):
  """A preparation whose rows are conversations."""
  path = shutil.copytree(prepared.folder, tmp_path_factory.mktemp("chats") / "rows")
  changed = {}
  for split, rows in (("train", packed()), ("validation", packed(20))):
    file = path / prepared.split(split).shards[0].name
    writer = ArrayRecordWriter(str(file), OPTIONS)
    for row in rows:
      writer.write(encode_conversations(row, prepared.dtype))
    writer.close()
    shard = Shard(name=file.name, rows=len(rows), sha256=file_sha256(file))
    changed[split] = dataclasses.replace(prepared.split(split), rows=len(rows), shards=(shard,))
  save_prepared(dataclasses.replace(prepared, folder=path, slots=S, **changed))
  return str(path)


@pytest.fixture(scope="module")
def config(folder):
  def build(**replay) -> DataConfig:
    changed = dataclasses.replace(REPLAY, **replay)
    return DataConfig(paths=(folder,), slots=S, batch_rows=4, shuffle_seed=3, replay=changed)

  return build


def open_hosts(cfg: DataConfig, hosts: int) -> list[Pipeline]:
  return [
    open_pipeline(cfg, ratios=(1, 2), engram=None, host=h, hosts=hosts, window=W)
    for h in range(hosts)
  ]


def global_batches(pipelines: list[Pipeline], steps: int) -> list[list[np.ndarray]]:
  """Everything in the layouts of some steps, rows in the order of the global batches."""
  found = []
  for _ in range(steps):
    parts = [flat(next(pipeline)) for pipeline in pipelines]
    woven = [np.stack(arrays, axis=1) for arrays in zip(*parts, strict=True)]
    found.append([array.reshape(4, *array.shape[2:]) for array in woven])
  return found


def flat(batch: Batch) -> list[np.ndarray]:
  fields = [v if isinstance(v, dict) else {0: v} for v in batch.layout]
  return [array for field in fields for _, array in sorted(field.items())]


def assert_equal(got, want):
  for ours, theirs in zip(got, want, strict=True):
    for a, b in zip(ours, theirs, strict=True):
      np.testing.assert_array_equal(a, b)


def is_one_of_replay(batch: Batch) -> bool:
  return batch.layout.decoder_slots.shape[1] == T


def test_rows_of_conversations_survive_the_way_to_disk():
  rows = [*packed(30), [], [Conversation(np.arange(5), np.zeros(5, bool), ())]]
  for vocab in (200, 2**16 + 1):
    dtype = token_dtype(vocab)
    for row in rows:
      read = decode_row(encode_conversations(row, dtype), dtype)
      assert len(read) == len(row)
      for ours, theirs in zip(read, row, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.loss_mask, theirs.loss_mask)
        assert ours.turns == theirs.turns and ours.tokens.dtype == np.int32


def test_packing_fills_rows_that_hold_every_conversation_once_and_fit_both_ways():
  rows = packed(500)
  for row in rows:
    assert sum(len(one.tokens) for one in row) <= S
    assert sum(decoder_slots_of(one.turns, W) for one in row) <= T
  key = lambda one: one.tokens.tobytes()
  assert sorted(key(one) for row in rows for one in row) == sorted(map(key, conversations(500)))
  used = [sum(len(one.tokens) for one in row) for row in rows]
  needed = [sum(decoder_slots_of(one.turns, W) for one in row) for row in rows]
  assert max(np.sum(used) / (S * len(rows)), np.sum(needed) / (T * len(rows))) > 0.9


def test_a_conversation_that_fits_no_row_is_refused():
  with pytest.raises(ValueError, match="conversation 0 needs .* a row has 128 and 3"):
    list(pack_conversations(conversations(1), slots=S, decoder_slots=3, window=W))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1 / 3, 1.0])
def test_replay_has_its_share_of_the_steps_as_evenly_as_can_be(share):
  kinds = [is_replayed(step, share) for step in range(600)]
  counts = np.cumsum(kinds)
  assert np.all(np.abs(counts - share * np.arange(1, 601)) < 1 + 1e-9)
  assert counts[-1] == round(600 * share)


def drawn(place=(0, 0, 0), seed=0, turns=None, **changes) -> list[list[int]]:
  turns = [one.turns for one in conversations(5)] if turns is None else turns
  return draw_hits(turns, dataclasses.replace(REPLAY, **changes), W, Place(*place), seed)


def test_hits_depend_on_row_epoch_and_seed_and_on_nothing_else():
  one = drawn((0, 1, 2), 5, hit_share=1.0)
  assert one == drawn((0, 1, 2), 5, hit_share=1.0)
  for place, seed in (((1, 1, 2), 5), ((0, 2, 2), 5), ((0, 1, 3), 5), ((0, 1, 2), 6)):
    assert drawn(place, seed, hit_share=1.0) != one


def test_hits_lie_between_responses_and_are_as_many_as_wanted():
  turns = [one.turns for one in conversations(5)]
  rows_with_hits, found = 0, []
  for record in range(400):
    hits = drawn((0, 0, record))
    count = sum(hit != NO_HIT for own in hits for hit in own)
    assert count <= HITS
    rows_with_hits += count > 0
    for own, places in zip(turns, hits, strict=True):
      after = 0
      for (begin, end), hit in zip(own, places, strict=True):
        if hit != NO_HIT:
          first = max(after, W + 1) + max(after, W + 1) % 2
          assert max(after, W + 1) <= hit < begin and hit % 2 == 0
          found.append((hit == first, hit))
        after = end
  assert 0.7 < rows_with_hits / 400 < 0.8
  assert len({hit for _, hit in found}) > 10
  assert drawn(hit_share=0.0) == [[NO_HIT] * len(own) for own in turns]


def test_hits_at_the_border_follow_the_response_before():
  turns = [((20, 30), (50, 60))]
  for record in range(20):
    assert drawn((0, 0, record), turns=turns, hit_share=1.0, border_share=1.0) == [[10, 30]]


def test_a_turn_without_room_for_a_hit_has_none():
  assert drawn(turns=[((W + 1, 20), (21, 25))], hit_share=1.0, hit_multiple=4) == [[0, 20]]
  assert drawn(turns=[((W + 1, 20), (20, 25))], hit_share=1.0) == [[NO_HIT, NO_HIT]]


def test_steps_alternate_between_two_shapes(config):
  pipeline = open_hosts(config(), 1)[0]
  batches = [next(pipeline) for _ in range(6)]
  assert [is_one_of_replay(batch) for batch in batches] == [False, True] * 3
  for batch in batches:
    replayed = is_one_of_replay(batch)
    assert batch.layout.tokens.shape == (4, S + HITS * W if replayed else S)
    assert batch.layout.targets.shape == (4, T if replayed else S)
    assert batch.layout.is_copy.any() == replayed


def test_every_number_of_hosts_lays_out_the_same_batches(config):
  one = global_batches(open_hosts(config(), 1), 12)
  for hosts in (2, 4):
    assert_equal(global_batches(open_hosts(config(), hosts), 12), one)


@pytest.mark.parametrize("hosts", [1, 4])
def test_a_restored_run_draws_what_the_saved_one_would_have(config, hosts):
  whole = global_batches(open_hosts(config(), 1), 16)
  started = open_hosts(config(), 2)
  first = global_batches(started, 7)
  saved = json.dumps(started[0].state())
  resumed = open_hosts(config(), hosts)
  for pipeline in resumed:
    next(pipeline)
    pipeline.restore(json.loads(saved))
  assert_equal(first + global_batches(resumed, 9), whole)


def test_another_epoch_draws_other_hits_for_the_same_rows(config):
  cfg = config(share=1.0, hit_share=1.0)
  pipeline = open_hosts(dataclasses.replace(cfg, batch_rows=1), 1)[0]
  rows = len(packed())
  epochs = [{}, {}]
  for epoch in epochs:
    for _ in range(rows):
      batch = next(pipeline)
      epoch[batch.records[0]] = batch.layout.positions[0].tobytes()
  assert epochs[0].keys() == epochs[1].keys()
  assert np.mean([epochs[0][name] != epochs[1][name] for name in epochs[0]]) > 0.5


def test_both_shapes_learn_the_same_tokens(config):
  learned = []
  for share in (0.0, 1.0):
    layout = next(open_hosts(config(share=share), 1)[0]).layout
    own = layout.weights > 0
    learned.append([layout.targets[b][own[b]].tolist() for b in range(4)])
  assert learned[0] == learned[1] and all(learned[0])


def test_without_a_window_every_step_is_exact(config):
  pipeline = open_pipeline(config(share=1.0), ratios=(), engram=None)
  assert not any(is_one_of_replay(next(pipeline)) for _ in range(3))


def test_a_position_with_other_replay_is_refused(config):
  state = open_hosts(config(), 1)[0].state()
  with pytest.raises(DataError, match="saved position in the data was made with replay ="):
    open_hosts(config(hit_share=0.1), 1)[0].restore(json.loads(json.dumps(state)))
  with pytest.raises(DataError, match="replay = "):
    open_pipeline(config(), ratios=(), engram=None, window=2 * W).restore(state)


def test_text_has_no_turns_and_is_refused(config_of):
  cfg = config_of(replay=dataclasses.replace(REPLAY, share=1.0))
  with pytest.raises(DataError, match=r"train-00000.*:\d+ holds no conversations"):
    next(open_hosts(cfg, 1)[0])


def test_rows_that_were_packed_for_more_decoder_slots_are_named(config):
  with pytest.raises(DataError, match=r":\d+ needs \d+ decoder slots, .* is 20; set it to"):
    next(open_hosts(config(decoder_slots=20, share=1.0), 1)[0])


def test_validation_is_exact_or_replayed_and_each_pass_draws_the_same(config):
  held_out = lambda **o: open_validation(config(), ratios=(1, 2), engram=None, window=W, **o)
  assert not any(is_one_of_replay(batch) for batch in held_out())
  validation = held_out(replayed=True)
  passes = [[flat(batch) for batch in validation] for _ in range(2)]
  assert all(is_one_of_replay(batch) for batch in validation)
  assert_equal(*passes)


def test_a_batch_says_how_full_it_is(config):
  exact, replayed = (next(open_hosts(config(share=share), 1)[0]) for share in (0.0, 1.0))
  assert exact.packing["replay_copies"] == 0
  for batch in (exact, replayed):
    layout = batch.layout
    assert batch.packing["encoder_fill"] == (layout.document >= 0).sum() / layout.document.size
    assert batch.packing["decoder_fill"] == (layout.decoder_slots >= 0).mean()
  assert 0 < replayed.packing["replay_copies"] <= HITS * W / (S + HITS * W)


def test_values_that_cannot_be_are_all_named():
  cfg = ReplayConfig(share=1.5, hit_share=-1, border_share=2, decoder_slots=0, hit_multiple=0)
  assert len(cfg.problems()) == 5
  assert "data.replay.share must lie in 0 ... 1, got 1.5." in cfg.problems()
  assert DataConfig(replay=cfg).value_problems() == cfg.problems()
