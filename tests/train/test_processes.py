"""Several processes agree: on what stops them, on who reads which rows, and on requests to stop.

Those that run together are this file: `python test_processes.py agree|batches [...]`.
"""

import subprocess
import sys
import zlib

import jax
import numpy as np
import pytest

from data.pipeline import open_pipeline
from deepseek_jax.sharding import batch_sharding, make_mesh
from deepseek_jax.training_config import MeshConfig
from tests.train.several import DEVICES, ROOT, environment, free_port, run
from train import processes, settings
from train.batches import open_training, placer, row_group
from train.errors import UsageError
from train.processes import COORDINATOR, NUMBER, PLACE

TOLD = {NUMBER: "2", PLACE: "1", COORDINATOR: "127.0.0.1:1234"}
STEPS = 3


def work(verb, *words):
  """What a process does; it ends with a traceback where something is not as it should be."""
  processes.join()
  {"agree": agree, "batches": read_batches}[verb](*words)


def agree():
  mesh = make_mesh(MeshConfig(fsdp=DEVICES))
  place, count = jax.process_index(), jax.process_count()
  own = [f"word {place}", "ü" * 300 * place]
  gathered = processes.gather(own)
  assert gathered == [[f"word {n}", "ü" * 300 * n] for n in range(count)], gathered

  flags = processes.Flags(mesh)
  answers = [flags.raised(place == 1 and step == 3, False) for step in range(6)]
  assert answers == [[step == 4, False] for step in range(6)], answers

  with pytest.raises(UsageError) as error, processes.agreed():  # noqa: PT012, two statements
    if place > 0:
      raise UsageError(["known to all but one", f"known to {place}"])
  seen = ["Process 1: known to all but one"]
  seen += [f"Process {n}: known to {n}" for n in range(1, count)]
  assert list(error.value.problems) == (seen if place == 0 else []), error.value.problems
  with processes.agreed():
    pass
  print("agreed")


def read_batches(*argv):
  """Prints which rows of the first steps this process reads, and what all of them together hold."""
  command = settings.parse(argv, devices=jax.device_count())
  mesh = make_mesh(command.settings.mesh)
  group = row_group(command.settings, mesh)
  place, whole = placer(mesh, group), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  everywhere = jax.jit(lambda layout: layout, out_shardings=whole)
  pipeline = open_training(command.settings, group)
  for _ in range(STEPS):
    batch = next(pipeline)
    placed = place(batch.layout)
    assert all(x.sharding == batch_sharding(mesh) for x in jax.tree.leaves(placed))
    together = jax.device_get(everywhere(placed))
    for mine, all_rows in zip(*map(jax.tree.leaves, (batch.layout, together)), strict=True):
      np.testing.assert_array_equal(all_rows[group.rows], mine)
    print(f"{group.index} of {group.count} reads {' '.join(batch.records)}")
    print(f"tokens {sorted(map(zlib.crc32, map(bytes, together.tokens)))}")


def test_wrong_words_about_processes_are_told_all_at_once():
  with pytest.raises(UsageError) as error:
    processes.join({NUMBER: "3", PLACE: "3"})
  assert error.value.problems == (
    "JAX_PROCESS_ID must be 0 to 2, got 3.",
    "JAX_COORDINATOR_ADDRESS must be HOST:PORT, got nothing.",
  )
  for wrong in ({NUMBER: "two"}, {PLACE: "-1"}, {COORDINATOR: "here"}):
    ((name, value),) = wrong.items()
    with pytest.raises(UsageError, match=f"{name} must be .*, got {value}"):
      processes.join(TOLD | wrong)


def test_a_single_process_joins_nobody():
  processes.join({})
  processes.join({NUMBER: "1"})
  assert not jax.distributed.is_initialized()
  assert processes.gather(["a"]) == [["a"]]


def test_nobody_at_the_coordinators_address_is_a_crash_within_bounds(tmp_path):
  told = environment(2, 1, free_port())
  quick = (
    "from train import processes, pretrain; processes.join.__kwdefaults__['seconds'] = 2; "
    "pretrain.main([])"
  )
  done = subprocess.run(
    [sys.executable, "-c", quick], env=told, cwd=ROOT, capture_output=True, text=True, timeout=60
  )
  assert done.returncode == 70, done.stderr
  assert "Process 1 of 2 did not meet the others at 127.0.0.1:" in done.stderr
  assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_what_one_knows_all_know(tmp_path, count):
  codes, outputs = run(tmp_path, count, (__file__, "agree"))
  assert codes == [0] * count, outputs
  assert all(lines == ["agreed"] for lines in outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("count", "mesh", "groups"),
  [
    (2, {"mesh__fsdp": 4}, [0, 1]),
    (2, {"mesh__fsdp": 2, "mesh__context": 2}, [0, 1]),
    (2, {"mesh__context": 4}, [0, 0]),
    (4, {"mesh__expert": 4}, [0, 1, 2, 3]),
    (4, {"mesh__fsdp": 2, "mesh__context": 2}, [0, 0, 1, 1]),
  ],
)
def test_hosts_read_the_rows_of_one_in_their_own_parts(runs, tmp_path, count, mesh, groups):
  argv = runs.argv(tmp_path / "run", **mesh)
  codes, outputs = run(tmp_path, count, (__file__, "batches", *argv))
  assert codes == [0] * count, outputs
  alone = read_alone(runs.command(tmp_path, devices=DEVICES, **mesh).settings)
  of = len(set(groups))
  for step in range(STEPS):
    for lines, group in zip(outputs, groups, strict=True):
      records = " ".join(alone[step][group::of])
      assert lines[2 * step] == f"{group} of {of} reads {records}"
    assert len({lines[2 * step + 1] for lines in outputs}) == 1


def read_alone(settings_of_run):
  pipeline = open_pipeline(settings_of_run.data, ratios=(), engram=None)
  return [next(pipeline).records for _ in range(STEPS)]


@pytest.mark.slow
def test_a_mesh_whose_rows_processes_share_in_part_is_refused(runs, tmp_path):
  argv = runs.argv(tmp_path / "run", mesh__fsdp=3, mesh__context=2, data__batch_rows=3)
  codes, outputs = run(tmp_path, 2, (__file__, "batches", *argv), devices=6)
  assert codes == [1, 1], outputs
  for lines in outputs:
    assert lines[-1] == (
      "ValueError: mesh.context * mesh.tensor is 2 and a process has 3 devices, so that processes "
      "share some of their rows and not all; one of the two numbers must divide the other."
    )


if __name__ == "__main__":
  work(*sys.argv[1:])
