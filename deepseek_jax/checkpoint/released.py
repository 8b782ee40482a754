"""Released tensors -> our parameters, whole or any part of one, from files (model.md section 4)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from deepseek_jax.checkpoint.names import to_nested
from deepseek_jax.checkpoint.released_formats import TILE, decode
from deepseek_jax.checkpoint.released_index import headers
from deepseek_jax.checkpoint.released_names import Parameter, ReleasedTensor, Stored, parameters
from deepseek_jax.checkpoint.safetensors_file import StoredTensor
from deepseek_jax.config import ModelConfig

COLLECTIONS = {"params": "params", "router": "balance"}  # item of a checkpoint -> Linen's name
SHOWN = 20  # problems of a checkpoint in one message
_BLOCK_BYTES = 2**26  # float32 values that are decoded at a time
_ALIGNED = 64  # bytes

Tensors = Mapping[str, StoredTensor]
Range = tuple[int, int]


def load_released(tensors: Tensors, cfg: ModelConfig, *, ignore: Sequence[str] = ()) -> Any:
  """The whole model as float32 NumPy arrays: {"params": ..., "balance": ...}.

  Args:
    tensors: by released name; `X.scale` beside a quantized `X.weight`.
    cfg: groups of layers are as its scan_layers has them.
    ignore: beginnings of names that may stay unused.

  Raises: ValueError that lists every missing, unused and misshapen tensor.
  """
  if problems := list(released_problems(tensors, cfg, ignore=ignore)):
    raise ValueError(list_problems(problems))
  flat: dict[str, dict[str, np.ndarray]] = {name: {} for name in COLLECTIONS.values()}
  for parameter in parameters(cfg):
    whole = tuple(slice(None) for _ in parameter.shape)
    flat[COLLECTIONS[parameter.item]][parameter.path] = read_part(tensors, parameter, whole)
  return {collection: to_nested(leaves) for collection, leaves in flat.items()}


def list_problems(problems: Sequence[str]) -> str:
  """One line; of many problems the first ones and their number."""
  more = len(problems) - SHOWN
  return "; ".join(problems[:SHOWN]) + (f"; and {more} more." if more > 0 else ".")


def released_problems(
  tensors: Tensors, cfg: ModelConfig, *, ignore: Sequence[str] = ()
) -> Iterator[str]:
  """Why the tensors are not those of the model: each must be used once, and none may be missing."""
  unused = {name for name in tensors if not name.startswith(tuple(ignore))}
  for parameter in parameters(cfg):
    for tensor in parameter.tensors:
      unused -= {tensor.name, tensor.scale_name}
      yield from tensor_problems(tensors, tensor)
  yield from (f"unused tensor {name}" for name in sorted(unused))


def tensor_problems(tensors: Tensors, tensor: ReleasedTensor) -> Iterator[str]:
  """A tensor may be stored as the release does or plain, whatever the configuration says."""
  if tensor.name not in tensors:
    yield f"missing tensor {tensor.name}"
    return
  found = tensors[tensor.name].header
  scaled: dict[str, tuple[Stored, ...]] = {"F8_E4M3": ("fp8", "fp8_rows"), "I8": ("fp4",)}
  plain: dict[str, Stored] = {"BF16": "bf16", "F32": "f32"}
  if found.dtype in plain:
    wanted = headers(tensor, plain[found.dtype])
    if tensor.scale_name in tensors:
      yield f"unused tensor {tensor.scale_name}"
  elif tensor.stored in scaled.get(found.dtype, ()):
    wanted = headers(tensor, tensor.stored)
  else:
    yield f"tensor {tensor.name} has dtype {found.dtype}, which this tensor never has"
    return
  for name, header in wanted.items():
    if name not in tensors:
      yield f"missing tensor {name}"
    elif tensors[name].header.shape != header.shape:
      yield f"misshapen tensor {name}: {tensors[name].header.shape} does not fit {header.shape}"
    elif tensors[name].header.dtype != header.dtype:
      yield f"tensor {name} has dtype {tensors[name].header.dtype} instead of {header.dtype}"


def read_part(tensors: Tensors, parameter: Parameter, index: tuple[slice, ...]) -> np.ndarray:
  """float32 values of a part of our parameter; reads the rows that it touches and no others.

  Args:
    tensors: free of problems.
    parameter: which.
    index: of the part, a slice without a step for each axis.
  """
  ranges = [one.indices(size)[:2] for one, size in zip(index, parameter.shape, strict=True)]
  part = _empty([stop - start for start, stop in ranges])
  lead, inner = ranges[: len(parameter.lead)], ranges[len(parameter.lead) :]
  for place in np.ndindex(*(stop - start for start, stop in lead)):
    at = tuple(start + offset for (start, _), offset in zip(lead, place, strict=True))
    tensor = parameter.tensors[np.ravel_multi_index(at, parameter.lead) if at else 0]
    _fill(part[place], tensors, tensor, inner)
  return part


def mean_row(tensors: Tensors, parameter: Parameter) -> np.ndarray:
  """float32 mean over the rows of the tensor that a table [rows, width] is made of."""
  tensor = parameter.tensors[0]
  rows, width = tensor.view
  total, step = np.zeros(width, np.float64), max(1, _BLOCK_BYTES // (4 * width))
  for first in range(0, rows, step):
    total += decoded_rows(tensors, tensor, first, min(first + step, rows)).sum(0, np.float64)
  return (total / rows).astype(np.float32)


def _empty(shape: Sequence[int]) -> np.ndarray:
  """Where JAX takes it as it is: on a CPU it copies arrays that do not begin so."""
  size = math.prod(shape)
  raw = np.empty(size + _ALIGNED // 4, np.float32)
  begin = -raw.ctypes.data % _ALIGNED // 4
  return raw[begin : begin + size].reshape(shape)


def _fill(ours: np.ndarray, tensors: Tensors, tensor: ReleasedTensor, inner: list[Range]) -> None:
  """Writes a part of one released tensor, and zeros for rows behind its end, into our array."""
  ranges = [inner[tensor.axes.index(axis)] for axis in range(len(tensor.view))]  # along the view
  view = ours.transpose([tensor.axes.index(axis) for axis in range(len(tensor.view))])
  (start, stop), *others = ranges
  rows = min(stop, tensor.view[0])
  factor = math.prod(
    tensor.view[1 : tensor.row_axes]
  )  # released rows for a place of the first axis
  step = max(1, _BLOCK_BYTES // (4 * math.prod(tensor.view[1:])))
  for begin in range(start, rows, step):
    end = min(begin + step, rows)
    block = decoded_rows(tensors, tensor, begin * factor, end * factor)
    block = block.reshape(end - begin, *tensor.view[1:])
    view[begin - start : end - start] = block[:, *(slice(*other) for other in others)]
  view[max(rows - start, 0) :] = 0


def decoded_rows(tensors: Tensors, tensor: ReleasedTensor, first: int, last: int) -> np.ndarray:
  """Released rows first ... last - 1, float32.

  Raises: ValueError for a file that changed since its header was read, and for values that are not
    finite.
  """
  stored, scale = tensors[tensor.name], None
  if stored.header.dtype in ("F8_E4M3", "I8"):
    scales = tensors[tensor.scale_name]
    by_row = scales.header.shape[0] == stored.header.shape[0]
    tiles = (first, last) if by_row else (first // TILE, -(-last // TILE))
    scale = scales.rows(*tiles)
  try:
    values = decode(stored.rows(first, last), scale, first)
  except ValueError as error:
    raise ValueError(f"{tensor.name} in {stored.path}: {error}.") from None
  if not np.isfinite(values).all():
    raise ValueError(f"{tensor.name} in {stored.path} holds values that are not finite.")
  return values
