"""What a person sees of a run: one bar on a terminal, one line per log interval elsewhere."""

import math
import time
from collections.abc import Mapping

import rich.console
import rich.progress

SHOWN_ALWAYS = "validation_bits_per_byte"  # a step with it is shown whatever the interval


class Progress:
  """Shows steps and sentences.

  Args:
    first_step: steps done before this start.
    total_steps: steps of the whole run.
    log_every: steps between two lines where there is no bar.
    console: rich's standard output if None.
  """

  def __init__(
    self,
    *,
    first_step: int,
    total_steps: int,
    log_every: int,
    console: rich.console.Console | None = None,
  ) -> None:
    self._console = console or rich.console.Console(soft_wrap=True, highlight=False)
    self._first_step, self._total_steps, self._log_every = first_step, total_steps, log_every
    self._started = time.monotonic()
    self._bar: rich.progress.Progress | None = None
    if self._console.is_terminal:
      self._bar = _bar(self._console)
      self._task = self._bar.add_task("", total=total_steps, completed=first_step, text="")
      self._bar.start()

  def say(self, sentence: str) -> None:
    """A sentence of its own, above the bar if there is one."""
    self._console.print(sentence, markup=False)

  def step(self, step: int, values: Mapping[str, object]) -> None:
    """Shows a step that is done."""
    text = _text(values)
    notable = SHOWN_ALWAYS in values
    if self._bar is not None:
      self._bar.update(self._task, completed=step, text=text)
    if notable or (
      self._bar is None and (step % self._log_every == 0 or step == self._total_steps)
    ):
      self.say(f"step {step}/{self._total_steps}  {text}  {self._time_left(step)}".rstrip())

  def close(self) -> None:
    if self._bar is not None:
      self._bar.stop()

  def _time_left(self, step: int) -> str:
    """Nothing before the first step, whose seconds say nothing about the others."""
    if step <= self._first_step:
      return ""
    per_step = (time.monotonic() - self._started) / (step - self._first_step)
    seconds = round(per_step * (self._total_steps - step))
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"


def _bar(console: rich.console.Console) -> rich.progress.Progress:
  return rich.progress.Progress(
    rich.progress.MofNCompleteColumn(),
    rich.progress.BarColumn(),
    rich.progress.TextColumn("{task.fields[text]}", markup=False),
    rich.progress.TimeRemainingColumn(),
    console=console,
  )


def _text(values: Mapping[str, object]) -> str:
  """Loss and speed, and the validation where there is one."""
  shown = {
    "loss": "loss {:.4f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    SHOWN_ALWAYS: "validation {:.4f} bits/byte",
  }
  number = lambda value: math.nan if value is None else value
  parts = [text.format(number(values[name])) for name, text in shown.items() if name in values]
  return "  ".join(parts)
