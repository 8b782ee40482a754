r"""DeepSeek-V4.1-Flash: 552 billion parameters and 197 billion in Engram tables.

  python -m train plan --config configs/flash.py --topology v5p:8x8x8
  python -m train pretrain --config configs/flash.py --workdir runs/flash --config.data.paths=DATA \
    --config.stages.long.data.paths=LONG_DATA

Hardware: 512 chips of v5p; wall time: compiled, never run. Every value that is not set here is the
release's.
"""

import ml_collections

from configs import base
from configs.schema import Stage


def get_config() -> ml_collections.ConfigDict:
  """The configuration. `data.paths` is empty: a run names its own."""
  c = base.get_config()
  c.model.indexer.pool_source = None  # the candidate pool comes in post-training (report 4.3)
  c.data.update(slots=65536, batch_rows=1536)  # 100.6 M tokens a step (report 4.2)
  # Eight chips share a row; six experts lie on a chip of each of the eight groups. A piece of the
  # step is one row for every eight chips.
  c.mesh.update(expert=64, context=8)
  c.accumulation = 24
  # Context grows from 64K to 1M tokens at 34 T (report 4.2); 128 chips share a row, each with as
  # many tokens of a piece as before. The mixture of long documents is the run's own.
  longer = {
    "data.slots": 2**20,
    "data.batch_rows": 96,  # tokens of a step stay the same
    "data.paths": (),
    "data.weights": (),
    "mesh.expert": 4,
    "mesh.context": 128,
  }
  c.stages = (Stage(name="long", tokens=34_000_000_000_000, changes=longer),)
  return c
