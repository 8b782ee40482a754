"""A released checkpoint becomes a step of ours, whole and equal, or nothing and one sentence."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from deepseek_jax.checkpoint import Checkpoints, manifest, restore_step
from deepseek_jax.checkpoint.names import named_leaves
from deepseek_jax.checkpoint.released import load_released
from deepseek_jax.checkpoint.released_config import released_config
from deepseek_jax.checkpoint.released_export import (
  owners_of_tensors,
  write_index,
  write_shard,
)
from deepseek_jax.checkpoint.released_folder import open_released
from deepseek_jax.checkpoint.released_index import release_tensors, shard_plan
from deepseek_jax.checkpoint.safetensors_file import (
  DTYPES,
  Header,
  read_headers,
  read_safetensors,
  write_safetensors,
)
from deepseek_jax.checkpoint.stored_arrays import chunk_shape, open_items
from deepseek_jax.layout import Document, build_layout, stack_layouts
from deepseek_jax.ngram import NgramHash
from deepseek_jax.sharding import make_mesh
from deepseek_jax.storage_path import storage_path
from train import convert, inspect
from train.errors import Exit, UsageError
from train.programs import build_programs
from train.settings import settings_from_json

CASE = pathlib.Path(__file__).resolve().parents[1] / "reference" / "quantized_model"
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


@pytest.fixture
def released(tmp_path):
  """A folder with a released checkpoint in one file; a test may change it."""
  folder = tmp_path / "released"
  folder.mkdir()
  for name in ("config.json", "weights.safetensors"):
    shutil.copy(CASE / name, folder)
  return folder


@pytest.fixture(scope="module")
def imported(converted):
  return converted / "run"


def rewrite(folder, change, name="weights.safetensors"):
  arrays = read_safetensors(folder / name)
  change(arrays)
  entries = {name: Header(NAMES[x.dtype], x.shape) for name, x in arrays.items()}
  write_safetensors(folder / name, entries, arrays.items())


def to_checkpoint(source, output, *more):
  return convert.main(
    ["--checkpoint", str(source), "--output", str(output), "--format", "checkpoint", *more]
  )


def to_released(source, output, dtype="released"):
  return convert.main(
    ["--checkpoint", str(source), "--output", str(output), "--format", "released", "--dtype", dtype]
  )


def values_of(folder):
  """Every weight of a released checkpoint, decoded, as our tree."""
  released = open_released(folder)
  return named_leaves(load_released(released.tensors, released.cfg))


def refusal(call, *arguments):
  """The one sentence with which it is refused."""
  with pytest.raises(UsageError) as error:
    call(*arguments)
  (problem,) = error.value.problems
  return problem


@pytest.fixture(scope="module")
def beginning(imported):
  """Settings, mesh and programs of a small run that starts from the import, and its step 0."""
  settings = settings_from_json((imported / "config.json").read_text())
  settings = dataclasses.replace(
    settings,
    data=dataclasses.replace(settings.data, slots=32, batch_rows=8),
    objective=dataclasses.replace(settings.objective, vocab_chunk_tokens=32),
    optim=dataclasses.replace(settings.optim, matrices="adamw", warmup_steps=1),
    total_steps=2,
  )
  mesh = make_mesh(settings.mesh)
  with jax.set_mesh(mesh):
    programs = build_programs(settings, mesh)
  abstract = programs.abstract_state
  wanted = {"params": abstract.params, "router": abstract.balance}
  return settings, mesh, programs, restore_step(imported / "checkpoints" / "0", wanted)


def test_an_import_is_a_step_with_the_decoded_values(imported):
  settings = settings_from_json((imported / "config.json").read_text())
  assert (settings.mesh.fsdp, settings.mesh.expert) == (4, 2)
  cfg = released_config(json.loads((CASE / "config.json").read_text()))
  assert settings.model == cfg
  wanted = load_released(read_headers(CASE / "weights.safetensors"), cfg)
  stored = open_items(imported / "checkpoints" / "0")
  for item, collection in (("params", "params"), ("router", "balance")):
    decoded = named_leaves(wanted[collection])
    assert set(stored[item]) == set(decoded)
    for name, array in stored[item].items():
      np.testing.assert_array_equal(array.read().result(), decoded[name], name)
  assert chunk_shape(stored["params"]["layer_0/moe/experts/w1"])[0] == 1  # read expert by expert
  assert manifest.verify_step(imported / "checkpoints" / "0") == []


@pytest.mark.slow
def test_training_starts_from_an_import(beginning):
  settings, mesh, programs, restored = beginning
  experts = restored.items["params"]["layer_0"]["moe"]["experts"]["w1"]
  assert len({str(shard.index) for shard in experts.addressable_shards}) == 8
  assert restored.step == 0
  ids_BS = np.random.default_rng(0).integers(0, settings.model.vocab, (8, 33))
  classes_V = np.arange(settings.model.vocab) % settings.model.engram.compressed_vocab
  hashing = NgramHash(settings.model.engram, classes_V.astype(np.int32))
  build = lambda ids_S: build_layout(
    [Document(ids_S)], slots=32, ratios=settings.model.ratios, hashing=hashing
  )
  batch = stack_layouts([build(ids_S[:32]) for ids_S in ids_BS])
  with jax.set_mesh(mesh):
    fresh = programs.create()
    state = fresh._replace(params=restored.items["params"], balance=restored.items["router"])
    placed = jax.tree.map(lambda x, at: jax.device_put(x, at.sharding), batch,
                          programs.abstract_batch)  # fmt: skip
    state, metrics = programs.step(state, placed)
  assert int(state.step) == 1 and int(metrics["skipped"]) == 0
  assert np.isfinite(float(metrics["loss"])) and float(metrics["grad_norm"]) > 0


def test_every_tensor_that_is_missing_unknown_or_misshapen_is_named(released, tmp_path):
  def change(arrays):
    del arrays["layers.1.attn.wq_a.scale"], arrays["norm.weight"]
    arrays["layers.7.attn_norm.weight"] = arrays["layers.0.attn_norm.weight"]
    arrays["mtp.0.norm.weight"] = arrays["layers.0.attn_norm.weight"]
    arrays["layers.2.ffn_norm.weight"] = arrays["layers.2.ffn_norm.weight"][:-1]
    arrays["layers.0.attn.wkv.weight"] = arrays["layers.0.attn.wkv.weight"].view(np.int8)

  rewrite(released, change)
  problem = refusal(to_checkpoint, released, tmp_path / "run")
  for part in (
    "missing tensor layers.1.attn.wq_a.scale",
    "missing tensor norm.weight",
    "unused tensor layers.7.attn_norm.weight",
    "unused tensor mtp.0.norm.weight",
    "misshapen tensor layers.2.ffn_norm.weight: (63,) does not fit (64,)",
    "tensor layers.0.attn.wkv.weight has dtype I8",
  ):
    assert part in problem
  assert not list(tmp_path.glob("run*"))


@pytest.mark.parametrize("dtype", ["released", "bfloat16"])
def test_what_was_imported_goes_out_with_the_same_values(imported, tmp_path, capsys, dtype):
  """The case's plain weights are bfloat16 and its others fit it too, so both are exact."""
  output = tmp_path / "out"
  assert to_released(imported, output, dtype) == Exit.DONE
  out = capsys.readouterr().out
  assert " becomes 1 files with " in out and "39 of 39 kinds of tensors are stored exactly" in out
  source, back = read_headers(CASE / "weights.safetensors"), open_released(output).tensors
  if dtype == "released":
    # The case has its hc scales in bfloat16, the release in float32.
    kinds = lambda tensors: {n: t.header for n, t in tensors.items() if not n.endswith("_scale")}
    assert kinds(back) == kinds(source)
  else:
    assert {stored.header.dtype for stored in back.values()} == {"BF16", "F32"}
  cfg = released_config(json.loads((CASE / "config.json").read_text()))
  wanted, found = named_leaves(load_released(source, cfg)), values_of(output)
  assert set(wanted) == set(found)
  for name in wanted:
    np.testing.assert_array_equal(found[name], wanted[name], name)
  assert manifest.verify_step(output) == []
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_in_many_files_is_the_one_in_one_file(imported, tmp_path):
  arrays = open_items(imported / "checkpoints" / "0")
  cfg = released_config(json.loads((CASE / "config.json").read_text()))
  shards = shard_plan(release_tensors(cfg), limit=50_000)
  assert len(shards) > 5
  for shard in shards:
    write_shard(arrays, owners_of_tensors(cfg), shard, tmp_path, "released")
  write_index(tmp_path, shards, cfg, "released")
  back = open_released(tmp_path)
  assert back.cfg == cfg and len({stored.path for stored in back.tensors.values()}) == len(shards)
  wanted = named_leaves(load_released(read_headers(CASE / "weights.safetensors"), cfg))
  for name, values in values_of(tmp_path).items():
    np.testing.assert_array_equal(values, wanted[name], name)


@pytest.mark.slow
def test_a_run_in_an_object_store_goes_out_as_a_local_one_does(converted, s3, tmp_path):
  url, released = f"{s3}/run", open_released(converted / "case")
  tree = load_released(released.tensors, released.cfg)
  items = jax.tree.map(jax.numpy.asarray, {"params": tree["params"], "router": tree["balance"]})
  checkpoints = Checkpoints(f"{url}/checkpoints")
  checkpoints.save(7, items, data={}, meta={})
  checkpoints.close()
  config = (converted / "run" / "config.json").read_bytes()
  (storage_path(url) / "config.json").write_bytes(config)
  assert to_released(url, tmp_path / "out") == Exit.DONE
  wanted = {p.name: p.read_bytes() for p in (converted / "released").iterdir()}
  assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == wanted
  assert inspect.main(["--checkpoint", url, "--hashes"]) == Exit.DONE
