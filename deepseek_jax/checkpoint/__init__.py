"""Saves and restores the state of a run: Orbax underneath, a manifest of hashes on top."""

from deepseek_jax.checkpoint.errors import CheckpointError
from deepseek_jax.checkpoint.manager import Checkpoints, Restored, read_document, restore_step
from deepseek_jax.checkpoint.manifest import verify_step

__all__ = [
  "CheckpointError",
  "Checkpoints",
  "Restored",
  "read_document",
  "restore_step",
  "verify_step",
]
