"""What the user is told when a checkpoint cannot be written or read."""


class CheckpointError(Exception):
  """A save or a restore failed; the message is a plain sentence for the user."""
