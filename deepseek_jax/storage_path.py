"""Paths of runs and data: local ones, and objects under s3:// and gs://.

The only file that knows about object storage. `storage_path` gives a pathlib.Path or a RemotePath,
which has the part of pathlib's interface that run folders and data need; what pathlib cannot
promise, `write_atomically`, takes either. TensorStore moves the bytes: it is here anyway, needs no
further package for S3 and GCS, and can write on the condition that nobody else has written.

A folder is no more than the common beginning of some keys: it cannot be made, is there while an
object is below it, and cannot be renamed.

Read from the environment, for s3://:
  AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL   another server than Amazon's
  AWS_REGION, AWS_DEFAULT_REGION          us-east-1 where only an endpoint is given
  AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN; or AWS_PROFILE and its files
and for gs://: GOOGLE_APPLICATION_CREDENTIALS, TENSORSTORE_GCS_HTTP_URL.
"""

import concurrent.futures
import dataclasses
import errno
import functools
import hashlib
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import tensorstore as ts

DRIVERS = {"s3": "s3", "gs": "gcs"}  # scheme of a URL -> TensorStore's name of it
MARK = "://"
# Conditional writes of S3 itself are used for Amazon's servers only, unless this is set; without
# them TensorStore looks first and writes then, and two writers may both believe to be the first.
CONDITIONAL = "TENSORSTORE_S3_USE_CONDITIONAL_WRITE"
RETRIES = {"max_retries": 5, "initial_delay": "200ms", "max_delay": "5s"}  # about ten seconds
REQUESTS = 16  # at once, where many objects are moved
ADVICE = {
  "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
  "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}


class Versioned(NamedTuple):
  data: bytes | None  # None: there is no such object
  generation: bytes  # changes with every write


class Hashed(NamedTuple):
  bytes: int
  sha256: str


@dataclasses.dataclass(frozen=True)
class RemotePath:
  """An object, or the beginning of the keys of several. Every error is an OSError whose strerror
  is the middle of a sentence.
  """

  scheme: str
  bucket: str
  key: str  # without a slash at either end

  def __str__(self) -> str:
    return f"{self.scheme}{MARK}{self.bucket}/{self.key}".rstrip("/")

  def __truediv__(self, name: str | os.PathLike[str]) -> Self:
    return dataclasses.replace(self, key=f"{self.key}/{os.fspath(name)}".strip("/"))

  def absolute(self) -> Self:
    return self

  @property
  def name(self) -> str:
    return self.key.rpartition("/")[2]

  @property
  def parent(self) -> Self:
    return dataclasses.replace(self, key=self.key.rpartition("/")[0])

  def read_bytes(self) -> bytes:
    """Raises FileNotFoundError for an object that is not there."""
    data = self.read_versioned().data
    if data is None:
      raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
    return data

  def read_text(self, encoding: str = "utf-8") -> str:
    return self.read_bytes().decode(encoding)

  def read_versioned(self) -> Versioned:
    """The object with the generation that `write_if_unchanged` asks for."""
    found = self._call(lambda store: store.read(self.key))
    return Versioned(found.value if found.state == "value" else None, found.stamp.generation)

  def is_file(self) -> bool:
    return self.read_versioned().data is not None

  def write_bytes(self, data: bytes) -> None:
    """Replaces the object; whoever reads sees the old one or the new one."""
    self._call(lambda store: store.write(self.key, data))

  def write_if_unchanged(self, data: bytes, generation: bytes) -> bytes | None:
    """Writes if the object is still that generation. Returns the new one, None if it was not."""
    written = self._call(lambda store: store.write(self.key, data, if_equal=generation))
    return written.generation or None

  def create_if_absent(self, data: bytes) -> bytes | None:
    """Returns the generation, or None if the object is there already; of several callers at once
    exactly one writes.
    """
    found = self.read_versioned()
    return self.write_if_unchanged(data, found.generation) if found.data is None else None

  def unlink_if_unchanged(self, generation: bytes) -> None:
    """Removes the object unless it was written since."""
    self._call(lambda store: store.write(self.key, None, if_equal=generation))

  def unlink(self) -> None:
    """Removes the object; nothing happens where there is none."""
    self._call(lambda store: store.write(self.key, None))

  def names_below(self, beginning: str = "") -> list[str]:
    """Keys of the objects below this folder, sorted, without its own part.

    Args:
      beginning: only names that begin so; others are not even listed by the store.
    """
    folder = f"{self.key}/" if self.key else ""
    strip = len(folder.encode())
    keys = self._call(
      lambda store: store.list(_beginning(folder + beginning), strip_prefix_length=strip)
    )
    return sorted(key.decode() for key in keys)

  def remove_tree(self) -> None:
    """Removes every object below this folder."""
    self._call(lambda store: store.delete_range(_beginning(f"{self.key}/")))

  def open_array(self, spec: dict[str, Any], **options: Any) -> ts.Future:
    """TensorStore's array whose objects lie below this folder, as `ts.open` gives it."""
    os.environ.setdefault(CONDITIONAL, "true")
    store = _store_spec(self.scheme, self.bucket) | {"path": f"{self.key}/"}
    return ts.open(spec | {"kvstore": store}, context=_context(), **options)

  def error(self, reason: str) -> OSError:
    """What TensorStore said, as an OSError with a short strerror."""
    return _error(self, reason)

  def _call(self, start: Callable[[ts.KvStore], ts.Future]) -> Any:
    try:
      return start(_bucket(self.scheme, self.bucket, _endpoint())).result()
    except ValueError as error:  # what TensorStore makes of every status but OK
      raise self.error(str(error)) from None


StoragePath = pathlib.Path | RemotePath


def is_remote(text: str | os.PathLike[str] | StoragePath) -> bool:
  """Whether this is the URL of an object store."""
  return MARK in str(text)


def storage_path(text: str | os.PathLike[str] | StoragePath) -> StoragePath:
  """The path that a text names. `url_problem` says which URLs name none."""
  if isinstance(text, RemotePath):
    return text
  if not is_remote(text):
    return pathlib.Path(text)
  scheme, _, rest = str(text).partition(MARK)
  bucket, _, key = rest.partition("/")
  return RemotePath(scheme, bucket, "/".join(filter(None, key.split("/"))))


def url_problem(name: str, text: str) -> str | None:
  """A sentence about a URL that can be no folder; `name` is the argument that holds it."""
  scheme, mark, rest = text.partition(MARK)
  if not mark or (scheme in DRIVERS and re.fullmatch(r"[^/\s]+/+[^/\s].*", rest)):
    return None
  accepted = ", ".join(f"{known}://BUCKET/FOLDER" for known in DRIVERS)
  return f"{name} must be a local folder or one of {accepted}, got {text}."


def write_atomically(path: StoragePath, data: bytes) -> None:
  """Replaces a file or an object so that a crash leaves the old content or the new one."""
  if isinstance(path, RemotePath):
    path.write_bytes(data)
    return
  partial = path.with_name(f"{path.name}.tmp")
  with open(partial, "wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path)
  _sync_folder(path.parent)


def hash_file(path: StoragePath) -> Hashed:
  """Reads a file or an object whole."""
  if isinstance(path, RemotePath):
    data = path.read_bytes()
    return Hashed(len(data), hashlib.sha256(data).hexdigest())
  with open(path, "rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Hashed(file.tell(), digest)


def cache_folder() -> pathlib.Path:
  """Where this machine keeps copies that can be made again: $DEEPSEEK_JAX_CACHE, or deepseek_jax in
  the user's folder for caches.
  """
  if given := os.environ.get("DEEPSEEK_JAX_CACHE"):
    return pathlib.Path(given).absolute()
  caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(caches, "deepseek_jax")


def upload_tree(folder: pathlib.Path, target: RemotePath) -> None:
  """Writes every file below a local folder to the same place below `target`."""
  files = [path for path in folder.rglob("*") if path.is_file()]
  name = lambda path: path.relative_to(folder).as_posix()
  with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
    list(pool.map(lambda path: (target / name(path)).write_bytes(path.read_bytes()), files))


def _sync_folder(folder: pathlib.Path) -> None:
  """Makes a rename survive a power cut, not only a crash of the process."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _beginning(text: str) -> ts.KvStore.KeyRange:
  """Keys that begin with the text."""
  return ts.KvStore.KeyRange(text, text[:-1] + chr(ord(text[-1]) + 1) if text else "")


def _endpoint() -> str | None:
  return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _store_spec(scheme: str, bucket: str) -> dict[str, Any]:
  spec: dict[str, Any] = {"driver": DRIVERS[scheme], "bucket": bucket}
  if scheme == "gs":
    return spec
  if "AWS_ACCESS_KEY_ID" in os.environ:  # otherwise it looks for files, and logs that they miss
    spec["aws_credentials"] = {"type": "environment"}
  region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
  if endpoint := _endpoint():
    spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
  elif region:
    spec["aws_region"] = region
  return spec


@functools.cache
def _bucket(scheme: str, bucket: str, endpoint: str | None) -> ts.KvStore:
  """Opened once for each bucket and endpoint; the latter is looked up in the environment again."""
  del endpoint
  os.environ.setdefault(CONDITIONAL, "true")
  return ts.KvStore.open(_store_spec(scheme, bucket), context=_context()).result()


@functools.cache
def _context() -> ts.Context:
  """Shared, so that the limits of requests in flight hold for all of them."""
  return ts.Context({"s3_request_retries": RETRIES, "gcs_request_retries": RETRIES})


def _error(path: RemotePath, text: str) -> OSError:
  """TensorStore's message as an OSError with a short strerror."""
  server = _endpoint() or "Amazon S3" if path.scheme == "s3" else "Google Cloud Storage"
  if text.startswith("NOT_FOUND"):  # an object that is not there is no error
    code, said = errno.ENOENT, f"there is no bucket {path.bucket} on {server}"
  elif re.search(r"PERMISSION_DENIED|UNAUTHENTICATED|http_response_code='40[13]'", text):
    code, said = errno.EACCES, f"{server} denies access (set {ADVICE[path.scheme]})"
  elif re.search(r"curl_code|CURL|DEADLINE_EXCEEDED|UNAVAILABLE", text):
    where = "AWS_ENDPOINT_URL" if path.scheme == "s3" else "TENSORSTORE_GCS_HTTP_URL"
    code, said = errno.EHOSTUNREACH, f"{server} cannot be reached (see {where} and the network)"
  else:
    code, said = (
      errno.EIO,
      re.sub(r"\s*\[[a-z_-]+='.*", "", text.splitlines()[0], flags=re.DOTALL)[:200],
    )
  return OSError(code, said, str(path))
