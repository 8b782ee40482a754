"""Reads safetensors files with every dtype that the release uses, as NumPy arrays."""

import pathlib

import ml_dtypes
import numpy as np
import safetensors

_DTYPES = {
  "F32": np.float32,
  "BF16": ml_dtypes.bfloat16,
  "F8_E4M3": ml_dtypes.float8_e4m3fn,
  "F8_E8M0": ml_dtypes.float8_e8m0fnu,
  "I8": np.int8,
  "U8": np.uint8,
  "I32": np.int32,
  "I64": np.int64,
  "BOOL": np.bool_,
}


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
  """All tensors of a file by name. Raises ValueError for a damaged file or an unknown dtype."""
  try:
    entries = safetensors.deserialize(path.read_bytes())
  except safetensors.SafetensorError as error:
    raise ValueError(f"{path} is not a readable safetensors file: {error}.") from None
  tensors = {}
  for name, entry in entries:
    if entry["dtype"] not in _DTYPES:
      raise ValueError(
        f"{path}: tensor {name} has dtype {entry['dtype']}, known are {sorted(_DTYPES)}."
      )
    flat = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]])
    tensors[name] = flat.reshape(entry["shape"])
  return tensors
