"""How much the selections of neighbouring queries overlap, on a trained model.

  python -m tests.bench.overlap --config configs/tiny.py --workdir RUN --config.KEY=VALUE ...

The arguments are those that trained RUN; model.scan_layers must have been off, so that every layer
can be watched. Prints a JSON line per layer that chooses: how many distinct entries a tile of T
neighbouring queries reads, as multiples of K (1: all choose the same, T: nobody shares). Only tiles
count whose queries see more than 2 K entries: the others cannot choose freely.
Legend: B rows, T queries, K chosen entries.
"""

import json
import pathlib
import sys
from itertools import islice

import jax
import numpy as np

from deepseek_jax.checkpoint import restore_step
from deepseek_jax.model import Model
from deepseek_jax.sharding import make_mesh
from train import settings as command_line
from train.batches import open_held_out, row_group
from train.loop import state_items
from train.programs import build_programs

TILES = (2, 4, 8, 16)
ROWS = 16


def selections(settings, variables, layout) -> dict[int, jax.Array]:
  """What each layer with an indexer chose: layer -> [B, T, K] int32."""
  chosen = {}

  def tap(name, value):
    if name.endswith("indexer.topk"):
      chosen[int(name.split(".")[1])] = value
    return value

  Model(settings.model, tap=tap).apply(variables, layout)
  return chosen


def distinct_per_tile(chosen_TK: np.ndarray, free_T: np.ndarray, size: int) -> list[float]:
  """Distinct entries of each whole tile of free queries, divided by K."""
  starts = [t for t in range(0, len(free_T) - size + 1, size) if free_T[t : t + size].all()]
  return [len(np.unique(chosen_TK[t : t + size])) / chosen_TK.shape[1] for t in starts]


def measure(settings, folder: pathlib.Path) -> list[dict]:
  """One record per layer that chooses."""
  mesh, model = make_mesh(settings.mesh, jax.devices()), settings.model
  distinct: dict[tuple[int, int], list[float]] = {}
  with jax.set_mesh(mesh):
    abstract = state_items(build_programs(settings, mesh).abstract_state)
    steps = [path for path in (folder / "checkpoints").iterdir() if path.name.isdigit()]
    newest = max(steps, key=lambda path: int(path.name))
    items = restore_step(newest, {name: abstract[name] for name in ("params", "router")}).items
    variables = {"params": items["params"], "balance": items["router"]}
    choose = jax.jit(lambda layout: selections(settings, variables, layout))
    held_out = open_held_out(settings, row_group(settings, mesh))
    for batch in islice(held_out, -(-ROWS // settings.data.batch_rows)):
      seen_BT = {m: end - batch.layout.entry_begin[m] for m, end in batch.layout.entry_end.items()}
      for layer, chosen_BTK in jax.device_get(choose(batch.layout)).items():
        free_BT = seen_BT[model.compress_ratios[layer]] > 2 * chosen_BTK.shape[-1]
        for chosen_TK, free_T in zip(chosen_BTK, free_BT, strict=True):
          for size in TILES:
            tiles = distinct_per_tile(chosen_TK, free_T, size)
            distinct.setdefault((layer, size), []).extend(tiles)
  return [
    {
      "step": int(newest.name),
      "layer": layer,
      "ratio": model.compress_ratios[layer],
      "top_k": model.indexer.top_k,
      "tiles": len(distinct[layer, TILES[0]]),
      **{f"distinct_of_{n}": float(np.mean(distinct[layer, n])) for n in TILES},
    }
    for layer in sorted({layer for layer, _ in distinct})
  ]


def main() -> None:
  command = command_line.parse(sys.argv[1:], devices=len(jax.devices()))
  for record in measure(command.settings, pathlib.Path(command.workdir)):
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
  main()
