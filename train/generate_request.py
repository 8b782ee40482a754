"""The command line of `generate`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from data.chat.messages import Chat
from deepseek_jax.sampling.generate import Sampling
from deepseek_jax.sharding import MESH_AXES
from deepseek_jax.storage_path import url_problem
from deepseek_jax.training_config import MeshConfig
from train import keys, settings
from train.chat_prompt import read_chat
from train.errors import UsageError

USAGE = """python -m train generate --checkpoint DIR --prompt TEXT [--NAME VALUE ...]

--checkpoint      folder of a run, a step of one, or a released checkpoint
--prompt          text to write on from; with --chat a user message, or a chat: NAME.json, or JSON
                  itself, a list of messages or a record as data/chat/record.py has them
--chat            the answer of a model that was trained on chats; on a terminal without --prompt
                  a chat that goes on line by line
--effort          of its reasoning, 1 to 100; left out, it answers without, unless the chat says so
--step            which checkpoint of the run; the newest where it is left out
--data            folder of prepared data with the tokenizer; the run's where it is left out
--max-new-tokens  tokens, at most (128)
--samples         texts to write, side by side (1)
--temperature     0 takes the likeliest token, 1 draws from the model (1)
--top-p           share of the probability that is drawn from, in (0, 1] (1)
--seed            of the random numbers; a text is the same for any number of samples (0)
--cache           packed: FP4 and FP8 bytes as the release serves them; plain: as computed (packed)
--mesh            devices to spread over, as in fsdp=2,expert=4 (one device)
--exact           every token of the prompt goes through every layer, not only the last window"""
TEXTS = ("--checkpoint", "--prompt", "--data", "--cache", "--mesh")
NUMBERS: dict[str, tuple[Any, str, Callable[[Any], bool]]] = {  # default, what is accepted
  "--step": (None, "at least 0", lambda n: n >= 0),
  "--max-new-tokens": (128, "at least 1", lambda n: n >= 1),
  "--samples": (1, "at least 1", lambda n: n >= 1),
  "--temperature": (1.0, "at least 0", lambda x: x >= 0),
  "--top-p": (1.0, "more than 0 and at most 1", lambda x: 0 < x <= 1),
  "--seed": (0, "from 0 to 2147483647", lambda n: 0 <= n < 2**31),
  "--effort": (None, "from 1 to 100", lambda n: 1 <= n <= 100),
}
CACHES = {"packed": True, "plain": False}


class Request(NamedTuple):
  checkpoint: str
  prompt: str | None  # None: a chat on the terminal
  is_chat: bool
  chat: Chat | None  # what the prompt means with --chat
  effort: int | None
  data: str | None
  packed: bool
  mesh: MeshConfig
  exact: bool
  step: int | None
  max_new_tokens: int
  samples: int
  sampling: Sampling


def parse(argv: Sequence[str], *, terminal: bool = False) -> Request:
  """The command line. Raises UsageError with every problem.

  Args:
    argv: without the program and the verb.
    terminal: whether somebody can type; then --chat needs no prompt.
  """
  found = settings.split(argv, (*TEXTS, *NUMBERS), switches=("--exact", "--chat"))
  values, problems = dict(found.values), list(found.problems)
  refused = "is not an argument: a checkpoint brings its configuration."
  problems += [f"--config.{key} {refused}" for key in found.overrides]
  is_chat = "--chat" in found.flags
  needed = ("--checkpoint",) if is_chat and terminal else ("--checkpoint", "--prompt")
  problems += [f"{name} is missing." for name in needed if name not in values]
  for name in ("--checkpoint", "--data"):
    problems += [p for p in (url_problem(name, values.get(name, "")),) if p]
  cache = values.get("--cache", "packed")
  if cache not in CACHES:
    problems.append(f"--cache is {cache!r}, accepted are {' and '.join(CACHES)}.")
  number = _numbers(values, problems)
  mesh, problem = _mesh_config(values.get("--mesh"))
  problems += [problem] if problem else []
  chat = None
  if is_chat and "--prompt" in values:
    try:
      chat = read_chat(values["--prompt"], number["--effort"])
    except UsageError as error:
      problems += error.problems
  elif "--effort" in values and not is_chat:
    problems.append("--effort is of an answer in a chat: it needs --chat.")
  if problems:
    raise UsageError(problems)
  return Request(
    checkpoint=values["--checkpoint"],
    prompt=values.get("--prompt"),
    is_chat=is_chat,
    chat=chat,
    effort=number["--effort"],
    data=values.get("--data"),
    packed=CACHES[cache],
    mesh=mesh,
    exact="--exact" in found.flags,
    step=number["--step"],
    max_new_tokens=number["--max-new-tokens"],
    samples=number["--samples"],
    sampling=Sampling(number["--temperature"], number["--top-p"], number["--seed"]),
  )


def _mesh_config(text: str | None) -> tuple[MeshConfig, str | None]:
  """What --mesh says, or what is wrong with it."""
  pairs = [pair.partition("=") for pair in text.split(",")] if text else []
  sizes = {axis: int(size) if size.isdecimal() else 0 for axis, _, size in pairs}
  if set(sizes) <= set(MESH_AXES) and all(sizes.values()):
    return MeshConfig(**sizes), None
  axes = ", ".join(MESH_AXES)
  return MeshConfig(), f"--mesh is {text}, accepted are AXIS=DEVICES,... with the axes {axes}."


def _numbers(values: dict[str, str], problems: list[str]) -> dict[str, Any]:
  """The arguments that are numbers, by name; what is wrong with them goes into `problems`."""
  number: dict[str, Any] = {name: default for name, (default, _, _) in NUMBERS.items()}
  for name, (default, accepted, accepts) in NUMBERS.items():
    if name not in values:
      continue
    kind = float if isinstance(default, float) else int
    try:
      given = keys.convert(kind, keys.from_text(kind, values[name]))
    except TypeError as error:
      problems.append(f"{name} {error}.")
      continue
    if accepts(given):
      number[name] = given
    else:
      problems.append(f"{name} must be {accepted}, got {given}.")
  return number
