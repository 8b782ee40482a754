"""What must hold between the keys of a configuration, and between it, the data and the devices."""

import dataclasses
from collections.abc import Iterator, Sequence

from configs.schema import Settings
from data.errors import DataError
from data.prepared import Prepared, load_prepared
from deepseek_jax.ngram import hash_primes
from deepseek_jax.optim import frozen, parts
from deepseek_jax.optim.schedule import learning_rate
from deepseek_jax.sharding import MESH_AXES, RULES, batch_pieces, mesh_problem
from deepseek_jax.training_config import LowRankConfig, MeshConfig
from train import stages
from train.errors import hint
from train.keys import KEYS, flatten
from train.replay_checks import replay_problems

# Sizes and counts. Those of `data` are checked by DataConfig itself.
AT_LEAST_ONE = (
  "total_steps",
  "accumulation",
  "max_skipped_steps",
  "objective.vocab_chunk_tokens",
  "checkpoint.every_steps",
  "checkpoint.keep_last",
  "validation.rows",
  "log.every_steps",
  *(f"mesh.{axis}" for axis in MESH_AXES),
  "model.moe.receive_factor",
  *(key for key, kind in KEYS.items() if key.startswith("model.") and kind is int),
)
NOT_NEGATIVE = (
  "seed",
  "objective.balance_weight",
  "objective.indexer_weight",
  "optim.peak_lr",
  "optim.warmup_steps",
  "optim.final_lr",
  "optim.eps",
  "optim.table_lr",
  "optim.update_rms",
  "optim.weight_decay",
  "optim.bias_speed",
  "optim.low_rank.rank",
  "checkpoint.keep_every",
  "validation.every_steps",
  "log.observed_queries",
  "profile.start_step",
  "profile.steps",
)
POSITIVE = (
  "model.init_std",
  "optim.clip_norm",
  "optim.low_rank.alpha",
  "model.norm_eps",
  "model.hc_eps",
  "model.rope.theta",
  "model.rope.compress_theta",
  "model.rope.yarn_factor",
)
ZERO_IS_FINE = ("model.engram.pad_token", "model.engram.prime_start")
SHARE = "data.replay.share"
# Axes of the mesh in the order in which a suggestion changes them.
_CHANGED_FIRST = ("fsdp", "replica", "expert", "context", "tensor")


def problems(
  settings: Settings,
  *,
  devices: int,
  slices: int = 1,
  reads_data: bool = True,
  measures_replay: bool = False,
) -> list[str]:
  """Every reason for which the run cannot start, in plain sentences; those of a stage name it.

  Args:
    settings: of the run.
    devices: how many the run has, over all hosts.
    slices: how many TPU slices these are (sharding.slice_count).
    reads_data: False for what needs no prepared folders.
    measures_replay: rows of validation are laid out with replay, whatever data.replay.share.
  """
  if measures_replay and settings.validation.every_steps > 0:
    settings = _with_replay(settings)
  (_, first), *others = stages.layered(settings)
  found = _stage_problems(first, devices, slices, reads_data)
  known = set(found)
  for name, stage in others:
    new = [
      said for said in _stage_problems(stage, devices, slices, reads_data) if said not in known
    ]
    if stage.model.tree() != first.model.tree():
      new.append("its changes to model.* would give the model other parameters.")
    known |= set(new)
    found += [f"Stage {name}: {said}" for said in new]
  if reads_data and (paths := _other_tokenizers([first, *(stage for _, stage in others)])):
    found.append(
      f"data.paths of one run must have one tokenizer; {', '.join(paths)} has another than "
      f"{first.data.paths[0]}."
    )
  return found or [*stages.order_problems(settings), *_schedule_problems(settings)]


def _with_replay(settings: Settings) -> Settings:
  """The settings with a share of steps that needs what validation needs, in every stage."""
  data = settings.data
  if data.replay.share == 0:
    data = dataclasses.replace(data, replay=dataclasses.replace(data.replay, share=1.0))
  changes = lambda stage: {k: v or 1.0 if k == SHARE else v for k, v in stage.changes.items()}
  later = tuple(dataclasses.replace(one, changes=changes(one)) for one in settings.stages)
  return dataclasses.replace(settings, data=data, stages=later)


def _stage_problems(settings: Settings, devices: int, slices: int, reads_data: bool) -> list[str]:
  """Those of a run that has no other stage."""
  bounds = list(_bounds(flatten(dataclasses.asdict(settings))))
  data = settings.data.problems() if reads_data else settings.data.value_problems()
  if bounds:  # ratios of sizes mean nothing where a size is zero
    return bounds + data
  return [
    *settings.model.problems(),
    *data,
    *_engram_problems(settings),
    *_row_problems(settings),
    *replay_problems(settings),
    *(_tokenizer_problems(settings) if reads_data else ()),
    *_optim_problems(settings),
    *mesh_problems(settings, devices=devices, slices=slices),
  ]


def _bounds(values: dict) -> Iterator[str]:
  if values["seed"] >= 2**63:  # what jax.random.key takes
    yield f"seed must be below 2^63, got {values['seed']}."
  if not values["model.compress_ratios"]:
    yield "model.compress_ratios is empty; give one number per layer."
  for key, value in values.items():
    if key in ZERO_IS_FINE or key in NOT_NEGATIVE:
      if value < 0:
        yield f"{key} must be 0 or more, got {value}."
    elif key in AT_LEAST_ONE and value < 1:
      yield f"{key} must be at least 1, got {value}."
    elif key in POSITIVE and value <= 0:
      yield f"{key} must be positive, got {value}."


def _engram_problems(settings: Settings) -> Iterator[str]:
  engram = settings.model.engram
  if len(set(engram.layers)) != len(engram.layers):
    yield f"model.engram.layers must not repeat a layer, got {engram.layers}."
  if len(engram.layers) != len(engram.table_rows) or engram.lookups < 1:
    return  # reported by the model
  primes = hash_primes(len(engram.layers), engram.lookups, engram.prime_start)
  rows = tuple(sum(table) for table in primes)
  if rows != engram.table_rows:
    yield (
      f"model.engram.table_rows is {engram.table_rows}, but the hash primes from "
      f"{engram.prime_start} on add up to {rows}."
    )


def _row_problems(settings: Settings) -> Iterator[str]:
  model, data = settings.model, settings.data
  if data.slots > 0 and (bad := [m for m in model.ratios if data.slots % m]):
    yield (
      f"data.slots ({data.slots}) must be a multiple of every compression ratio in "
      f"model.compress_ratios; it is not one of {bad}."
    )
  if data.batch_rows > 0:
    pieces = batch_pieces(settings.mesh) * settings.accumulation
    if data.batch_rows % pieces:
      axes = " * ".join(f"mesh.{axis}" for axis in RULES["batch"])
      yield (
        f"data.batch_rows ({data.batch_rows}) must be a multiple of {axes} * accumulation, which "
        f"is {pieces}."
      )


def _tokenizer_problems(settings: Settings) -> Iterator[str]:
  for prepared in _folders(settings):
    yield from _vocabulary_problems(settings, prepared)
    if (replay := settings.data.replay).share:
      window = settings.model.attention.window
      yield from prepared.replay_problems(decoder_slots=replay.decoder_slots, window=window)


def _folders(settings: Settings) -> Iterator[Prepared]:
  for path in settings.data.paths:
    try:
      yield load_prepared(path)
    except (OSError, DataError):
      continue  # reported by the data


def _other_tokenizers(parts: Sequence[Settings]) -> list[str]:
  """Folders of later stages whose tokenizer is none of the first one's."""
  first, *later = [list(_folders(part)) for part in parts]
  known = {prepared.tokenizer_sha256 for prepared in first}
  others = {
    str(prepared.folder)
    for folders in later
    for prepared in folders
    if known and prepared.tokenizer_sha256 not in known
  }
  return sorted(others)


def _vocabulary_problems(settings: Settings, prepared: Prepared) -> Iterator[str]:
  model, where = settings.model, f"the tokenizer of {prepared.folder}"
  if prepared.vocab > model.vocab:
    yield (
      f"model.vocab is {model.vocab}, but {where} has {prepared.vocab} token ids; embedding and "
      f"head are as large as model.vocab says, so set it to {prepared.vocab} or more."
    )
  if not model.engram.layers:
    return
  if prepared.compressed_classes > model.engram.compressed_vocab:
    yield (
      f"model.engram.compressed_vocab is {model.engram.compressed_vocab}, but {where} has "
      f"{prepared.compressed_classes} classes."
    )
  if model.engram.pad_token >= prepared.vocab:
    yield (
      f"model.engram.pad_token is {model.engram.pad_token}, but {where} ends at id "
      f"{prepared.vocab - 1}."
    )


def _optim_problems(settings: Settings) -> Iterator[str]:
  optim = settings.optim
  for name in ("beta1", "beta2", "momentum"):
    if not 0 <= getattr(optim, name) < 1:
      yield f"optim.{name} must be at least 0 and less than 1, got {getattr(optim, name)}."
  if optim.warmup_steps >= settings.total_steps:
    yield (
      f"optim.warmup_steps ({optim.warmup_steps}) must be below total_steps "
      f"({settings.total_steps})."
    )
  for name in optim.frozen:
    if name not in frozen.names():
      near = hint(name, frozen.names(), ", ".join(parts.PARTS))
      yield f"optim.frozen names {name!r}, which is no role or part of parameters; {near}."
  if not optim.low_rank.parts:
    yield f"optim.low_rank.parts is empty; name some of {', '.join(LowRankConfig().parts)}."
  if optim.final_lr > optim.peak_lr:
    yield f"optim.final_lr ({optim.final_lr}) must not exceed optim.peak_lr ({optim.peak_lr})."


def _schedule_problems(settings: Settings) -> list[str]:
  """What keeps the learning rate from its way through the stages of a run."""
  try:
    learning_rate(settings.optim, stages.spans(settings))
  except ValueError as error:
    return [str(error)]
  return []


def mesh_problems(settings: Settings, *, devices: int, slices: int) -> Iterator[str]:
  """What keeps the mesh from these devices, with a mesh that would fit, and from the model."""
  mesh = settings.mesh
  if problem := mesh_problem(mesh, devices=devices, slices=slices):
    yield f"{problem} {_fitting(settings, devices, slices)}"
  for axis, pieces, key, size in _divided(settings, mesh):
    if size % pieces:
      yield f"mesh.{axis} is {pieces}, which does not divide {key} ({size})."
  yield from _context_problems(settings)


def _context_problems(settings: Settings) -> Iterator[str]:
  """What keeps the slots of a row from being cut along mesh.context."""
  context, slots, model = settings.mesh.context, settings.data.slots, settings.model
  if slots < 1 or slots % context or _cuts(settings, context):
    return  # fine, or reported elsewhere
  best = max(pieces for pieces in range(1, context) if _cuts(settings, pieces))
  yield (
    f"mesh.context is {context}, which leaves {slots // context} of the {slots} data.slots to a "
    f"device; that must be a multiple of every ratio in model.compress_ratios "
    f"({', '.join(map(str, model.ratios))}) and at least model.attention.window - 1 "
    f"({model.attention.window - 1}). "
    f"--config.mesh.context={best} would fit."
  )


def _cuts(settings: Settings, context: int) -> bool:
  """Whether a piece of a row has whole entries, and reaches as far back as a window does.

  The halo of a piece is all in the piece before it.
  """
  own, left_over = divmod(settings.data.slots, context)
  whole = left_over == 0 and all(own % m == 0 for m in settings.model.ratios)
  return context == 1 or (whole and own >= settings.model.attention.window - 1)


def _divided(settings: Settings, mesh: MeshConfig) -> list[tuple[str, int, str, int]]:
  """(axis, its size, key, its value) for every key that an axis of the mesh must divide."""
  model = settings.model
  return [
    ("expert", mesh.expert, "model.moe.experts", model.moe.experts),
    ("tensor", mesh.tensor, "model.attention.heads", model.attention.heads),
    ("context", mesh.context, "data.slots", settings.data.slots),
  ]


def _fitting(settings: Settings, devices: int, slices: int) -> str:
  """A sentence with a mesh that fits devices, rows and model, by as few changes as possible."""
  rows, given = settings.data.batch_rows // settings.accumulation, settings.mesh

  def fits(mesh: MeshConfig) -> bool:
    whole = all(size % pieces == 0 for _, pieces, _, size in _divided(settings, mesh))
    rows_fit = rows % batch_pieces(mesh) == 0 and mesh.replica % slices == 0
    return whole and rows_fit and _cuts(settings, mesh.context)

  def changes(mesh: MeshConfig) -> list[str]:
    return [axis for axis in _CHANGED_FIRST if getattr(mesh, axis) != getattr(given, axis)]

  def effort(mesh: MeshConfig) -> tuple:
    changed = changes(mesh)
    return len(changed), [_CHANGED_FIRST.index(axis) for axis in changed], -mesh.fsdp

  meshes = (MeshConfig(**sizes) for sizes in _splits(devices, MESH_AXES))
  best = min(filter(fits, meshes), key=effort, default=None)
  if best is None:
    return (
      f"No mesh of {devices} devices in {slices} slices suits data.batch_rows / accumulation "
      f"({rows}), data.slots ({settings.data.slots}), model.moe.experts "
      f"({settings.model.moe.experts}) and model.attention.heads."
    )
  words = " ".join(f"--config.mesh.{axis}={getattr(best, axis)}" for axis in changes(best))
  return f"{words} would fit."


def _splits(product: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
  """Every way to write the product as one size for each axis."""
  first, *rest = axes
  if not rest:
    yield {first: product}
    return
  for size in range(1, product + 1):
    if product % size == 0:
      yield from ({first: size, **others} for others in _splits(product // size, rest))
