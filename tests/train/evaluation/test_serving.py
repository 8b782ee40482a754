"""What serving changes: nothing where it is the same computation, something where it is not."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import linen as nn
from tokenizers import Tokenizer

from configs import nano
from configs.schema import Settings
from data.config import DataConfig
from data.plain_tokenizer import plain_tokenizer
from data.prepared import TOKENIZER
from data.source import Row
from deepseek_jax.config import ModelConfig, NumericsConfig
from deepseek_jax.layout import Document
from deepseek_jax.model import Model
from deepseek_jax.ngram import NgramHash, hash_primes
from deepseek_jax.sharding import make_mesh
from deepseek_jax.training_config import MeshConfig
from tests.train.conftest import SLOTS, VOCAB
from train.evaluation import inside, served_rows, serving
from train.evaluation.checkpoints import Checkpoint
from train.evaluation.model import EvaluatedModel
from train.evaluation.request import parse

NANO = ModelConfig.from_dict(nano.get_config().model.to_dict())
ENGRAM = dataclasses.replace(
  NANO.engram, layers=(0,), compressed_vocab=VOCAB, table_rows=(sum(hash_primes(1, 4, 101)[0]),)
)
# Pairs with Engram, and a decoder that chooses twice; the pool holds 8 of up to 64 entries.
CFG = dataclasses.replace(
  NANO,
  vocab=VOCAB,
  sinkhorn_iterations=1,
  compress_ratios=(2, 1, 1),
  kv_sources=(0, 1),
  index_sources=(0, 1, 2),
  decoder_start=1,
  engram=ENGRAM,
  indexer=dataclasses.replace(NANO.indexer, pool_source=1),
  numerics=NumericsConfig(compute_dtype="float32", window_fp8=False),
  scan_layers=False,
  remat="none",
)
W = CFG.attention.window  # 8
REQUEST = parse(["--checkpoint=x", "--tasks=y", "--limit=4"])


def variables_of(cfg: ModelConfig):
  """Away from where training starts, so that every term matters."""
  hashing = NgramHash(cfg.engram, np.zeros(VOCAB, np.int32)) if cfg.engram.layers else None
  shape = served_rows.RowShape(cfg, hashing, SLOTS, 2)
  init = lambda key: nn.unbox(Model(cfg).init(key, shape.exact([[]])))

  def draw(path, leaf):
    name = jax.tree_util.keystr(path).encode()
    rng = np.random.default_rng(int.from_bytes(name, "little") % 2**32)
    size = {"embed": 1.0, "scale": 0.5, "base": 0.3, "bias": 0.1, "bias_vl": 0.1, "wo_b": 2.0}
    kind, drawn = path[-1].key, rng.normal(size=leaf.shape)
    if kind in size:
      return np.float32(size[kind] * drawn)
    return np.float32(1 + 0.2 * drawn if leaf.ndim == 1 else 0.3 * drawn)

  return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(init, jax.random.key(0)))


@pytest.fixture(scope="module")
def model(prepared) -> EvaluatedModel:
  tokenizer = Tokenizer.from_file(str(prepared.folder / TOKENIZER))
  data = DataConfig(paths=(str(prepared.folder),), slots=SLOTS)
  return EvaluatedModel(
    checkpoint=Checkpoint(prepared.folder, 1),
    sha256="",
    cfg=CFG,
    settings=Settings(model=CFG, data=data),
    variables=variables_of(CFG),
    data=(prepared,),
    tokenizer=plain_tokenizer(tokenizer),
    hashing=NgramHash(CFG.engram, prepared.compressed_id()),
    mesh=make_mesh(MeshConfig(), jax.devices()[:1]),
    rows=2,
    packed=False,
    seed=0,
  )


def measure(make, model, request=REQUEST):
  """Metrics of a task, and what it logs."""
  logged = []
  task = make("it", "", request)
  assert task.problems(model, request) == []
  found = task.run(model, request, logged.append)
  assert set(task.metrics) <= set(found)
  return found, logged


@pytest.fixture(scope="module")
def exited(model):
  return measure(serving.early_exit, model)


def test_early_exit_changes_something_and_tables_add_up(exited):
  found, logged = exited
  assert found["kl"] > 1e-6
  assert found["loss_gap"] == pytest.approx(found["changed_loss"] - found["loss"])
  tokens = np.array(found["tokens_by_distance"])
  assert found["distance"] == [0, 1, 2, 4, 8, 16, 32, 64][: len(tokens)]
  assert tokens.sum() == found["tokens"] == sum(row["tokens"] for row in logged)
  of_bucket = [n * kl for n, kl in zip(tokens, found["kl_by_distance"], strict=True) if n]
  assert sum(of_bucket) / tokens.sum() == pytest.approx(found["kl"])
  assert len(logged) == 4


def rows_of(*lengths) -> list[Row]:
  rng = np.random.default_rng(0)
  draw = lambda n: Document(rng.integers(0, VOCAB, n).astype(np.int32))
  return [Row(f"row:{n}", [draw(length) for length in own]) for n, own in enumerate(lengths)]


def test_early_exit_is_exact_for_prompts_up_to_the_window(model):
  """Prompts are halves of documents; those of the second row are seen to matter."""
  rows, logged = rows_of((2 * W + 1, 9, 1, 14), (48, 8)), []
  plans = [served_rows.early_exit(row) for row in rows]
  serving.compare_served(model, rows, plans, logged.append)
  short, long = logged
  assert short["kl"] < 1e-6 and abs(short["loss_gap"]) < 1e-6 and short["top1"] == 1
  assert short["tokens"] == W + 1 + 5 + 7
  assert long["kl"] > 1e-5


@pytest.mark.slow
def test_a_prefix_that_lost_its_windows_changes_something(model, exited):
  found, _ = measure(serving.prefix_continued, model)
  assert found["kl"] > 1e-5
  assert 0 < found["tokens"] <= exited[0]["tokens"]


@pytest.mark.slow
def test_fp4_entries_change_something(model):
  found, _ = measure(serving.fp4, model)
  assert 1e-6 < found["kl"] < 1


def test_the_pool_changes_something_until_it_holds_the_context(model):
  found, _ = measure(serving.pool, model)
  assert found["kl"] > 1e-6
  found = serving.compare_sides(model, rows_of((8,) * 8), serving.switched("pool"), ignore)
  assert found["kl"] == found["loss_gap"] == 0 and found["top1"] == 1
  assert found["tokens"] == 8 * 7


def ignore(sample):
  del sample


def test_engram_changes_something_where_there_is_one(model):
  found, _ = measure(serving.engram, model)
  assert found["kl"] > 1e-4
  cfg = dataclasses.replace(
    CFG,
    compress_ratios=(0,),
    kv_sources=(),
    index_sources=(),
    decoder_start=None,
    engram=dataclasses.replace(ENGRAM, layers=(), table_rows=()),
    indexer=dataclasses.replace(CFG.indexer, pool_source=None),
  )
  without = dataclasses.replace(model, cfg=cfg, variables=variables_of(cfg), hashing=None)
  found, _ = measure(serving.engram, without)
  assert found["kl"] == found["loss_gap"] == 0 and found["top1"] == 1


def test_recall_is_one_where_every_entry_is_chosen(model):
  found, _ = measure(inside.recall, model)
  assert 0 < found["worst_recall"] < found["recall"] < found["pool_recall"] < 1
  assert found["recall_layers"] == [0, 1, 2] and found["pool_recall_layers"] == [1, 2]
  assert found["worst_recall"] == min(found["recall_by_layer"])
  assert 0 < found["window_mass"] + found["sink_mass"] < 1
  found = inside.recall_of(model, rows_of((CFG.indexer.top_k,) * 16))
  np.testing.assert_allclose(found["recall_by_layer"], 1, atol=1e-5)
  np.testing.assert_allclose(found["pool_recall_by_layer"], 1, atol=1e-5)


def test_loads_are_shares_over_the_mean(model):
  found, _ = measure(inside.experts, model)
  load_LE = np.array(found["load"])
  assert load_LE.shape == (3, CFG.moe.experts)
  np.testing.assert_allclose(load_LE.mean(axis=1), 1)
  assert found["imbalance"] == load_LE.max() > 1
  assert 0 < found["entropy"] == min(found["entropy_by_layer"]) < 1


TASKS = {  # of every way to go through the rows
  "early_exit": serving.early_exit,
  "recall": inside.recall,
  "experts": inside.experts,
}


def assert_same(ours, theirs):
  assert ours.keys() == theirs.keys()
  for name, value in ours.items():
    np.testing.assert_allclose(
      np.array(value, float), np.array(theirs[name], float), rtol=1e-4, atol=1e-6, err_msg=name
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TASKS))
def test_rows_and_devices_that_compute_at_a_time_change_nothing(name, model):
  found, logged = measure(TASKS[name], model)
  other, other_logged = measure(TASKS[name], dataclasses.replace(model, rows=3))
  assert_same(found, other)
  assert [row["record"] for row in logged] == [row["record"] for row in other_logged]
  mesh = make_mesh(MeshConfig(fsdp=2, expert=2, context=2), jax.devices()[:8])
  other, _ = measure(TASKS[name], dataclasses.replace(model, mesh=mesh))
  assert_same(found, other)


def test_what_a_model_does_not_have_is_a_sentence(model):
  no_decoder = dataclasses.replace(CFG.indexer, pool_source=None)
  flat = dataclasses.replace(
    model, cfg=dataclasses.replace(CFG, decoder_start=None, indexer=no_decoder)
  )
  for make, part in (
    (serving.early_exit, "there is no decoder"),
    (serving.prefix_continued, "there is no decoder"),
    (serving.pool, "do not allow it with and without pool"),
  ):
    (problem,) = make("it", "", REQUEST).problems(flat, REQUEST)
    assert part in problem
  empty = dataclasses.replace(
    model.data[0], validation=dataclasses.replace(model.data[0].validation, rows=0)
  )
  (problem,) = serving.fp4("it", "", REQUEST).problems(
    dataclasses.replace(model, data=(empty,)), REQUEST
  )
  assert "no validation part" in problem
