"""What must hold between replay, the model and the mesh.  Legend: m compression ratio."""

from collections.abc import Iterator

from configs.schema import Settings


def replay_problems(settings: Settings) -> Iterator[str]:
  """What keeps a model, its rows and its mesh from steps with replay, in plain sentences."""
  replay, model, context = settings.data.replay, settings.model, settings.mesh.context
  if not replay.share:
    return
  window, pool = model.attention.window, model.indexer
  largest = max(model.ratios, default=1)
  if model.decoder_start is None:
    yield "Replay needs a decoder, but model.decoder_start is none: there is no decoder."
  if replay.hit_multiple < 1:
    return  # reported by the data
  block = 1
  if pool.pool_source is not None and pool.pool_source < model.num_layers:
    block = max(1, pool.pool_block_size * model.compress_ratios[pool.pool_source])
  if replay.hit_multiple % block:
    yield (
      f"data.replay.hit_multiple is {replay.hit_multiple}; with the candidate pool it must be a "
      f"multiple of the {block} tokens of a block."
    )
  if window % replay.hit_multiple or window < largest:
    yield (
      f"model.attention.window is {window}; it must be a multiple of data.replay.hit_multiple "
      f"({replay.hit_multiple}) and no less than any compression ratio ({largest})."
    )
  slots = settings.data.slots + replay.max_hits * window
  if bad := [m for m in model.ratios if slots % (m * context)]:
    yield (
      f"data.slots + data.replay.max_hits * model.attention.window is {slots}, which must be a "
      f"multiple of mesh.context ({context}) times every compression ratio; it is not of {bad}."
    )
  own, left_over = divmod(replay.decoder_slots, context)
  if left_over or (context > 1 and own < window - 1):
    yield (
      f"data.replay.decoder_slots is {replay.decoder_slots}; mesh.context ({context}) must divide "
      f"it and leave at least model.attention.window - 1 ({window - 1}) to a device."
    )
