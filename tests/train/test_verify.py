"""`python -m train verify` on the stored reference cases, and what it says when they do not fit."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from deepseek_jax.checkpoint.safetensors_file import read_safetensors
from train import verify
from train.errors import Exit

REFERENCE = pathlib.Path(__file__).resolve().parents[1] / "reference"
BACKBONE = ("minimal_csa2", "candidate_pool", "engram", "image_span")
CACHES = ("decode", "decoder_replay")


def run(case, *arguments):
  return verify.main(["--reference", str(case), *arguments])


@pytest.fixture
def copied(tmp_path):
  """A case that a test may damage: a function (name, changed tensors) -> folder."""

  def copy(name, change=lambda tensors: None):
    folder = shutil.copytree(REFERENCE / name, tmp_path / name)
    tensors = read_safetensors(folder / "weights.safetensors")
    change(tensors)
    wide = {name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items()}
    save_file(wide, folder / "weights.safetensors")
    return folder

  return copy


def report(reference, folder, *arguments):
  output = folder / "out.json"
  assert run(reference, "--output", str(output), *arguments) == Exit.DONE
  return json.loads(output.read_text())


@pytest.fixture(scope="module")
def of_all_cases(tmp_path_factory):
  """What the command says of all cases without another word, which takes a minute or two."""
  return report(REFERENCE, tmp_path_factory.mktemp("report"))


# One case is enough for a quick look.
def test_our_forward_with_rounded_entries_matches_the_reference_in_float32(tmp_path):
  case = BACKBONE[0]
  found = report(REFERENCE / case, tmp_path, "--numerics", "fp32_qat")
  assert_matches(found["numerics"]["fp32_qat"][case])


@pytest.mark.slow
@pytest.mark.parametrize("case", [*BACKBONE[1:], "decoder_replay"])
def test_every_case_with_rounded_entries_matches_the_reference_in_float32(case, of_all_cases):
  assert_matches(of_all_cases["numerics"]["fp32_qat"][case])


def assert_matches(traces):
  floats = [t for name, t in traces.items() if name != "logits" and t["relative"] is not None]
  assert len(floats) > 20
  assert max(t["relative"] for t in floats) <= 2e-5
  whole = (".topk", ".router_experts", ".rows", ".candidates")
  chosen = {name: trace for name, trace in traces.items() if name.endswith(whole)}
  assert any(name.endswith(".topk") for name in chosen)
  assert all(trace["identical"] for trace in chosen.values())


@pytest.mark.slow
def test_all_cases_match_by_default_with_and_without_rounding(of_all_cases):
  others = {*CACHES, "quantized_model"}
  layouts = {"decoder_replay as a layout"}
  assert set(of_all_cases["cases"]) == {*BACKBONE, *others, *layouts, "quant_vectors"}
  for numerics in ("fp32", "fp32_qat"):
    assert set(of_all_cases["numerics"][numerics]) == {*BACKBONE, *others, *layouts}


def test_number_vectors_are_equal_byte_for_byte(tmp_path):
  assert run(REFERENCE / "quant_vectors", "--output", str(tmp_path / "out.json")) == Exit.DONE
  vectors = json.loads((tmp_path / "out.json").read_text())["cases"]["quant_vectors"]
  assert len(vectors) > 20
  assert all(
    v["identical"] for name, v in vectors.items() if "gemm" not in name and name != "logits"
  )


@pytest.mark.slow
@pytest.mark.parametrize("case", CACHES)
def test_prefill_steps_and_caches_match_the_reference(case, of_all_cases):
  """Rounded rows go through the packed cache, others through a plain one."""
  found = {name: cases[case] for name, cases in of_all_cases["numerics"].items() if case in cases}
  assert set(found) == {"fp32", "fp32_qat"}
  for traces in found.values():
    assert sum(name.startswith("final.") for name in traces) > 8
    assert traces["decode_logits"]["relative"] <= 2e-5
    assert traces["final.layers.3.compressed_kv"]["relative"] <= 2e-5
    assert traces["logits"]["top1"] == 1


def test_a_case_with_caches_that_lacks_its_prompt_is_refused(copied, capsys):
  folder = copied("decoder_replay")
  recorded = read_safetensors(folder / "outputs_fp32.safetensors")
  del recorded["exact_logits"]
  save_file(recorded, folder / "outputs_fp32.safetensors")
  assert run(folder, "--numerics", "fp32") == Exit.USAGE
  assert "decode_logits comes without prefill_logits or" in capsys.readouterr().err


def test_caches_are_not_compared_in_bfloat16(tmp_path, capsys):
  folder = shutil.copytree(REFERENCE / "decode", tmp_path / "decode")
  shutil.copy(folder / "outputs_fp32.safetensors", folder / "outputs.safetensors")
  assert run(folder, "--numerics", "bf16") == Exit.USAGE
  assert "a cache cannot be fed with recorded values" in capsys.readouterr().out


@pytest.mark.slow
def test_products_of_quantized_activations_match_the_reference():
  assert run(REFERENCE / "quantized_model", "--numerics", "fp32_actqat") == Exit.DONE


@pytest.mark.slow
@pytest.mark.parametrize("case", [*BACKBONE, "quantized_model"])
def test_sites_fed_with_recorded_inputs_match_in_bfloat16(case, capsys):
  assert run(REFERENCE / case, "--numerics", "bf16") == Exit.DONE
  compared = int(capsys.readouterr().out.split(" traces of 1 cases compared")[0].split()[-1])
  assert compared > 25


def test_the_report_has_the_promised_structure_and_is_strict_json(tmp_path):
  output = tmp_path / "out.json"
  numerics = ("--numerics", "fp32", "--output", str(output))
  assert run(REFERENCE / "minimal_csa2", *numerics) == Exit.DONE
  refuse = lambda name: pytest.fail(f"{name} is no JSON")
  report = json.loads(output.read_text(), parse_constant=refuse)
  assert set(report) == {"cases", "numerics"}
  traces = report["cases"]["minimal_csa2"]
  assert set(traces["layers.0.streams"]) == {"max_abs", "relative", "identical"}
  agreement = {"mean_kl", "p95_kl", "cosine", "top1"}
  assert set(traces["logits"]) == agreement | {"max_abs", "relative", "identical"}
  assert traces["logits"]["top1"] == 1 and traces["logits"]["cosine"] == pytest.approx(1)
  assert abs(traces["logits"]["mean_kl"]) < 1e-9


def test_a_changed_weight_is_noticed_and_its_traces_are_named(copied, capsys):
  def change(tensors):
    gain = tensors["layers.1.attn.kv_norm.weight"].astype(np.float32)
    tensors["layers.1.attn.kv_norm.weight"] = gain * 1.01

  folder = copied("minimal_csa2", change)
  assert run(folder, "--numerics", "fp32") == Exit.CHECK_FAILED
  out = capsys.readouterr().out
  failed = [line for line in out.splitlines() if line.startswith("beyond its bound: ")]
  assert "beyond its bound: minimal_csa2 (fp32) layers.1.attn.window_kv" in failed
  assert not any(" layers.0." in line for line in failed)


def test_missing_unused_and_misshapen_tensors_are_all_named(copied, capsys):
  def change(tensors):
    del tensors["layers.0.attn.wq_a.weight"]
    tensors["layers.0.attn.wq_z.weight"] = np.zeros((2, 2), np.float32)
    tensors["layers.1.attn.compressor.wgate.weight"] = np.zeros((3, 5), np.float32)

  folder = copied("minimal_csa2", change)
  assert run(folder) == Exit.USAGE
  error = capsys.readouterr().err
  assert "missing tensor layers.0.attn.wq_a.weight" in error
  assert "unused tensor layers.0.attn.wq_z.weight" in error
  assert "misshapen tensor layers.1.attn.compressor.wgate.weight: (3, 5) does not fit" in error
  assert error.count("\n") == 1 and "Traceback" not in error


def test_a_folder_of_cases_is_taken_whole_and_cases_of_other_parts_are_named(tmp_path, capsys):
  """Traces of the drafter make a case that we cannot compare yet."""
  shutil.copytree(REFERENCE / "quant_vectors", tmp_path / "quant_vectors")
  folder = shutil.copytree(REFERENCE / "minimal_csa2", tmp_path / "later")
  ids_BS = np.zeros((1, 2), np.int32)
  save_file({"input_ids": ids_BS, "mtp.0.attn.o": ids_BS}, folder / "outputs_fp32.safetensors")
  assert run(tmp_path, "--numerics", "fp32") == Exit.DONE
  out = capsys.readouterr().out
  assert "later (fp32): not compared, its traces need the drafter, which is not there yet." in out
  assert "22 traces of 1 cases compared, 0 beyond their bound; 1 not compared." in out


@pytest.mark.parametrize(
  ("prepare", "sentence"),
  [
    (lambda f: shutil.rmtree(f), "is not a folder."),
    (lambda f: [p.unlink() for p in f.iterdir()], "holds no case"),
    (lambda f: (f / "weights.safetensors").unlink(), "it has no weights.safetensors."),
    (lambda f: (f / "weights.safetensors").write_bytes(b"no"), "not a readable safetensors file"),
    (lambda f: [p.unlink() for p in f.glob("outputs*")], "has nothing to compare"),
    (lambda f: (f / "config.json").write_text("{}"), "config.json lacks the key"),
  ],
)  # fmt: skip
def test_a_case_that_cannot_be_read_is_one_sentence(prepare, sentence, copied, capsys):
  folder = copied("minimal_csa2")
  prepare(folder)
  assert run(folder) == Exit.USAGE
  error = capsys.readouterr().err
  assert sentence in error and error.count("\n") == 1


def test_unknown_numerics_are_refused_with_the_known_ones(capsys):
  with pytest.raises(SystemExit) as stopped:
    run(REFERENCE, "--numerics", "fp16")
  assert stopped.value.code == Exit.USAGE
  error = capsys.readouterr().err
  assert "fp16" in error and "fp32_qat" in error


@pytest.mark.parametrize("name", ["embed_out", "logits"])
def test_a_trace_that_was_cut_is_refused_and_not_compared_in_part(name, copied, capsys):
  folder = copied("minimal_csa2")
  recorded = read_safetensors(folder / "outputs_fp32.safetensors")
  recorded[name] = np.ascontiguousarray(recorded[name][..., :1])
  save_file(recorded, folder / "outputs_fp32.safetensors")
  assert run(folder, "--numerics", "fp32") == Exit.USAGE
  assert f"trace {name} is" in capsys.readouterr().err
