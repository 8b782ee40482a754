"""DeepSeek-V4.1-Flash: 552 billion parameters and 197 billion in Engram tables.

  python -m train pretrain --config configs/flash.py --workdir runs/flash \
    --config.data.paths=DATA --config.mesh.fsdp=64 --config.mesh.expert=48

Hardware: a pod; wall time: not yet measured. Every value that is not set here is the release's.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  """The configuration. `data.paths` is empty: a run names its own."""
  c = base.get_config()
  c.data.update(slots=65536, batch_rows=1536)  # 100.6 M tokens a step (report 4.2)
  return c
