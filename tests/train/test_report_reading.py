"""What a report reads from metrics and results, before anything is drawn."""

import json

import numpy as np
import pytest

from train.reporting import drawing
from train.reporting.by_place import by_place as by_place_figures
from train.reporting.columns import read_columns
from train.reporting.results import read_results

pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")

MAP = {"lengths": [64, 128, 256], "depths": [0.0, 1.0]}


def test_of_lines_of_one_step_the_last_counts_and_columns_have_gaps():
  records = {"step": 2, "a": 1}, {"step": 1, "a": 5, "b": 7}, {"step": 2, "a": 3, "c": "text"}
  columns = read_columns(json.dumps(record).encode() for record in records)
  assert columns.steps_N.tolist() == [1, 2] and sorted(columns.values) == ["a", "b"]
  np.testing.assert_array_equal(columns.get("a"), [5, 3])
  np.testing.assert_array_equal(columns.get("b"), [7, np.nan])
  assert columns.last("b") == 7 and not columns.has("c")


def test_thinning_keeps_spikes_ends_and_order():
  steps, values = np.arange(100_000), np.ones(100_000)
  values[[777, 50_000]] = [9.0, -9.0]
  values[60_000:62_000] = np.nan
  x, y = drawing.thin(steps, values)
  assert len(x) <= 602 and np.all(np.diff(x) > 0) and {777, 50_000} <= set(x)
  assert np.isnan(y).any() and x[0] == 0


def test_a_running_mean_skips_what_is_not_finite_and_keeps_a_constant():
  values = np.full(200, 2.0)
  values[[0, 50, 199]] = np.nan
  got = drawing.smooth(values)
  np.testing.assert_array_equal(np.isnan(got), np.isnan(values))
  np.testing.assert_allclose(got[np.isfinite(got)], 2.0)


def test_checkpoints_of_several_files_share_columns_and_curves_have_their_places(tmp_path):
  by_place = {"distance": [0, 16], "kl": 0.5, "kl_by_distance": [1.0, None],
              "tokens_by_distance": [9, 0], "top1_by_distance": [1.0]}  # fmt: skip
  files = {
    "first.json": [{"step": 3, "results": {"fp4": by_place}}],
    "second.json": [{"step": 3, "results": {"pool": {"kl": 2.0}}}],
    "third.json": [{"step": 3, "results": {"pool": {"kl": 4.0}}}, {"step": None, "results": {}}],
  }
  for name, records in files.items():
    (tmp_path / name).write_text(json.dumps(records))
  results = read_results([str(tmp_path / name) for name in files])
  assert results.sources == ["step 3", "step 3 (third.json)", "a checkpoint"]
  assert results.numbers == {"fp4.kl": [0.5, None, None], "pool.kl": [2.0, 4.0, None]}
  (curve,) = results.curves
  assert (curve.task, curve.metric, curve.starts_K) == ("fp4", "kl", [0, 16])
  with drawing.style():
    (drawn,) = by_place_figures(results.curves)
  assert ">kl by distance</text>" in drawn.svg and ">fp4</text>" in drawn.svg


def test_tables_are_read_in_either_order_and_bad_ones_left_out(tmp_path):
  by_length = [[1, 2], [3, 4], [5, None]]
  task = {
    **MAP,
    "accuracy": by_length,
    "ragged": [[1], [2, 3]],
    "inner": {**MAP, "accuracy": [[1, 3, 5], [2, 4, None]]},
    "listed": [1, 2],
    "mean": 0.5,
  }
  (tmp_path / "r.json").write_text(json.dumps([{"step": 3, "results": {"needle": task}}]))
  results = read_results([str(tmp_path / "r.json")])
  assert results.numbers == {"needle.mean": [0.5]} and results.sources == ["step 3"]
  first, second = results.maps
  assert (first.metric, second.metric) == ("accuracy", "inner.accuracy")
  assert first.rows.values == [0.0, 1.0] and first.columns.values == [64, 128, 256]
  for found in (first, second):
    np.testing.assert_array_equal(found.cells_RC, [[1, 3, 5], [2, 4, np.nan]])
