"""The compressor of a KV source: m neighbouring tokens become one entry.

Legend: B rows, S encoder slots, N entry cells, m ratio, D width, d head width.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from deepseek_jax.by_slots import Place, by_slots
from deepseek_jax.config import ModelConfig
from deepseek_jax.nn import parameters
from deepseek_jax.ops.matmul import dot, exact_dot
from deepseek_jax.ops.rms_norm import rms_norm
from deepseek_jax.types import Entries


class Compressor(nn.Module):
  """latent_j = RMSNorm(sum_i softmax_i(W_gate x)_i W_kv x_i), a softmax per channel over m tokens.

  Ratio 1 has no gate and runs in the compute dtype; others run in float32 up to the norm.
  Source: model.md section 2.5.
  """

  cfg: ModelConfig
  ratio: int

  def setup(self):
    cfg, d = self.cfg, self.cfg.attention.head_dim
    matrix = parameters.normal(cfg.init_std)
    self.wkv = parameters.declare(self, "wkv", matrix, (cfg.dim, d), ("embed", None))
    self.norm = parameters.declare(self, "norm", parameters.ones, (d,), (None,))
    if self.ratio > 1:
      self.wgate = parameters.declare(self, "wgate", matrix, (cfg.dim, d), ("embed", None))

  def __call__(self, x_BSD: jax.Array, entries: Entries) -> jax.Array:
    """Returns the latents [B, N, d] in x's dtype, before rotation and quantization."""
    if self.ratio == 1:  # cell e is slot e, so there is nothing to gather
      sums_BNd = dot("bsd,de->bse", x_BSD, self.wkv)
    else:
      sums_BNd = by_slots(_weighted_sums, (*self.rows(x_BSD), entries.slots_BNm))
    return self._normalized(sums_BNd.astype(x_BSD.dtype))

  def rows(self, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What an entry needs of its tokens: W_kv x and W_gate x, float32 [B, S, d] each."""
    return exact_dot("bsd,de->bse", x_BSD, self.wkv), exact_dot("bsd,de->bse", x_BSD, self.wgate)

  def merge(self, a_BSd: jax.Array, z_BSd: jax.Array, entries: Entries, dtype) -> jax.Array:
    """As a call, of entries whose slots count the given rows; those of a sequence on one device."""
    sums_BNd = _weighted_sums(Place(1), (a_BSd, z_BSd, entries.slots_BNm), (), (), ())
    return self._normalized(sums_BNd.astype(dtype))

  def _normalized(self, sums_BNd: jax.Array) -> jax.Array:
    return rms_norm(sums_BNd, self.norm, eps=self.cfg.norm_eps)


def _weighted_sums(place: Place, slots, rows, pieces, weights) -> jax.Array:
  """sum_i softmax_i(z)_i a_i over the slots i of each entry: float32 [B, N, d].

  The slots of an entry follow one another, and the last of them lies where the entry does.
  """
  del rows, pieces, weights
  a_BSd, z_BSd, slots_BNm = slots
  before = slots_BNm.shape[-1] - 1
  first = place.begin(a_BSd.shape[1]) - place.halo(before)
  place_BNm = jnp.maximum(slots_BNm - first, 0)
  of_entry = jax.vmap(lambda x_Sd, place_Nm: x_Sd[place_Nm])
  a_BNmd = of_entry(place.with_halo(a_BSd, before), place_BNm)
  z_BNmd = of_entry(place.with_halo(z_BSd, before), place_BNm)
  return jnp.sum(jax.nn.softmax(z_BNmd, axis=2) * a_BNmd, axis=2)
