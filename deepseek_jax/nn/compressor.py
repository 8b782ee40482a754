"""The compressor of a KV source: m neighbouring tokens become one entry.

Legend: B rows, S encoder slots, N entry cells, m ratio, D width, d head width.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from deepseek_jax.config import ModelConfig
from deepseek_jax.nn import parameters
from deepseek_jax.nn.linear import dot, exact_dot
from deepseek_jax.ops.rms_norm import rms_norm
from deepseek_jax.types import Entries


class Compressor(nn.Module):
  """latent_j = RMSNorm(sum_i softmax_i(W_gate x)_i W_kv x_i), a softmax per channel over m tokens.

  Ratio 1 has no gate and runs in the compute dtype; others run in float32 up to the norm.
  Source: model.md section 2.5.
  """

  cfg: ModelConfig
  ratio: int

  @nn.compact
  def __call__(self, x_BSD: jax.Array, entries: Entries) -> jax.Array:
    """Returns the latents [B, N, d] in x's dtype, before rotation and quantization."""
    cfg, d = self.cfg, self.cfg.attention.head_dim
    matrix = parameters.normal(cfg.init_std)
    wkv_Dd = parameters.declare(self, "wkv", matrix, (cfg.dim, d), ("embed", None))
    gain_d = parameters.declare(self, "norm", parameters.ones, (d,), (None,))
    if self.ratio == 1:  # cell e is slot e, so there is nothing to gather
      latent_BNd = dot("bsd,de->bse", x_BSD, wkv_Dd)
    else:
      wgate_Dd = parameters.declare(self, "wgate", matrix, (cfg.dim, d), ("embed", None))
      slots_BNm = jnp.maximum(entries.slots_BNm, 0)
      of_entry = jax.vmap(lambda x_Sd, slots_Nm: x_Sd[slots_Nm])
      a_BNmd = of_entry(exact_dot("bsd,de->bse", x_BSD, wkv_Dd), slots_BNm)
      z_BNmd = of_entry(exact_dot("bsd,de->bse", x_BSD, wgate_Dd), slots_BNm)
      latent_BNd = jnp.sum(jax.nn.softmax(z_BNmd, axis=2) * a_BNmd, axis=2).astype(x_BSD.dtype)
    return rms_norm(latent_BNd, gain_d, eps=cfg.norm_eps)
