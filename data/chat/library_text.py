"""Look-ups in the text of Python's standard library, as an agent's tools would do them."""

import dataclasses
import functools
import re
from collections import Counter

from data.prepare.sources import read_source

SHORTEST, LONGEST = 40, 2000  # lines of a file that is used
_DEFINITION = re.compile(r"(?:def|class) ([A-Za-z]\w{3,})")


@dataclasses.dataclass(frozen=True)
class Library:
  """Files by path, and where names are defined."""

  files: dict[str, list[str]]  # path -> lines
  definitions: dict[str, tuple[str, int]]  # name -> path and line number, from 1
  words: tuple[str, ...]  # that occur in many files

  def find(self, name: str) -> str:
    path, line = self.definitions[name]
    return f"{path}, line {line}"

  def read(self, path: str, first: int, lines: int) -> str:
    chosen = self.files[path][first - 1 : first - 1 + lines]
    return "\n".join(f"{number}: {line}" for number, line in enumerate(chosen, first))

  def count(self, path: str, word: str) -> int:
    return sum(len(re.findall(rf"\b{re.escape(word)}\b", line)) for line in self.files[path])


@functools.cache
def standard_library() -> Library:
  """The files that `python-stdlib` names, and the names at their left margin that are unique."""
  files, places, times = {}, {}, Counter()
  for key, text in read_source("python-stdlib"):
    lines = (text or "").split("\n")
    if not SHORTEST <= len(lines) <= LONGEST:
      continue
    files[key] = lines
    for number, line in enumerate(lines, 1):
      if found := _DEFINITION.match(line):
        times[found[1]] += 1
        places[found[1]] = (key, number)
  definitions = {name: place for name, place in sorted(places.items()) if times[name] == 1}
  return Library(files, definitions, ("None", "class", "def", "for", "import", "return", "self"))
