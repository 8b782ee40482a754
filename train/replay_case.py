"""The reference case with bounded replay, as one forward over a layout with one turn.

Its tokens are a prompt, whose last window alone has gone through the decoder, and a response.
Legend: B rows, S tokens, T decoder slots, N entries.
"""

import numpy as np

from deepseek_jax.layout import Document, Layout, Replay, build_layout, stack_layouts
from train.reference_case import Case, CaseError, pool_mask, slots_for, traces

_LOGITS = "tail_logits", "decode_logits", "exact_logits"


def is_replay(recorded: dict[str, np.ndarray]) -> bool:
  """Whether these are the traces of such a case."""
  return all(name in recorded for name in _LOGITS)


def run_replay_case(case: Case) -> dict[str, np.ndarray]:
  """Our value of every recorded trace: all of them are parts of what one forward gives."""
  ids_BS, (_, tail, _) = case.recorded["input_ids"], case.recorded["tail_logits"].shape
  prompt = ids_BS.shape[1] - case.recorded["decode_logits"].shape[1]
  replay = Replay(window=tail, decoder_slots=ids_BS.shape[1] - prompt + tail)
  ours = traces(
    case.cfg, case.variables, _layout(case, ids_BS, [(prompt, ids_BS.shape[1])], replay), {}
  )
  exact = traces(case.cfg, case.variables, _layout(case, ids_BS[:, :prompt], None, None), {})
  found = {
    "tail_logits": ours["logits"][:, :tail],
    "decode_logits": ours["logits"][:, tail:],
    "exact_logits": exact["logits"][:, :prompt],
  }
  for name, recorded in case.recorded.items():
    if name not in found and name != "input_ids":
      value = _value(name, ours, ids_BS.shape[1], replay.decoder_slots, case)
      # Prompt and tail come first along every axis, and what follows them is the response or empty.
      found[name] = value[tuple(slice(size) for size in recorded.shape)]
  return found


def _layout(case: Case, ids_BS: np.ndarray, turns, replay: Replay | None) -> Layout:
  row = lambda ids_S: build_layout(
    [Document(ids_S)],
    turns and [turns],
    slots=slots_for(len(ids_S), case.cfg.ratios),
    ratios=case.cfg.ratios,
    replay=replay,
  )
  return stack_layouts([row(ids_S) for ids_S in ids_BS])


def _value(
  name: str, ours: dict[str, np.ndarray], tokens: int, decoder_slots: int, case: Case
) -> np.ndarray:
  start, window = case.cfg.decoder_start, case.cfg.attention.window
  if start is None:
    raise CaseError(f"{case.name} has traces of a decoder, but its model has none.")
  if name == "encoder.pre":
    return ours[f"layers.{start - 1}.hc_ffn.pre"]
  if name == f"layers.{start}.kv_in":
    return ours[f"layers.{start}.attn_in"]
  layer = ".".join(name.removeprefix("final.").split(".")[:2])
  if name.endswith(".window_ring"):  # the last window, each key at its position modulo the window
    keys_BQd, in_decoder = ours[f"{layer}.attn.window_kv"], int(layer.split(".")[1]) >= start
    used = decoder_slots if in_decoder else tokens
    return np.roll(keys_BQd[:, used - window : used], tokens, axis=1)
  if name.startswith("final."):
    return ours[f"{layer}.attn.compressed_kv" if name.endswith("_kv") else f"{layer}.indexer.k"]
  if name.endswith(".candidates"):
    return pool_mask(ours[f"{layer}.indexer.pool"], tokens, case)
  return ours[name]
