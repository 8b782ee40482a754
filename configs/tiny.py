"""Ten layers with every part of the backbone, on the text of Python's standard library.

  make pretrain
  python -m train pretrain --config configs/tiny.py --workdir runs/tiny
  python -m train pretrain --config configs/tiny.py:smoke --workdir runs/smoke  # a few steps

Hardware: two CPU cores. Wall time: about 5 minutes. Expect: 1.93 bits per byte, a bigram has 2.28.
"""

import ml_collections

from configs import base
from deepseek_jax.ngram import hash_primes


def get_config(variant: str = "full") -> ml_collections.ConfigDict:
  """The configuration; variants are "full" and "smoke"."""
  c = base.get_config()
  model = c.model
  model.update(vocab=1024, dim=128, decoder_start=6, init_std=0.05, remat="none")
  model.compress_ratios = (0, 0, 2, 2, 2, 2, 1, 1, 1, 1)
  model.update(kv_sources=(2, 4, 6), index_sources=(2, 4, 6, 8))
  model.numerics.compute_dtype = "float32"  # what a CPU is fast in
  model.attention.update(heads=4, head_dim=32, rope_dim=16, q_rank=64, o_rank=32, o_groups=2)
  model.attention.window = 32
  model.rope.yarn_original_length = 256
  model.indexer.update(heads=2, head_dim=32, top_k=16)
  model.indexer.update(pool_source=6, pool_blocks=8, pool_block_size=4)
  model.moe.update(experts=8, experts_per_token=2, hidden=128)
  model.engram.update(layers=(1, 6), max_ngram=3, heads=2, head_dim=32, prime_start=4001)
  model.engram.update(compressed_vocab=1024)
  model.engram.table_rows = tuple(sum(primes) for primes in hash_primes(2, 4, 4001))
  c.data.update(paths=(".data/tiny",), slots=256, batch_rows=4)
  c.optim.update(peak_lr=2e-2, final_lr=1e-3, warmup_steps=50, decay_begin=None, decay_end=None)
  c.objective.vocab_chunk_tokens = 1024
  c.checkpoint.update(every_steps=100, keep_last=2, keep_every=0)
  c.validation.update(every_steps=100, rows=64)
  c.total_steps = 300
  if variant == "smoke":
    c.total_steps = 6
    c.optim.warmup_steps = 2
    c.checkpoint.every_steps = 3
    c.validation.update(every_steps=3, rows=4)
  elif variant != "full":
    raise ValueError(f"variant {variant!r} is not one of full, smoke")
  return c
