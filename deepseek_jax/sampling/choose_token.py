"""From logits to a token: temperature, nucleus, and random numbers that belong to a place.

Legend: B sequences, V vocabulary.
"""

import jax
import jax.numpy as jnp


def choose_token(
  logits_BV: jax.Array,
  seed: jax.typing.ArrayLike,
  sequence_B: jax.typing.ArrayLike,
  position_B: jax.typing.ArrayLike,
  *,
  temperature: float = 1.0,
  top_p: float = 1.0,
) -> jax.Array:
  """int32 [B] tokens drawn from softmax(logits / temperature), cut to its nucleus.

  The nucleus is the smallest set of likeliest tokens with at least top_p of the probability. The
  random number depends on seed, sequence and position alone, so that a text does not depend on
  those that are written beside it.

  Args:
    logits_BV: float32.
    sequence_B: int32 number of the text.
    position_B: int32 position that the token will have.
    temperature: 0 takes the likeliest, of equals the lowest id.
    top_p: in (0, 1].
  """
  if temperature == 0:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  return _draw(logits_BV, seed, sequence_B, position_B, temperature, top_p)


@jax.jit
def _draw(logits_BV, seed, sequence_B, position_B, temperature, top_p):
  def one(logits_V, sequence, position):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sequence), position)
    ids_V = jnp.argsort(-logits_V, stable=True)
    log_p_V = jax.nn.log_softmax(logits_V[ids_V] / temperature)
    p_V = jnp.exp(log_p_V)
    inside_V = jnp.cumsum(p_V) - p_V < top_p  # what comes before it is not enough yet
    return ids_V[jax.random.categorical(key, jnp.where(inside_V, log_p_V, -jnp.inf))]

  return jax.vmap(one)(logits_BV, sequence_B, position_B).astype(jnp.int32)
