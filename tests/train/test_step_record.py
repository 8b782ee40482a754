"""What a line of metrics.jsonl says, from the scalars of a step."""

import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import Settings
from deepseek_jax.flops import flops_per_token
from deepseek_jax.layout import Document, Replay, build_layout
from train.step_record import Counts, InFlight, NotFinite, StepRecord, replayed_flops

SETTINGS = Settings(max_skipped_steps=2)


def in_flight(step, *, tokens=100, skipped=0, seconds=0.5):
  metrics = {"tokens": tokens, "loss": 2.5, "grad_norm": 1.0, "lr": 0.1, "skipped": skipped}
  metrics = {name: jnp.asarray(value) for name, value in metrics.items()}
  packing = {"encoder_fill": 0.5}
  return InFlight(step, metrics, (f"a:{step}", ""), time.monotonic() - seconds, 0.125, packing)


def make(kind="cpu", counts=Counts(), devices=2):
  sentences = []
  chips = [types.SimpleNamespace(device_kind=kind)] * devices
  return StepRecord(SETTINGS, counts, chips, sentences.append), sentences


def test_mfu_is_model_flops_over_the_peak_of_all_devices():
  record, _ = make("NVIDIA H200")
  line = record.read(in_flight(1), ())
  flops = flops_per_token(SETTINGS.model, "train", SETTINGS.data.slots)
  assert line["mfu"] == pytest.approx(line["tokens_per_second"] * flops / (2 * 989e12))
  assert line["tokens_per_second"] == pytest.approx(100 / line["step_seconds"])
  assert line["step_seconds"] >= 0.5


def test_mfu_of_a_step_with_replay_counts_what_it_computes():
  document, ratios = Document(np.zeros(1024, np.int32)), SETTINGS.model.ratios
  exact = build_layout([document], slots=1024, ratios=ratios)
  replay = Replay(window=SETTINGS.model.attention.window, decoder_slots=256)
  replayed = build_layout([document], [((960, 1024),)], slots=1024, ratios=ratios, replay=replay)
  assert replayed_flops(SETTINGS.model, exact) is None
  flops = replayed_flops(SETTINGS.model, replayed)
  assert flops < 0.65 * flops_per_token(SETTINGS.model, "train", 1024)
  line = make("NVIDIA H200")[0].read(in_flight(1)._replace(flops=flops), ())
  assert line["mfu"] == pytest.approx(line["tokens_per_second"] * flops / (2 * 989e12))


def test_an_unknown_peak_leaves_mfu_empty_and_says_so_once():
  record, sentences = make()
  assert record.read(in_flight(1), ())["mfu"] is None
  assert sentences == ["mfu stays empty: the peak rate of a cpu is not known."]


def test_how_full_the_rows_were_is_on_the_line():
  assert make()[0].read(in_flight(1), ())["encoder_fill"] == 0.5


def test_a_step_lasts_from_the_end_of_the_one_before():
  record, _ = make()
  began = time.monotonic()
  first, second = in_flight(1, seconds=0.0), in_flight(2, seconds=0.0)
  time.sleep(0.05)
  seconds = [record.read(done, ())["step_seconds"] for done in (first, second)]
  assert sum(seconds) <= time.monotonic() - began
  assert seconds[0] >= 0.05


def test_counts_go_on_after_a_restart():
  counts = Counts(tokens=1000, skipped_steps=3, skipped_batches=((4, ("a:4",)),), damaged=("b:1",))
  as_stored = {**counts._asdict(), "skipped_batches": [[4, ["a:4"]]], "damaged": ["b:1"]}
  assert Counts.from_json(as_stored) == counts
  record, sentences = make(counts=counts)
  line = record.read(in_flight(5), ("b:1", "b:2"))
  assert (line["tokens"], line["skipped_steps"], line["damaged_records"]) == (1100, 3, 2)
  assert sentences[-1] == "Damaged records were left out: b:2 (2 so far)."


def test_skipped_steps_in_a_row_stop_the_run_and_name_every_record():
  record, _ = make()
  for step, skipped in ((1, 1), (2, 0), (3, 1)):
    record.read(in_flight(step, skipped=skipped), ())
    record.check()
  record.read(in_flight(4, skipped=2), ())
  with pytest.raises(NotFinite, match=r"2 steps in a row.*step 3: a:3; step 4: a:4\.$"):
    record.check()
  assert record.counts.skipped_steps == 3
