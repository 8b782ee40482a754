"""Negative log-likelihood through tokamax's Mosaic TPU kernels, which keep logits in VMEM.

Not chosen by itself: it was compiled for v5p, v6e and tpu7x but timed on none, and a kernel call is
not split over devices, while the plain path works on a vocabulary that is.

Legend: X tokens, D width, V vocabulary.
"""

import jax
import jax.numpy as jnp

from deepseek_jax.ops import dispatch


def token_nll(
  hidden_XD: jax.Array,
  head_VD: jax.Array,
  targets_X: jax.Array,
  *,
  chunk_tokens: int,
  compute_dtype: jax.typing.DTypeLike,
) -> jax.Array:
  del chunk_tokens  # the kernel's own blocks
  if (platform := dispatch.device().platform) != "tpu":
    raise NotImplementedError(f"tokamax's cross-entropy needs a TPU, the backend is {platform}")
  try:
    import tokamax  # optional and slow to import  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise NotImplementedError("the package tokamax is not installed") from error
  nll_X = tokamax.linear_softmax_cross_entropy_loss(
    hidden_XD.astype(compute_dtype),
    targets_X,
    head_VD.astype(compute_dtype).T,
    reduction="none",
    implementation="mosaic_tpu",
  )
  return nll_X.astype(jnp.float32)
