"""From a checkpoint's folder to a model that can be asked."""

import functools

from jax.sharding import Mesh

from configs.schema import Settings
from deepseek_jax.checkpoint import CheckpointError
from train.errors import UsageError
from train.evaluation.checkpoints import Checkpoint
from train.evaluation.model import EvaluatedModel
from train.evaluation.request import Request
from train.stored_model import open_model
from train.stored_text import open_text
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
  settings = stored.settings or Settings(model=stored.cfg)
  folders = request.data or settings.data.paths
  first = open_text(stored, next(iter(folders), None))
  prepared = (first.prepared, *(open_tokenizer(folder)[0] for folder in folders[1:]))
  if len({one.tokenizer_sha256 for one in prepared}) > 1:
    raise UsageError([f"The folders {', '.join(folders)} have different tokenizers."])
  model = functools.partial(
    EvaluatedModel,
    checkpoint=checkpoint,
    sha256=sha256,
    cfg=stored.cfg,
    settings=settings,
    data=prepared,
    tokenizer=first.tokenizer,
    hashing=first.hashing,
    mesh=mesh,
    rows=request.rows,
    packed=request.packed,
    seed=request.seed,
  )
  try:
    return model(variables=stored.variables(mesh))
  except (CheckpointError, ValueError) as error:
    raise UsageError([str(error)]) from error
