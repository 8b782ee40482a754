"""The compilers that we pin know every flag of the table; an unknown one ends their process."""

import importlib.util
import os
import subprocess
import sys

import pytest

from launch import xla_flags

EVERY = {str(flag): flag for flags in xla_flags.TABLE.values() for flag in flags}


def of_variable(name):
  return " ".join(text for text, flag in EVERY.items() if flag.variable == name)


def start_jax(program, **variables):
  done = subprocess.run(
    [sys.executable, "-c", program],
    env=os.environ | {"JAX_PLATFORMS": "cpu"} | variables,
    capture_output=True,
    text=True,
    check=False,
    timeout=120,
  )
  return done.returncode == 0, done.stderr


def test_xla_knows_its_flags():
  program = "import jax; jax.devices()"
  good, _ = start_jax(program, XLA_FLAGS=of_variable("XLA_FLAGS"))
  wrong, error = start_jax(program, XLA_FLAGS=of_variable("XLA_FLAGS") + "x --xla_gpu_nonsense=1")
  assert good
  assert not wrong and "xla_gpu_nonsense" in error


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the tpu extra")
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_libtpu_knows_its_flags(topology):
  program = f"""
import jax, jax.numpy as jnp
from jax.experimental import topologies
device = topologies.get_topology_desc(platform="tpu", topology_name="{topology}").devices[0]
on_it = jax.sharding.SingleDeviceSharding(device)
jax.jit(jnp.sum, in_shardings=on_it).lower(jax.ShapeDtypeStruct((8, 128), jnp.float32)).compile()
"""
  alone = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
  texts = of_variable("LIBTPU_INIT_ARGS")
  good, error = start_jax(program, LIBTPU_INIT_ARGS=texts, **alone)
  assert good, error
  wrong, _ = start_jax(program, LIBTPU_INIT_ARGS=f"{texts} --xla_tpu_nonsense=true", **alone)
  assert not wrong


def test_one_device_has_no_flags_for_collectives():
  one = {kind: xla_flags.flags(kind, devices=1) for kind in xla_flags.TABLE}
  assert all(flags == () for kind, flags in one.items() if kind != "gpu")
  assert {flag.name or flag.variable for flag in one["gpu"]} == {
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "xla_allow_excess_precision",
    "xla_gpu_enable_triton_gemm",
  }


def test_flags_for_several_slices_are_for_several_slices():
  one, two = (xla_flags.flags("v5p", devices=8, slices=slices) for slices in (1, 2))
  assert set(one) < set(two)


def test_the_user_has_the_last_word():
  chosen = [flag for flag in xla_flags.flags("gpu", devices=2) if flag.name is not None]
  first, *rest = chosen
  others = " ".join(map(str, rest))
  given = f"--xla_force_host_platform_device_count=2 --{first.name}=mine"
  of = lambda text: xla_flags.variables(chosen, {"XLA_FLAGS": text})["XLA_FLAGS"]
  assert of(given) == f"{others} {given}"
  assert xla_flags.variables(chosen, {}) == {"XLA_FLAGS": f"{first} {others}"}
  assert of(f"--{first.name}s=mine") == f"{first} {others} --{first.name}s=mine"


def test_a_variable_with_one_value_keeps_the_user_s():
  name, chosen = "XLA_PYTHON_CLIENT_MEM_FRACTION", xla_flags.flags("gpu", devices=1)
  assert xla_flags.variables(chosen, {})[name] == "0.92"
  assert xla_flags.variables(chosen, {name: "0.5"})[name] == "0.5"
