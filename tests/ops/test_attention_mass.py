"""Shares of attention against plain numpy. Legend as in attention_mass.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.attention_mass import AttentionMass, Choice, Queries, attention_mass
from deepseek_jax.sharding import make_mesh
from deepseek_jax.training_config import MeshConfig

B, Q, H, D, N, K, WINDOW, BLOCK = 4, 16, 3, 8, 10, 3, 4, 2
RNG = np.random.default_rng(0)
EXISTS_BN = RNG.random((B, N)) < 0.9
SINK_H = np.array([0.5, -1.0, 0.0], np.float32)
ENTRIES_BND = RNG.normal(size=(B, N, D)).astype(np.float32)


def ids(most, choices):
  """[B,Q,choices] ascending ids below `most` of each query, -1 behind them."""
  taken = [
    sorted(RNG.permutation(max(1, most(q)))[: min(choices, most(q))])
    for _ in range(B)
    for q in range(Q)
  ]
  padded = [row + [-1] * (choices - len(row)) for row in taken]
  return np.array(padded, np.int32).reshape(B, Q, choices)


def queries():
  end_BQ = np.broadcast_to(np.arange(Q) * N // Q, (B, Q)).astype(np.int32)
  selection = ids(lambda q: q * N // Q, K)
  selection = np.where(
    (selection >= 0) & np.take_along_axis(EXISTS_BN[:, None], np.maximum(selection, 0), axis=2),
    selection,
    -1,
  )
  return Queries(
    RNG.normal(size=(B, Q, H, D)).astype(np.float32),
    RNG.normal(size=(B, Q, D)).astype(np.float32),
    np.broadcast_to(np.arange(Q) // 7 * 7, (B, Q)).astype(np.int32),
    np.arange(Q) % 5 != np.arange(B)[:, None],
    Choice(
      -np.sort(-selection, axis=2),
      np.zeros((B, Q), np.int32),
      end_BQ,
      ids(lambda q: -(-(q * N // Q) // BLOCK), 2),
    ),
  )


def by_hand(x: Queries, sampled):
  """Plain numpy, a query at a time."""
  values = [of_query(x, b, q) for b in range(B) for q in sampled if x.counts_BQ[b, q]]
  total = {name: sum(value.get(name, 0.0) for value in values) for name in AttentionMass._fields}
  return total | {"largest_logit": max(value["largest_logit"] for value in values)}


def of_query(x: Queries, b, q):
  logits_Hk = lambda keys_kd: x.q_BQHd[b, q] @ keys_kd.T / np.sqrt(D)
  first = max(x.segment_start_BQ[b, q], q - WINDOW + 1)
  near_Hk = logits_Hk(x.window_kv_BQd[b, first : q + 1])
  entry_HN = logits_Hk(ENTRIES_BND[b])
  seen = [n for n in range(x.choice.end_BQ[b, q]) if EXISTS_BN[b, n]]
  chosen = [n for n in x.choice.selection_BQK[b, q] if n >= 0]
  pooled = [n for n in seen if n // BLOCK in x.choice.pool_BQP[b, q]]
  mass_H = lambda those: np.exp(entry_HN[:, those]).sum(1)
  near_H, sink_H = np.exp(near_Hk).sum(1), np.exp(SINK_H)
  served_H, open_H = (near_H + sink_H + mass_H(those) for those in (chosen, seen))
  values = {
    "queries": 1,
    "sink": np.mean(sink_H / served_H),
    "window": np.mean(near_H / served_H),
    "largest_logit": max(near_Hk.max(), entry_HN[:, chosen].max(initial=-np.inf)),
  }
  if seen:
    share = lambda those: (mass_H(those) / open_H).sum()
    recall, pool_recall = (share(those) / share(seen) for those in (chosen, pooled))
    values |= {"seeing": 1, "recall": recall, "pool_recall": pool_recall}
  return values


def measured(x: Queries, samples: int):
  run = functools.partial(attention_mass, window=WINDOW, samples=samples, pool_block_size=BLOCK)
  return jax.jit(run)(x, ENTRIES_BND, EXISTS_BN, SINK_H)


@pytest.mark.parametrize(
  ("samples", "sampled"), [(16, range(16)), (4, (3, 7, 11, 15)), (99, range(16))]
)
def test_shares_are_those_of_plain_numpy_on_evenly_spaced_queries(samples, sampled):
  x = queries()
  got, want = measured(x, samples), by_hand(x, sampled)
  for name, value in want.items():
    np.testing.assert_allclose(getattr(got, name), value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("mesh", [MeshConfig(context=4, fsdp=2), MeshConfig(fsdp=4, context=2)])
def test_on_a_mesh_they_are_the_same(mesh):
  x = queries()
  want = measured(x, 16)
  with jax.set_mesh(make_mesh(mesh)):
    got = measured(x, 16)
  for name in AttentionMass._fields:
    np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-5, err_msg=name)


def test_a_layer_without_entries_has_window_and_sink_only():
  x = queries()._replace(choice=None)
  got = attention_mass(x, None, None, SINK_H, window=WINDOW, samples=16)
  assert got.seeing == 0 and got.recall == 0
  np.testing.assert_allclose(got.sink + got.window, got.queries, rtol=1e-6)


def test_it_has_no_gradient():
  x = queries()
  total = lambda q: sum(measured(x._replace(q_BQHd=q), 16))
  assert not jnp.any(jax.grad(total)(x.q_BQHd))
