"""What a compiled program sends between devices, read from its text.

The text is a list of computations of instructions, one a line:
  %body (p: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
    %g = bf16[16,4]{1,0} all-gather(%x), replica_groups=..., dimensions={0}
  }
"""

import re
from collections import defaultdict
from typing import NamedTuple

KINDS = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-permute",
  "ragged-all-to-all",
  "reduce-scatter",
)
_BITS = {"pred": 8, "token": 0}  # other types carry their bits in their names: bf16, s32, f8e4m3fn
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|[\s)}])([a-z][a-z0-9\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count":\s*\{"n":"(\d+)"')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


class _Instruction(NamedTuple):
  name: str
  opcode: str
  result_bytes: int
  operands: list[str]
  line: str


def collectives(program: str) -> dict[str, dict[str, int]]:
  """Collectives by kind.

  Args:
    program: `compiled.as_text()`.

  Returns: kind -> "count", how often one is run in a step, and "bytes", what it works on, added up
    over these runs: the larger of what goes in and what comes out on one device. The body of a loop
    counts as often as it is run, once where the compiler does not know.
  """
  computations, entry = _computations(program)
  total: dict[str, dict[str, int]] = defaultdict(lambda: {"count": 0, "bytes": 0})
  for name, times in _runs(computations, entry).items():
    sizes = {i.name: i.result_bytes for i in computations[name]}
    for instruction in computations[name]:
      kind = instruction.opcode.removesuffix("-start")
      if kind not in KINDS:
        continue
      given = sum(sizes.get(operand, 0) for operand in instruction.operands)
      made = instruction.result_bytes
      if instruction.opcode.endswith("-start"):
        made -= given if made > given else 0  # the result holds the operands too
      total[kind]["count"] += times
      total[kind]["bytes"] += times * max(given, made)
  return dict(sorted(total.items()))


def _computations(program: str) -> tuple[dict[str, list[_Instruction]], str]:
  """Name -> instructions, and which computation the program starts with."""
  found: dict[str, list[_Instruction]] = {}
  current, entry = "", ""
  for line in program.splitlines():
    if header := _HEADER.match(line):
      current = header[1]
      found[current] = []
      entry = current if line.startswith("ENTRY") else entry
    elif current and (parts := _INSTRUCTION.match(line)):
      found[current].append(_instruction(parts[1], parts[2]))
  return found, entry


def _instruction(name: str, text: str) -> _Instruction:
  opcode = _OPCODE.search(text)
  if opcode is None:
    return _Instruction(name, "", 0, [], text)
  inside = text[opcode.end() : _closing(text, opcode.end())]
  operands = re.findall(r"%([\w.\-]+)", inside)
  return _Instruction(name, opcode[1], _bytes(text[: opcode.start()]), operands, text)


def _closing(text: str, start: int) -> int:
  """Where the parenthesis that is open at `start` closes."""
  depth = 1
  for place in range(start, len(text)):
    depth += {"(": 1, ")": -1}.get(text[place], 0)
    if depth == 0:
      return place
  return len(text)


def _bytes(shapes: str) -> int:
  """Bytes of all arrays in a type, but for u32[], the contexts of asynchronous instructions."""
  arrays = _ARRAY.findall(shapes)  # layouts, in braces, have no brackets
  return sum(_array_bytes(kind, sizes) for kind, sizes in arrays if (kind, sizes) != ("u32", ""))


def _array_bytes(kind: str, sizes: str) -> int:
  digits = re.search(r"\d+", kind)
  bits = _BITS.get(kind, int(digits[0]) if digits else 0)
  count = 1
  for size in filter(None, sizes.split(",")):
    count *= int(size)
  return (count * bits + 7) // 8


def _runs(computations: dict[str, list[_Instruction]], entry: str) -> dict[str, int]:
  """How often each computation is run."""
  times: dict[str, int] = defaultdict(int)

  def visit(name: str, factor: int) -> None:
    times[name] += factor
    for instruction in computations[name]:
      for called in _calls(instruction):
        if called in computations:
          visit(called, factor * _trips(instruction, computations))

  visit(entry, 1)
  return times


def _calls(instruction: _Instruction) -> list[str]:
  if instruction.opcode in KINDS:
    return []  # what they apply is a sum of two numbers
  branches = _BRANCHES.search(instruction.line)
  inside = re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
  return [*_CALLED.findall(instruction.line), *inside]


def _trips(instruction: _Instruction, computations: dict[str, list[_Instruction]]) -> int:
  """How often a loop is run; 1 for what is no loop or does not say.

  The GPU compiler writes it down. In a TPU program it is the one number that the condition of the
  loop compares with, for JAX counts from 0.
  """
  if known := _TRIPS.search(instruction.line):
    return int(known[1])
  if instruction.opcode != "while":
    return 1
  condition = _CONDITION.search(instruction.line)
  lines = [i.line for i in computations.get(condition[1], ())] if condition else []
  bounds = [int(b) for line in lines for b in re.findall(r"^[su]32\[\]\S* constant\((\d+)\)", line)]
  return bounds[0] if len(bounds) == 1 else 1
