"""A named implementation runs or raises; an automatic choice may pass over what cannot run."""

import logging

import jax
import pytest

from deepseek_jax.ops import dispatch


def reference(x):
  return ("reference", x)


def limited(x):
  if x > 8:
    raise NotImplementedError(f"needs x <= 8, got {x}")
  return ("xla", x)


def broken(x):
  raise TypeError(f"cannot take {x}")


def test_named_implementation_raises_what_it_cannot_do():
  with pytest.raises(NotImplementedError, match="got 9"):
    dispatch.call({"reference": reference, "xla": limited}, "xla", 9)


def test_unknown_name_lists_the_accepted_ones():
  with pytest.raises(ValueError, match=r"'cuda', accepted are \['reference', 'xla'\]"):
    dispatch.call({"reference": reference, "xla": limited}, "cuda", 1)


def test_automatic_choice_prefers_the_first_that_takes_the_arguments():
  implementations = {"reference": reference, "xla": limited}
  assert dispatch.call(implementations, None, 8) == ("xla", 8)
  assert dispatch.call(implementations, None, x=9) == ("reference", 9)


def test_what_is_slow_for_a_shape_runs_only_when_named():
  implementations = {"reference": reference, "xla": limited}
  assert dispatch.call(implementations, None, 8, slow=("xla",)) == ("reference", 8)
  assert dispatch.call(implementations, "xla", 8, slow=("xla",)) == ("xla", 8)


@pytest.mark.parametrize(("kind", "chosen"), [("Auto", "reference"), ("Manual", "pallas_gpu")])
def test_a_kernel_is_not_taken_where_the_compiler_would_have_to_split_it(kind, chosen):
  implementations = {"reference": reference, "pallas_gpu": lambda x: ("pallas_gpu", x)}
  h200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
  axis_types = (jax.sharding.AxisType[kind],)
  mesh = jax.sharding.AbstractMesh((2,), ("fsdp",), axis_types=axis_types, abstract_device=h200)
  with jax.sharding.use_abstract_mesh(mesh):
    assert dispatch.call(implementations, None, 1) == (chosen, 1)
    assert dispatch.call(implementations, "pallas_gpu", 1) == ("pallas_gpu", 1)


def test_automatic_choice_hides_no_other_error():
  with pytest.raises(TypeError, match="cannot take 1"):
    dispatch.call({"reference": reference, "xla": broken}, None, 1)


def test_automatic_choice_is_logged_once(caplog):
  def another(x):
    return x

  with caplog.at_level(logging.INFO, "deepseek_jax.ops.dispatch"):
    for _ in range(3):
      dispatch.call({"reference": another}, None, 1)
  assert [r.message for r in caplog.records if "another" in r.message] == [
    f"{__name__}.another runs its 'reference' implementation on cpu"
  ]
