"""`python -m train generate`: writes on from a prompt with the weights of a checkpoint."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from data.chat.markup import Mark
from data.chat.tokens import ChatTokenizer, chat_tokenizer
from data.errors import RequestError
from deepseek_jax.sampling.cache import decoding_config
from deepseek_jax.sampling.generate import generate, go_on
from deepseek_jax.sampling.sampler import Sampler
from deepseek_jax.sampling.session import Session
from deepseek_jax.sampling.weights import decoding_dtype
from train import processes
from train.arguments import lay_mesh
from train.chat_prompt import Answer, chat_tokens
from train.chat_talk import talk, typed_lines
from train.errors import Exit, UsageError
from train.generate_request import USAGE, Request, parse
from train.pretrain import join_and_find_devices
from train.stored_model import StoredModel, open_model
from train.stored_text import StoredText, open_text


class Trained(NamedTuple):
  """A checkpoint, ready to write with."""

  sampler: Sampler
  text: StoredText
  encoder: ChatTokenizer | None  # where a chat is asked
  mesh: Mesh


def main(argv: Sequence[str]) -> int:
  """Prints the text as it is written. Raises UsageError with every problem."""
  if any(word in ("--help", "-h") for word in argv):
    print(USAGE)
    return Exit.DONE
  join_and_find_devices()
  with processes.agreed():
    alone = jax.process_count() == 1
    request = parse(argv, terminal=alone and sys.stdin is not None and sys.stdin.isatty())
    trained = load(request)
  pieces = converse if request.prompt is None else write
  with jax.set_mesh(trained.mesh), contextlib.suppress(KeyboardInterrupt):
    for piece in pieces(trained, request):
      if processes.first():
        print(piece, end="", flush=True)
  processes.say("")
  return Exit.DONE


def load(request: Request) -> Trained:
  """Weights, configuration and tokenizer of a checkpoint, on the mesh of the request.

  Raises: UsageError with everything that is missing or does not fit.
  """
  problems: list[str] = []

  def found(what: Callable[..., Any], *arguments: Any) -> Any:
    try:
      return what(*arguments)
    except (UsageError, RequestError) as error:
      problems.extend(error.problems)
      return None

  mesh: Mesh = found(lay_mesh, request.mesh)
  model: StoredModel | None = found(open_model, "--checkpoint", request.checkpoint, request.step)
  text: StoredText | None = None
  encoder: ChatTokenizer | None = None
  if model is not None:
    misfits = decoding_config(model.cfg, packed=request.packed).problems()
    problems += [*misfits, "--cache plain keeps rows as they are computed."] if misfits else []
    text = found(open_text, model, request.data)
  if text is not None and request.is_chat:
    encoder = found(chat_tokenizer, text.tokenizer)
  if problems:
    raise UsageError(problems)
  assert model is not None and text is not None
  variables = model.variables(mesh, functools.partial(decoding_dtype, model.cfg))
  sampler = Sampler(model.cfg, variables, text.hashing, packed=request.packed)
  return Trained(sampler, text, encoder, mesh)


class Shown(Protocol):
  """A text as it is shown while it is written."""

  def begin(self) -> str: ...
  def add(self, token: int) -> str: ...
  def end(self) -> str: ...


class Continuation:
  """A text that goes on from a prompt's last tokens."""

  def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
    self._tokenizer = tokenizer
    self._stream = DecodeStream(list(before), skip_special_tokens=True)

  def begin(self) -> str:
    return ""

  def add(self, token: int) -> str:
    return self._stream.step(self._tokenizer, token) or ""

  def end(self) -> str:
    return ""


def converse(trained: Trained, request: Request) -> Iterator[str]:
  """A chat with whoever sits at the terminal."""
  encoder = trained.encoder
  assert encoder is not None
  so = functools.partial(
    go_on,
    sampling=request.sampling,
    max_new_tokens=request.max_new_tokens,
    end=encoder.ids[Mark.EOS],
    vocab=trained.text.prepared.vocab,
  )
  session = Session(trained.sampler, exact=request.exact)
  room = request.max_new_tokens
  return talk(session, encoder, typed_lines(), so, effort=request.effort, room=room)


def write(trained: Trained, request: Request) -> Iterator[str]:
  """Pieces of text: of one sample as they come, of several one text after the other."""
  prepared, tokenizer, encoder = trained.text.prepared, trained.text.tokenizer, trained.encoder
  if request.chat is not None and encoder is not None:
    thinking, end = request.chat.effort is not None, encoder.ids[Mark.EOS]
    prompt = chat_tokens(encoder, request.chat)
    new: Callable[[], Shown] = functools.partial(Answer, encoder, thinking=thinking)
  else:
    ids, end = tokenizer.encode(request.prompt or "", add_special_tokens=False).ids, prepared.eos
    prompt = np.array([prepared.bos, *ids], np.int32)
    new = functools.partial(Continuation, tokenizer, ids[-8:])
  shown = [new() for _ in range(request.samples)]
  steps = generate(
    trained.sampler,
    [prompt] * request.samples,
    request.sampling,
    max_new_tokens=request.max_new_tokens,
    end=end,
    vocab=prepared.vocab,
    exact=request.exact,
  )
  pieces = (
    [one.add(token) if token is not None else "" for one, token in zip(shown, tokens, strict=True)]
    for tokens in steps
  )
  if request.samples == 1:
    yield shown[0].begin()
    yield from (piece for (piece,) in pieces)
    yield shown[0].end()
    return
  for number, text in enumerate(zip(*pieces, strict=True)):
    whole = f"{shown[number].begin()}{''.join(text)}{shown[number].end()}"
    yield f"{'' if number == 0 else '\n'}--- {number}\n{whole}"
