"""The marks and fixed texts of the released chat format (model.md section 4.1).

A mark is one token of the tokenizer that text alone never becomes. The words that announce the
tools are ours, as model.md does not have the release's; they stand in TOOLS_BEGIN and TOOLS_END.
"""

import enum
import re


class Mark(enum.Enum):
  """Names in the release's tokenizer. Not strings: text that spells a mark must not equal it."""

  BOS = "<｜begin▁of▁sentence｜>"
  EOS = "<｜end▁of▁sentence｜>"  # ends every answer
  SYSTEM = "<｜System｜>"
  USER = "<｜User｜>"
  ASSISTANT = "<｜Assistant｜>"
  THINK = "<think>"
  THINK_END = "</think>"
  DSML = "｜DSML｜"  # inside the tags of tool calls


Piece = Mark | str  # a string is text

BLANK_LINE = "\n\n"
RESULT, RESULT_END = "<tool_result>", "</tool_result>"  # text, not marks
EFFORT = (
  "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)
EFFORT_PATTERN = re.compile(re.escape(EFFORT).replace(r"\{\}", "([1-9][0-9]?|100)"))

TOOLS_BEGIN = (
  "## Tools\n\nAn answer calls tools by ending with such a block, one invoke for each call:\n\n"
  "<｜DSML｜ calls>\n"
  '<｜DSML｜ invoke name="TOOL">\n'
  '<｜DSML｜ parameter name="NAME" string="true">TEXT</｜DSML｜ parameter>\n'
  '<｜DSML｜ parameter name="NAME" string="false">JSON</｜DSML｜ parameter>\n'
  "</｜DSML｜ invoke>\n"
  "</｜DSML｜ calls>\n\n"
)
TOOLS_END = "\n"


def split_at_marks(text: str, marks: tuple[Mark, ...] = tuple(Mark)) -> list[Piece]:
  """Text with every spelled mark as one. Right for text of ours, wrong for text of others."""
  names = [mark.value for mark in marks]
  parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
  return [Mark(part) if part in names else part for part in parts if part]
