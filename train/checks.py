"""What must hold between the keys of a configuration, and between it, the data and the devices."""

import dataclasses
import math
from collections.abc import Iterator

from configs.schema import Settings
from data.errors import DataError
from data.prepared import Prepared, load_prepared
from deepseek_jax.ngram import hash_primes
from deepseek_jax.sharding import MESH_AXES, batch_pieces
from train.keys import KEYS, flatten

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
  "optim.weight_decay",
  "optim.bias_speed",
  "checkpoint.keep_every",
  "validation.every_steps",
  "profile.start_step",
  "profile.steps",
)
POSITIVE = (
  "model.init_std",
  "optim.clip_norm",
  "model.norm_eps",
  "model.hc_eps",
  "model.rope.theta",
  "model.rope.compress_theta",
  "model.rope.yarn_factor",
)
ZERO_IS_FINE = ("model.engram.pad_token", "model.engram.prime_start")


def problems(settings: Settings, *, devices: int) -> list[str]:
  """Every reason for which the run cannot start, in plain sentences."""
  bounds = list(_bounds(flatten(dataclasses.asdict(settings))))
  data = settings.data.problems()
  if bounds:  # ratios of sizes mean nothing where a size is zero
    return bounds + data
  return [
    *settings.model.problems(),
    *data,
    *_engram_problems(settings),
    *_data_problems(settings),
    *_optim_problems(settings),
    *_mesh_problems(settings, devices),
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


def _data_problems(settings: Settings) -> Iterator[str]:
  model, data = settings.model, settings.data
  if data.slots > 0 and (bad := [m for m in model.ratios if data.slots % m]):
    yield (
      f"data.slots ({data.slots}) must be a multiple of every compression ratio in "
      f"model.compress_ratios; it is not one of {bad}."
    )
  if data.batch_rows > 0:
    pieces = batch_pieces(settings.mesh) * settings.accumulation
    if data.batch_rows % pieces:
      yield (
        f"data.batch_rows ({data.batch_rows}) must be a multiple of mesh.replica * mesh.fsdp * "
        f"accumulation, which is {pieces}."
      )
  for path in data.paths:
    try:
      prepared = load_prepared(path)
    except (OSError, DataError):
      continue  # reported by the data
    yield from _vocabulary_problems(settings, prepared)


def _vocabulary_problems(settings: Settings, prepared: Prepared) -> Iterator[str]:
  model, where = settings.model, f"the tokenizer of {prepared.folder}"
  if prepared.vocab > model.vocab:
    yield f"model.vocab is {model.vocab}, but {where} has {prepared.vocab} token ids."
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
  for name in ("beta1", "beta2"):
    if not 0 <= getattr(optim, name) < 1:
      yield f"optim.{name} must be at least 0 and less than 1, got {getattr(optim, name)}."
  if optim.warmup_steps >= settings.total_steps:
    yield (
      f"optim.warmup_steps ({optim.warmup_steps}) must be below total_steps "
      f"({settings.total_steps})."
    )
  if optim.final_lr > optim.peak_lr:
    yield f"optim.final_lr ({optim.final_lr}) must not exceed optim.peak_lr ({optim.peak_lr})."


def _mesh_problems(settings: Settings, devices: int) -> Iterator[str]:
  mesh, model = settings.mesh, settings.model
  sizes = {axis: getattr(mesh, axis) for axis in MESH_AXES}
  if math.prod(sizes.values()) != devices:
    axes = " * ".join(f"{axis} {size}" for axis, size in sizes.items())
    yield (
      f"The axes of mesh ({axes}) multiply to {math.prod(sizes.values())}, but the number of "
      f"devices is {devices}."
    )
  for axis, pieces, key, size in (
    ("mesh.expert", mesh.expert, "model.moe.experts", model.moe.experts),
    ("mesh.tensor", mesh.tensor, "model.attention.heads", model.attention.heads),
    ("mesh.context", mesh.context, "data.slots", settings.data.slots),
  ):
    if size % pieces:
      yield f"{axis} is {pieces}, which does not divide {key} ({size})."
