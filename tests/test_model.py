"""What the whole model promises about rows: causality, packing, padding, pools, decoder slots.

One compiled function serves most tests: the value, outputs and gradients of
sum(logits * cotangent) + kl_weight * (sum of the indexers' losses), for rows of fixed shape.
Legend: B rows, S encoder slots, T decoder slots, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from configs import nano
from deepseek_jax.config import ModelConfig, NumericsConfig
from deepseek_jax.layout import PADDING, Document, Layout, build_layout, stack_layouts
from deepseek_jax.model import Model, logits
from deepseek_jax.ngram import NgramHash
from deepseek_jax.types import LayerAux

B, S = 6, 48
LENGTHS = (5, 23, 1, 3, 2, 7)  # odd starts, a lone token, and a second document that binds the pool
EXACT = NumericsConfig(compute_dtype="float32", window_fp8=False)
CFG = dataclasses.replace(ModelConfig.from_dict(nano.get_config().model.to_dict()), numerics=EXACT)
HASHING = NgramHash(CFG.engram, np.arange(CFG.vocab, dtype=np.int32))
TOLERANCE = 1e-5  # of the largest magnitude, docs/design.md section 5
# Sums over other numbers of slots are added up in another order; some cancel to a hundredth.
OTHER_SHAPE = 5e-5
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def row(*documents) -> Layout:
  return build_layout(
    [Document(np.asarray(tokens)) for tokens in documents],
    slots=S, ratios=CFG.ratios, hashing=HASHING,
  )  # fmt: skip


def batch(*rows: Layout) -> Layout:
  """Rows of empty padding fill it up to B."""
  return stack_layouts([*rows, *[row()] * (B - len(rows))])


def split(tokens, lengths=LENGTHS):
  return np.split(np.asarray(tokens)[: sum(lengths)], np.cumsum(lengths)[:-1])


def random_parameters(key_path, leaf):
  """Away from where training starts, so that every term of every formula matters."""
  name = jax.tree_util.keystr(key_path)
  rng = np.random.default_rng(abs(hash_of(name)))
  size = {"embed": 1.0, "scale": 0.5, "base": 0.3, "sink": 1.0, "bias": 0.1, "bias_vl": 0.1}
  values = rng.normal(size=leaf.shape)
  kind = key_path[-1].key
  if kind in size:
    return np.float32(size[kind] * values)
  return np.float32(1 + 0.2 * values if leaf.ndim == 1 else 0.15 * values)


def hash_of(name: str) -> int:
  return int.from_bytes(name.encode(), "little") % 2**32


@pytest.fixture(scope="module")
def variables():
  init = lambda key: nn.unbox(Model(CFG).init(key, batch()))
  return jax.tree_util.tree_map_with_path(
    random_parameters, jax.eval_shape(init, jax.random.key(0))
  )


def layers_of(output):
  return jax.tree.leaves(output.layers, is_leaf=lambda x: isinstance(x, LayerAux))


def compiled(cfg=CFG):
  def total(params, balance, layout, cotangent_BTV, kl_weight):
    output = Model(cfg, indexer_loss="sparse").apply({"params": params, "balance": balance}, layout)
    kl = sum(layer.indexer_kl for layer in layers_of(output))
    return jnp.sum(logits(output) * cotangent_BTV) + kl_weight * kl, output

  run = jax.jit(jax.value_and_grad(total, has_aux=True), compiler_options=FAST_COMPILE)

  def call(variables, layout, cotangent_BTV, kl_weight=0.0):
    """(value, ModelOutput, gradients of the parameters)"""
    (value, output), grads = run(
      variables["params"], variables["balance"], layout, np.float32(cotangent_BTV), kl_weight
    )
    return value, output, grads

  return call


@pytest.fixture(scope="module")
def run():
  return compiled()


@pytest.fixture(scope="module")
def forward_of():
  """Hidden states of a variant of the configuration."""

  @functools.cache
  def compiled_forward(cfg):
    return jax.jit(Model(cfg).apply, compiler_options=FAST_COMPILE)

  return lambda cfg, variables, layout: np.asarray(
    compiled_forward(cfg)(variables, layout).hidden_BTD
  )


def normal(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_close(got, want, what="", tolerance=TOLERANCE):
  got, want = np.asarray(got), np.asarray(want)
  assert np.isfinite(got).all(), what
  error, largest = np.abs(got - want).max(), np.abs(want).max()
  assert error <= tolerance * largest, f"{what}: {error} of {largest}"


def assert_trees_close(got, want, tolerance=TOLERANCE):
  for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
    assert_close(g, w, jax.tree_util.keystr(path), tolerance)


def test_packed_documents_equal_separate_ones_in_value_and_gradient(run, variables):
  tokens = np.random.default_rng(1).integers(0, CFG.vocab, sum(LENGTHS))
  documents, cotangents = split(tokens), split(normal(sum(LENGTHS), CFG.vocab))
  packed, separate = batch(row(*documents)), batch(*[row(d) for d in documents])
  packed_BTV, separate_BTV = np.zeros((B, S, CFG.vocab)), np.zeros((B, S, CFG.vocab))
  packed_BTV[0, : sum(LENGTHS)] = np.concatenate(cotangents)
  for b, cotangent in enumerate(cotangents):
    separate_BTV[b, : len(cotangent)] = cotangent

  value, output, grads = run(variables, packed, packed_BTV, 1.0)
  wanted_value, wanted, wanted_grads = run(variables, separate, separate_BTV, 1.0)
  joined = np.concatenate([wanted.hidden_BTD[b, :n] for b, n in enumerate(LENGTHS)])
  assert_close(output.hidden_BTD[0, : sum(LENGTHS)], joined, "hidden")
  assert value == pytest.approx(float(wanted_value), rel=1e-5)
  assert_trees_close(grads, wanted_grads)
  for ours, theirs in zip(layers_of(output), layers_of(wanted), strict=True):
    np.testing.assert_array_equal(ours.load_text_E, theirs.load_text_E)
    assert ours.indexer_kl == pytest.approx(float(theirs.indexer_kl), rel=1e-5)


def unique_tokens():
  """[B, sum(LENGTHS)] tokens of which no two are equal, so that their embeddings tell slots."""
  return np.random.default_rng(2).permutation(CFG.vocab)[: B * sum(LENGTHS)].reshape(B, -1)


def test_an_output_depends_on_no_later_slot_and_on_no_other_document(run, variables):
  tokens_BS = unique_tokens()
  layout = batch(*[row(*split(tokens)) for tokens in tokens_BS])
  seen_from = [4, 5, 14, 27, 28, 40]  # one slot of every row
  cotangent_BTV = np.zeros((B, S, CFG.vocab))
  for b, slot in enumerate(seen_from):
    cotangent_BTV[b, slot] = normal(CFG.vocab, seed=b)
  _, _, grads = run(variables, layout, cotangent_BTV)
  for b, slot in enumerate(seen_from):
    document = layout.document[b, : sum(LENGTHS)]
    expected = (document == document[slot]) & (np.arange(sum(LENGTHS)) <= slot)
    reached = np.any(np.asarray(grads["embed"])[tokens_BS[b]] != 0, axis=-1)
    np.testing.assert_array_equal(reached, expected)


def test_a_changed_token_changes_nothing_before_it_and_no_other_document(run, variables):
  """Also through choices and hashed rows, which have no gradient."""
  tokens = unique_tokens()[0]
  rows = [row(*split(tokens))]
  changed_slots = (7, 15, 28, 30, 40)
  for slot in changed_slots:
    other = tokens.copy()
    other[slot] = (other[slot] + 1) % CFG.vocab
    rows.append(row(*split(other)))
  _, output, _ = run(variables, batch(*rows), np.zeros((B, S, CFG.vocab)))
  hidden_BTD, document = np.asarray(output.hidden_BTD), rows[0].document[0]
  for b, slot in enumerate(changed_slots, start=1):
    kept = (document != document[slot]) | (np.arange(S) < slot)
    kept &= document >= 0
    assert_close(hidden_BTD[b, kept], hidden_BTD[0, kept])
    moved = np.abs(hidden_BTD[b] - hidden_BTD[0]).max(-1)[(document == document[slot]) & ~kept]
    assert np.all(moved > 1e-3)


def test_padding_reaches_nothing_and_is_finite(run, variables):
  documents = split(np.random.default_rng(3).integers(1, CFG.vocab, sum(LENGTHS)))  # no token 0
  layout = batch(row(*documents))
  cotangent_BTV = np.where((layout.document >= 0)[..., None], normal(B, S, CFG.vocab), 0)
  value, output, grads = run(variables, layout, cotangent_BTV, 1.0)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((output, grads)))
  assert not np.any(grads["embed"][0])  # padding slots hold token 0

  other = layout._replace(tokens=np.where(layout.document < 0, 9, layout.tokens))
  other_value, other_output, _ = run(variables, other, cotangent_BTV, 1.0)
  assert other_value == pytest.approx(float(value), rel=1e-6)
  real = layout.document >= 0
  assert_close(other_output.hidden_BTD[real], output.hidden_BTD[real])
  for layer in layers_of(output):
    assert layer.load_text_E.sum() == real.sum() * CFG.moe.experts_per_token


def test_rows_of_nothing_but_padding_have_finite_values_and_gradients(run, variables):
  _, output, grads = run(variables, batch(), np.ones((B, S, CFG.vocab)), 1.0)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((output, grads)))
  assert all(layer.indexer_kl == 0 and layer.balance == 0 for layer in layers_of(output))


def is_indexer(key_path):
  return any(key.key == "indexer" for key in key_path)


def test_the_language_loss_gives_the_indexers_nothing_and_their_loss_gives_the_rest_nothing(
  run, variables
):
  layout = batch(row(*split(unique_tokens()[0])))
  _, output, language = run(variables, layout, normal(B, S, CFG.vocab), 0.0)
  _, _, indexers = run(variables, layout, np.zeros((B, S, CFG.vocab)), 1.0)
  assert sum(layer.indexer_kl > 0 for layer in layers_of(output)) == len(CFG.index_sources)
  for path, leaf in jax.tree.leaves_with_path(language):
    assert np.any(leaf) != is_indexer(path), jax.tree_util.keystr(path)
  for path, leaf in jax.tree.leaves_with_path(indexers):
    assert np.any(leaf) == is_indexer(path), jax.tree_util.keystr(path)


def test_replay_copies_are_left_out_of_the_counts(run, variables):
  layout = batch(row(*split(unique_tokens()[0])))
  copies = layout.is_copy.copy()
  copies[0, 5:9] = True
  _, plain, _ = run(variables, layout, np.zeros((B, S, CFG.vocab)))
  _, copied, _ = run(variables, layout._replace(is_copy=copies), np.zeros((B, S, CFG.vocab)))
  np.testing.assert_array_equal(copied.hidden_BTD, plain.hidden_BTD)
  for ours, theirs in zip(layers_of(copied), layers_of(plain), strict=True):
    assert ours.load_text_E.sum() == theirs.load_text_E.sum() - 4 * CFG.moe.experts_per_token
    assert ours.indexer_kl < theirs.indexer_kl or theirs.indexer_kl == 0


def variant(**indexer):
  return dataclasses.replace(CFG, indexer=dataclasses.replace(CFG.indexer, **indexer))


def test_a_pool_changes_nothing_until_more_blocks_are_visible_than_it_holds(
  run, forward_of, variables
):
  lengths = (5, 40)
  documents = [
    split(np.random.default_rng(b).integers(0, CFG.vocab, 45), lengths) for b in range(B)
  ]
  layout = batch(*[row(*d) for d in documents])
  on = np.asarray(run(variables, layout, np.zeros((B, S, CFG.vocab)))[1].hidden_BTD)
  off = forward_of(variant(pool_source=None), variables, layout)
  fits = CFG.indexer.pool_blocks * CFG.indexer.pool_block_size
  fitting = (layout.document >= 0) & (layout.positions < fits)
  assert_close(on[fitting], off[fitting])
  beyond = (layout.document == 1) & (layout.positions >= fits)
  moved = np.abs(on - off)[beyond].max(-1) > 1e-3
  assert moved.mean() > 0.2, "the pool binds in the second document"


def test_a_choice_changes_nothing_while_all_visible_entries_are_chosen(forward_of, variables):
  layout = batch(*[row(*split(tokens)) for tokens in unique_tokens()])
  chosen = forward_of(variant(pool_source=None), variables, layout)
  dense = forward_of(variant(pool_source=None, top_k=S), variables, layout)
  few = (layout.document >= 0) & (layout.positions < CFG.indexer.top_k)
  assert_close(chosen[few], dense[few])
  assert np.abs(chosen - dense)[layout.document >= 0].max() > 1e-2, "top-k binds later"


WINDOW = CFG.attention.window


def tail_layout(layout: Layout, first: int) -> Layout:
  """T = window decoder slots that start from the encoder slots `first` ... of every row."""
  cut = lambda x: x[:, first : first + WINDOW]
  return layout._replace(
    decoder_slots=cut(np.where(layout.document >= 0, np.arange(S, dtype=np.int32), PADDING)),
    decoder_segment_start=np.maximum(cut(layout.segment_start) - first, 0),
    decoder_entry_begin={m: cut(x) for m, x in layout.entry_begin.items()},
    decoder_entry_end={m: cut(x) for m, x in layout.entry_end.items()},
    targets=cut(layout.targets),
    weights=cut(layout.weights),
  )


def one_document(length):
  return batch(*[row(tokens[:length]) for tokens in unique_tokens()])


@pytest.mark.slow
def test_a_tail_that_covers_the_prompt_is_the_whole_decoder(run, variables):
  layout, cotangent_BTV = one_document(WINDOW), normal(B, S, CFG.vocab)
  cotangent_BTV[:, WINDOW:] = 0
  _, whole, grads = run(variables, layout, cotangent_BTV, 1.0)
  _, tail, tail_grads = run(variables, tail_layout(layout, 0), cotangent_BTV[:, :WINDOW], 1.0)
  assert_close(tail.hidden_BTD, whole.hidden_BTD[:, :WINDOW])
  assert_trees_close(tail_grads, grads, OTHER_SHAPE)


def test_a_tail_equals_full_length_decoder_slots_whose_window_starts_there(run, variables):
  length = 40
  first, layout = length - WINDOW, one_document(length)
  start_BS = np.where(np.arange(S) >= first, first, 0).astype(np.int32)
  start_BS = np.where(layout.document >= 0, start_BS, layout.decoder_segment_start)
  cotangent_BTV = np.zeros((B, S, CFG.vocab), np.float32)
  cotangent_BTV[:, first:length] = normal(B, WINDOW, CFG.vocab)
  full = layout._replace(decoder_segment_start=start_BS)
  _, whole, grads = run(variables, full, cotangent_BTV)
  tail_slots = tail_layout(layout, first)
  _, tail, tail_grads = run(variables, tail_slots, cotangent_BTV[:, first:length])
  assert_close(tail.hidden_BTD, whole.hidden_BTD[:, first:length])
  assert_trees_close(tail_grads, grads, OTHER_SHAPE)
  by_layer = [layer.load_text_E.sum() for layer in layers_of(tail)]
  slots = [B * (length if n < CFG.decoder_start else WINDOW) for n in range(CFG.num_layers)]
  np.testing.assert_array_equal(by_layer, np.array(slots) * CFG.moe.experts_per_token)


def test_a_tail_reaches_early_slots_through_the_global_entries_alone(run, variables):
  """Windows of the encoder carry a token three layers far; without entries nothing goes beyond."""
  length, nothing = 41, lambda ends: {m: np.zeros_like(x) for m, x in ends.items()}
  first, layout = length - WINDOW, one_document(length)
  early = first - CFG.decoder_start * (WINDOW - 1)
  assert early > 10
  tail = tail_layout(layout, first)
  tail = tail._replace(entry_begin=nothing(tail.entry_begin), entry_end=nothing(tail.entry_end))
  blind = tail._replace(decoder_entry_end=nothing(tail.decoder_entry_end))
  cotangent_BTV = normal(B, WINDOW, CFG.vocab)

  def reached(layout):
    grads = run(variables, layout, cotangent_BTV)[2]
    return np.any(np.asarray(grads["embed"])[layout.tokens[:, :early]] != 0, axis=-1)

  assert np.any(reached(tail), axis=1).all()
  assert not np.any(reached(blind))


def test_the_backward_pass_does_not_choose_again(variables):
  """What an indexer costs grows with the square of the context; its choice is small and is kept."""
  layout = batch(row(np.arange(13)))

  def choices(remat, differentiate):
    model = Model(dataclasses.replace(CFG, remat=remat))
    total = lambda params: jnp.sum(model.apply(variables | {"params": params}, layout).hidden_BTD)
    program = jax.make_jaxpr(jax.grad(total) if differentiate else total)(variables["params"])
    return str(program).count(" top_k[")

  routers = len(CFG.schedule())  # the only other choice in a layer, and it is made again
  forward = choices("none", differentiate=False)
  assert forward > routers and choices("block", differentiate=True) == forward + routers
