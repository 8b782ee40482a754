"""Counts and FLOPs against the release's published numbers and against sums done by hand."""

import dataclasses

import numpy as np
import pytest

from deepseek_jax import flops
from deepseek_jax.config import IndexerConfig, ModelConfig, flash
from deepseek_jax.layout import Document, Replay, build_layout, decoder_slots_of

FLASH = flash()
TWO_LAYERS = ModelConfig(
  vocab=10,
  compress_ratios=(0, 0),
  kv_sources=(),
  index_sources=(),
  decoder_start=None,
  indexer=IndexerConfig(pool_source=None),
  engram=dataclasses.replace(FLASH.engram, layers=(), table_rows=()),
)


def test_parameter_counts_are_the_releases():
  # model.md section 1.6, less the vision tower: 748,979,953,264 - 485,268,480
  assert flops.parameters(FLASH) == {
    "backbone": 551_880_835_184,
    "router_bias": 30_720,
    "engram": 196_613_849_600,
    "total": 748_494_684_784,
  }


def test_activated_parameters_are_the_reports():
  active = flops.activated_parameters(FLASH)
  assert active["prefill"] == pytest.approx(7.893e9, rel=1e-4)
  assert active["decode"] == pytest.approx(16.131e9, rel=1e-4)
  assert active["decode"] - FLASH.vocab * FLASH.dim == pytest.approx(15.469e9, rel=1e-4)


def test_attention_and_expert_of_a_window_layer_have_the_known_sizes():
  layer = flops.layer_parameters(FLASH, FLASH.schedule()[0])
  attention, expert = 126_615_552, 35_389_440  # model.md section 1.6
  assert layer.experts == 384 * expert and layer.active_experts == 6 * expert
  assert layer.matrices == attention + expert + 2 * 24 * 20480 + 384 * 5120


def test_training_flops_of_window_layers_are_six_per_matrix_parameter_plus_attention():
  layer = flops.layer_parameters(TWO_LAYERS, TWO_LAYERS.schedule()[0])
  matrices = 2 * (layer.matrices + layer.active_experts) + 10 * 5120
  keys = sum(min(t + 1, 128) for t in range(300)) / 300
  attention = 2 * 3 * 4 * 64 * 512 * keys
  got = flops.flops_per_token(TWO_LAYERS, "train", 300)
  assert got == pytest.approx(6 * matrices + attention, rel=1e-12)


def test_attention_stops_growing_at_top_k_and_scans_do_not():
  growth = lambda short, long: (
    flops.flops_per_token(FLASH, "decode", long) - flops.flops_per_token(FLASH, "decode", short)
  )
  per_entry = 2 * 32 * 128
  unrestricted = growth(20_000, 20_002)  # two tokens: an entry in each of 2, 8, 14 and two in 20
  assert unrestricted == pytest.approx(per_entry * (3 * 1 + 2), rel=1e-9)


def test_prefill_costs_half_of_decode_because_the_decoder_sees_the_tail_alone():
  prefill = flops.flops_per_token(FLASH, "prefill", 65_536)
  everything = flops.flops_per_token(FLASH, "decode", 65_536)
  assert 0.4 < prefill / everything < 0.55


def test_prefill_within_the_window_is_the_forward_part_of_training_but_for_the_head():
  context = 100
  prefill = flops.flops_per_token(FLASH, "prefill", context)
  scans = sum(
    2 * 32 * 128 * sum((t + 1) // s.ratio for t in range(context)) / context
    for s in FLASH.schedule()
    if s.kind in ("full", "reindex")
  )
  head = FLASH.vocab * FLASH.dim
  forward = (flops.flops_per_token(FLASH, "train", context) - scans - 6 * head) / 3 + scans
  assert prefill == pytest.approx(forward + 2 * head / context, rel=1e-12)


def test_prefill_is_the_sum_over_tokens_and_layers_with_windows_that_start_at_the_tail():
  context, window = 300, 128
  attention, scan, total = 4 * 64 * 512, 2 * 32 * 128, 2 * FLASH.vocab * FLASH.dim
  for spec in FLASH.schedule():
    layer = flops.layer_parameters(FLASH, spec)
    start = context - window if spec.layer >= 20 else 0
    total += 2 * layer.kv_side * context
    for t in range(start, context):
      visible = (t + 1) // spec.ratio if spec.ratio else 0
      total += 2 * (layer.matrices + layer.active_experts)
      total += attention * (min(t + 1 - start, window) + min(visible, 512))
      total += scan * visible * (spec.kind in ("full", "reindex"))
  got = flops.flops_per_token(FLASH, "prefill", context)
  assert got == pytest.approx(total / context, rel=1e-12)


@pytest.mark.parametrize(
  ("kind", "peak"),
  [("NVIDIA H200", 989e12), ("TPU v5", 459e12), ("TPU v6e", 918e12), ("TPU7x", 1153.5e12)],
)
def test_peaks_are_per_device(kind, peak):
  assert flops.peak_flops(kind) == peak


@pytest.mark.parametrize("kind", ["cpu", "TPU v5 lite", "NVIDIA H200 MIG 1g.18gb"])
def test_unknown_devices_have_no_peak(kind):
  assert flops.peak_flops(kind) is None


def conversation(context, responses=4, context_share=0.9, window=128):
  """A row of turns of equal length, each found again up to the response before it."""
  turn = context // responses
  answer = round(turn * (1 - context_share))
  turns = [((n + 1) * turn - answer, (n + 1) * turn) for n in range(responses)]
  hits = [max(n * turn, window + 1) for n in range(responses)]
  document, ratios = Document(np.zeros(context, np.int32)), FLASH.ratios
  exact = build_layout([document], slots=context, ratios=ratios)
  replay = Replay(window=window, decoder_slots=decoder_slots_of(turns, window))
  slots = context + responses * window
  return exact, build_layout([document], [turns], [hits], slots=slots, ratios=ratios, replay=replay)


def test_a_row_that_is_one_document_costs_what_its_tokens_do():
  exact, _ = conversation(1024)
  got = flops.layout_flops(FLASH, exact)
  assert got == pytest.approx(1024 * flops.flops_per_token(FLASH, "train", 1024), rel=1e-12)


@pytest.mark.parametrize(("context", "limit"), [(8192, 1.63), (65_536, 1.79)])
def test_replay_saves_what_encoder_and_decoder_slots_say(context, limit):
  """Halves of equal cost would give the limit; the output layer, which is saved too, adds to it."""
  exact, replayed = conversation(context)
  slots = lambda row: int((row.document >= 0).sum() + (row.decoder_slots >= 0).sum())
  assert slots(exact) / slots(replayed) == pytest.approx(limit, abs=0.006)
  ratio = flops.layout_flops(FLASH, exact) / flops.layout_flops(FLASH, replayed)
  assert limit < ratio < limit + 0.05


def test_a_replayed_row_is_the_sum_over_its_slots():
  _, replayed = conversation(1200, responses=2)
  attention, scan, total = 4 * 64 * 512, 2 * 32 * 128, 0.0
  for spec in FLASH.schedule():
    layer, decoder = flops.layer_parameters(FLASH, spec), spec.layer >= 20
    total += 6 * layer.kv_side * (replayed.document >= 0).sum()
    starts = replayed.decoder_segment_start if decoder else replayed.segment_start
    for slot, start in enumerate(starts[0]):
      own = replayed.decoder_slots[0, slot] if decoder else slot
      if own < 0 or replayed.document[0, own] < 0:
        continue
      seen = replayed.positions[0, own] + 1
      visible = seen // spec.ratio if spec.ratio else 0
      total += 6 * (layer.matrices + layer.active_experts)
      total += 3 * attention * (min(slot - start + 1, 128) + min(visible, 512))
      total += scan * visible * (spec.kind in ("full", "reindex"))
  total += 6 * FLASH.vocab * FLASH.dim * (replayed.decoder_slots >= 0).sum()
  assert flops.layout_flops(FLASH, replayed) == pytest.approx(total, rel=1e-12)
