r"""Raw text or chats -> tokenizer, packed rows and metadata in one folder.

  python -m train prepare --source python-stdlib --tokenizer train:1024 --out .data/stdlib
  python -m train prepare --format chat --source tools:0 --tokenizer train:1024 --slots 1024 \
    --out .data/tools

Chats are JSON lines with messages, tool calls and results (data/chat/record.py says which keys),
or a generated set of tool use, tools:SEED. Only the assistant's answers are learned.

The folder is complete when it has a metadata.json. Text is held in memory: prepare a corpus that
does not fit as several folders with one tokenizer.json, and mix them in the configuration.
"""

import argparse
import difflib
import time
from collections.abc import Sequence

from data.errors import DataError, RequestError
from data.prepare.request import FORMATS, TOKENIZERS, PrepareRequest
from data.prepare.run import existing, prepare
from data.prepare.sources import KINDS
from data.prepare.traces import CHAT_KINDS
from data.prepared import Prepared, Split
from deepseek_jax.storage_path import StoragePath, storage_path, url_problem
from train.errors import Exit, UsageError

NUMBERS = {
  "slots": int,
  "decoder_slots": int,
  "window": int,
  "validation_share": float,
  "max_megabytes": float,
}
NAMES_SHOWN = 20  # of what was left out; metadata.json has all of them


def main(argv: Sequence[str]) -> int:
  """Runs the verb. Returns its exit code; raises UsageError with every problem."""
  request, folder = _parse(argv)
  began = time.monotonic()
  try:
    if prepared := existing(request, folder):
      print(f"{folder} already holds exactly this; nothing to do.")
    else:
      prepared = prepare(request, folder)
      print(f"Prepared {folder} in {time.monotonic() - began:.1f} s.")
  except RequestError as error:
    raise UsageError(error.problems) from None
  except DataError as error:
    raise UsageError([str(error)]) from None
  except OSError as error:
    where = error.filename or folder
    raise UsageError([f"{where} cannot be used: {error.strerror or error}."]) from None
  print(_summary(prepared))
  return Exit.DONE


class _Parser(argparse.ArgumentParser):
  def error(self, message: str):
    raise UsageError([f"prepare: {message}."])


def _parse(argv: Sequence[str]) -> tuple[PrepareRequest, StoragePath]:
  parser = _parser()
  known, unknown = parser.parse_known_args(argv)
  arguments, problems = vars(known), []
  options = [f"--{name.replace('_', '-')}" for name in arguments]
  for word in [word for word in unknown if word.startswith("-")] or unknown:
    near = difflib.get_close_matches(word.partition("=")[0], options, n=1)
    hint = f"the nearest is {near[0]}" if near else f"known are {', '.join(options)}"
    problems.append(f"{word} is not an argument of prepare; {hint}.")
  for name, kind in NUMBERS.items():
    text = arguments[name]
    try:
      arguments[name] = None if text is None else kind(text)
    except ValueError:
      wanted = {int: "an integer", float: "a number"}[kind]
      problems.append(f"--{name.replace('_', '-')} takes {wanted}, got {text!r}.")
      arguments[name] = getattr(PrepareRequest(), name)
  if not arguments["out"]:
    problems.append("--out needs a folder.")
  out = arguments.pop("out")
  if problem := url_problem("--out", out):
    problems.append(problem)
  request = PrepareRequest(**arguments)
  if problems := problems + request.problems():
    raise UsageError(problems)
  return request, storage_path(out)


def _parser() -> argparse.ArgumentParser:
  default = PrepareRequest()
  parser = _Parser(
    prog="python -m train prepare",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add("--format", default=default.format, help=f"{' or '.join(FORMATS)} (default text)")
  text_kinds = f"of text {KINDS} (default {default.source})"
  add("--source", default=default.source, help=f"{text_kinds}; of chats {CHAT_KINDS}")
  add("--text-field", default=default.text_field, help="key or column of JSONL and Parquet")
  add("--out", required=True, metavar="DIR", help="folder to write; s3:// and gs:// too")
  add(
    "--tokenizer",
    default=default.tokenizer,
    help=f"{TOKENIZERS} (default {default.tokenizer})",
  )
  add("--chat-tokens", action="store_true", help="train the tokenizer with those of chats")
  for role in ("bos", "eos", "pad"):
    add(f"--{role}-token", metavar="NAME", help=f"the {role} token of a given tokenizer")
  add("--slots", default=default.slots, metavar="N", help=f"tokens in a row ({default.slots})")
  add("--decoder-slots", metavar="N", help="of a row of chats in a step with replay (no limit)")
  add("--window", default=default.window, metavar="N", help="the model's, for the same (128)")
  add(
    "--validation-share",
    default=default.validation_share,
    metavar="X",
    help=f"share of the documents that is held out ({default.validation_share})",
  )
  add("--max-megabytes", metavar="X", help="stop after so much text, in 10^6 bytes")
  return parser


def _summary(prepared: Prepared) -> str:
  dropped = ", ".join(f"{count} {why}" for why, count in prepared.dropped.items() if count)
  names, more = prepared.dropped_names, len(prepared.dropped_names) - NAMES_SHOWN
  line, room = _line, []
  if prepared.contents == "chat":
    line = _chat_line
    room = [f"a row takes up to {prepared.decoder_slots} decoder slots with replay"]
  return "\n".join(
    [
      line("train", prepared.train),
      line("validation", prepared.validation),
      *room,
      f"left out: {dropped or 'nothing'}",
      *(f"  {name}" for name in names[:NAMES_SHOWN]),
      *([f"  and {more} more, all of them in metadata.json"] if more > 0 else []),
      f"vocabulary {prepared.vocab}, {prepared.compressed_classes} compressed classes",
    ]
  )


def _line(name: str, split: Split) -> str:
  return (
    f"{name}: {split.documents} documents, {split.tokens} tokens in {split.rows} rows, "
    f"{split.bytes_per_token:.3f} bytes per token, padding {split.padding_fraction:.2%}"
  )


def _chat_line(name: str, split: Split) -> str:
  return (
    f"{name}: {split.documents} conversations, {split.tokens} tokens in {split.rows} rows, "
    f"{split.targets} of them learned, padding {split.padding_fraction:.2%}"
  )
