"""The parameters of one hyper-connection site.

Legend: B rows, Q slots, c streams, D width, M = 2c + c*c coefficients.
"""

import jax
from flax import linen as nn

from deepseek_jax.by_slots import by_slots
from deepseek_jax.config import ModelConfig
from deepseek_jax.nn import parameters
from deepseek_jax.ops.hyper_connection import Mixing, mixing
from deepseek_jax.ops.sinkhorn import sinkhorn


class HyperConnection(nn.Module):
  """Predicts how a site reads and writes streams. `site` is 2 layer (attention) or + 1 (FFN)."""

  cfg: ModelConfig
  site: int

  @nn.compact
  def __call__(self, streams_BQcD: jax.Array) -> Mixing:
    cfg = self.cfg
    c, count = cfg.streams, 2 * cfg.streams + cfg.streams**2
    fn_McD = parameters.declare(
      self, "fn", parameters.normal(cfg.init_std), (count, c, cfg.dim), (None, None, "embed")
    )
    base_M = parameters.declare(self, "base", parameters.hc_base(self.site, c), (count,), (None,))
    scale_3 = parameters.declare(self, "scale", parameters.hc_scale, (3,), (None,))
    return mixing(
      streams_BQcD,
      fn_McD,
      base_M,
      scale_3,
      norm_eps=cfg.norm_eps,
      hc_eps=cfg.hc_eps,
      normalize=self._normalize,
    )

  def _normalize(self, logits_BQcc: jax.Array) -> jax.Array:
    own = lambda place, own_BQcc, *_: sinkhorn(
      own_BQcc, self.cfg.sinkhorn_iterations, self.cfg.hc_eps
    )
    return by_slots(own, logits_BQcc)
