"""Bits per byte on the validation split, and the bigram that they are held against.

Legend: B rows, T decoder slots.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from configs.schema import Settings
from data.bigram import count_bigrams
from data.pipeline import Batch, open_validation, validation_split
from deepseek_jax.layout import Layout
from deepseek_jax.step import TrainState
from deepseek_jax.storage_path import StoragePath
from train import metric_lines, processes
from train.batches import RowGroup, open_held_out

MODEL, BASELINE = "validation_bits_per_byte", "baseline_bits_per_byte"
# Nats a learned token of conversations, of a run that measures both (train/replay_report.py).
EXACT, REPLAYED = "validation_exact_loss", "validation_replayed_loss"
# The baseline reads the training data again and holds every pair in memory; for a longer run that
# is no longer a matter of seconds, and a bigram no longer a measure.
BASELINE_TOKENS_AT_MOST = 100_000_000


class Validation:
  """The first `validation.rows` rows of the validation split, as often as asked.

  Args:
    settings: of the run; sound.
    evaluate: (params, balance, layout) -> sums of nats and of loss weights.
    place: puts the rows of a layout that this process has read onto the devices.
    group: which rows this process reads.
    report: takes one sentence about something the user should know.
    trained_on: gives the batches of the whole run, of all hosts.

  Every process makes the same calls.

  Raises: ValueError if there is no validation split, DataError if its files are damaged.
  """

  before_training = False  # whether the state that the run begins with is measured as well

  def __init__(
    self,
    settings: Settings,
    evaluate: Callable[[Any, Any, Layout], tuple[jax.Array, jax.Array]],
    place: Callable[[Any], Any],
    group: RowGroup,
    report: Callable[[str], None],
    trained_on: Callable[[], Iterable[Batch]],
  ) -> None:
    self._settings, self._evaluate, self._place = settings, evaluate, place
    self._group, self._report, self._trained_on = group, report, trained_on
    self._split = validation_split(settings.data)
    self._rows = min(settings.validation.rows, self._split.rows)
    self._batches = open_held_out(settings, group)
    if self._rows < settings.validation.rows:
      report(
        f"validation.rows is {settings.validation.rows}, but the validation split has "
        f"{self._rows}; all of them are used."
      )
    self._damaged = 0

  @property
  def rows(self) -> int:
    return self._rows

  def measure(self, state: TrainState) -> dict[str, float]:
    """Bits per byte of the model, under the name that metrics have for it."""
    group = self._group
    batches = first_rows(self._batches, self._rows, host=group.index, hosts=group.count)
    sums = [
      self._evaluate(state.params, state.balance, self._place(batch.layout)) for batch in batches
    ]
    nats, targets = np.sum(np.asarray(jax.device_get(sums), np.float64), axis=0)
    self.tell_damage()
    return {MODEL: self._split.bits_per_byte(nats / max(targets, 1))}

  def tell_damage(self) -> None:
    """Reports records that the latest pass left out and no pass before it."""
    damaged = processes.union(processes.gather(self._batches.damaged))
    if len(damaged) > self._damaged:
      self._damaged = len(damaged)
      self._report(
        f"{len(damaged)} damaged validation records were left out: {', '.join(damaged)}."
      )

  def baseline(self, tokens: int) -> dict[str, float]:
    """Bits per byte, on the same rows, of the bigram counted on the batches of the run.

    Batches whose step was skipped are counted too, which makes the bigram a little stronger. Empty
    for a run of more than BASELINE_TOKENS_AT_MOST tokens.
    """
    if tokens > BASELINE_TOKENS_AT_MOST:
      self._report(
        f"No bigram was counted: {tokens:,} tokens are more than {BASELINE_TOKENS_AT_MOST:,}."
      )
      return {}
    data = self._settings.data
    bigram = count_bigrams(self._trained_on(), self._settings.model.vocab)
    held_out = open_validation(data, ratios=(), engram=None)
    nats, targets = bigram.nats(first_rows(held_out, self._rows))
    return {BASELINE: self._split.bits_per_byte(nats / max(targets, 1))}


def first_rows(
  batches: Iterable[Batch], rows: int, *, host: int = 0, hosts: int = 1
) -> Iterator[Batch]:
  """As many batches as hold the first `rows` rows; rows after them lose their loss weight.

  All hosts take equally many. Row b of a host's batch is number host + b * hosts of the step.
  """
  before = 0
  for batch in batches:
    if before >= rows:
      return
    local = len(batch.layout.weights)
    wanted_B = before + host + hosts * np.arange(local) < rows
    weights_BT = np.where(wanted_B[:, None], batch.layout.weights, np.float32(0))
    yield batch._replace(layout=batch.layout._replace(weights=weights_BT))
    before += local * hosts


def comparison(folder: StoragePath) -> list[str]:
  """What a finished run came to, in sentences, from its metrics."""
  try:
    lines = metric_lines.read(folder)
  except (OSError, ValueError) as error:
    return [f"The metrics in {folder} cannot be read ({error})."]
  if not lines:
    return [f"{folder} holds no metrics of the run."]
  last, seconds = lines[-1], sum(line.get("step_seconds", 0) for line in lines)
  sentences = [
    f"{last['step']:,} steps, {last['tokens']:,} tokens, {last['tokens'] / seconds:,.0f} tokens/s."
  ]
  model, bigram = last.get(MODEL), last.get(BASELINE)
  if model is not None and bigram is not None:
    fewer = 100 * (1 - model / bigram)
    sentences.append(
      f"Validation: {model:.4f} bits per byte; interpolated Kneser-Ney bigram of the same tokens: "
      f"{bigram:.4f}; that is {abs(fewer):.1f}% {'fewer' if fewer >= 0 else 'more'}."
    )
  elif model is not None:
    sentences.append(f"Validation: {model:.4f} bits per byte.")
  if EXACT in last:
    sentences.append(
      f"Held-out answers: {last[EXACT]:.4f} nats a token exact, {last[REPLAYED]:.4f} with replay."
    )
  return sentences
