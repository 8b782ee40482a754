"""From a checkpoint's folder to a model that can be asked."""

import dataclasses
import functools
from typing import Any

from jax.sharding import Mesh

from configs.schema import Settings
from data.errors import DataError
from deepseek_jax.checkpoint import CheckpointError, remote_storage, storage
from deepseek_jax.storage_path import RemotePath
from train import stages
from train.errors import UsageError
from train.evaluation.checkpoints import Checkpoint
from train.evaluation.model import EvaluatedModel
from train.evaluation.request import Request
from train.processes import say
from train.stored_model import open_model
from train.stored_tokenizer import open_tokenizer


def open_evaluated(checkpoint: Checkpoint, request: Request, mesh: Mesh) -> EvaluatedModel:
  """Checks the files of a checkpoint and puts its weights onto the mesh.

  Raises: UsageError for a checkpoint that is damaged, and for data that do not fit it.
  """
  stored = open_model("--checkpoint", str(checkpoint.path))
  try:
    sha256 = checkpoint.sha256()
  except OSError as error:
    raise UsageError([f"{checkpoint.path} cannot be read: {error.strerror}."]) from None
  settings = settings_at(stored.settings or Settings(model=stored.cfg), checkpoint.step)
  cfg = dataclasses.replace(settings.model, scan_layers=False)
  folders = request.data or settings.data.paths
  if not folders:
    raise UsageError([f"{checkpoint.path} names no data: --data must name the tokenizer's."])
  opened = [open_tokenizer(folder) for folder in folders]
  prepared, tokenizer = tuple(one for one, _ in opened), opened[0][1]
  if len({one.tokenizer_sha256 for one in prepared}) > 1:
    raise UsageError([f"The folders {', '.join(folders)} have different tokenizers."])
  if prepared[0].vocab > cfg.vocab:
    many = f"The tokenizer in {folders[0]} has {prepared[0].vocab} tokens"
    raise UsageError([f"{many}, the model's vocabulary {cfg.vocab}."])
  _check_tokenizer(checkpoint, folders[0], prepared[0].tokenizer_sha256)
  model = functools.partial(
    EvaluatedModel,
    checkpoint=checkpoint,
    sha256=sha256,
    cfg=cfg,
    settings=settings,
    data=prepared,
    tokenizer=tokenizer,
    mesh=mesh,
    rows=request.rows,
    packed=request.packed,
    seed=request.seed,
  )
  try:
    model(variables=None).hashing  # noqa: B018, whether the classes of its tokens fit the tables
    return model(variables=stored.variables(mesh))
  except (CheckpointError, DataError, ValueError) as error:
    raise UsageError([str(error)]) from error


def settings_at(settings: Settings, step: int | None) -> Settings:
  """Those of the stage of a run that took a step; a checkpoint is measured as its stage has it."""
  plan = stages.resolve(settings)
  return stages.stage_of(plan, min(max(step or 0, 1), settings.total_steps)).settings


def _check_tokenizer(checkpoint: Checkpoint, folder: str, sha256: str) -> None:
  """Raises UsageError unless the checkpoint was trained with the tokenizer, as far as it says."""
  if not checkpoint.is_step:
    return
  read: Any = remote_storage if isinstance(checkpoint.path, RemotePath) else storage
  try:
    known = read.read_document(checkpoint.path, "data").get("tokenizer")
  except CheckpointError as error:
    raise UsageError([str(error)]) from None
  if known is None:
    say(f"{checkpoint.path} does not say with which tokenizer it was trained.")
  elif known != sha256:
    raise UsageError(
      [
        f"{checkpoint.path} was trained with another tokenizer than that of {folder}; --data must "
        "name data that were prepared with its own."
      ]
    )
