"""Cross-entropy of the output layer. Legend: X tokens, D width, V vocabulary."""

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
    hidden_XD, head_VD = (
      jax.random.normal(jax.random.key(i), (size, sizes.model_width), jnp.bfloat16)
      for i, size in enumerate((tokens, sizes.vocabulary))
    )
    head_VD = (head_VD * sizes.model_width**-0.5).astype(jnp.bfloat16)
    targets_X = jax.random.randint(jax.random.key(2), (tokens,), 0, sizes.vocabulary)
    for name in request.implementations_for(tokens):
      yield from _of_implementation(sizes, name, (hidden_XD, head_VD, targets_X))


def _of_implementation(sizes: Sizes, name: str, arrays) -> Iterator[Case]:
  hidden_XD = arrays[0]
  tokens = len(hidden_XD)
  shape = {"tokens": tokens, "vocabulary": sizes.vocabulary}
  flops = 2.0 * hidden_XD.size * sizes.vocabulary
  check = min(sizes.checked, tokens)

  def both(hidden_XD, head_VD, targets_X, weights_X):
    nll = lambda hidden_XD, head_VD: _nll(sizes, name, hidden_XD, head_VD, targets_X)
    nll_X, gradients = jax.vjp(nll, hidden_XD, head_VD)
    return nll_X, *gradients(weights_X)

  yield Case(
    shape, name, "forward", lambda *arrays: _nll(sizes, name, *arrays), lambda: arrays, flops,
    errors=lambda program: {
      "nll": measure.relative_error(program(*arrays)[:check], _exact(arrays, check)[0])
    },
  )  # fmt: skip
  checked_X = (jnp.arange(tokens) < check).astype(jnp.float32)
  yield Case(
    shape, name, "forward+backward", both, lambda: (*arrays, jnp.ones(tokens)), 3 * flops,
    errors=lambda program: _errors(check, program(*arrays, checked_X), _exact(arrays, check)),
  )  # fmt: skip


def _nll(sizes: Sizes, name: str, hidden_XD, head_VD, targets_X):
  return linear_token_nll(
    hidden_XD,
    head_VD,
    targets_X,
    chunk_tokens=sizes.loss_chunk,
    compute_dtype=jnp.bfloat16,
    implementation=name,
  )


def _errors(check: int, got, want) -> dict[str, float]:
  nll_X, d_hidden_XD, d_head_VD = got
  named = {"nll": nll_X[:check], "d_hidden": d_hidden_XD[:check], "d_head": d_head_VD}
  pairs = zip(named.items(), want, strict=True)
  return {name: measure.relative_error(value, exact) for (name, value), exact in pairs}


def _exact(arrays, check: int):
  """nll of the first tokens and the gradients of its sum, in float32."""
  hidden_XD, head_VD, targets_X = arrays

  def nll(hidden_XD, head_VD):
    return linear_token_nll(
      hidden_XD,
      head_VD,
      targets_X[:check],
      chunk_tokens=check,
      compute_dtype=jnp.float32,
      implementation="reference",
    )

  def run(hidden_XD, head_VD):
    nll_X, gradients = jax.vjp(nll, hidden_XD, head_VD)
    return nll_X, *gradients(jnp.ones_like(nll_X))

  with jax.default_matmul_precision("highest"):
    return jax.jit(run)(hidden_XD[:check].astype(jnp.float32), head_VD.astype(jnp.float32))
