"""The command line of `generate`."""

from collections.abc import Sequence
from typing import NamedTuple

from data.chat.messages import Chat
from deepseek_jax.sampling.generate import Sampling
from deepseek_jax.storage_path import url_problem
from deepseek_jax.training_config import MeshConfig
from train import settings
from train.arguments import Numbers, read_mesh, read_numbers
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
NUMBERS: Numbers = {
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
  number, wrong = read_numbers(values, NUMBERS)
  mesh, unknown = read_mesh(values.get("--mesh"))
  problems += wrong + unknown
  chat = None
  if is_chat and "--prompt" in values:
    try:
      chat = read_chat(values["--prompt"], None if wrong else number["--effort"])
    except UsageError as error:
      problems += error.problems
  elif "--effort" in values and not is_chat:
    problems.append("--effort is of an answer in a chat: it needs --chat.")
  elif is_chat and terminal and number["--samples"] != 1:
    problems.append(f"--samples is {number['--samples']}, but a chat on the terminal is one text.")
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
