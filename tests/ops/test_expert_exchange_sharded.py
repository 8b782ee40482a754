"""Experts over devices against every expert run on every token, in float32.

Legend: B rows, Q slots, D width, E experts, F hidden width, k experts per token.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.expert_exchange import apply_experts
from deepseek_jax.sharding import make_mesh, partition_spec
from deepseek_jax.training_config import MeshConfig
from tests.thinned import rest_slow
from train.plan_collectives import collectives

B, Q, D, E, F, K = 8, 6, 8, 8, 6, 2
FACTOR = 1.25
NAMES_IN, NAMES_OUT = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
MESHES = {
  "expert 8": MeshConfig(expert=8),
  "expert 2 fsdp 2 context 2": MeshConfig(expert=2, fsdp=2, context=2),
  "expert 4 replica 2": MeshConfig(expert=4, replica=2),
  "expert 2 tensor 2 fsdp 2": MeshConfig(expert=2, tensor=2, fsdp=2),
  "no expert axis": MeshConfig(fsdp=4, context=2),
}
RNG = np.random.default_rng(0)
LOADS = {
  "uneven": RNG.choice(E, (B, Q, K), p=np.arange(1, E + 1) / 36),
  "empty experts": RNG.choice([1, 2, 6], (B, Q, K)),
  "one expert takes all": np.full((B, Q, K), 5),
}


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def arguments(load, experts=E):
  matrices = normal(1, experts, D, F), normal(2, experts, D, F), normal(3, experts, F, D)
  expert_BQk = jnp.asarray(LOADS[load] % experts, jnp.int32)
  return normal(4, B, Q, D), expert_BQk, normal(5, B, Q, K), matrices


def feed_forward(multiply, x_PD, weight_P, w1_EDF, w3_EDF, w2_EFD):
  hidden_PF = jax.nn.silu(multiply(x_PD, w1_EDF)) * multiply(x_PD, w3_EDF)
  return multiply(hidden_PF * weight_P[:, None], w2_EFD)


def exchanged(x_BQD, expert_BQk, weight_BQk, matrices, receive_factor):
  named = list(zip(matrices, (NAMES_IN, NAMES_IN, NAMES_OUT), strict=True))
  return apply_experts(
    feed_forward, x_BQD, expert_BQk, weight_BQk, named, receive_factor=receive_factor
  )


def dense(x_BQD, expert_BQk, weight_BQk, matrices):
  w1_EDF, w3_EDF, w2_EFD = matrices
  share_BQE = jnp.sum(weight_BQk[..., None] * jax.nn.one_hot(expert_BQk, len(w1_EDF)), axis=2)
  gate, up = (jnp.einsum("bqd,edf->bqef", x_BQD, w) for w in (w1_EDF, w3_EDF))
  return jnp.einsum("bqef,bqe,efd->bqd", jax.nn.silu(gate) * up, share_BQE, w2_EFD), jnp.ones(())


def with_gradients(fn):
  """(x, experts, weights, matrices) -> output, rounds, gradients of a loss of the output."""

  def total(x, expert, weight, matrices):
    out_BQD, rounds = fn(x, expert, weight, matrices)
    return jnp.sum(out_BQD * normal(6, B, Q, D)), (out_BQD, rounds)

  run = jax.value_and_grad(total, (0, 2, 3), has_aux=True)

  def flat(*args):
    (_, (out_BQD, rounds)), gradients = run(*args)
    return rounds, (out_BQD, *gradients)

  return jax.jit(flat)


def placed(mesh, x, expert, weight, matrices):
  tokens = ("batch", "slots", None)
  put = lambda array, names: jax.device_put(
    array, jax.sharding.NamedSharding(mesh, partition_spec(names, array.shape, mesh))
  )
  names = (NAMES_IN, NAMES_IN, NAMES_OUT)
  matrices = tuple(put(w, n) for w, n in zip(matrices, names, strict=True))
  return put(x, tokens), put(expert, tokens), put(weight, tokens), matrices


def assert_equal(got, want):
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(g, w, atol=1e-5 * np.abs(w).max())


@functools.cache
def on_mesh(mesh_name, receive_factor=FACTOR):
  mesh = make_mesh(MESHES[mesh_name])
  return mesh, with_gradients(functools.partial(exchanged, receive_factor=receive_factor))


def rounds_by_hand(expert_BQk, mesh):
  """The longest queue of all devices over the buffer; rows lie along (replica, fsdp, expert)."""
  groups, devices = mesh.shape["replica"] * mesh.shape["fsdp"], mesh.shape["expert"]
  if devices == 1:
    return 1
  by_group = np.moveaxis(expert_BQk.reshape(groups, B // groups, mesh.shape["context"], -1), 2, 1)
  queues = [
    np.bincount(np.ravel(e) // (E // devices), minlength=devices) for g in by_group for e in g
  ]
  copies = expert_BQk.size // (len(queues) * devices)
  return np.max(-(-np.array(queues) // math.ceil(FACTOR * copies)))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("mesh_name", rest_slow(MESHES, 2))
def test_values_and_gradients_are_those_of_every_expert_on_every_token(load, mesh_name):
  mesh, run = on_mesh(mesh_name)
  args = arguments(load)
  with jax.set_mesh(mesh):
    rounds, got = run(*placed(mesh, *args))
  assert_equal(got, with_gradients(dense)(*args)[1])
  assert rounds == rounds_by_hand(LOADS[load], mesh)
  if load == "one expert takes all":
    assert rounds == math.ceil(mesh.shape["expert"] / FACTOR)


def traffic(mesh_name, receive_factor=FACTOR):
  mesh, run = on_mesh(mesh_name, receive_factor)
  with jax.set_mesh(mesh):
    compiled = run.lower(*placed(mesh, *arguments("uneven"))).compile()
  return collectives(compiled.as_text())


def test_no_token_is_gathered():
  """Experts lie on their devices: all that is gathered are the loads of all devices, once."""
  found = traffic("expert 8")
  assert found["all-gather"] == {"count": 1, "bytes": 8 * E * 4}
  assert "reduce-scatter" not in found


def test_matrices_are_gathered_over_all_axes_but_expert_and_their_gradients_scattered():
  found = traffic("expert 2 fsdp 2 context 2", receive_factor=2.0)
  matrices = 3 * (E // 2) * D * F * 4
  assert found["all-gather"]["bytes"] == matrices + 2 * E * 4
  assert found["reduce-scatter"]["bytes"] == matrices
  # Tokens, weights, results and their gradients: a buffer for every load needs no other rounds.
  assert found["all-to-all"]["count"] == 6


def test_experts_that_do_not_divide_by_the_axis_lie_on_every_device():
  mesh, _ = on_mesh("expert 2 fsdp 2 context 2")
  args = arguments("uneven", experts=5)
  with jax.set_mesh(mesh):
    run = with_gradients(functools.partial(exchanged, receive_factor=FACTOR))
    rounds, got = run(*placed(mesh, *args))
  assert rounds == 1
  assert_equal(got, with_gradients(dense)(*args)[1])
