"""A checkpoint as something to ask: how likely are these tokens, and what comes after them.

Legend: B rows of a call, S slots of a row, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer

from configs.schema import Settings
from data.prepared import Prepared
from deepseek_jax.config import ModelConfig
from deepseek_jax.layout import Document, Layout, build_layout, stack_layouts
from deepseek_jax.model import Model
from deepseek_jax.ngram import NgramHash
from deepseek_jax.ops.token_scores import TokenScores, token_scores
from deepseek_jax.sampling.cache import decoding_config
from deepseek_jax.sampling.generate import Sampling, generate
from deepseek_jax.sampling.sampler import Sampler
from deepseek_jax.sampling.weights import decoding_weights
from deepseek_jax.sharding import batch_pieces, to_host
from deepseek_jax.training_config import MeshConfig
from train.batches import RowGroup, placer
from train.evaluation.checkpoints import Checkpoint

GREEDY = Sampling(temperature=0.0)
_CAPACITY = 128  # tokens of the smallest cache; larger ones are this times a power of two


class Scored(NamedTuple):
  """Tokens, of which those from `start` on are asked for."""

  tokens: np.ndarray  # [n] int32, BOS included
  start: int  # at least 1: nothing comes before the first token


class Likelihood(NamedTuple):
  """Of each token that was asked for."""

  log_p: np.ndarray  # [n - start] float32, nats
  is_top: np.ndarray  # [n - start] bool, whether it is the likeliest of all

  @property
  def total(self) -> float:
    return float(np.sum(self.log_p, dtype=np.float64))


@dataclasses.dataclass(frozen=True)
class EvaluatedModel:
  """A checkpoint on its devices."""

  checkpoint: Checkpoint
  sha256: str  # of the checkpoint
  cfg: ModelConfig  # scan_layers=False
  settings: Settings  # of the run; defaults around cfg for a release
  variables: Any  # {"params", "balance"}, a subtree per layer, float32
  data: tuple[Prepared, ...]  # all with the tokenizer below
  tokenizer: Tokenizer  # makes no special token of any text
  hashing: NgramHash | None  # Engram's; None for a model without tables
  mesh: Mesh
  rows: int  # that are computed at a time, if they have the slots of the data
  packed: bool  # whether caches of generation hold the bytes of the release
  seed: int

  @functools.cached_property
  def sampler(self) -> Sampler:
    """Of the decode path, with the rows of its caches packed or not."""
    weights = decoding_weights(self.cfg, self.variables)
    return Sampler(self.cfg, weights, self.hashing, packed=self.packed)

  def generation_problems(self) -> list[str]:
    """Why no text can be generated, in plain sentences."""
    found = decoding_config(self.cfg, packed=self.packed).problems()
    return [*found, "--cache plain keeps rows as they are computed."] if found else []

  def encode(self, text: str) -> np.ndarray:
    """int32 tokens of a text behind BOS."""
    ids = self.tokenizer.encode(text, add_special_tokens=False).ids
    return np.array([self.data[0].bos, *ids], np.int32)

  def score(self, layout: Layout) -> TokenScores:
    """[B, T] log-probability of every target, and whether it is the likeliest token.

    Args:
      layout: any; rows of padding are added up to what the mesh cuts them into.
    """
    wanted = len(layout.tokens)
    rows = wanted + -wanted % self._row_pieces
    layout = _with_rows(layout, rows)
    place = placer(self.mesh, RowGroup(0, 1, np.arange(rows)))
    program = _score_program(self.cfg, self.settings.objective.vocab_chunk_tokens)
    with jax.set_mesh(self.mesh):
      scores = to_host(program(self.variables, place(layout)))
    return jax.tree.map(lambda x: x[:wanted], scores)

  def log_likelihoods(self, sequences: Sequence[Scored]) -> list[Likelihood]:
    """Of each sequence the log-probabilities of its tokens from `start` on.

    Sequences are packed into rows, longest first, all rows of a call with equally many slots: those
    of the data, or a power of two times that if a sequence is longer. Neither they nor the rows
    that are computed at a time change what a sequence is given.
    """
    if not sequences:
      return []
    slots = self.slots_of(max(len(sequence.tokens) for sequence in sequences) - 1)
    rows = _pack([len(sequence.tokens) - 1 for sequence in sequences], slots)
    found: dict[int, Likelihood] = {}
    for some in _some(rows, self.rows_of(slots)):
      layouts = [self._row([sequences[n] for n in row], slots) for row in some]
      layout = _with_rows(stack_layouts(layouts), self.rows_of(slots))
      scores = self.score(layout)
      for number, row in enumerate(some):
        begin = 0
        for n in row:
          end = begin + len(sequences[n].tokens) - 1
          asked = slice(begin + sequences[n].start - 1, end)
          found[n] = Likelihood(scores.log_p_BT[number, asked], scores.is_top_BT[number, asked])
          begin = end
    return [found[n] for n in range(len(sequences))]

  def generate(
    self,
    prompts: Sequence[np.ndarray],
    max_new_tokens: int,
    stop: Sequence[str] = (),
    sampling: Sampling = GREEDY,
  ) -> list[str]:
    """What follows each prompt, up to EOS, the first of the stop strings, or so many tokens.

    A text depends on its prompt, its number in the list and `sampling` alone.

    Args:
      prompts: int32 tokens, BOS included.
      max_new_tokens: of each text.
      stop: strings that end a text and are no part of it.
      sampling: greedy unless told otherwise.
    """
    if not prompts:
      return []
    by_length = sorted(range(len(prompts)), key=lambda n: (len(prompts[n]), n))
    rows = min(self.rows, len(prompts))
    rows += -rows % self._row_pieces
    texts: dict[int, str] = {}
    for some in _some(by_length, rows):
      filled = [*some, *[some[-1]] * (rows - len(some))]  # all groups are of one shape
      own = [prompts[n] for n in filled]
      with jax.set_mesh(self.mesh):
        tokens = self._continue(own, filled, max_new_tokens, stop, sampling)
      decode = lambda ids: self.tokenizer.decode(ids, skip_special_tokens=True)
      texts |= {n: _cut(decode(ids), stop) for n, ids in zip(filled, tokens, strict=True)}
    return [texts[n] for n in range(len(prompts))]

  def _continue(
    self,
    prompts: Sequence[np.ndarray],
    numbers: Sequence[int],
    max_new_tokens: int,
    stop: Sequence[str],
    sampling: Sampling,
  ) -> list[list[int]]:
    """New tokens of some prompts, computed side by side, in a cache of one of few sizes."""
    eos, longest = self.data[0].eos, max(map(len, prompts))
    capacity = _CAPACITY << max(0, math.ceil(math.log2((longest + max_new_tokens) / _CAPACITY)))
    steps = generate(
      self.sampler,
      prompts,
      sampling,
      max_new_tokens=capacity - longest,
      end=eos,
      vocab=self.data[0].vocab,
      numbers=numbers,
    )
    texts: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    for _, tokens in zip(range(max_new_tokens), steps, strict=False):
      for n, token in enumerate(tokens):
        if ended[n] or token is None:
          continue
        if token != eos:
          texts[n].append(token)
        written = self.tokenizer.decode(texts[n], skip_special_tokens=True) if stop else ""
        ended[n] = token == eos or any(end in written for end in stop)
      if all(ended):
        break
    return texts

  def slots_of(self, longest: int, base: int | None = None) -> int:
    """Slots of rows that hold so many tokens.

    Args:
      longest: tokens.
      base: slots of a row that is not longer, made so many that ratios and mesh divide them; the
        others have a power of two times as many. None: those of the data.
    """
    pieces = self.mesh.shape["context"]
    unit = math.lcm(*self.cfg.ratios, 1) * pieces
    least = pieces * (self.cfg.attention.window - 1) if pieces > 1 else 1  # windows reach one piece
    slots = max(least, self.data[0].slots if base is None else base)
    slots += -slots % unit
    return slots << max(0, math.ceil(math.log2(longest / slots)))

  def rows_of(self, slots: int) -> int:
    """How many rows of so many slots are computed at a time: as many tokens as `rows` rows of the
    data have, and as the mesh divides them.
    """
    rows = max(1, self.rows * self.slots_of(1) // slots)
    return rows + -rows % self._row_pieces

  @property
  def _row_pieces(self) -> int:
    return batch_pieces(MeshConfig(**self.mesh.shape))

  def _row(self, sequences: Sequence[Scored], slots: int) -> Layout:
    documents = [Document(s.tokens[:-1], int(s.tokens[-1])) for s in sequences]
    return build_layout(documents, slots=slots, ratios=self.cfg.ratios, hashing=self.hashing)


@functools.lru_cache(maxsize=4)
def _score_program(cfg: ModelConfig, chunk_tokens: int) -> Any:
  """(variables, layout) -> TokenScores; one for all checkpoints of a run."""
  model: Any = Model(cfg)

  def score(variables: Any, layout: Layout) -> TokenScores:
    output = model.apply(variables, layout)
    return token_scores(
      output.hidden_BTD,
      output.head_VD,
      layout.targets,
      chunk_tokens=chunk_tokens,
      compute_dtype=cfg.numerics.compute_dtype,
    )

  return jax.jit(score)


def _with_rows(layout: Layout, rows: int) -> Layout:
  """The layout with empty rows up to so many."""
  missing = rows - len(layout.tokens)
  if not missing:
    return layout
  empty = build_layout(
    [], slots=layout.tokens.shape[1], ratios=tuple(layout.entry_slots), hashing=None
  )
  shape = (1, *layout.engram_rows.shape[1:])
  empty = empty._replace(engram_rows=np.full(shape, -1, np.int32))
  return stack_layouts([layout, *[empty] * missing])


def _pack(lengths: Sequence[int], slots: int) -> list[list[int]]:
  """Rows of sequence numbers, the longest sequences first, each into the first row with room."""
  rows: list[list[int]] = []
  room: list[int] = []
  for n in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
    place = next((r for r, free in enumerate(room) if free >= lengths[n]), len(rows))
    if place == len(rows):
      rows.append([])
      room.append(slots)
    rows[place].append(n)
    room[place] -= lengths[n]
  return rows


def _some(items: Sequence[Any], count: int) -> Iterator[Sequence[Any]]:
  for first in range(0, len(items), count):
    yield items[first : first + count]


def _cut(text: str, stop: Iterable[str]) -> str:
  """The text before the first stop string."""
  ends = [place for end in stop if (place := text.find(end)) >= 0]
  return text[: min(ends)] if ends else text
