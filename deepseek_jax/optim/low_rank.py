"""Low-rank changes of matrices: W + (alpha / rank) A B, of which only A and B train.

The factors lie beside the weights, under "low_rank" and the names of their matrices, so that they
are parameters like others; the model sees the sum and knows of none of this. Every expert, output
group and layer of a repetition has factors of its own; the heads of a query projection share A.
Source: LoRA, arXiv 2106.09685, section 4.1: A random, B = 0, the factor alpha / rank.
Legend: i inputs, r rank, o outputs, or heads and outputs; axes before i count matrices.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.optim.partition import ADAPTABLE, LOW_RANK, logical_matrix, role
from deepseek_jax.optim.parts import part
from deepseek_jax.training_config import LowRankConfig


class Factors(NamedTuple):
  """Of one matrix [..., i, o]; the names are those in checkpoints and in the optimizer's table."""

  a: Any  # [..., i, r]
  b: Any  # [..., r, o]


def with_factors(params: dict, cfg: LowRankConfig, key: jax.Array) -> dict:
  """The same weights with factors whose product is 0: A is normal with variance 1 / i, B is 0.

  Args:
    params: without factors.
    cfg: rank and parts; without a rank, nothing is added.
    key: of the random numbers.
  """
  if not cfg.rank:
    return params
  paths = [path for path, _ in jax.tree.leaves_with_path(params)]

  def start(path: tuple[Any, ...], w: jax.Array) -> Factors:
    a_shape, b_shape, inputs = _shapes(path, w.shape, cfg.rank)
    own = jax.random.fold_in(key, paths.index(path))
    return Factors(jax.random.normal(own, a_shape) * inputs**-0.5, jnp.zeros(b_shape))

  return params | {LOW_RANK: _of_matrices(params, cfg, start)}


def with_boxes(boxed: dict, cfg: LowRankConfig) -> dict:
  """As `with_factors`, for shapes in Linen's boxes: a factor's axes are named like its matrix's."""
  if not cfg.rank:
    return boxed

  def start(path: tuple[Any, ...], box: Any) -> Factors:
    a_shape, b_shape, _ = _shapes(path, box.value.shape, cfg.rank)
    lead = len(a_shape) - 2
    names = Factors(
      (*box.names[: lead + 1], None), (*box.names[:lead], None, *box.names[lead + 1 :])
    )
    shapes = Factors(a_shape, b_shape)
    struct = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return Factors(
      *(box.replace(value=struct(s), names=n) for s, n in zip(shapes, names, strict=True))
    )

  return boxed | {LOW_RANK: _of_matrices(boxed, cfg, start)}


def without_factors(params: dict) -> dict:
  """The weights as they were before any change."""
  return {name: value for name, value in params.items() if name != LOW_RANK}


def merged(params: dict, cfg: LowRankConfig) -> dict:
  """The weights that the model computes with; float32, exact products."""
  if LOW_RANK not in params:
    return params

  def add(w: jax.Array, factors: Factors) -> jax.Array:
    outputs = "xyz"[: w.ndim - factors.a.ndim + 1]
    spec = f"...ir,...r{outputs}->...i{outputs}"
    change = jnp.einsum(spec, *factors, precision=jax.lax.Precision.HIGHEST)
    return w + cfg.alpha / cfg.rank * change

  return _changed(without_factors(params), params[LOW_RANK], add)


def changed_matrices(params: dict) -> dict:
  """The matrices that have factors, in the tree of these, as they were before any change."""

  def choose(weights: Any, factors: Any) -> Any:
    if isinstance(factors, Factors):
      return weights
    return {name: choose(weights[name], inner) for name, inner in factors.items()}

  return choose(params, params[LOW_RANK])


def with_matrices(params: dict, matrices: Mapping) -> dict:
  """The weights with `matrices` in place of those that have these names."""
  return _changed(params, matrices, lambda _, matrix: matrix)


def _changed(weights: Any, changes: Any, change: Callable[[Any, Any], Any]) -> Any:
  """`change(w, c)` where `changes` has a leaf or factors, else w."""
  if not isinstance(changes, Mapping):
    return change(weights, changes)
  return weights | {n: _changed(weights[n], inner, change) for n, inner in changes.items()}


def _of_matrices(tree: Mapping, cfg: LowRankConfig, make: Callable, path: tuple = ()) -> dict:
  """make(path, leaf) of every matrix in the parts, in nested dicts without empty ones."""
  found = {}
  for name, value in tree.items():
    own = (*path, jax.tree_util.DictKey(name))
    if isinstance(value, Mapping):
      if inner := _of_matrices(value, cfg, make, own):
        found[name] = inner
    elif role(own) in ADAPTABLE and part(role(own)) in cfg.parts:
      found[name] = make(own, value)
  return found


def _shapes(path: tuple[Any, ...], shape: tuple[int, ...], rank: int):
  """Shapes of A and B, and the number of inputs."""
  of_inputs = logical_matrix(path).reduction_axis
  assert isinstance(of_inputs, int)  # of every adaptable role
  axis = len(shape) + of_inputs
  lead, inputs, outputs = shape[:axis], shape[axis], shape[axis + 1 :]
  return (*lead, inputs, rank), (*lead, rank, *outputs), inputs
