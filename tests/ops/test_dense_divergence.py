"""The indexer's loss on all entries against a softmax written out query by query.

Legend: B rows, Q queries, H heads, d head width, I indexer heads, i indexer width, N entry cells.
"""

import jax
import numpy as np
import pytest

from deepseek_jax.layout import Document, build_layout, stack_layouts
from deepseek_jax.ops.indexer import Choice, Teacher, Visible, dense_divergence, select, tiles
from deepseek_jax.ops.sparse_attention import sparse_attention

SLOTS, WINDOW, HEADS, WIDTH, TOP_K, BLOCK = 36, 4, 2, 8, 3, 2
RATIO = 2
ROWS = ((5, 1, 23, 2), (36,))  # lengths of the documents


@pytest.fixture(scope="module")
def case():
  """Packed documents with a hole; arrays, the layer's own choice, a pool that leaves some out."""
  make = lambda row: build_layout(
    [Document(np.arange(n)) for n in row], slots=SLOTS, ratios=(RATIO,)
  )
  layout = stack_layouts([make(row) for row in ROWS])
  exists_BN = layout.entry_slots[RATIO][..., -1] >= 0
  exists_BN[:, 16 // RATIO] = False
  seen = Visible(exists_BN, layout.entry_begin[RATIO], layout.entry_end[RATIO])
  rng, entries = np.random.default_rng(0), SLOTS // RATIO
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  student = normal(2, SLOTS, 2, 4), normal(2, entries, 4), normal(2, SLOTS, 2)
  attention = {
    "q": normal(2, SLOTS, HEADS, WIDTH),
    "window": normal(2, SLOTS, WIDTH),
    "entries": normal(2, entries, WIDTH),
    "sink": normal(HEADS),
    "start": np.asarray(layout.segment_start),
  }
  counts_BQ = (layout.document >= 0) & (rng.uniform(size=(2, SLOTS)) < 0.8)
  choice = Choice(top_k=TOP_K, publish_blocks=3, block_size=BLOCK)
  pool_BQW = np.asarray(select(*student, seen, choice).pool_BQW)
  return student, attention, seen, counts_BQ, pool_BQW


def divergence(student, attention, seen, counts_BQ, pool_BQW):
  """The op, behind the layer's own choice and attention."""
  choice = Choice(top_k=TOP_K, block_size=BLOCK)
  selection_BQK = select(*student, seen, choice, pool_BQW=pool_BQW).selection_BQK
  attended = sparse_attention(
    attention["q"],
    attention["window"],
    attention["entries"],
    selection_BQK,
    attention["start"],
    attention["sink"],
    window=WINDOW,
  )
  teacher = Teacher(attention["q"], attended.lse_BQH, selection_BQK)
  pool = {} if pool_BQW is None else {"pool_BQW": pool_BQW, "block_size": BLOCK}
  return dense_divergence(*student, teacher, attention["entries"], seen, counts_BQ, **pool)


def oracle(student, attention, seen, counts_BQ, pool_BQW):
  """Float64, one query after the other."""
  (q, keys, weights), at = (np.float64(x) for x in student), attention
  total = 0.0
  for b, t in zip(*np.nonzero(counts_BQ), strict=True):
    ids = np.arange(seen.begin_BQ[b, t], seen.end_BQ[b, t])
    ids = ids[np.asarray(seen.exists_BN)[b, ids]]
    if pool_BQW is not None:
      ids = ids[np.isin((ids - seen.begin_BQ[b, t]) // BLOCK, pool_BQW[b, t])]
    if not len(ids):
      continue
    near = np.arange(max(at["start"][b, t], t - WINDOW + 1), t + 1)
    query = np.float64(at["q"][b, t]) / np.sqrt(WIDTH)
    logits = [query @ np.float64(x).T for x in (at["window"][b, near], at["entries"][b, ids])]
    joint = np.concatenate([*logits, np.float64(at["sink"])[:, None]], axis=1)
    p = np.exp(joint) / np.exp(joint).sum(axis=1, keepdims=True)
    share = p[:, len(near) : -1].sum(axis=0)
    share /= share.sum()
    scores = np.maximum(keys[b, ids] @ q[b, t].T, 0) @ weights[b, t]
    total += np.sum(share * (np.log(share) - scores + np.log(np.exp(scores).sum())))
  return total


@pytest.mark.parametrize(
  ("restricted", "pieces"), [(False, True), (True, True), (True, False)], ids=str
)
def test_value_and_gradient_are_those_of_the_softmax_written_out(
  case, restricted, pieces, monkeypatch
):
  if pieces:  # of seven queries
    monkeypatch.setattr(tiles, "SCORE_BYTES", 7 * 4 * 2 * HEADS * SLOTS)
  student, attention, seen, counts_BQ, pool_BQW = case
  pool_BQW = pool_BQW if restricted else None
  fixed = attention, seen, counts_BQ, pool_BQW
  loss = lambda *student: divergence(student, *fixed)
  value, grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*student)
  assert value == pytest.approx(oracle(student, *fixed), rel=1e-5)
  rng, step = np.random.default_rng(5), 1e-6
  for number, grad in enumerate(grads):
    direction = rng.normal(size=grad.shape)
    moved = lambda sign, n=number, v=direction: [
      x + sign * step * v if i == n else x for i, x in enumerate(map(np.float64, student))
    ]
    slope = (oracle(moved(1), *fixed) - oracle(moved(-1), *fixed)) / (2 * step)
    assert np.sum(grad * direction) == pytest.approx(slope, rel=2e-3)
  assert not np.any(grads[0][~counts_BQ]), "queries that do not count teach nothing"


def test_window_and_sink_and_the_pool_matter(case):
  """Without any of them the loss is another one, so that the test above can fail."""
  student, attention, seen, counts_BQ, pool_BQW = case
  value = oracle(student, attention, seen, counts_BQ, None)
  other = {"sink": attention["sink"] + 1.0}, {"window": 2 * attention["window"]}
  for change in other:
    changed = oracle(student, attention | change, seen, counts_BQ, None)
    assert abs(changed / value - 1) > 1e-4
  assert abs(oracle(student, attention, seen, counts_BQ, pool_BQW) / value - 1) > 1e-2


def test_the_teacher_is_detached(case):
  student, attention, seen, counts_BQ, _ = case
  loss = lambda attention: divergence(student, attention, seen, counts_BQ, None)
  floats = {name: x for name, x in attention.items() if name != "start"}
  grads = jax.jit(jax.grad(lambda a: loss(a | {"start": attention["start"]})))(floats)
  assert not any(np.any(grad) for grad in grads.values())


def test_queries_that_see_nothing_add_nothing_and_have_finite_gradients(case):
  student, attention, seen, counts_BQ, _ = case
  nothing = seen._replace(end_BQ=seen.begin_BQ)
  loss = lambda *student: divergence(student, attention, nothing, counts_BQ, None)
  value, grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*student)
  assert value == 0
  assert all(np.all(np.asarray(g) == 0) for g in grads)
