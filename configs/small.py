"""About 2.5 billion activated parameters, with the release's head sizes, window and top-k.

  python -m train pretrain --config configs/small.py --workdir runs/small --config.data.paths=DIR
  python -m train pretrain --config configs/small.py:two_gpus ...  # experts and weights on both

Hardware: one H200: 16,300 tokens a second, 30.6% MFU (docs/log.md); or two: not yet measured.
"""

import ml_collections

from configs import base
from deepseek_jax.ngram import hash_primes


def get_config(variant: str = "one_gpu") -> ml_collections.ConfigDict:
  """The configuration; variants are "one_gpu" and "two_gpus", with equally many tokens on each.

  `data.paths` is empty: a run names its own.
  """
  c = base.get_config()
  model = c.model
  model.update(dim=2560, decoder_start=6, remat="block_keep_results")
  model.compress_ratios = (0, 0) + (2,) * 4 + (1,) * 8
  model.update(kv_sources=(2, 4, 6), index_sources=(2, 4, 6, 10))
  model.attention.q_rank = 1024
  model.indexer.pool_source = 6
  model.indexer.pool_blocks = 512  # a half of the entries of a row: the pool binds
  model.moe.update(experts=32, hidden=1024)
  model.engram.update(layers=(1, 6), prime_start=50_000)
  model.engram.table_rows = tuple(sum(primes) for primes in hash_primes(2, 24, 50_000))
  c.objective.vocab_chunk_tokens = 4096
  # Newton-Schulz of its matrices takes as many products as 16,384 tokens themselves do, so Muon
  # wants larger steps than one card's; not measured yet.
  c.optim.update(matrices="adamw", decay_begin=None, decay_end=None)
  c.data.update(slots=8192, batch_rows=2)
  c.total_steps = 50_000
  if variant == "two_gpus":
    c.data.batch_rows *= 2
    c.mesh.expert = 2
  elif variant != "one_gpu":
    raise ValueError(f"variant {variant!r} is not one of one_gpu, two_gpus")
  return c
