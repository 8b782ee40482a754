"""Configuration keys: dotted names, their types, the text that sets them, their nearest names."""

import ast
import dataclasses
import difflib
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from configs.schema import Settings
from deepseek_jax.config import Config

Section = type[Config]


def _key_types(section: Section = Settings, prefix: str = "") -> dict[str, Any]:
  found = {}
  for field in dataclasses.fields(section):
    name = prefix + field.name
    if isinstance(field.type, type) and issubclass(field.type, Config):
      found |= _key_types(field.type, name + ".")
    else:
      found[name] = field.type
  return found


KEYS = _key_types()  # dotted name -> type
SECTIONS = sorted({key[:dot] for key in KEYS for dot, letter in enumerate(key) if letter == "."})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested sections -> dotted name -> value. A mapping that is no section stays a value."""
  flat = {}
  for name, value in values.items():
    key = f"{prefix}{name}"
    if isinstance(value, Mapping) and key in SECTIONS:
      flat |= flatten(value, key + ".")
    else:
      flat[key] = value
  return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
  """The inverse of `flatten`."""
  tree: dict[str, Any] = {}
  for key, value in flat.items():
    *sections, name = key.split(".")
    node = tree
    for section in sections:
      node = node.setdefault(section, {})
    node[name] = value
  return tree


def unknown_key(name: str) -> str:
  """The sentence about a name that is no key, with the nearest one or those of its section."""
  if name in SECTIONS:
    return f"{name} is a section; name one of its keys: {', '.join(_inside(name))}."
  known = (*KEYS, *SECTIONS)
  by_last_part = {key.rpartition(".")[2]: key for key in known}
  near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
  near = near or [
    by_last_part[last]
    for last in difflib.get_close_matches(name.rpartition(".")[2], by_last_part, n=1, cutoff=0.7)
  ]
  if near:
    return f"{name} is not a configuration key; the nearest is {near[0]}."
  section = name.rpartition(".")[0]
  where = f"{section} has" if section in SECTIONS else "known are"
  return f"{name} is not a configuration key; {where} {', '.join(_inside(section))}."


def _inside(section: str) -> list[str]:
  """Names right below a section; of the whole tree if it does not exist."""
  prefix = section + "." if section in SECTIONS else ""
  inside = [key.removeprefix(prefix) for key in KEYS if key.startswith(prefix)]
  return list(dict.fromkeys(key.partition(".")[0] for key in inside))


def from_text(kind: Any, text: str) -> Any:
  """The value that a command line means; text that fits no other way stays text."""
  if kind is str or (get_origin(kind) is Literal and text in get_args(kind)):
    return text
  constants = {"true": True, "false": False, "none": None}
  if text.lower() in constants:
    return constants[text.lower()]
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    value = [part.strip() for part in text.split(",")] if kind == tuple[str, ...] else text
  if get_origin(kind) is tuple and isinstance(value, int | float | str) and value != text:
    return (value,)  # --config.model.kv_sources=2
  return value


def convert(kind: Any, value: Any) -> Any:
  """The value as its key's type, integers as numbers and lists as tuples. Raises TypeError."""
  origin, arguments = get_origin(kind), get_args(kind)
  if origin in (Union, types.UnionType):  # X | None
    return None if value is None else convert(arguments[0], value)
  if origin is tuple and isinstance(value, list | tuple):
    try:
      return tuple(convert(arguments[0], item) for item in value)
    except TypeError:
      raise TypeError(f"must be {expected(kind)}, got {value!r}") from None
  if kind is float and type(value) in (int, float) and math.isfinite(value):
    return float(value)
  if type(value) is kind and kind is not float:
    return value
  if origin is Literal and value in arguments:
    return value
  raise TypeError(f"must be {expected(kind)}, got {value!r}")


def expected(kind: Any, *, plural: bool = False) -> str:
  """What a key accepts, in words."""
  origin, arguments = get_origin(kind), get_args(kind)
  if origin in (Union, types.UnionType):
    return expected(arguments[0]) + " or none"
  if origin is tuple:
    return "a list of " + expected(arguments[0], plural=True)
  if origin is Literal:
    return "one of " + ", ".join(arguments)
  one, many = {
    int: ("an integer", "integers"),
    float: ("a finite number", "finite numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "texts"),
  }[kind]
  return many if plural else one
