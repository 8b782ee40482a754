"""The processes of one run: how they join, agree on what stops them, and say things once.

Without JAX_NUM_PROCESSES there is one process, and nothing here costs anything. What a process is
told is described in launch/local.py.

Until the first step every problem of one is a problem of all (`agreed`). Later a process whose data
or checkpoint fails ends at once with its own code, for it cannot take the step that the others are
in. The supervisor then ends the others; without one JAX does, at once where a connection is lost,
else when heartbeats have been missing for 100 s.
"""

import contextlib
import json
import math
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.errors import Exit, UsageError

NUMBER, PLACE, COORDINATOR = "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"
AUTO = "auto"  # JAX finds number, place and coordinator
JOIN_SECONDS = 300.0  # hosts of a pod start minutes apart: their images are pulled first


def join(told: Mapping[str, str] = os.environ, *, seconds: float = JOIN_SECONDS) -> None:
  """Meets the other processes. Call it before the first question for devices.

  Where the others do not come the process ends, to be started again.

  Args:
    told: the environment.
    seconds: longest wait for the others.

  Raises: UsageError for values that make no sense.
  """
  number = told.get(NUMBER)
  if number is None:
    return
  if problems := list(_problems(told)):
    raise UsageError(problems)
  if number == "1":
    return
  # JAX would take SIGTERM over and hide it from Python: train/signals.py hears it, and `Flags`
  # brings it to the other processes.
  jax.config.update("jax_enable_preemption_service", False)
  given = {}
  if number != AUTO:
    given = {
      "coordinator_address": told[COORDINATOR],
      "num_processes": int(number),
      "process_id": int(told[PLACE]),
      "cluster_detection_method": "deactivate",
    }
  who = "This process" if number == AUTO else f"Process {told[PLACE]} of {number}"
  where = told.get(COORDINATOR, "the coordinator that JAX found")
  alone = f"{who} did not meet the others at {where}"
  # At the end of its own patience JAX aborts the process without a word to a user.
  watchdog = threading.Timer(seconds, leave, (f"{alone} within {seconds:g} s.", Exit.CRASHED))
  watchdog.daemon = True
  watchdog.start()
  try:
    jax.distributed.initialize(**given, initialization_timeout=math.ceil(seconds) + 60)
  except ValueError as error:  # what JAX cannot find by itself
    raise UsageError(
      [f"{NUMBER} is {AUTO}, but JAX finds neither a pod nor a cluster's job here: {error}"]
    ) from error
  except RuntimeError as error:
    leave(f"{alone}: {str(error).splitlines()[0]}.", Exit.CRASHED)
  finally:
    watchdog.cancel()


def _problems(told: Mapping[str, str]) -> Iterator[str]:
  number, place, address = told[NUMBER], told.get(PLACE), told.get(COORDINATOR)
  if number == AUTO:
    return
  if not number.isdecimal() or int(number) < 1:
    yield f"{NUMBER} must be a positive integer or {AUTO}, got {number}."
  elif int(number) == 1:
    return
  elif place is None or not place.isdecimal() or int(place) >= int(number):
    yield f"{PLACE} must be 0 to {int(number) - 1}, got {'nothing' if place is None else place}."
  if address is None or not re.fullmatch(r".+:\d{1,5}", address):
    yield f"{COORDINATOR} must be HOST:PORT, got {'nothing' if address is None else address}."


def first() -> bool:
  """Whether this process speaks and writes for all of them."""
  return jax.process_index() == 0


def say(sentence: str) -> None:
  """Shows a sentence once; a progress bar, once there is one, lets it pass above itself."""
  if first():
    print(sentence, flush=True)


def warn(sentence: str) -> None:
  """Shows a sentence that is about this process."""
  print(signed(sentence), flush=True)


def complain(sentence: str) -> None:
  """Shows, once and as an error, a sentence that every process has."""
  if first():
    print(sentence, file=sys.stderr)


def signed(sentence: str) -> str:
  """The sentence, with the place of this process where there are several."""
  count = jax.process_count()
  return sentence if count == 1 else f"Process {jax.process_index()} of {count}: {sentence}"


def leave(sentence: str, code: Exit) -> NoReturn:
  """Ends this process at once, not waiting for other processes nor for a blocked thread."""
  print(sentence, file=sys.stderr, flush=True)
  sys.stdout.flush()
  os._exit(code)


def gather(words: Sequence[str]) -> list[list[str]]:
  """The words of every process, by its place. Every process must call it at the same point."""
  if jax.process_count() == 1:
    return [list(words)]
  text = np.frombuffer(json.dumps(list(words)).encode(), np.uint8)
  lengths = multihost_utils.process_allgather(np.int32(len(text)))
  width = 1 << int(lengths.max() - 1).bit_length()  # few widths, so few programs
  texts = multihost_utils.process_allgather(np.pad(text, (0, width - len(text))))
  return [json.loads(bytes(row[:n])) for row, n in zip(texts, lengths, strict=True)]


def union(gathered: Sequence[Sequence[str]]) -> tuple[str, ...]:
  """What `gather` has found, each word once."""
  return tuple(dict.fromkeys(word for words in gathered for word in words))


@contextlib.contextmanager
def agreed() -> Iterator[None]:
  """Inside, every process may raise UsageError; at the end all raise it if one of them did.

  The first process has all the problems in its error, the others have none left to show. Nothing
  inside may wait for another process.
  """
  own: tuple[str, ...] = ()
  try:
    yield
  except UsageError as error:
    own = error.problems
    if jax.process_count() == 1:
      raise
  found = gather(own)
  if any(found):
    raise UsageError(_merged(found) if first() else [])


def _merged(found: Sequence[Sequence[str]]) -> list[str]:
  """Those of the first process; of the others what only they have, with their place."""
  problems = list(found[0])
  for place, words in enumerate(found[1:], 1):
    known = {problem for before in found[:place] for problem in before}
    problems += [f"Process {place}: {problem}" for problem in words if problem not in known]
  return problems


class Flags:
  """Yes-or-no questions that all processes answer alike, at the same step and without a wait.

  The devices work the answers out between two steps, so they are those of the step before; those of
  a single process are its own, at once.

  Args:
    mesh: over all devices of the run.
  """

  def __init__(self, mesh: Mesh) -> None:
    self._split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    everywhere = NamedSharding(mesh, PartitionSpec())
    self._any = jax.jit(lambda x: jnp.max(x, axis=0), out_shardings=everywhere)
    self._pending: jax.Array | None = None

  def raised(self, *own: bool) -> list[bool]:
    """Whether any process said yes in its call before; call it once a step, everywhere alike."""
    if jax.process_count() == 1:
      return list(own)
    before = self._pending
    answers = np.asarray([own], np.int32)
    shape = (self._split.mesh.size, len(own))
    self._pending = self._any(
      jax.make_array_from_callback(shape, self._split, lambda index: answers)
    )
    return [False] * len(own) if before is None else [bool(x) for x in np.asarray(before)]


class NoMetrics:
  """Stands where the first process has its MetricsWriter."""

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    pass

  def write(self, step: int, values: Mapping[str, object]) -> None:
    pass

  def flush(self) -> None:
    pass

  def say(self, sentence: str) -> None:
    pass
