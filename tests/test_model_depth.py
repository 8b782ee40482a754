"""What is compiled does not grow with the number of layers; lowered, nothing compiled or run."""

import dataclasses

import jax
import pytest
from flax import linen as nn

from configs import nano
from configs.schema import Settings
from deepseek_jax.model import Model
from deepseek_jax.sharding import make_mesh
from train.batches import empty_row
from train.programs import build_programs

SMALL = Settings.from_dict(nano.get_config().to_dict())


def settings(groups: int, *, scan: bool = True) -> Settings:
  """A decoder of one layer that makes entries and the pool, and groups that choose inside it."""
  model = dataclasses.replace(
    SMALL.model,
    compress_ratios=(1,) * (1 + groups),
    kv_sources=(0,),
    index_sources=tuple(range(1 + groups)),
    decoder_start=0,
    indexer=dataclasses.replace(SMALL.model.indexer, pool_source=0, pool_blocks=5),
    engram=dataclasses.replace(SMALL.model.engram, layers=(), table_rows=()),
    scan_layers=scan,
  )
  return dataclasses.replace(SMALL, model=model)


def lowered_text(chosen: Settings) -> str:
  mesh = make_mesh(chosen.mesh, jax.devices()[:1])
  with jax.set_mesh(mesh):
    programs = build_programs(chosen, mesh)
    return programs.step.lower(programs.abstract_state, programs.abstract_batch).as_text()


@pytest.mark.slow
def test_eight_groups_lower_to_the_text_of_two_and_to_much_less_than_unrolled():
  two, eight = len(lowered_text(settings(2))), len(lowered_text(settings(8)))
  assert eight < 1.1 * two
  assert len(lowered_text(settings(8, scan=False))) > 2 * eight


def test_entries_and_pool_enter_the_scan_as_constants_and_only_streams_flow():
  chosen = settings(8)
  row, model = empty_row(chosen), Model(chosen.model)
  init = lambda key: nn.unbox(model.init(key, row))
  variables = jax.eval_shape(init, jax.random.key(0))
  program = jax.make_jaxpr(model.apply)(variables, row)
  (scan,) = [e for e in program.eqns if e.primitive.name == "scan" and e.params["length"] == 8]
  shape_of = lambda variable: (variable.aval.dtype.name, variable.aval.shape)
  given, made = ([shape_of(v) for v in variables] for variables in (scan.invars, scan.outvars))
  first, slots = chosen.model, chosen.data.slots
  dtype = first.numerics.compute_dtype
  flow = [shape for shape in made if shape[1][0] != 8]  # what a step makes is stacked to 8
  assert flow == [(dtype, (1, slots, first.streams, first.dim)), ("float32", (1, slots, 2))]
  entries = (dtype, (1, slots, first.attention.head_dim))
  pool = ("int32", (1, slots, first.indexer.pool_blocks))
  assert {entries, pool} <= set(given)
