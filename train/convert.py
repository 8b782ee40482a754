r"""Released checkpoints in and out.

python -m train convert --checkpoint RELEASED --output RUN --format checkpoint
python -m train convert --checkpoint RUN --output DIR --format released --dtype released \
  --carry-from RELEASED
"""

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from deepseek_jax.checkpoint import CheckpointError
from deepseek_jax.checkpoint.released_folder import is_released
from deepseek_jax.storage_path import is_remote
from train import processes, settings
from train.errors import Exit, UsageError
from train.export_released import NOTHING, export_released
from train.import_released import Resize, import_released
from train.pretrain import join_and_find_devices

USAGE = """python -m train convert --checkpoint FROM --output TO --format FORMAT [--dtype DTYPE]
                        [--carry-from RELEASED] [--resize-vocab N] [--tokenizer FILE]
                        [--config.KEY=VALUE ...]

--checkpoint  a released checkpoint (config.json and *.safetensors), or a run folder or one of its
              steps
--output      a folder that does not exist yet
--format      checkpoint: a run folder with step 0, to start from; released: safetensors files with
              their index and config.json
--dtype       with --format released: released (FP8 and FP4, as the release stores it) or bfloat16
--carry-from  with --format released: a released checkpoint whose vision and drafter tensors are
              written too, as they are, or none; a run that began with such a release needs it
--resize-vocab  with --format checkpoint: rows of embedding and head, if not those of the release;
              new ones are the mean of the old ones
--tokenizer   with --resize-vocab: the tokenizer.json that these rows are for, to be checked
--config.KEY  with --format checkpoint: of the run that starts there, such as mesh.expert"""
OF_IMPORTS, OF_EXPORTS = ("--resize-vocab", "--tokenizer"), ("--dtype", "--carry-from")
ARGUMENTS = ("--checkpoint", "--output", "--format", *OF_EXPORTS, *OF_IMPORTS)
FORMATS, DTYPES = ("checkpoint", "released"), ("released", "bfloat16")


class Request(NamedTuple):
  checkpoint: str
  output: pathlib.Path
  format: str
  dtype: str  # "" without --dtype
  carry_from: str  # "" without --carry-from
  resize: Resize | None
  overrides: dict[str, str]


def main(argv: Sequence[str]) -> int:
  """Converts. Returns the exit code; raises UsageError with every problem of the arguments."""
  if any(word in ("--help", "-h") for word in argv):
    print(USAGE)
    return Exit.DONE
  devices = join_and_find_devices()
  with processes.agreed():
    request = parse(argv)
  try:
    if request.format == "checkpoint":
      source = pathlib.Path(request.checkpoint).absolute()
      import_released(source, request.output, request.overrides, devices, request.resize)
    else:
      export_released(request.checkpoint, request.output, request.dtype, request.carry_from)
    return Exit.DONE
  except CheckpointError as error:
    if jax.process_count() > 1:  # the others may wait for this one
      processes.leave(processes.signed(str(error)), Exit.CHECK_FAILED)
    processes.complain(str(error))
    return Exit.CHECK_FAILED


def parse(argv: Sequence[str]) -> Request:
  """What the arguments mean. Raises UsageError with every problem."""
  values, overrides, problems, _ = settings.split(argv, ARGUMENTS, switches=())
  problems += [f"{name} is missing." for name in ARGUMENTS[:3] if name not in values]
  for name, accepted in (("--format", FORMATS), ("--dtype", DTYPES)):
    if name in values and values[name] not in accepted:
      problems.append(f"{name} must be one of {', '.join(accepted)}, got {values[name]}.")
  exporting = values.get("--format") == "released"
  if exporting and "--dtype" not in values:
    problems.append(f"--format released needs --dtype, one of {', '.join(DTYPES)}.")
  if exporting and overrides:
    problems.append("--config.KEY goes with --format checkpoint.")
  if not exporting and "--dtype" in values:
    problems.append("--dtype goes with --format released; a checkpoint of ours is float32.")
  if not exporting and "--carry-from" in values:
    problems.append("--carry-from goes with --format released.")
  problems += _resize_problems(values, exporting=exporting)
  if problems:
    raise UsageError(problems)
  source, output = values["--checkpoint"], values["--output"]
  carry_from = values.get("--carry-from", "")
  if carry_from not in ("", NOTHING) and not is_released(pathlib.Path(carry_from)):
    problems.append(f"--carry-from {carry_from} is no released checkpoint.")
  if not exporting and is_remote(source):
    problems.append(f"--checkpoint {source} must be a local folder.")
  elif not is_remote(source) and not pathlib.Path(source).is_dir():
    problems.append(f"--checkpoint {source} is not a folder.")
  elif not is_remote(source) and exporting == is_released(pathlib.Path(source)):
    kind = "a released checkpoint already" if exporting else "no released checkpoint"
    problems.append(f"--checkpoint {source} is {kind}.")
  if is_remote(output):
    problems.append(f"--output {output} must be a local folder.")
  elif os.path.lexists(output):
    problems.append(f"--output {output} exists; name a folder that does not.")
  if problems:
    raise UsageError(problems)
  target = pathlib.Path(output).absolute()
  dtype = values.get("--dtype", "")
  resize = None
  if "--resize-vocab" in values:
    resize = Resize(int(values["--resize-vocab"]), values.get("--tokenizer"))
  return Request(source, target, values["--format"], dtype, carry_from, resize, overrides)


def _resize_problems(values: Mapping[str, str], *, exporting: bool) -> Iterator[str]:
  given = [name for name in OF_IMPORTS if name in values]
  if exporting and given:
    yield f"{' and '.join(given)} goes with --format checkpoint."
  if given == ["--tokenizer"]:
    yield "--tokenizer goes with --resize-vocab."
  vocab = values.get("--resize-vocab", "1")
  if not vocab.isdecimal() or int(vocab) < 1:
    yield f"--resize-vocab must be a number of tokens, got {vocab}."
