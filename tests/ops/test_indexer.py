"""Choice of entries and pools against loops, with whole numbers so that scores tie exactly.

Legend: B rows, Q queries, I indexer heads, i indexer width, N entry cells, K chosen entries, W pool
blocks.
"""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepseek_jax.layout import Document, build_layout, stack_layouts
from deepseek_jax.ops.indexer import Choice, Visible, divergence, reference, select, tiles

HEADS, WIDTH, SLOTS = 2, 4, 36
# The kernels are interpreted here: arithmetic and indexing are checked, not what a compiler does.
SELECTS = ("reference", "xla", "pallas_gpu", "pallas_tpu")
DIVERGENCES = ("reference", "xla", "pallas_gpu")
ROWS = ((5, 1, 23, 2), (36,))  # lengths of the documents


def visible(ratio):
  """Packed documents with odd starts, queries that see nothing, and a hole in every row's range."""
  rows = [
    build_layout([Document(np.arange(n)) for n in row], slots=SLOTS, ratios=(ratio,))
    for row in ROWS
  ]
  layout = stack_layouts(rows)
  exists_BN = layout.entry_slots[ratio][..., -1] >= 0
  exists_BN[:, 16 // ratio] = False
  return Visible(exists_BN, layout.entry_begin[ratio], layout.entry_end[ratio])


def whole_numbers(ratio, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.integers(-2, 3, shape).astype(np.float32)
  entries = SLOTS // ratio
  return draw(2, SLOTS, HEADS, WIDTH), draw(2, entries, WIDTH), draw(2, SLOTS, HEADS) / 4


def slow_scores(q_BQIi, keys_BNi, weights_BQI, seen: Visible):
  """[B,Q,N], minus infinity where an entry may not be seen."""
  dots = np.einsum("bqji,bni->bqnj", np.float64(q_BQIi), keys_BNi)
  scores_BQN = np.einsum("bqnj,bqj->bqn", np.maximum(dots, 0), weights_BQI)
  entry_N = np.arange(keys_BNi.shape[1])
  inside = (entry_N >= seen.begin_BQ[..., None]) & (entry_N < seen.end_BQ[..., None])
  return np.where(inside & seen.exists_BN[:, None], scores_BQN, -np.inf)


def best(scores_N, count):
  """Ids of the best, the lowest first among equals, ascending."""
  order = sorted(range(len(scores_N)), key=lambda n: (-scores_N[n], n))
  return sorted(n for n in order[:count] if scores_N[n] > -np.inf)


def slow_pool(scores_N, begin, end, blocks, size):
  """Blocks of the document with the best single entry; the newest one is always there."""
  if end <= begin:
    return []
  newest = (end - begin - 1) // size
  of_block = lambda g: scores_N[begin + g * size : begin + (g + 1) * size]
  score = [np.inf if g == newest else of_block(g).max(initial=-np.inf) for g in range(newest + 1)]
  return best(np.array(score), blocks)


def lists(ids_BQK):
  """Choices as lists; also checks that -1 stands at the end only."""
  for ids_K in np.asarray(ids_BQK).reshape(-1, ids_BQK.shape[-1]):
    kept = ids_K[ids_K >= 0]
    assert np.all(ids_K[: len(kept)] >= 0)
    yield list(kept)


def run(arrays, seen, choice, implementation="reference", **options):
  call = lambda *a: select(*a, seen, choice, implementation=implementation, **options)
  return jax.jit(call)(*arrays)


@pytest.fixture(params=["whole", "pieces"])
def chunk(request, monkeypatch):
  """Everything at once, or chunks of queries, blocks of keys, and rows chosen block by block."""
  if request.param == "pieces":
    monkeypatch.setattr(reference, "QUERY_CHUNK", 5)
    monkeypatch.setattr(tiles, "FEWEST_QUERIES", 8)
    monkeypatch.setattr(tiles, "MOST_QUERIES", 8)
    monkeypatch.setattr(tiles, "SCORE_TILE", tiles.ScoreTile(queries=8, keys=16, warps=1, stages=1))
    monkeypatch.setattr(tiles, "DIRECT_PLACES", 8)
    monkeypatch.setattr(tiles, "PRODUCT_BYTES", 7 * 4 * 2 * 8 * HEADS)  # seven keys, eight queries
    monkeypatch.setattr(tiles, "DIVERGENCE_BYTES", 5 * 4 * 2 * 3 * WIDTH)  # five queries of a row


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(
  ("implementation", "ratio"),
  [("reference", 1), ("reference", 2), ("xla", 1), ("pallas_gpu", 2), ("pallas_tpu", 2)],
)
def test_the_best_visible_entries_are_chosen_and_ties_go_to_the_lowest_id(ratio, implementation):
  arrays, seen = whole_numbers(ratio), visible(ratio)
  got = run(arrays, seen, Choice(top_k=3), implementation)
  scores_BQN = slow_scores(*arrays, seen)
  want = [best(scores_N, 3) for scores_N in scores_BQN.reshape(-1, scores_BQN.shape[-1])]
  assert list(lists(got.selection_BQK)) == want
  assert [] in want, "some query sees nothing"
  kth = np.sort(scores_BQN, -1)[..., -3:]
  assert np.mean((scores_BQN >= kth[..., :1]).sum(-1) > 3) > 0.2, "some choices are ties"


@pytest.mark.usefixtures("chunk")
def test_scores_are_returned_when_asked_for():
  arrays, seen = whole_numbers(2), visible(2)
  got = run(arrays, seen, Choice(top_k=3), with_scores=True)
  np.testing.assert_allclose(got.scores_BQN, slow_scores(*arrays, seen), atol=1e-6)
  for name in SELECTS[1:]:
    with pytest.raises(NotImplementedError, match="scores"):
      run(arrays, seen, Choice(top_k=3), name, with_scores=True)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(
  "implementation",
  ["reference", "xla", *(pytest.param(n, marks=pytest.mark.slow) for n in SELECTS[2:])],
)
def test_fewer_queries_than_entries_choose_what_they_choose_among_all(implementation):
  """As decoder slots do, in any order and some of them twice."""
  (q, keys, weights), seen = whole_numbers(1), visible(1)
  slots = np.array([30, 31, 32, 33, 12, 13, 30, 31, 35])
  of = lambda x_BQ: x_BQ[:, slots]
  choice = Choice(top_k=3, publish_blocks=3, block_size=4)
  got = run(
    (of(q), keys, of(weights)),
    Visible(seen.exists_BN, of(seen.begin_BQ), of(seen.end_BQ)),
    choice,
    implementation,
  )
  want = run((q, keys, weights), seen, choice)
  np.testing.assert_array_equal(got.selection_BQK, of(want.selection_BQK))
  np.testing.assert_array_equal(got.pool_BQW, of(want.pool_BQW))


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("implementation", SELECTS)
def test_a_published_pool_has_the_best_blocks_of_the_query_s_own_document(implementation):
  arrays, seen = whole_numbers(1), visible(1)
  choice = Choice(top_k=3, publish_blocks=3, block_size=4)
  got = run(arrays, seen, choice, implementation)
  scores_BQN = slow_scores(*arrays, seen)
  want = [
    slow_pool(scores_BQN[b, t], seen.begin_BQ[b, t], seen.end_BQ[b, t], 3, 4)
    for b, t in itertools.product(range(2), range(SLOTS))
  ]
  assert list(lists(got.pool_BQW)) == want
  assert list(lists(got.selection_BQK)) == [best(s, 3) for s in scores_BQN.reshape(-1, SLOTS)]


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("members_first", [True, False], ids=["members alone", "all scored"])
@pytest.mark.parametrize("implementation", SELECTS)
def test_a_pool_restricts_the_choice_to_its_blocks(implementation, members_first, monkeypatch):
  monkeypatch.setitem(tiles.MEMBERS_FIRST, implementation, 0 if members_first else 1000)
  arrays, seen, other = whole_numbers(1), visible(1), whole_numbers(1, seed=7)
  choice = Choice(top_k=3, publish_blocks=2, block_size=4)
  pool_BQW = run(arrays, seen, choice).pool_BQW
  got = run(other, seen, Choice(top_k=3, block_size=4), implementation, pool_BQW=pool_BQW)
  scores_BQN = slow_scores(*other, seen)
  in_pool = lambda b, t: np.isin((np.arange(SLOTS) - seen.begin_BQ[b, t]) // 4, pool_BQW[b, t])
  places = list(itertools.product(range(2), range(SLOTS)))
  want = [best(np.where(in_pool(b, t), scores_BQN[b, t], -np.inf), 3) for b, t in places]
  assert list(lists(got.selection_BQK)) == want
  free = [best(scores_BQN[b, t], 3) for b, t in places]
  assert any(w != f for w, f, (b, t) in zip(want, free, places, strict=True) if b == 0 and t >= 6)


@pytest.mark.parametrize("implementation", SELECTS)
def test_a_row_with_fewer_entries_than_top_k_chooses_them_all(implementation):
  arrays, seen = whole_numbers(2), visible(2)
  got = run(arrays, seen, Choice(top_k=100), implementation)
  assert got.selection_BQK.shape == (2, SLOTS, SLOTS // 2)
  ids = np.arange(SLOTS // 2)
  for b, t in itertools.product(range(2), range(SLOTS)):
    want = ids[seen.exists_BN[b] & (ids >= seen.begin_BQ[b, t]) & (ids < seen.end_BQ[b, t])]
    np.testing.assert_array_equal(np.sort(got.selection_BQK[b, t])[-len(want) or SLOTS :], want)


def bfloat16_scores(shapes, seed=3):
  """Arrays in bfloat16 and their scores with the release's three roundings."""
  rng = np.random.default_rng(seed)
  q, keys, weights = (rng.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in shapes)
  rounded = lambda x: x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
  dots = rounded(np.einsum("bqji,bni->bqnj", np.float32(q), np.float32(keys)))
  weighted = rounded(np.maximum(dots, 0) * np.float32(weights)[:, :, None])
  return (q, keys, weights), rounded(weighted.sum(-1))


def test_scores_are_rounded_to_bfloat16_where_the_released_code_does():
  shapes = (2, SLOTS, HEADS, WIDTH), (2, SLOTS, WIDTH), (2, SLOTS, HEADS)
  arrays, want = bfloat16_scores(shapes)
  got = run(arrays, visible(1), Choice(top_k=3, scores_bf16=True), with_scores=True)
  shown = np.isfinite(got.scores_BQN)
  np.testing.assert_array_equal(got.scores_BQN[shown], want[shown])


@pytest.mark.parametrize("implementation", SELECTS[1:])
def test_rounded_scores_tie_and_are_chosen_as_by_the_released_code(implementation):
  shapes = (2, SLOTS, HEADS, WIDTH), (2, SLOTS, WIDTH), (2, SLOTS, HEADS)
  arrays, _ = bfloat16_scores(shapes)
  choice = Choice(top_k=5, publish_blocks=3, block_size=2, scores_bf16=True)
  want, got = run(arrays, visible(1), choice), run(arrays, visible(1), choice, implementation)
  np.testing.assert_array_equal(got.selection_BQK, want.selection_BQK)
  np.testing.assert_array_equal(got.pool_BQW, want.pool_BQW)
  pooled = Choice(top_k=5, block_size=2, scores_bf16=True)
  want, got = (
    run(arrays, visible(1), pooled, name, pool_BQW=want.pool_BQW)
    for name in ("reference", implementation)
  )
  np.testing.assert_array_equal(got.selection_BQK, want.selection_BQK)


def divergence_case():
  """Real scores, a choice among what is visible, teacher masses that do not add up to one."""
  rng, seen = np.random.default_rng(4), visible(1)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  arrays = normal(2, SLOTS, HEADS, WIDTH), normal(2, SLOTS, WIDTH), normal(2, SLOTS, HEADS)
  selection_BQK = np.asarray(run(arrays, seen, Choice(top_k=3)).selection_BQK)
  teacher_BQK = np.where(selection_BQK >= 0, rng.uniform(0, 2, selection_BQK.shape), 0)
  teacher_BQK[0, 3] = 0  # all of its mass lies in the window
  counts_BQ = rng.uniform(size=(2, SLOTS)) < 0.8
  return arrays, selection_BQK, teacher_BQK.astype(np.float32), counts_BQ


def slow_divergence(arrays, selection_BQK, teacher_BQK, counts_BQ):
  q_BQIi, keys_BNi, weights_BQI = arrays
  total = 0.0
  for b, t in zip(*np.nonzero(counts_BQ), strict=True):
    chosen = selection_BQK[b, t] >= 0
    if not chosen.any() or not teacher_BQK[b, t].any():
      continue
    share = np.float64(teacher_BQK[b, t][chosen])
    share /= share.sum()
    keys = keys_BNi[b, selection_BQK[b, t][chosen]]
    scores = np.maximum(keys @ np.float64(q_BQIi[b, t]).T, 0) @ weights_BQI[b, t]
    total += np.sum(share * (np.log(share) - scores + np.log(np.exp(scores).sum())))
  return total


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("implementation", DIVERGENCES)
def test_divergence_is_the_sum_over_counting_queries(implementation):
  arrays, *rest = divergence_case()
  got = jax.jit(lambda *a: divergence(*a, implementation=implementation))(*arrays, *rest)
  assert got == pytest.approx(slow_divergence(arrays, *rest), rel=1e-5)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("implementation", DIVERGENCES)
def test_divergence_has_its_slope_as_gradient_and_teaches_the_student_alone(implementation):
  (q, keys, weights), selection, teacher, counts = divergence_case()
  of_all = lambda q, keys, weights, teacher: divergence(
    q, keys, weights, selection, teacher, counts, implementation=implementation
  )
  *grads, d_teacher = jax.jit(jax.grad(of_all, range(4)))(q, keys, weights, teacher)
  assert not np.any(d_teacher)
  floats, rng, step = [np.float64(x) for x in (q, keys, weights)], np.random.default_rng(5), 1e-6
  for number, grad in enumerate(grads):
    direction = rng.normal(size=grad.shape)
    moved = lambda sign, n=number, v=direction: [
      x + sign * step * v if i == n else x for i, x in enumerate(floats)
    ]
    high = slow_divergence(moved(1), selection, teacher, counts)
    low = slow_divergence(moved(-1), selection, teacher, counts)
    assert np.sum(grad * direction) == pytest.approx((high - low) / (2 * step), rel=2e-3)
  assert not np.any(grads[0][~counts]), "queries that do not count teach nothing"


@pytest.mark.parametrize("implementation", DIVERGENCES)
def test_divergence_of_queries_without_a_choice_is_zero_with_finite_gradients(implementation):
  arrays, selection, teacher, counts = divergence_case()
  nothing = jnp.full_like(selection, -1)
  rest = nothing, 0 * teacher, counts
  of = lambda *arrays: divergence(*arrays, *rest, implementation=implementation)
  value, grads = jax.value_and_grad(of, (0, 1, 2))(*arrays)
  assert value == 0
  assert all(np.all(g == 0) for g in grads)
