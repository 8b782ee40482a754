"""A parameter that the loss cannot change is found, behind whatever its gradient passes through."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from configs.schema import Settings
from deepseek_jax.sharding import make_mesh
from train import gradient_paths
from train.gradient_paths import unreached, zero_gradients

PARAMS = {"a": jnp.ones((3, 4)), "b": jnp.ones((3, 4)), "table": jnp.ones((5, 4))}
X = jnp.ones((2, 4))


def scanned(params, x):
  def layer(carry, ab):
    a, b = ab
    return carry * a + jax.lax.stop_gradient(b), None

  carry, _ = jax.lax.scan(layer, x, (params["a"], params["b"]))
  return jnp.sum(carry + params["table"][0])


def constant_of_a_scan(params, x):
  turn = lambda carry, _: (carry * params["a"][0] + jax.lax.stop_gradient(params["b"][0]), None)
  return jnp.sum(jax.lax.scan(turn, x, length=3)[0] + params["table"][0])


def rematerialized(params, x):
  layer = jax.checkpoint(lambda a, b: jnp.tanh(x @ a.T) @ jax.lax.stop_gradient(b))
  return jnp.sum(layer(params["a"], params["b"])) + jnp.sum(params["table"])


def jitted(params, x):
  layer = jax.jit(lambda a, b: x * a[0] + jax.lax.stop_gradient(b[0]))
  return jnp.sum(layer(params["a"], params["b"]) + params["table"][0])


def conditional(params, x):
  either = jax.lax.cond(
    x[0, 0] > 0,
    lambda a, b: a * 2 + jax.lax.stop_gradient(b),
    lambda a, b: a * 3,
    params["a"],
    params["b"],
  )
  return jnp.sum(either) + jnp.sum(params["table"])


@jax.custom_vjp
def forgets_b(a, b):
  return a + b


forgets_b.defvjp(lambda a, b: (a + b, None), lambda _, d: (d, jnp.zeros_like(d)))


def with_a_rule_that_gives_zeros(params, x):
  return jnp.sum(forgets_b(params["a"], params["b"])) + jnp.sum(params["table"])


def looked_up_and_multiplied_by_nothing(params, x):
  rows = params["table"][jnp.array([1, 2])]
  return jnp.sum(x * rows) + jnp.sum(params["a"]) + jnp.sum(params["b"] * jnp.zeros((3, 4)))


def sharded(params, x):
  mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  local = lambda a, b, x: jax.lax.psum(x @ a.T + jax.lax.stop_gradient(x @ b.T), "d")
  layer = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=P())
  y = layer(params["a"], params["b"], jnp.tile(x, (4, 1)))
  return jnp.sum(y) + jnp.sum(params["table"])


@pytest.mark.parametrize(
  "loss",
  [
    scanned,
    constant_of_a_scan,
    rematerialized,
    jitted,
    conditional,
    with_a_rule_that_gives_zeros,
    looked_up_and_multiplied_by_nothing,
    sharded,
  ],
  ids=lambda loss: loss.__name__,
)
def test_only_the_disconnected_parameter_is_named(loss):
  assert zero_gradients(loss, PARAMS, X) == ["b"]
  grads = jax.grad(loss)(PARAMS, X)
  assert not jnp.any(grads["b"]) and jnp.any(grads["a"]) and jnp.any(grads["table"])


def test_an_unused_parameter_is_named_by_its_path():
  loss = lambda params: jnp.sum(params["used"]["w"] ** 2)
  shapes = {"used": {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}}
  shapes["left"] = {"out": jax.ShapeDtypeStruct((3,), jnp.float32)}
  assert zero_gradients(loss, shapes) == ["left/out"]


def test_a_gradient_that_merely_is_zero_here_is_a_path():
  assert zero_gradients(lambda p: jnp.sum(jax.nn.relu(p["w"])), {"w": jnp.zeros(3)}) == []


def test_a_carry_that_becomes_something_later_is_a_path():
  def loss(params):
    def turn(carry, _):
      first, second = carry
      return (second, first + params["w"]), None

    (first, _), _ = jax.lax.scan(turn, (jnp.float32(0), jnp.float32(0)), length=4)
    return first

  assert zero_gradients(loss, {"w": jnp.float32(1)}) == []


@pytest.mark.slow
def test_the_model_has_a_path_to_every_parameter_and_a_cut_one_is_found(runs, monkeypatch):
  settings = runs.command("run").settings
  mesh = make_mesh(Settings().mesh, jax.devices()[:1])
  with jax.set_mesh(mesh):
    assert unreached(settings, mesh) == []
    whole = gradient_paths.training_loss

    def cut(given):
      loss = whole(given)

      def without_attention(params, *rest):
        frozen = jax.lax.stop_gradient(params["layer_1"]["attn"])
        return loss(params | {"layer_1": params["layer_1"] | {"attn": frozen}}, *rest)

      return without_attention

    monkeypatch.setattr(gradient_paths, "training_loss", cut)
    found = unreached(settings, mesh)
  assert found and all(name.startswith("layer_1/attn/") for name in found)
  assert "layer_1/attn/indexer/wk" in found
