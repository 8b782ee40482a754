"""The indexer: which compressed entries a query attends to, and how it learns to choose.

Legend: B rows, Q queries, I indexer heads, i indexer width, N entry cells, K chosen entries,
W pool blocks.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.by_slots import by_slots
from deepseek_jax.ops import dispatch
from deepseek_jax.ops.indexer import chosen, dense, reference, xla
from deepseek_jax.ops.indexer.dense import Support, Teacher


@dataclasses.dataclass(frozen=True)
class Choice:
  """How entries are chosen: top_k of all visible ones, or of those inside the given pool."""

  top_k: int
  publish_blocks: int = 0  # > 0: also choose this many blocks as the candidate pool
  block_size: int = 1  # entries in a pool block
  scores_bf16: bool = False  # round scores where the released code does


class Visible(NamedTuple):
  """Which entries exist and which of them a query may see."""

  exists_BN: jax.Array  # bool
  begin_BQ: jax.Array  # int32, first visible entry id: the document's first
  end_BQ: jax.Array  # int32, one past the last


class Selected(NamedTuple):
  selection_BQK: jax.Array  # int32, ascending, -1 at the end
  pool_BQW: jax.Array | None  # int32 blocks counted from the document's first entry, like selection
  scores_BQN: jax.Array | None  # float32, minus infinity where nothing is visible


_STATIC = "choice", "with_scores"
_SELECT = {
  "reference": reference.select,
  "xla": xla.select,
  "pallas_gpu": dispatch.on_demand(f"{__name__}.pallas_gpu", "select", *_STATIC),
  "pallas_tpu": dispatch.on_demand(f"{__name__}.pallas_tpu", "select", *_STATIC),
}
_DIVERGENCE = {
  "reference": reference.divergence,
  "xla": chosen.by_scatter,
  "pallas_gpu": chosen.by_sorted_rows,
}


def select(
  q_BQIi: jax.Array,
  keys_BNi: jax.Array,
  head_weights_BQI: jax.Array,
  visible: Visible,
  choice: Choice,
  *,
  pool_BQW: jax.Array | None = None,
  with_scores: bool = False,
  implementation: str | None = None,
) -> Selected:
  """Scores every visible entry and takes the best, the lowest id first among equals.

  score[n] = sum_h w_h relu(q_h . k_n). With pool_BQW only entries of those blocks are taken. The
  pool that choice.publish_blocks asks for holds the blocks with the best single entry, the newest
  block always among them. Nothing here has a gradient. Scores must be finite and visible ranges lie
  within the entries. Source: model.md sections 2.6.3-2.6.6.

  Args:
    q_BQIi, keys_BNi: rotated, and fake-quantized where the stage says so.
    head_weights_BQI: signed, scaled.
    pool_BQW: int32 block ids, ascending, distinct, -1 at the end; it excludes publish_blocks.
    with_scores: also return the scores before the pool's restriction, all [B,Q,N] of them; what
      the reference is for.
    implementation: a name, or None for the best one on this device. All choose the same ids where
      products and sums are exact in float32; elsewhere they add heads in orders of their own, and
      ids may differ where scores lie within their last bits.
  """
  if pool_BQW is not None and choice.publish_blocks:
    raise ValueError("a layer that is restricted to a pool cannot publish one")
  run = functools.partial(
    dispatch.call, _SELECT, implementation, choice=choice, with_scores=with_scores
  )
  q_BQIi, keys_BNi, head_weights_BQI = jax.lax.stop_gradient((q_BQIi, keys_BNi, head_weights_BQI))

  def own(place, slots, rows, pieces, weights):
    del place, pieces, weights
    q_BQIi, head_weights_BQI, begin_BQ, end_BQ, pool_BQW = slots
    keys_BNi, exists_BN = rows
    visible = Visible(exists_BN, begin_BQ, end_BQ)
    return run(q_BQIi, keys_BNi, head_weights_BQI, visible, pool_BQW=pool_BQW)

  slots = q_BQIi, head_weights_BQI, visible.begin_BQ, visible.end_BQ, pool_BQW
  return Selected(*by_slots(own, slots, rows=(keys_BNi, visible.exists_BN)))


def divergence(
  q_BQIi: jax.Array,
  keys_BNi: jax.Array,
  head_weights_BQI: jax.Array,
  selection_BQK: jax.Array,
  teacher_BQK: jax.Array,
  counts_BQ: jax.Array,
  *,
  implementation: str | None = None,
) -> jax.Array:
  """Sum over counting queries of KL(teacher || softmax of scores), both on the chosen entries.

  The teacher is normalized here; a query without a chosen entry adds 0. Float32; gradients reach
  queries, keys and head weights. Source: model.md section 6.5.

  Returns: float32 scalar, in nats.
  """
  if not keys_BNi.shape[1]:
    return jnp.zeros((), jnp.float32)
  run = functools.partial(dispatch.call, _DIVERGENCE, implementation)
  teacher_BQK = jax.lax.stop_gradient(teacher_BQK)

  def own(place, slots, rows, pieces, weights):
    del place, pieces, weights
    q_BQIi, *others = slots
    return run(q_BQIi, rows, *others)[None]

  slots = q_BQIi, head_weights_BQI, selection_BQK, teacher_BQK, counts_BQ
  return jnp.sum(by_slots(own, slots, rows=keys_BNi, returns="pieces"))


def dense_divergence(
  q_BQIi: jax.Array,
  keys_BNi: jax.Array,
  head_weights_BQI: jax.Array,
  teacher: Teacher,
  entry_kv_BNd: jax.Array,
  visible: Visible,
  counts_BQ: jax.Array,
  *,
  pool_BQW: jax.Array | None = None,
  block_size: int = 1,
) -> jax.Array:
  """Sum over counting queries of KL(teacher || softmax of scores), on all entries they may choose.

  teacher[n] = sum_h exp(s_hn - L_h) / its sum over n, where L_h is the log of the denominator with
  window, sink and all those entries. Float32; gradients reach queries, keys and head weights alone.
  Source: model.md section 6.5.

  Args:
    q_BQIi, keys_BNi, head_weights_BQI: as for `divergence`.
    teacher: attention of the layer on its chosen entries; they must lie among those it may choose.
    entry_kv_BNd: the entries that attention reads.
    visible: as for `select`.
    counts_BQ: bool, queries that teach.
    pool_BQW: where given, only entries of these blocks may be chosen.
    block_size: entries in one.

  Returns: float32 scalar, in nats; a query that sees no entry adds 0.
  """
  if not keys_BNi.shape[1]:
    return jnp.zeros((), jnp.float32)
  teacher, entry_kv_BNd = jax.lax.stop_gradient((teacher, entry_kv_BNd))

  def own(place, slots, rows, pieces, weights):
    del place, pieces, weights
    return dense.divergence(slots, rows, block_size)[None]

  support = Support(visible.begin_BQ, visible.end_BQ, pool_BQW)
  slots = q_BQIi, head_weights_BQI, teacher, support, counts_BQ
  rows = keys_BNi, entry_kv_BNd, visible.exists_BN
  return jnp.sum(by_slots(own, slots, rows=rows, returns="pieces"))
