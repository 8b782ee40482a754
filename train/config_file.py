"""Loads a configuration file: a Python file with `get_config()`, or `get_config(variant)`."""

import importlib.util
import inspect
import pathlib
import re
import traceback
import types

import ml_collections

from train.errors import UsageError
from train.keys import unknown_key

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def load(argument: str) -> ml_collections.ConfigDict:
  """The ConfigDict of FILE.py[:variant].

  FILE is looked up from the current folder, then from the repository's.
  Raises: UsageError with one sentence when it is missing, fails, or knows no such variant.
  """
  name, colon, variant = argument.partition(".py:")
  path = _find(name + ".py" if colon else argument)
  module = _run(path, lambda: _module(path))
  if not callable(getattr(module, "get_config", None)):
    raise UsageError([f"{path} has no function get_config()."])
  variants = bool(inspect.signature(module.get_config).parameters)
  if variant and not variants:
    raise UsageError([f"{path} has no variants, got {variant!r}."])
  config = _run(path, lambda: module.get_config(*[variant] * bool(variant)))
  if not isinstance(config, ml_collections.ConfigDict):
    raise UsageError([f"{path}: get_config() must return a ConfigDict, got {config!r}."])
  return config


def _find(name: str) -> pathlib.Path:
  if not name.endswith(".py"):
    raise UsageError(
      [f"--config must be a Python file (FILE.py or FILE.py:variant), got {name!r}."]
    )
  for folder in (pathlib.Path(), REPOSITORY):
    if (folder / name).is_file():
      return folder / name
  known = sorted(p.name for p in (REPOSITORY / "configs").glob("*.py"))
  known = [name for name in known if name not in ("base.py", "schema.py")]
  raise UsageError(
    [f"--config names {name}, which does not exist; configs/ has {', '.join(known)}."]
  )


def _module(path: pathlib.Path) -> types.ModuleType:
  spec = importlib.util.spec_from_file_location("config_file", path)
  assert spec and spec.loader  # the path ends in .py
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _run(path: pathlib.Path, program):
  """Runs a part of the file; whatever it raises becomes one sentence, for the file is input."""
  try:
    return program()
  except Exception as error:
    raise UsageError([_sentence(path, error)]) from error


def _sentence(path: pathlib.Path, error: Exception) -> str:
  frames = traceback.extract_tb(error.__traceback__)
  lines = [frame.lineno for frame in frames if pathlib.Path(frame.filename) == path.absolute()]
  line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
  where = f"{path}, line {line}" if line else str(path)
  message = str(error.args[0]) if error.args else ""
  if locked := re.search(r'Key "(\w+)" does not exist', message):
    return f"{where}: {unknown_key(locked[1])}"
  if isinstance(error, ValueError):
    return f"{where}: {message.rstrip('.')}."
  return f"{where}: {type(error).__name__}: {message.rstrip('.')}."
