"""Ops with kernels on a mesh: every device works on its rows and slots, and nothing changes.

Legend: B rows, Q queries, H heads, d head width, N entry cells, K chosen entries.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops import indexer
from deepseek_jax.ops.sparse_attention import plan_selection, sparse_attention
from deepseek_jax.sharding import batch_sharding, make_mesh
from deepseek_jax.training_config import MeshConfig

B, Q, H, D, N, K, WINDOW = 4, 16, 3, 16, 8, 4, 4
INDEXER_HEADS, INDEXER_WIDTH = 2, 16
MESHES = {
  "rows": (MeshConfig(replica=2, fsdp=2, tensor=2), 4),
  "rows that do not divide": (MeshConfig(replica=2, fsdp=2, expert=2), 3),
  "slots": (MeshConfig(context=4, tensor=2), 3),
  "rows and slots": (MeshConfig(fsdp=2, context=4), 4),
}


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def visible():
  end_BQ = jnp.broadcast_to((jnp.arange(Q, dtype=jnp.int32) * N) // Q, (B, Q))
  return indexer.Visible(jnp.ones((B, N), bool), jnp.zeros_like(end_BQ), end_BQ)


def layer(implementation, rows, sink_H):
  """Choice, plan, attention with the teacher, and the indexer's loss."""
  q, window_kv, entry_kv, index_q, keys, weights = rows
  seen, start = visible(), jnp.broadcast_to(jnp.arange(Q, dtype=jnp.int32) // 7 * 7, q.shape[:2])
  chosen = indexer.select(
    index_q, keys, weights, seen, indexer.Choice(K), implementation=implementation
  ).selection_BQK
  options = {"window": WINDOW, "implementation": implementation}
  if implementation == "pallas_gpu":  # the indexer's name; attention has another one for any size
    options["implementation"] = "pallas_triton"
  plan = plan_selection(chosen, entry_kv, q, **options)
  attended = sparse_attention(
    q, window_kv, entry_kv, chosen, start, sink_H, plan=plan, with_teacher=True, **options
  )
  kl = indexer.divergence(
    index_q, keys, weights, chosen, attended.teacher_BQK, jnp.ones((B, Q), bool),
    implementation=implementation,
  )  # fmt: skip
  return jnp.sum(attended.out_BQHd**2) + jnp.sum(attended.lse_BQH) + kl, chosen


@pytest.mark.parametrize(
  "implementation", ["reference", pytest.param("pallas_gpu", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("mesh_name", MESHES)
def test_values_choices_and_gradients_are_those_of_one_device(
  implementation, mesh_name, monkeypatch
):
  cfg, rows = MESHES[mesh_name]
  monkeypatch.setattr(f"{__name__}.B", rows)
  arrays = (
    normal(0, rows, Q, H, D), normal(1, rows, Q, D), normal(2, rows, N, D),
    normal(3, rows, Q, INDEXER_HEADS, INDEXER_WIDTH), normal(4, rows, N, INDEXER_WIDTH),
    normal(5, rows, Q, INDEXER_HEADS),
  )  # fmt: skip
  sink_H = normal(6, H)
  run = jax.value_and_grad(functools.partial(layer, implementation), (0, 1), has_aux=True)
  want = jax.jit(run)(arrays, sink_H)
  with jax.set_mesh(make_mesh(cfg)):
    got = jax.jit(run)(arrays, sink_H)
  (value, chosen), gradients = got
  np.testing.assert_array_equal(chosen, want[0][1])
  np.testing.assert_allclose(value, want[0][0], rtol=1e-6)
  for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(want[1]), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())


def test_nothing_but_the_gradient_of_what_is_shared_travels():
  arrays = (normal(0, B, Q, H, D), normal(1, B, Q, D), normal(2, B, N, D))
  selection_BQK = jnp.zeros((B, Q, K), jnp.int32).at[..., 1:].set(-1)
  start_BQ = jnp.zeros((B, Q), jnp.int32)
  mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))

  def total(arrays, sink_H):
    return jnp.sum(sparse_attention(*arrays, selection_BQK, start_BQ, sink_H, window=4).out_BQHd)

  with jax.set_mesh(mesh):
    placed = jax.device_put(arrays, batch_sharding(mesh))
    text = jax.jit(jax.grad(total, (0, 1))).lower(placed, normal(6, H)).compile().as_text()
  assert "all-gather" not in text and "all-to-all" not in text and "all-reduce" in text
