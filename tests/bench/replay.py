"""What a training step saves on conversations when only the ends of prompts enter the decoder.

  python -m tests.bench replay --config configs/small.py [--config.KEY=VALUE ...] [--responses 4]
      [--steps 30] [--json F]

Every row is one conversation of data.slots tokens, 90% of them context, whose turns are equally
long and each found again up to the response before it. The step runs on these rows as a whole,
then as a server with bounded replay sees them; both learn the same tokens. Prints one record with
both runs, how much faster the second is, and what the formula of deepseek_jax/flops.py says.
With --config.data.slots=65536 that is the case of long contexts.
"""

import dataclasses
import sys
from typing import Any

import numpy as np

from configs.schema import Settings
from data.config import ReplayConfig
from data.conversation import Conversation
from data.replay import Place, RowLayouts
from data.source import Row
from deepseek_jax.flops import layout_flops
from deepseek_jax.layout import Layout, decoder_slots_of, stack_layouts
from tests.bench import document, step
from train.errors import UsageError
from train.replay_checks import replay_problems

_CONTEXT = 0.9  # share of the tokens of a conversation
_TILE = 128  # decoder slots are a multiple of it, as a run would have them
ARGUMENTS = ("--config", "--responses", "--steps", "--json")


def main(words: list[str]) -> int:
  plain, arguments = document.read(words, ARGUMENTS)
  given, responses = arguments.values, int(arguments.values.get("--responses", "4"))
  settings = with_replay(plain, responses)
  if problems := list(replay_problems(settings)):
    raise UsageError(problems)
  measured = compare(settings, int(given.get("--steps", "30")), responses)
  document.write("replay", arguments, {"responses": responses, **measured})
  return 0


def with_replay(settings: Settings, responses: int) -> Settings:
  """The settings with as many hits as turns, and decoder slots for exactly these conversations."""
  model, indexer = settings.model, settings.model.indexer
  block = 1
  if indexer.pool_source is not None:
    block = indexer.pool_block_size * model.compress_ratios[indexer.pool_source]
  needed = decoder_slots_of(turns_of(settings.data.slots, responses), model.attention.window)
  replay = ReplayConfig(
    share=0.5,
    decoder_slots=-(-needed // _TILE) * _TILE,
    hit_share=1.0,
    border_share=1.0,
    max_hits=responses,
    hit_multiple=block,
  )
  return dataclasses.replace(settings, data=dataclasses.replace(settings.data, replay=replay))


def turns_of(tokens: int, responses: int) -> tuple[tuple[int, int], ...]:
  """Responses at the ends of turns of equal length."""
  turn = tokens // responses
  answer = max(1, round(turn * (1 - _CONTEXT)))
  return tuple(((n + 1) * turn - answer, (n + 1) * turn) for n in range(responses))


def batch(settings: Settings, responses: int, seed: int, *, replayed: bool) -> Layout:
  """A batch of such conversations, of random tokens."""
  rng, slots, model = np.random.default_rng(seed), settings.data.slots, settings.model
  layouts = RowLayouts(
    settings.data, model.ratios, step.hashing_of(settings), model.attention.window
  )
  turns, mask = turns_of(slots, responses), np.zeros(slots, bool)
  for begin, end in turns:
    mask[begin:end] = True
  rows = []
  for number in range(settings.data.batch_rows):
    tokens = rng.integers(0, model.vocab, slots, np.int32)
    row = Row(f"row {number}", [Conversation(tokens, mask, turns)])
    place = Place(0, seed, number)
    rows.append(layouts.replayed(row, place) if replayed else layouts.exact(row))
  return stack_layouts(rows)


def compare(settings: Settings, steps: int, responses: int) -> dict[str, Any]:
  """Both runs, one after the other, and the ratio of their speeds."""
  records, model_flops = {}, {}
  for name, replayed in (("whole", False), ("replayed", True)):
    batches = [batch(settings, responses, n, replayed=replayed) for n in range(2)]
    prepared = step.prepare(settings, replayed=replayed)
    print(f"{name}: compiled in {prepared.compile_seconds:.1f} s.", file=sys.stderr, flush=True)
    used = lambda x: int(np.sum(x) // settings.data.batch_rows)
    records[name] = step.run(prepared, steps, None, batches) | {
      "encoder_slots": used(batches[0].document >= 0),
      "decoder_slots": used(batches[0].decoder_slots >= 0),
      "shape": [batches[0].tokens.shape[1], batches[0].decoder_slots.shape[1]],
      "learned": used(batches[0].weights > 0),
    }
    model_flops[name] = layout_flops(settings.model, batches[0])
  whole, replayed = records["whole"], records["replayed"]
  slots = lambda record: record["encoder_slots"] + record["decoder_slots"]
  return {
    "runs": records,
    "speedup": replayed["tokens_per_second"] / whole["tokens_per_second"],
    "temporary_bytes": {name: r["memory"]["temporary_bytes"] for name, r in records.items()},
    "by_formula": {
      "flops": model_flops["whole"] / model_flops["replayed"],
      "slots": slots(whole) / slots(replayed),  # if encoder and decoder cost the same
    },
  }
