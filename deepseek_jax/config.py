"""Model hyper-parameters: frozen, nested, with cross-field checks. The only model defaults.

Letters in trailing comments are the ones that array names use everywhere else.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self, get_args

Kind = Literal["swa", "full", "reindex", "reuse"]

# JAX cuts an array into equal pieces only, and the rows of an Engram table are a sum of primes.
# So many devices cut it, and their divisors: the 512 chips of v5p:8x8x8 and twice as many.
TABLE_ROWS_MULTIPLE = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Base of every configuration section: builds itself from a mapping and names unknown keys."""

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> Self:
    """Builds the section; sections inside it may be mappings. Raises ValueError on unknown keys."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := sorted(set(values) - set(fields)):
      raise ValueError(f"{cls.__name__}: unknown key {unknown}, known are {sorted(fields)}")

    return cls(**{name: _built(fields[name].type, value) for name, value in values.items()})


def _built(kind: Any, value: Any) -> Any:
  """A value of a section's field, without JSON's lists."""
  if isinstance(value, Mapping):
    if isinstance(kind, type) and issubclass(kind, Config):
      return kind.from_dict(value)
    return {name: _built(None, inner) for name, inner in value.items()}
  if isinstance(value, list | tuple):
    return tuple(_built(next(iter(get_args(kind)), None), inner) for inner in value)
  return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
  heads: int = 64  # H, query heads; one shared key-value head
  head_dim: int = 512  # d
  rope_dim: int = 64  # R, the last R channels are rotated
  q_rank: int = 1280  # width of the normalized query latent
  o_rank: int = 1024  # output latent of one group
  o_groups: int = 8  # groups of heads that share an output latent
  window: int = 128  # slots of the sliding window, the query's own included


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig(Config):
  theta: float = 10000.0  # layers without compressed entries
  compress_theta: float = 160000.0  # layers with compressed entries, together with YaRN
  yarn_factor: float = 16.0
  yarn_beta_fast: float = 32.0
  yarn_beta_slow: float = 1.0
  yarn_original_length: int = 65536  # tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig(Config):
  heads: int = 32  # I
  head_dim: int = 128  # i
  top_k: int = 512  # K, entries chosen per query
  pool_source: int | None = 20  # layer that publishes the candidate pool; None: no pool
  pool_blocks: int = 2048  # blocks in the pool
  pool_block_size: int = 8  # entries in a block


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig(Config):
  experts: int = 384  # E, routed experts
  experts_per_token: int = 6  # k
  hidden: int = 2304  # F, of a routed expert and of the shared one
  route_scale: float = 1.5
  limit: float = 10.0  # clamp of the gate (above) and of the up projection (both sides)
  receive_factor: float = 2.0  # tokens that a device receives at a time, over an even load's


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramConfig(Config):
  layers: tuple[int, ...] = (1, 14)  # layers before which a table is read
  table_rows: tuple[int, ...] = (384006168, 384016682)  # sum of the hash primes of each table
  max_ngram: int = 4  # orders 2 .. max_ngram
  heads: int = 8  # hash heads per order
  head_dim: int = 256  # channels of one row
  prime_start: int = 16_000_000  # hash moduli are the distinct primes from here on
  pad_token: int = 2
  compressed_vocab: int = 99092  # classes of the tokenizer's compression map

  @property
  def lookups(self) -> int:
    """Rows that one token reads from one table."""
    return (self.max_ngram - 1) * self.heads

  @property
  def stored_rows(self) -> tuple[int, ...]:
    """Rows of each table with the zero rows at its end that let devices share it evenly."""
    return tuple(-(-r // TABLE_ROWS_MULTIPLE) * TABLE_ROWS_MULTIPLE for r in self.table_rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumericsConfig(Config):
  """What is rounded where; a training stage sets it (model.md section 3.5)."""

  compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"  # activations and matmul operands
  window_fp8: bool = True  # fake-quantize window entries to E4M3, a scale per 32 channels
  main_fp4: bool = False  # fake-quantize compressed entries to E2M1, an E4M3 scale per 16
  indexer_fp4: bool = False  # fake-quantize indexer queries and keys to E2M1, a scale per 32
  experts_fp4: bool = False  # fake-quantize routed experts to E2M1, a scale per 32 inputs
  scores_bf16: bool = False  # round indexer scores where the released code does
  activations_fp8: bool = False  # fake-quantize inputs of linears that the release keeps in FP8


@dataclasses.dataclass(frozen=True)
class LayerSpec:
  """What one layer is, as data.

  kind: "swa" window only; "full" owns compressed entries and an indexer; "reindex" chooses anew
  among the entries of `kv_source`; "reuse" takes entries and choice from layers before it.
  """

  layer: int
  kind: Kind
  ratio: int  # tokens per compressed entry; 0 without entries
  kv_source: int | None
  index_source: int | None
  pool: Literal["publish", "restrict"] | None
  engram: int | None  # index of the Engram table read before this layer
  starts_decoder: bool  # queries from here on are decoder slots


@dataclasses.dataclass(frozen=True)
class LayerGroup:
  """Consecutive layers that are repeated `repeat` times with the same structure."""

  layers: tuple[LayerSpec, ...]  # of the first repetition
  repeat: int

  @property
  def name(self) -> str:
    first = self.layers[0].layer
    return f"layers_{first}_{first + len(self.layers) * self.repeat - 1}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
  """The backbone. Defaults are the release's (config.json of DeepSeek-V4.1-Flash)."""

  vocab: int = 129280  # V
  dim: int = 5120  # D
  streams: int = 4  # c, residual streams
  compress_ratios: tuple[int, ...] = (0, 0) + (2,) * 18 + (1,) * 20  # one per layer
  kv_sources: tuple[int, ...] = (2, 8, 14, 20)
  index_sources: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
  decoder_start: int | None = 20  # None: every layer reads every slot (no CED)
  norm_eps: float = 1e-20
  sinkhorn_iterations: int = 20
  hc_eps: float = 1e-6
  attention: AttentionConfig = AttentionConfig()
  rope: RopeConfig = RopeConfig()
  indexer: IndexerConfig = IndexerConfig()
  moe: MoeConfig = MoeConfig()
  engram: EngramConfig = EngramConfig()
  numerics: NumericsConfig = NumericsConfig()
  init_std: float = 0.02  # of matrices, embeddings and tables; the report states none (ours)
  scan_layers: bool = True  # False: one subtree per layer
  # What the backward pass computes again (nn/block.py).
  remat: Literal["none", "block", "block_keep_results"] = "block"

  @property
  def num_layers(self) -> int:
    return len(self.compress_ratios)

  @property
  def ratios(self) -> tuple[int, ...]:
    """Distinct compression ratios in use, ascending."""
    return tuple(sorted({r for r in self.compress_ratios if r}))

  def schedule(self) -> tuple[LayerSpec, ...]:
    """One LayerSpec per layer."""
    specs, kv, index = [], None, None
    for layer, ratio in enumerate(self.compress_ratios):
      kv = layer if layer in self.kv_sources else kv
      index = layer if layer in self.index_sources else index
      kind: Kind = "reuse"
      if ratio == 0:
        kind = "swa"
      elif layer in self.kv_sources:
        kind = "full"
      elif layer in self.index_sources:
        kind = "reindex"
      pool = None
      if self.indexer.pool_source is not None and layer in self.index_sources:
        if layer == self.indexer.pool_source:
          pool = "publish"
        elif layer > self.indexer.pool_source and kv == self.indexer.pool_source:
          pool = "restrict"
      engram = self.engram.layers.index(layer) if layer in self.engram.layers else None
      specs.append(
        LayerSpec(
          layer=layer,
          kind=kind,
          ratio=ratio,
          kv_source=kv if ratio else None,
          index_source=index if ratio else None,
          pool=pool,
          engram=engram,
          starts_decoder=layer == self.decoder_start,
        )
      )
    return tuple(specs)

  def scan_plan(self) -> tuple[LayerGroup, ...]:
    """Groups in order; with scan_layers equal neighbours become one repeated group.

    A group starts at every index source and at every layer without entries.
    """
    groups: list[list[LayerSpec]] = []
    for spec in self.schedule():
      if spec.kind == "reuse" and groups and groups[-1][0].kind != "swa":
        groups[-1].append(spec)
      else:
        groups.append([spec])
    plan: list[LayerGroup] = []
    for layers in groups:
      group, last = LayerGroup(tuple(layers), 1), plan[-1] if plan else None
      if self.scan_layers and last is not None and self._repeats(last, group):
        plan[-1] = LayerGroup(last.layers, last.repeat + 1)
      else:
        plan.append(group)
    return tuple(plan)

  def tree(self) -> tuple:
    """What decides which parameters there are, and in which groups they are stacked."""
    sizes = dataclasses.replace(
      self, indexer=dataclasses.replace(self.indexer, pool_source=None), numerics=NumericsConfig()
    )
    return sizes, [(group.name, [spec.kind for spec in group.layers]) for group in self.scan_plan()]

  def _repeats(self, last: LayerGroup, group: LayerGroup) -> bool:
    """Whether a group is one more of its predecessor; entries do not leave a repeated group."""
    same = self._signature(last.layers) == self._signature(group.layers)
    return same and not self._exports(last) and not self._exports(group)

  def _signature(self, group) -> tuple:
    first = group[0].layer
    inside = lambda source: source is not None and source >= first
    return tuple(
      (s.kind, s.ratio, inside(s.kv_source), s.pool, s.engram, s.starts_decoder) for s in group
    ) + (self._reads_from_outside(group),)

  def _reads_from_outside(self, group) -> int | None:
    """The KV source of a group that has none of its own."""
    source = group[0].kv_source
    return None if source is None or source >= group[0].layer else source

  def _exports(self, group: LayerGroup) -> bool:
    """Whether a later group reads the entries of this one."""
    first = group.layers[0].layer
    end = first + len(group.layers) * group.repeat
    return any(
      s.kv_source is not None and first <= s.kv_source < end for s in self.schedule()[end:]
    )

  def problems(self) -> list[str]:
    """Every reason for which this configuration cannot be built, in plain sentences."""
    return [*_schedule_problems(self), *_size_problems(self), *_engram_problems(self)]


def _schedule_problems(c: ModelConfig) -> Iterator[str]:
  count = c.num_layers
  for name in ("kv_sources", "index_sources"):
    for layer in getattr(c, name):
      if not 0 <= layer < count:
        yield f"model.{name} names layer {layer}, but layers go from 0 to {count - 1}."
      elif c.compress_ratios[layer] == 0:
        yield f"model.{name} names layer {layer}, whose compress_ratios entry is 0 (window only)."
    if list(getattr(c, name)) != sorted(set(getattr(c, name))):
      yield f"model.{name} must be ascending without repeats, got {getattr(c, name)}."
  if missing := sorted(set(c.kv_sources) - set(c.index_sources)):
    yield f"model.index_sources must contain every KV source, missing are layers {missing}."
  for spec in c.schedule():
    if spec.ratio < 0:
      yield f"model.compress_ratios of layer {spec.layer} is {spec.ratio}, accepted are 0, 1, ..."
    if spec.ratio > 0:
      if spec.kv_source is None:
        yield f"Layer {spec.layer} reads compressed entries, but no KV source stands before it."
      elif c.compress_ratios[spec.kv_source] != spec.ratio:
        yield (
          f"Layer {spec.layer} has compression ratio {spec.ratio}, but its KV source, layer "
          f"{spec.kv_source}, has ratio {c.compress_ratios[spec.kv_source]}."
        )
  pool, start = c.indexer.pool_source, c.decoder_start
  if pool is not None and pool not in c.kv_sources:
    yield f"model.indexer.pool_source is layer {pool}, which is none of kv_sources {c.kv_sources}."
  if start is not None and [s for s in c.kv_sources if s >= start] != [start]:
    yield (
      f"model.decoder_start is {start}: exactly one KV source must lie at or after it, at "
      f"{start} itself, but kv_sources is {c.kv_sources}."
    )
  if start is not None and start < count and c.compress_ratios[start] != 1:
    yield f"model.decoder_start is layer {start}, whose compression ratio must be 1."


def _size_problems(c: ModelConfig) -> Iterator[str]:
  a, i, m = c.attention, c.indexer, c.moe
  sizes = {"model.vocab": c.vocab, "model.dim": c.dim, "model.streams": c.streams}
  for section, values in (("attention", a), ("indexer", i), ("moe", m)):
    for field in dataclasses.fields(values):
      value = getattr(values, field.name)
      if field.type is int:
        sizes[f"model.{section}.{field.name}"] = value
  for name, value in sizes.items():
    if value < 1:
      yield f"{name} must be at least 1, got {value}."
  if a.o_groups > 0 and a.heads % a.o_groups:
    yield f"model.attention.heads ({a.heads}) must be a multiple of o_groups ({a.o_groups})."
  if a.rope_dim % 2 or a.rope_dim > min(a.head_dim, i.head_dim):
    yield (
      f"model.attention.rope_dim ({a.rope_dim}) must be even and at most head_dim ({a.head_dim}) "
      f"and indexer.head_dim ({i.head_dim})."
    )
  if m.experts_per_token > m.experts:
    yield (
      f"model.moe.experts_per_token ({m.experts_per_token}) must not exceed experts ({m.experts})."
    )
  if i.pool_source is not None and (i.pool_blocks - 1) * i.pool_block_size + 1 < i.top_k:
    yield (
      f"model.indexer: a pool of {i.pool_blocks} blocks of {i.pool_block_size} can hold fewer "
      f"visible entries than top_k ({i.top_k}); (pool_blocks - 1) * pool_block_size + 1 must "
      "reach top_k."
    )
  yield from _block_problems(c)


def _block_problems(c: ModelConfig) -> Iterator[str]:
  """Quantizers share a scale among the channels of a block, so widths are whole blocks."""
  n, a, i = c.numerics, c.attention, c.indexer
  for switch, width, block in (
    ("window_fp8", a.head_dim, 32),
    ("main_fp4", a.head_dim, 16),
    ("indexer_fp4", i.head_dim, 32),
  ):
    if getattr(n, switch) and width % block:
      yield f"model.numerics.{switch} needs a head_dim that is a multiple of {block}, got {width}."
  inputs = {
    "model.dim": c.dim,
    "model.attention.q_rank": a.q_rank,
    "model.attention.o_groups * o_rank": a.o_groups * a.o_rank,
    "model.moe.hidden": c.moe.hidden,
  }
  for name, width in inputs.items():
    if n.activations_fp8 and width % 32:
      yield f"model.numerics.activations_fp8 needs {name} to be a multiple of 32, got {width}."
    if n.experts_fp4 and name in ("model.dim", "model.moe.hidden") and width % 32:
      yield f"model.numerics.experts_fp4 needs {name} to be a multiple of 32, got {width}."


def _engram_problems(c: ModelConfig) -> Iterator[str]:
  e = c.engram
  if len(e.layers) != len(e.table_rows):
    yield (
      f"model.engram.layers has {len(e.layers)} entries and table_rows {len(e.table_rows)}; there "
      "is one table per layer."
    )
  for layer in e.layers:
    if not 0 <= layer < c.num_layers:
      yield f"model.engram.layers names layer {layer}, but layers go from 0 to {c.num_layers - 1}."
  if e.layers and e.max_ngram < 2:
    yield f"model.engram.max_ngram must be at least 2, got {e.max_ngram}."


def flash(**changes: Any) -> ModelConfig:
  """The released sizes of DeepSeek-V4.1-Flash."""
  return dataclasses.replace(ModelConfig(), **changes)
