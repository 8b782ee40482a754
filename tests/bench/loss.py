"""Cross-entropy of the output layer. Legend: B rows, T slots, D width, V vocabulary."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from deepseek_jax.ops.cross_entropy import linear_token_nll
from tests.bench import measure
from tests.bench.case import Case, Request, Sizes

IMPLEMENTATIONS = ("xla", "tokamax", "reference")


def cases(request: Request) -> Iterator[Case]:
  sizes = request.sizes
  for tokens in request.tokens:
    hidden_BTD, head_VD = (
      jax.random.normal(jax.random.key(i), (*size, sizes.model_width), jnp.bfloat16)
      for i, size in enumerate(((1, tokens), (sizes.vocabulary,)))
    )
    head_VD = (head_VD * sizes.model_width**-0.5).astype(jnp.bfloat16)
    targets_BT = jax.random.randint(jax.random.key(2), (1, tokens), 0, sizes.vocabulary)
    for name in request.implementations_for(tokens):
      yield from _of_implementation(sizes, name, (hidden_BTD, head_VD, targets_BT))


def _of_implementation(sizes: Sizes, name: str, arrays) -> Iterator[Case]:
  hidden_BTD = arrays[0]
  tokens = hidden_BTD.shape[1]
  shape = {"tokens": tokens, "vocabulary": sizes.vocabulary}
  flops = 2.0 * hidden_BTD.size * sizes.vocabulary
  check = min(sizes.checked, tokens)

  def both(hidden_BTD, head_VD, targets_BT, weights_BT):
    nll = lambda hidden_BTD, head_VD: _nll(sizes, name, hidden_BTD, head_VD, targets_BT)
    nll_BT, gradients = jax.vjp(nll, hidden_BTD, head_VD)
    return nll_BT, *gradients(weights_BT)

  yield Case(
    shape, name, "forward", lambda *arrays: _nll(sizes, name, *arrays), lambda: arrays, flops,
    errors=lambda program: {
      "nll": measure.relative_error(program(*arrays)[:, :check], _exact(arrays, check)[0])
    },
  )  # fmt: skip
  checked_BT = (jnp.arange(tokens)[None] < check).astype(jnp.float32)
  yield Case(
    shape, name, "forward+backward", both, lambda: (*arrays, jnp.ones((1, tokens))), 3 * flops,
    errors=lambda program: _errors(check, program(*arrays, checked_BT), _exact(arrays, check)),
  )  # fmt: skip


def _nll(sizes: Sizes, name: str, hidden_BTD, head_VD, targets_BT):
  return linear_token_nll(
    hidden_BTD,
    head_VD,
    targets_BT,
    chunk_tokens=sizes.loss_chunk,
    compute_dtype=jnp.bfloat16,
    implementation=name,
  )


def _errors(check: int, got, want) -> dict[str, float]:
  nll_BT, d_hidden_BTD, d_head_VD = got
  named = {"nll": nll_BT[:, :check], "d_hidden": d_hidden_BTD[:, :check], "d_head": d_head_VD}
  pairs = zip(named.items(), want, strict=True)
  return {name: measure.relative_error(value, exact) for (name, value), exact in pairs}


def _exact(arrays, check: int):
  """nll of the first tokens and the gradients of its sum, in float32."""
  hidden_BTD, head_VD, targets_BT = arrays

  def nll(hidden_BTD, head_VD):
    return linear_token_nll(
      hidden_BTD,
      head_VD,
      targets_BT[:, :check],
      chunk_tokens=check,
      compute_dtype=jnp.float32,
      implementation="reference",
    )

  def run(hidden_BTD, head_VD):
    nll_BT, gradients = jax.vjp(nll, hidden_BTD, head_VD)
    return nll_BT, *gradients(jnp.ones_like(nll_BT))

  with jax.default_matmul_precision("highest"):
    return jax.jit(run)(hidden_BTD[:, :check].astype(jnp.float32), head_VD.astype(jnp.float32))
