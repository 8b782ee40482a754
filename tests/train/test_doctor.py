"""`doctor` fails for what would make a run fail, and names it; each check is made to fail once."""

import jax
import pytest

from deepseek_jax.storage_path import RemotePath, storage_path
from train import gradient_paths
from train.__main__ import main
from train.errors import Exit

EIGHT = {"mesh__fsdp": 8, "data__batch_rows": 8}


@pytest.fixture
def doctor(capsys):
  """Runs the verb; gives its exit code and subject -> (state, text)."""

  def run(*argv):
    code = main(["doctor", *argv])
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    return code, {subject: (state, text) for state, subject, *text in rows}

  return run


def test_the_machine_alone_is_described(doctor):
  code, found = doctor()
  assert code == Exit.DONE
  assert found["devices"] == ("ok", ["8 x cpu (cpu)"])
  assert found["jax"] == ("-", [jax.__version__])
  assert "xla_flags" in found and "storage" not in found and "gradients" not in found


def test_local_storage_is_written_and_left_as_it_was(doctor, tmp_path):
  code, found = doctor(f"--workdir={tmp_path}/runs/a")
  assert (code, found["storage"][0]) == (Exit.DONE, "ok")
  assert list((tmp_path / "runs" / "a").iterdir()) == []


def test_storage_that_cannot_be_a_folder_fails(doctor, tmp_path):
  (tmp_path / "file").touch()
  code, found = doctor(f"--workdir={tmp_path}/file")
  assert code == Exit.CHECK_FAILED
  assert found["storage"] == ("FAIL", [f"{tmp_path}/file cannot be written: File exists."])


def test_a_store_is_written_and_left_as_it_was(doctor, s3):
  code, found = doctor(f"--workdir={s3}/runs/a")
  assert (code, found["storage"][0]) == (Exit.DONE, "ok")
  assert storage_path(f"{s3}/runs").names_below() == []


def test_a_bucket_that_is_not_there_fails(doctor, s3):
  code, found = doctor("--workdir=s3://no-such-bucket/a")
  assert code == Exit.CHECK_FAILED
  assert found["storage"][0] == "FAIL" and "there is no bucket" in found["storage"][1][0]


def test_a_store_that_ignores_conditions_fails(doctor, s3, monkeypatch):
  monkeypatch.setattr(
    RemotePath, "write_if_unchanged", lambda path, data, generation: path.write_bytes(data) or b"1"
  )
  code, found = doctor(f"--workdir={s3}/a")
  assert code == Exit.CHECK_FAILED
  assert "two runs could have one folder" in found["storage"][1][0]


def test_a_mesh_that_does_not_fit_fails_and_says_what_would(doctor, runs, tmp_path):
  code, found = doctor(*runs.argv(tmp_path, mesh__fsdp=3))
  assert code == Exit.CHECK_FAILED
  state, (text,) = found["configuration"]
  assert state == "FAIL" and "multiply to 3" in text and "mesh.fsdp=4" in text


@pytest.mark.slow
def test_a_sound_configuration_passes(doctor, runs, tmp_path):
  code, found = doctor(*runs.argv(tmp_path, **EIGHT))
  assert code == Exit.DONE
  assert {found[subject][0] for subject in ("configuration", "mesh", "gradients")} == {"ok"}


def test_a_parameter_without_a_gradient_fails_by_name(doctor, runs, tmp_path, monkeypatch):
  whole = gradient_paths.training_loss

  def cut(settings):
    loss = whole(settings)
    frozen = lambda params: params | {"head": jax.lax.stop_gradient(params["head"])}
    return lambda params, *rest: loss(frozen(params), *rest)

  monkeypatch.setattr(gradient_paths, "training_loss", cut)
  code, found = doctor(*runs.argv(tmp_path, **EIGHT))
  assert code == Exit.CHECK_FAILED
  said = "none reaches head; optim.frozen does not name what may stay as it is."
  assert found["gradients"] == ("FAIL", [said])


@pytest.mark.slow
def test_indexers_that_are_off_must_be_frozen(doctor, runs, tmp_path):
  """Decay would move them; a stage that trains them again is looked at by itself."""
  off = {"objective__indexer": "off"} | EIGHT
  code, found = doctor(*runs.argv(tmp_path, **off))
  state, (text,) = found["gradients"]
  assert (code, state) == (Exit.CHECK_FAILED, "FAIL")
  assert "layer_1/attn/indexer/wk" in text or "attn/indexer/wk (2 times)" in text
  again = {"objective.indexer": "dense", "optim.frozen": ("embed",)}
  later = repr([{"name": "later", "tokens": 600, "changes": again}])
  code, found = doctor(*runs.argv(tmp_path, optim__frozen="indexer", stages=later, **off))
  assert code == Exit.DONE, found
  assert found["gradients"][1][0].startswith("reach every parameter but the frozen attn/indexer/")
  assert found["gradients:later"] == ("ok", ["reach every parameter but the frozen embed"])
