"""One forward over a layout with turns gives what a server gives that replays at the same places.

The server is tests/step_by_step.py. All cases are rows of one batch, so that they compile once.
Legend: B rows, S encoder slots, T decoder slots, W window.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import linen as nn

from configs import nano
from deepseek_jax.config import ModelConfig, NumericsConfig
from deepseek_jax.layout import Document, Layout, Replay, build_layout, stack_layouts
from deepseek_jax.model import Model
from deepseek_jax.ngram import NgramHash
from tests.step_by_step import serve

S, T = 128, 96
EXACT = NumericsConfig(compute_dtype="float32", window_fp8=False)
NANO = ModelConfig.from_dict(nano.get_config().model.to_dict())
# The second source of pairs comes late enough that a replayed token differs from its original there
# also where it is the last one of its window.
POOL = dataclasses.replace(
  NANO,
  compress_ratios=(0, 2, 2, 2, 1, 1),
  kv_sources=(1, 3, 4),
  index_sources=(1, 3, 4, 5),
  decoder_start=4,
  indexer=dataclasses.replace(NANO.indexer, pool_source=4),
  numerics=EXACT,
)
NO_POOL = dataclasses.replace(POOL, indexer=dataclasses.replace(POOL.indexer, pool_source=None))
HASHING = NgramHash(POOL.engram, np.arange(POOL.vocab, dtype=np.int32))
W = POOL.attention.window  # 8
TOLERANCE = 2e-5  # of the largest magnitude; the server works in float64
FAST_COMPILE = {"xla_backend_optimization_level": 0}


class Served(NamedTuple):
  """A conversation: its length, its responses and the hits before them."""

  tokens: int
  turns: tuple[tuple[int, int], ...]
  hits: tuple[int, ...]


EVEN_CASES = {
  "cold start": [Served(50, ((41, 50),), (0,))],
  "hit at an even position": [Served(50, ((41, 50),), (24,))],
  "short new input": [Served(40, ((33, 40),), (30,))],
  "context shorter than the window": [Served(20, ((5, 20),), (0,))],
  "context of one window": [Served(20, ((W, 20),), (0,))],
  "several turns": [Served(70, ((20, 27), (40, 48), (55, 68)), (12, 34, 52))],
  "turns with and without hits": [Served(66, ((11, 19), (26, 33), (50, 66)), (0, 0, 40))],
  "several conversations": [
    Served(23, ((12, 20),), (0,)),  # it ends after its response, and the next starts at an odd slot
    Served(30, ((15, 19), (25, 30)), (10, 22)),
    Served(3, ((1, 3),), (0,)),
    Served(21, ((19, 21),), (14,)),
  ],
}
ODD_CASES = {
  "hit at an odd position": [Served(50, ((41, 50),), (23,))],
  "hit right before the response": [Served(50, ((40, 50),), (39,))],
  "shortest hit": [Served(30, ((20, 30),), (W + 1,))],
  "odd hits of several turns": [Served(70, ((20, 27), (40, 48), (55, 68)), (13, 35, 51))],
  "odd hits in odd places": [
    Served(33, ((20, 33),), (11,)),
    Served(37, ((14, 18), (29, 37)), (9, 25)),
  ],
}
CASES = EVEN_CASES | ODD_CASES


def tokens_of(name: str) -> list[np.ndarray]:
  rng = np.random.default_rng(len(name))
  return [rng.integers(0, POOL.vocab, served.tokens).astype(np.int32) for served in CASES[name]]


def row(name: str, **changes) -> Layout:
  replay = Replay(**{"window": W, "decoder_slots": T} | changes)
  return build_layout(
    [Document(tokens) for tokens in tokens_of(name)],
    [served.turns for served in CASES[name]],
    [served.hits for served in CASES[name]],
    slots=S, ratios=POOL.ratios, hashing=HASHING, replay=replay,
  )  # fmt: skip


def random_variables(cfg, layout):
  """Away from where training starts, so that every term of every formula matters."""
  rng = np.random.default_rng(0)
  size = {"embed": 1.0, "scale": 0.5, "base": 0.3, "sink": 1.0, "bias": 0.1, "bias_vl": 0.1}

  def values(path, leaf):
    drawn = rng.normal(size=leaf.shape)
    if path[-1].key in size:
      return np.float32(size[path[-1].key] * drawn)
    return np.float32(1 + 0.2 * drawn if leaf.ndim == 1 else 0.15 * drawn)

  init = lambda key: nn.unbox(Model(cfg).init(key, layout))
  return jax.tree_util.tree_map_with_path(values, jax.eval_shape(init, jax.random.key(0)))


@pytest.fixture(scope="module")
def variables():
  return random_variables(POOL, row("cold start"))


@pytest.fixture(scope="module")
def forward_of(variables):
  """Hidden states [used, D] of the decoder slots of every row, all rows in one program."""

  def forward(cfg, rows: dict[str, Layout]) -> dict[str, np.ndarray]:
    layout = stack_layouts(list(rows.values()))
    run = jax.jit(Model(cfg).apply, compiler_options=FAST_COMPILE)
    hidden_BTD = np.asarray(run(variables, layout).hidden_BTD)
    used_BT = layout.decoder_slots >= 0
    return {name: hidden_BTD[b, used_BT[b]] for b, name in enumerate(rows)}

  return forward


def served(cfg, variables, name, **options):
  found = [
    serve(cfg, variables, HASHING, tokens, one.turns, one.hits, **options)
    for tokens, one in zip(tokens_of(name), CASES[name], strict=True)
  ]
  return np.concatenate(found)


def distance(got, want):
  """Largest error, relative to the largest magnitude."""
  assert got.shape == want.shape
  return np.abs(got - want).max() / np.abs(want).max()


KEPT, SHORT = "short new input, outputs kept", "short new input"


@pytest.fixture(scope="module")
def without_pool(forward_of):
  rows = {name: row(name) for name in CASES}
  return forward_of(NO_POOL, rows | {KEPT: row(SHORT, short_input="exact")})


@pytest.mark.parametrize("name", list(CASES))
def test_the_layout_gives_what_a_server_gives(name, without_pool, variables):
  assert distance(without_pool[name], served(NO_POOL, variables, name)) < TOLERANCE


def test_outputs_that_were_kept_stand_in_for_replayed_ones(without_pool, variables):
  kept = served(NO_POOL, variables, SHORT, outputs_kept=True)
  assert distance(without_pool[KEPT], kept) < TOLERANCE
  assert distance(without_pool[SHORT], kept) > 1e-3


def test_a_server_that_loses_nothing_gives_something_else(without_pool, variables):
  """So that every hit above is seen to matter, also the one whose decoder reads no copy."""
  for name, conversations in CASES.items():
    if any(hit for one in conversations for hit in one.hits):
      lucky = [one._replace(hits=(0,) * len(one.hits)) for one in conversations]
      found = [
        serve(NO_POOL, variables, HASHING, tokens, one.turns, one.hits)
        for tokens, one in zip(tokens_of(name), lucky, strict=True)
      ]
      assert distance(without_pool[name], np.concatenate(found)) > 10 * TOLERANCE, name


@pytest.fixture(scope="module")
def with_pool(forward_of):
  block = POOL.indexer.pool_block_size
  return forward_of(POOL, {name: row(name, hit_multiple=block) for name in EVEN_CASES})


@pytest.mark.parametrize("name", list(EVEN_CASES))
def test_with_the_candidate_pool_too(name, with_pool, variables):
  assert distance(with_pool[name], served(POOL, variables, name)) < TOLERANCE


def test_the_pool_binds_in_these_cases(with_pool, without_pool):
  assert sum(distance(with_pool[n], without_pool[n]) > 1e-3 for n in EVEN_CASES) >= 5


# Three layers: a window, pairs, and a decoder whose one layer chooses every entry.
DENSE = dataclasses.replace(
  NO_POOL,
  compress_ratios=(0, 2, 1),
  kv_sources=(1, 2),
  index_sources=(1, 2),
  decoder_start=2,
  remat="none",
  engram=dataclasses.replace(POOL.engram, layers=(), table_rows=()),
  indexer=dataclasses.replace(NO_POOL.indexer, top_k=S),
)


def test_the_loss_reaches_every_earlier_token_through_the_global_entries():
  """Two encoder layers carry a token 2 (W - 1) slots far; from before that, only entries do."""
  begin, end = 60, 64
  tokens = np.random.default_rng(0).permutation(DENSE.vocab)[:end].astype(np.int32)
  layout = build_layout(
    [Document(tokens)], [[(begin, end)]], [[40]], slots=S, ratios=DENSE.ratios,
    replay=Replay(window=W, decoder_slots=16),
  )  # fmt: skip
  nothing = {m: np.zeros_like(x) for m, x in layout.entry_end.items()}
  layout = layout._replace(entry_begin=nothing, entry_end=nothing)  # of encoder queries
  no_entries = layout._replace(decoder_entry_end=layout.decoder_entry_begin)
  variables = random_variables(DENSE, layout)

  @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
  @jax.grad
  def slope(params, layout):
    hidden_BTD = Model(DENSE).apply(variables | {"params": params}, layout).hidden_BTD
    weight_BTD = jax.random.normal(jax.random.key(1), hidden_BTD.shape)
    return (hidden_BTD * weight_BTD * layout.weights[..., None]).sum()

  reached = lambda layout: np.any(slope(variables["params"], layout)["embed"][tokens] != 0, axis=-1)
  last_learned = end - 2  # its target is the last token
  np.testing.assert_array_equal(reached(layout), np.arange(end) <= last_learned)
  far = np.arange(end) < begin - W - 2 * (W - 1)
  assert far.sum() > 30
  assert not np.any(reached(no_entries)[far])


def test_a_model_without_a_decoder_refuses_fewer_decoder_slots():
  whole = dataclasses.replace(DENSE, decoder_start=None)
  with pytest.raises(ValueError, match="96 decoder slots for 128 encoder slots, but decoder_start"):
    jax.eval_shape(Model(whole).init, jax.random.key(0), row("cold start"))
