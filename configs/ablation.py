r"""About 20 million activated parameters, to compare ways of building the model with each other.

  python -m train prepare --source folder:TEXT --tokenizer train:8192 --slots 2048 \
    --out .data/ablation
  python -m train ablate --config configs/ablation.py --only v4_1 --output runs/ablation/v4_1.json
  python -m train ablate --table runs/ablation

Everything but the schedule of layers is the same: the release's, with half of the layers, and a
window and a top-k that leave out most of a 2,048-token row. Engram tables stand where groups of
layers stay equal, so that these compile once. docs/log.md says which text was trained on.

Hardware: one H200. Wall time: 215 s for V4.1 with compiling, two seeds (docs/log.md).
"""

import ml_collections

from configs import base
from deepseek_jax.ngram import hash_primes

LAYERS = 20
HALF = LAYERS // 2
_SOURCES, _CHOICES = (1, 4, 7, 10), (1, 4, 7, 10, 12, 14, 16, 18)  # the release's, halved

VARIANTS = {
  "v4_1": "V4.1: four sources, eight choices, decoder over one source (CED)",
  "no_ced": "no CED: the upper half has sources of its own at every choice, no decoder",
  "yoco": "YOCO-like: windows only below, one source in the middle, one choice",
  "v4": "V4-like: every layer has entries of four tokens (without V4's overlap) and chooses",
  "no_index_sharing": "no shared choices: every layer with entries chooses",
  "no_engram": "no Engram tables",
  "no_mhc": "one residual stream instead of four (a site's gates remain)",
}


def get_config(variant: str = "v4_1") -> ml_collections.ConfigDict:
  """The configuration of one of VARIANTS."""
  c = base.get_config()
  model = c.model
  model.update(vocab=8192, dim=384, decoder_start=HALF, remat="none")
  model.compress_ratios = (0,) + (2,) * (HALF - 1) + (1,) * HALF
  model.update(kv_sources=_SOURCES, index_sources=_CHOICES)
  model.attention.update(heads=8, head_dim=64, rope_dim=16, q_rank=128, o_rank=64, o_groups=4)
  model.attention.window = 64
  model.rope.yarn_original_length = 2048
  # The candidate pool comes in post-training (report 4.3).
  model.indexer.update(heads=4, head_dim=32, top_k=64, pool_source=None)
  model.moe.update(experts=48, experts_per_token=3, hidden=128)
  model.engram.update(layers=(0, HALF), max_ngram=3, heads=4, head_dim=32, prime_start=20_011)
  model.engram.update(compressed_vocab=8192)
  model.engram.table_rows = tuple(sum(primes) for primes in hash_primes(2, 8, 20_011))
  c.objective.vocab_chunk_tokens = 8192
  c.optim.update(peak_lr=1e-2, final_lr=1e-3, warmup_steps=30, muon_dtype="bfloat16")
  c.optim.update(decay_begin=None, decay_end=None)
  c.data.update(paths=(".data/ablation",), slots=2048, batch_rows=16)
  c.validation.rows = 192
  c.log.observed_queries = 0
  c.total_steps = 305  # of 32,768 tokens: 10 million, none of them twice

  if variant == "no_ced":
    own = (*_SOURCES[:-1], *range(HALF, LAYERS, 2))
    model.update(decoder_start=None, kv_sources=own, index_sources=own)
  elif variant == "yoco":
    model.compress_ratios = (0,) * HALF + (1,) * HALF
    model.update(kv_sources=(HALF,), index_sources=(HALF,))
  elif variant == "v4":
    every = tuple(range(1, LAYERS))
    model.compress_ratios = (0,) + (4,) * (LAYERS - 1)
    model.update(decoder_start=None, kv_sources=every, index_sources=every)
  elif variant == "no_index_sharing":
    model.index_sources = tuple(range(1, LAYERS))
  elif variant == "no_engram":
    model.engram.update(layers=(), table_rows=())
  elif variant == "no_mhc":
    model.streams = 1
  elif variant != "v4_1":
    raise ValueError(f"variant {variant!r} is not one of {', '.join(VARIANTS)}")
  return c
