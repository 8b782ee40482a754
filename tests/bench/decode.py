"""Speed of prefill and of a decoding step of a configuration, with random weights and tokens.

  python -m tests.bench decode --config configs/small.py [--config.KEY=VALUE ...]
      [--prompts 16384] [--contexts 4096,262144] [--rows 1] [--steps 32] [--json F]

Prefill: seconds until the logits of a prompt's last token, with early exit and exact, through the
same chunks; the host's part (n-gram hashes) included. Decoding: a step behind a cache of each
context, filled with random rows. `seconds_per_token` is the loop of `generate`: the step, the
choice of the token, and its way to the host; `program_seconds` are steps that are queued and
awaited together. What is timed is compiled and has run once before the clock starts.

The bars are for one H200, with as many layers before the decoder as in it:
  --config configs/small.py --config.model.compress_ratios=0,0,2,2,2,2,1,1,1,1,1,1
"""

import dataclasses
import statistics
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from configs.schema import Settings
from deepseek_jax.model import Model
from deepseek_jax.sampling.cache import Cache
from deepseek_jax.sampling.choose_token import choose_token
from deepseek_jax.sampling.row_formats import RowFormat, Stored, row_formats
from deepseek_jax.sampling.sampler import Sampler
from deepseek_jax.sampling.weights import decoding_dtype
from tests.bench import document, measure
from tests.bench.step import hashing_of
from train.batches import empty_row

ARGUMENTS = ("--config", "--prompts", "--contexts", "--rows", "--steps", "--json")
PREFILL_BAR, GROWTH_BAR = 0.56, 1.35  # early exit over exact; the longest context over the shortest
_PREFILLS = 3  # of each kind, in turn; the fastest counts


class Request(NamedTuple):
  prompts: tuple[int, ...]  # tokens
  contexts: tuple[int, ...]  # tokens, ascending
  rows: int
  steps: int


def main(words: list[str]) -> int:
  settings, arguments = document.read(words, ARGUMENTS)
  given = arguments.values
  numbers = lambda name, default: sorted(map(int, str(given.get(name, default)).split(",")))
  (rows,), (steps,) = numbers("--rows", "1"), numbers("--steps", "32")
  prompts, contexts = numbers("--prompts", "16384"), numbers("--contexts", "4096,262144")
  measured = run(settings, Request(tuple(prompts), tuple(contexts), rows, steps))
  document.write("decode", arguments, measured)
  return 0


def run(settings: Settings, request: Request) -> dict[str, Any]:
  """A record for every prompt and context, and what the bars are about."""
  weights = jax.block_until_ready(random_weights(settings))
  sampler = Sampler(settings.model, weights, hashing_of(settings))
  prefill = [_prefill(sampler, request.rows, tokens) for tokens in request.prompts]
  decode = [_decode(sampler, weights, request, tokens) for tokens in request.contexts]
  growth = lambda name: decode[-1][name] / decode[0][name]
  return {
    "device": jax.devices()[0].device_kind,
    "rows": request.rows,
    "weight_bytes": sum(x.nbytes for x in jax.tree.leaves(weights)),
    "prefill": prefill,
    "decode": decode,
    "early_exit_over_exact": {r["tokens"]: r["early_exit"] / r["exact"] for r in prefill},
    "growth": {name: growth(name) for name in ("seconds_per_token", "program_seconds")},
    "bars": {"early_exit_over_exact": PREFILL_BAR, "growth": GROWTH_BAR},
    "device_peak_bytes": measure.device_peak_bytes(),
  }


def abstract_weights(settings: Settings) -> Any:
  """Shapes and dtypes of what decoding reads, a subtree for each layer."""
  cfg = dataclasses.replace(settings.model, scan_layers=False, remat="none")
  init = lambda key: nn.unbox(Model(cfg).init(key, empty_row(settings)))

  def lay(path, x):
    name = jax.tree_util.keystr(path, simple=True, separator="/").partition("/")[2]
    return jax.ShapeDtypeStruct(x.shape, decoding_dtype(cfg, name))

  return jax.tree_util.tree_map_with_path(lay, jax.eval_shape(init, jax.random.key(0)))


def random_weights(settings: Settings) -> Any:
  """Gains around 1, all else small; made on the device."""
  small = measure.random_tree(abstract_weights(settings), 0.02, 0)
  return jax.tree.map(lambda x: x + 1 if x.ndim == 1 else x, small)


def _prefill(sampler: Sampler, rows: int, tokens: int) -> dict[str, Any]:
  rng, taken = np.random.default_rng(0), {"early_exit": [], "exact": []}
  prompts = [rng.integers(0, sampler.cfg.vocab, tokens).astype(np.int32) for _ in range(rows)]
  for _ in range(1 + _PREFILLS):  # the first compiles
    for name, seconds in taken.items():
      cache = jax.block_until_ready(sampler.new_cache(rows, tokens))
      began = time.perf_counter()
      jax.block_until_ready(sampler.prefill(cache, prompts, exact=name == "exact"))
      seconds.append(time.perf_counter() - began)
      _say(f"prefill of {tokens} tokens, {name}", seconds)
  return {"tokens": tokens} | {name: min(seconds[1:]) for name, seconds in taken.items()}


def _decode(sampler: Sampler, weights: Any, request: Request, tokens: int) -> dict[str, Any]:
  rows, steps, vocab = request.rows, request.steps, sampler.cfg.vocab
  cache = filled(sampler, rows, tokens, room=2 * steps + 2)
  active, number, position = np.ones(rows, bool), np.arange(rows), np.full(rows, tokens)
  next_B, seconds = np.arange(rows) % vocab, []
  for _ in range(1 + steps):  # the first compiles
    began = time.perf_counter()
    cache, logits_BV = sampler.step(cache, next_B, active)
    next_B = np.asarray(choose_token(logits_BV, 0, number, position))
    seconds.append(time.perf_counter() - began)
  _say(f"a token behind {tokens}", seconds[:2])
  one_B1, ones = next_B[:, None], np.ones(rows, np.int32)
  hashed = sampler.engram_rows(np.asarray(cache.recent), one_B1)
  for count in range(1 + steps):
    if count == 1:
      jax.block_until_ready(logits_BV)
      began = time.perf_counter()
    # As a step calls it: other arguments would be another program.
    cache, logits_BV = sampler.programs.extend(weights, cache, one_B1, hashed, ones, write=True)
  jax.block_until_ready(logits_BV)
  queued = (time.perf_counter() - began) / steps
  p50 = statistics.median(seconds[1:])
  return {"context": tokens, "seconds_per_token": p50, "program_seconds": queued}


def filled(sampler: Sampler, rows: int, tokens: int, room: int) -> Cache:
  """A cache of so many tokens, whose rows are random."""
  cfg, formats = sampler.cfg, row_formats(sampler.cfg, packed=sampler.packed)
  width, index_width = cfg.attention.head_dim, cfg.indexer.head_dim

  def fill(key: jax.Array) -> Cache:
    empty = sampler.new_cache(rows, tokens + room)
    keys = iter(jax.random.split(key, 3 * len(empty.layers)))

    def drawn(form: RowFormat, width: int, old: Stored | None) -> Stored | None:
      if old is None:
        return None
      shape = (*old[0].shape[:2], width)
      return form.write(jax.random.normal(next(keys), shape, cfg.numerics.compute_dtype))

    layers = tuple(
      memory._replace(
        window=drawn(formats.window, width, memory.window),
        entries=drawn(formats.main, width, memory.entries),
        keys=drawn(formats.index, index_width, memory.keys),
      )
      for memory in empty.layers
    )
    recent = jnp.zeros_like(empty.recent)
    return empty._replace(layers=layers, position=empty.position + tokens, recent=recent)

  return jax.jit(fill)(jax.random.key(1, impl="rbg"))


def _say(what: str, seconds: list[float]) -> None:
  times = ", ".join(f"{s:.4f}" for s in seconds)
  print(f"{what}: {times} s", file=sys.stderr, flush=True)
