"""The stored reference cases with caches: prefill, single steps, the decoder on a prompt's tail.

What programs of decoding give is compared as they give it; values inside a step are observed on the
side. Legend: B rows, C tokens, V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.model import logits
from deepseek_jax.ngram import NgramHash
from deepseek_jax.sampling.cache import Cache
from deepseek_jax.sampling.forward import CachedModel, Reached
from deepseek_jax.sampling.prefill import empty_tail, enter, push
from deepseek_jax.sampling.row_formats import row_formats
from deepseek_jax.sampling.sampler import Sampler
from deepseek_jax.types import ModelOutput
from train.reference_case import Case, CaseError, pool_mask, run_case
from train.replay_case import is_replay

LOGITS = "decode_logits"  # what every such case has


def run_decoding_case(case: Case) -> dict[str, np.ndarray]:
  """Our traces by reference name; rows are packed where the case rounds all of them."""
  n = case.cfg.numerics
  packed = n.window_fp8 and n.main_fp4 and n.indexer_fp4
  hashing = None
  if case.compressed_id is not None:
    hashing = NgramHash(case.cfg.engram, case.compressed_id)
  with jax.default_matmul_precision("highest"):  # accelerators shorten float32 operands otherwise
    sampler = Sampler(case.cfg, case.variables, hashing, packed=packed)
    run = _Run(case, sampler, _observed(sampler, "encode"), _observed(sampler, "decode"))
    if is_replay(case.recorded):
      ours = _tail_case(run)
    elif "prefill_logits" in case.recorded:
      ours = _decode_case(run)
    else:
      raise CaseError(
        f"{case.name}: {LOGITS} comes without prefill_logits or tail_logits and exact_logits."
      )
  return _as_recorded(ours, case)


class _Run(NamedTuple):
  case: Case
  sampler: Sampler
  encode_observed: Any  # jitted: what CachedModel.encode returns, and the values on the way
  decode_observed: Any

  @property
  def ids_BS(self) -> np.ndarray:
    return self.case.recorded["input_ids"]

  def new_cache(self) -> Cache:
    return self.sampler.new_cache(*self.ids_BS.shape)

  def forward(self, tokens: int) -> np.ndarray:
    """[B, C, V] logits of one forward without a cache."""
    alone = dataclasses.replace(self.case, recorded={"input_ids": self.ids_BS[:, :tokens]})
    return run_case(alone, site_by_site=False)["logits"][:, :tokens]

  def encode(self, cache: Cache, tokens_BC: np.ndarray):
    rows = self.sampler.engram_rows(np.asarray(cache.recent), tokens_BC)
    return self.encode_observed(self.case.variables, cache, tokens_BC, rows, _count(tokens_BC))

  def decode(self, cache: Cache, reached: Reached, first_B: jax.Array, count_B: jax.Array):
    return self.decode_observed(self.case.variables, cache, reached, first_B, count_B)

  def logits(self, hidden_BCD: jax.Array) -> jax.Array:
    return logits(ModelOutput(hidden_BCD, self.case.variables["params"]["head"], {}))

  def step_through(self, cache: Cache, start: int, ours: dict) -> None:
    """Steps to the end; inside those that were recorded more is noted."""
    recorded = {int(n.split(".")[1]) for n in self.case.recorded if n.startswith("step.")}
    each, active_B = [], np.ones(len(self.ids_BS), bool)
    for position in range(start, self.ids_BS.shape[1]):
      tokens_B = self.ids_BS[:, position]
      if position in recorded:
        seen, _ = _whole_pass(self, cache, tokens_B[:, None])
        ours |= {f"step.{position}.{name}": value for name, value in seen.items()}
      cache, logits_BV = self.sampler.step(cache, tokens_B, active_B)
      each.append(np.asarray(logits_BV))
    ours[LOGITS] = np.stack(each, axis=1)
    formats = row_formats(self.sampler.cfg, packed=self.sampler.packed)
    for number, memory in enumerate(cache.layers):
      name = f"final.layers.{number}"
      ours[f"{name}.window_ring"] = formats.window.read(memory.window)
      if memory.entries is not None:
        ours[f"{name}.compressed_kv"] = formats.main.read(memory.entries)
        ours[f"{name}.index_k"] = formats.index.read(memory.keys)


def _observed(sampler: Sampler, method: str) -> Any:
  def run(variables, *arguments):
    seen = {}

    def tap(name, value):
      seen[name] = value
      return value

    model: Any = CachedModel(sampler.cfg, tap=tap, packed=sampler.packed)
    return model.apply(variables, *arguments, method=method), seen

  return jax.jit(run)


def _count(tokens_BC: np.ndarray) -> jax.Array:
  return jnp.full(len(tokens_BC), tokens_BC.shape[1], jnp.int32)


def _whole_pass(run: _Run, cache: Cache, tokens_BC: np.ndarray) -> tuple[dict, jax.Array]:
  """All layers on tokens behind the cache: what was seen, and logits [B, C, V]."""
  (after, reached), below = run.encode(cache, tokens_BC)
  (_, hidden_BCD), above = run.decode(after, reached, cache.position, _count(tokens_BC))
  return below | above, run.logits(hidden_BCD)


def _decode_case(run: _Run) -> dict[str, Any]:
  """A prefill of every layer on every token, then steps."""
  prompt = run.case.recorded["prefill_logits"].shape[1]
  ours: dict[str, Any] = {"oneshot_logits": run.forward(run.ids_BS.shape[1])}
  _, ours["prefill_logits"] = _whole_pass(run, run.new_cache(), run.ids_BS[:, :prompt])
  cache, _ = run.sampler.prefill(run.new_cache(), list(run.ids_BS[:, :prompt]), exact=True)
  run.step_through(cache, prompt, ours)
  return ours


def _tail_case(run: _Run) -> dict[str, Any]:
  """A prefill whose decoder sees the last window of the prompt, then steps."""
  prompt = run.case.recorded["exact_logits"].shape[1]
  tokens_BC, start = run.ids_BS[:, :prompt], run.sampler.cfg.decoder_start or 0
  cache = run.new_cache()
  tail = empty_tail(run.sampler.cfg, cache)
  (cache, reached), ours = run.encode(cache, tokens_BC)
  admitted = enter(push(tail, reached, _count(tokens_BC)), cache)
  (_, hidden_BTD), above = run.decode(*admitted)
  ours |= above
  ours["encoder.pre"] = ours[f"layers.{start - 1}.hc_ffn.pre"]
  ours[f"layers.{start}.kv_in"] = ours[f"layers.{start}.attn_in"]
  ours["tail_logits"] = run.logits(hidden_BTD)
  ours["exact_logits"] = run.forward(prompt)
  cache, _ = run.sampler.prefill(run.new_cache(), list(tokens_BC))
  run.step_through(cache, prompt, ours)
  return ours


def _as_recorded(ours: dict, case: Case) -> dict[str, np.ndarray]:
  """Pools become masks over entries, and cells that hold no entry are dropped."""
  out = {}
  for name, value in ours.items():
    value = np.asarray(value)
    if name.endswith(".indexer.pool"):
      name = name.removesuffix("pool") + "candidates"
      value = pool_mask(value, case.recorded["input_ids"].shape[1], case)
    recorded = case.recorded.get(name)
    if recorded is not None and value.ndim == recorded.ndim and not name.endswith(".topk"):
      value = value[tuple(slice(size) for size in recorded.shape)]
    out[name] = value
  return out
