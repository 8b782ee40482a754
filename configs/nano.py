"""Five layers with every part of the backbone, as narrow as it goes; the tests train it.

  python -m train pretrain --config configs/nano.py --workdir runs/nano --config.data.paths=DIR

A tokenizer that `prepare` trains has at least 259 entries: for prepared text add
--config.model.vocab=260 --config.model.engram.compressed_vocab=260.

Hardware: one CPU core. Wall time: not yet measured.
"""

import ml_collections

from configs import base
from deepseek_jax.ngram import hash_primes


def get_config() -> ml_collections.ConfigDict:
  """The configuration. `data.paths` is empty: a run names its own."""
  c = base.get_config()
  model = c.model
  model.numerics.compute_dtype = "float32"
  model.update(vocab=256, dim=32, streams=2, decoder_start=3, sinkhorn_iterations=4)
  model.update(compress_ratios=(0, 2, 2, 1, 1), kv_sources=(1, 3), index_sources=(1, 3, 4))
  model.attention.update(heads=2, head_dim=32, rope_dim=8, q_rank=16, o_rank=8, o_groups=2)
  model.attention.window = 8
  model.rope.yarn_original_length = 64
  model.indexer.update(heads=2, head_dim=32, top_k=4)
  model.indexer.update(pool_source=3, pool_blocks=4, pool_block_size=2)
  model.moe.update(experts=4, experts_per_token=2, hidden=32)
  model.engram.update(layers=(1, 2), max_ngram=3, heads=2, head_dim=8, prime_start=101)
  model.engram.update(compressed_vocab=256)
  model.engram.table_rows = tuple(sum(primes) for primes in hash_primes(2, 4, 101))
  c.data.update(slots=64, batch_rows=4)
  c.optim.update(matrices="adamw", peak_lr=3e-3, final_lr=3e-4, warmup_steps=2)
  c.optim.update(decay_begin=None, decay_end=None)
  c.objective.vocab_chunk_tokens = 64
  c.checkpoint.update(every_steps=2, keep_last=2, keep_every=0)
  c.validation.update(every_steps=4, rows=4)
  c.log.every_steps = 1
  c.total_steps = 8
  return c
