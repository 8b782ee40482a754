"""About 1.6 billion activated parameters, with the release's head sizes, window and top-k.

  python -m train pretrain --config configs/small.py --workdir runs/small --config.data.paths=DIR

Hardware: eight accelerators of 80 GB or more. Wall time: not yet measured.
"""

import ml_collections

from configs import base
from deepseek_jax.ngram import hash_primes


def get_config() -> ml_collections.ConfigDict:
  """The configuration. `data.paths` is empty: a run names its own."""
  c = base.get_config()
  model = c.model
  model.update(dim=2048, decoder_start=8)
  model.compress_ratios = (0, 0) + (2,) * 6 + (1,) * 8
  model.update(kv_sources=(2, 5, 8), index_sources=(2, 5, 8, 12))
  model.attention.update(q_rank=768, o_rank=512)
  model.indexer.pool_source = 8
  model.indexer.pool_blocks = 512  # a half of the entries of a row: the pool binds
  model.moe.update(experts=64, hidden=768)
  model.engram.update(layers=(1, 5), prime_start=50_000)
  model.engram.table_rows = tuple(sum(primes) for primes in hash_primes(2, 24, 50_000))
  c.data.update(slots=8192, batch_rows=64)
  c.mesh.fsdp = 8
  c.total_steps = 50_000
  return c
