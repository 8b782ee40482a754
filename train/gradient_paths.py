"""Which parameters the loss can never change: those whose gradient is zero whatever the data are.

The gradient is traced, not computed, so a model of any size takes seconds and no memory. In the
trace a parameter that the loss does not depend on, or only through stop_gradient, has a gradient
that is made of nothing but zeros: a constant, carried through scans, sums and products. A gradient
counts as zero only where that follows from the operations; one that merely happens to be zero, a
dead unit's for instance, does not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from configs.schema import Settings
from deepseek_jax.layout import Layout
from deepseek_jax.objective.denominators import count
from deepseek_jax.optim.schedule import Span
from train.programs import build_programs, training_loss

# Zero where any operand is zero.
PRODUCTS = {"mul", "dot_general", "ragged_dot_general", "conv_general_dilated", "and"}
# Zero where all operands are that have values; others hold indices, sizes and the like.
KEEPING = (
  {"add", "add_any", "sub", "neg", "max", "min", "abs", "sign", "concatenate", "pad", "cumsum"}
  | {"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "rev", "slice"}
  | {"convert_element_type", "reduce_precision", "copy", "reduce_sum", "reduce_max", "reduce_min"}
  | {"psum", "psum_invariant", "pvary", "all_gather", "all_to_all", "ppermute", "reduce_scatter"}
  | {"sharding_constraint", "device_put", "sqrt", "tanh", "sin", "real", "imag"}
)
FIRST = {"div", "dynamic_slice", "gather", "integer_pow", "top_k"}
VALUES = {
  "select_n": slice(1, None),
  "dynamic_update_slice": slice(0, 2),
  "scatter-add": slice(0, 3, 2),
  "scatter_add": slice(0, 3, 2),
  **{name: slice(0, 1) for name in FIRST},
  **{name: slice(None) for name in KEEPING},
}

LOOKED_AT = 2**20  # elements of a constant


def unreached(settings: Settings, mesh: Mesh, spans: Sequence[Span] | None = None) -> list[str]:
  """Names of the model's parameters that the training loss gives no gradient, frozen ones too.

  Args:
    settings: of a run or of a stage; sound.
    mesh: that it works on.
    spans: as for `build_programs`.
  """
  loss_fn = training_loss(settings)
  programs = build_programs(settings, mesh, spans)
  state, batch = programs.abstract_state, programs.abstract_batch

  def loss(params: Any, balance: Any, layout: Layout) -> jax.Array:
    return loss_fn(params, balance, layout, count(layout, settings.model))[0]

  return zero_gradients(loss, state.params, state.balance, batch)


def zero_gradients(loss: Callable[..., jax.Array], params: Any, *rest: Any) -> list[str]:
  """Names of the leaves of `params` that `loss(params, *rest)` can never change.

  Args:
    loss: gives a scalar; traced once.
    params: tree of arrays or jax.ShapeDtypeStruct.
    rest: further arguments, likewise.
  """
  traced = jax.make_jaxpr(jax.grad(loss))(params, *rest)
  zero = _zeros(traced.jaxpr, [_is_zero(x) for x in traced.consts], [False] * len(traced.in_avals))
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
  return [name for name, found in zip(names, zero, strict=True) if found]


def _zeros(jaxpr: core.Jaxpr, consts: Sequence[bool], arguments: Sequence[bool]) -> list[bool]:
  """Which outputs are zero, given which inputs are."""
  known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
  read = lambda atom: _is_zero(atom.val) if isinstance(atom, core.Literal) else known[atom]
  for equation in jaxpr.eqns:
    outputs = _outputs(equation, [read(atom) for atom in equation.invars])
    known |= dict(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _outputs(equation: core.JaxprEqn, inputs: list[bool]) -> list[bool]:
  name, params = equation.primitive.name, equation.params
  if name == "scan":  # constants, carry, inputs of the turns; the last have one axis more outside
    body, same = _open(params["jaxpr"]), lambda a, b: a.aval.ndim == b.aval.ndim
    carried = sum(map(same, body.outvars, equation.outvars))
    end = sum(map(same, body.invars, equation.invars))
    return _loop(params["jaxpr"], inputs, range(end - carried, end))
  if name == "while":  # constants of the condition, constants of the body, carry
    body = _open(params["body_jaxpr"])
    turn, carried = len(body.invars), len(body.outvars)
    return _loop(params["body_jaxpr"], inputs[-turn:], range(turn - carried, turn))
  if name == "cond":
    branches = [_closed(branch, inputs[1:]) for branch in params["branches"]]
    return [all(found) for found in zip(*branches, strict=True)]
  if name == "optimization_barrier":
    return inputs
  if (inner := _inner(equation)) is not None:
    return _closed(inner, inputs)
  if name in PRODUCTS:
    return [any(inputs)]
  if name in VALUES:
    return [all(inputs[VALUES[name]])] * len(equation.outvars)
  return [False] * len(equation.outvars)


def _loop(body: core.ClosedJaxpr | core.Jaxpr, inputs: list[bool], carried: range) -> list[bool]:
  """Outputs of a loop: what is carried stays zero only if no turn changes that."""
  state = list(inputs)
  while True:
    outputs = _closed(body, state)
    kept = [state[place] and outputs[n] for n, place in enumerate(carried)]
    if kept == [state[place] for place in carried]:
      return kept + outputs[len(carried) :]
    for place, zero in zip(carried, kept, strict=True):
      state[place] = zero


def _inner(equation: core.JaxprEqn) -> core.ClosedJaxpr | core.Jaxpr | None:
  """The program that an equation merely calls; None for one that it does something else with."""
  for value in equation.params.values():
    jaxpr = _open(value)
    if isinstance(jaxpr, core.Jaxpr) and (
      (len(jaxpr.invars), len(jaxpr.outvars)) == (len(equation.invars), len(equation.outvars))
    ):
      return value
  return None


def _open(value: Any) -> Any:
  return value.jaxpr if isinstance(value, core.ClosedJaxpr) else value


def _closed(jaxpr: core.ClosedJaxpr | core.Jaxpr, inputs: Sequence[bool]) -> list[bool]:
  if isinstance(jaxpr, core.ClosedJaxpr):
    return _zeros(jaxpr.jaxpr, [_is_zero(value) for value in jaxpr.consts], inputs)
  return _zeros(jaxpr, [False] * len(jaxpr.constvars), inputs)


def _is_zero(value: Any) -> bool:
  """Of a constant; a large one is not looked at."""
  return np.size(value) <= LOOKED_AT and not np.any(np.asarray(value))
