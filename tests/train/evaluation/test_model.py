"""Likelihoods and texts of a checkpoint: what they are, and what they do not depend on."""

import dataclasses

import numpy as np
import pytest

from configs.schema import Stage
from deepseek_jax.layout import Document, build_layout, stack_layouts
from deepseek_jax.model import Model, logits
from tests.train.evaluation.conftest import opened
from train.arguments import lay_mesh
from train.evaluation.continuations import continuations
from train.evaluation.model import Scored
from train.stored_model import settings_at

WORDS = ["expert", "router", "stream", "entry", "window", "query", "layer", "token", "slot"]


@pytest.fixture(scope="module")
def sequences(model):
  """Of many lengths; the longest has 64 tokens to predict, a whole row."""
  rng = np.random.default_rng(1)
  texts = [" ".join(rng.choice(WORDS, size)) for size in (1, 2, 6, 15, 40, 80)]
  tokens = [model.encode(text)[:65] for text in texts]
  assert len(tokens[-1]) == 65
  return [Scored(t, int(rng.integers(1, len(t)))) for t in tokens]


@pytest.fixture(scope="module")
def likelihoods(model, sequences):
  return model.log_likelihoods(sequences)


def assert_same(found, expected):
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one.log_p, other.log_p, atol=2e-5)
    np.testing.assert_array_equal(one.is_top, other.is_top)


def test_likelihoods_are_those_of_each_sequence_in_a_row_of_its_own(model, sequences, likelihoods):
  for (tokens, start), likelihood in zip(sequences, likelihoods, strict=True):
    rows = [[Document(tokens[:-1], int(tokens[-1]))], []]
    layouts = [
      build_layout(row, slots=64, ratios=model.cfg.ratios, hashing=model.hashing) for row in rows
    ]
    scores = model.score(stack_layouts(layouts))
    asked = slice(start - 1, len(tokens) - 1)
    np.testing.assert_allclose(likelihood.log_p, scores.log_p_BT[0, asked], atol=2e-5)
    np.testing.assert_array_equal(likelihood.is_top, scores.is_top_BT[0, asked])


def test_likelihoods_depend_neither_on_rows_nor_on_padding_nor_on_neighbours(
  model, sequences, likelihoods
):
  order = [3, 0, 5]
  alone = model.log_likelihoods([sequences[n] for n in order])
  assert_same(alone, [likelihoods[n] for n in order])
  long = Scored(np.resize(sequences[-1].tokens, 100), 1)  # rows become one and twice as long
  assert_same(model.log_likelihoods([*sequences, long])[:-1], likelihoods)


@pytest.mark.slow
def test_likelihoods_are_the_same_for_any_number_of_rows(model, sequences, likelihoods):
  for rows in (1, 5):
    other = dataclasses.replace(model, rows=rows)
    assert_same(other.log_likelihoods(sequences), likelihoods)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2,expert=2,tensor=2", "replica=2,expert=2,context=2"])
def test_likelihoods_and_texts_of_eight_devices_are_those_of_one(
  mesh, model, trained, sequences, likelihoods
):
  spread = opened(trained, "--rows=2", f"--mesh={mesh}")
  assert_same(spread.log_likelihoods(sequences), likelihoods)
  prompts = [s.tokens[: s.start] for s in sequences]
  assert spread.generate(prompts, 6) == model.generate(prompts, 6)


@pytest.mark.slow
def test_texts_depend_neither_on_rows_nor_on_neighbours(model, sequences):
  prompts = [s.tokens[: s.start] for s in sequences]
  texts = model.generate(prompts, 8)
  assert dataclasses.replace(model, rows=4).generate(prompts, 8) == texts
  assert model.generate(prompts[:1], 8) == texts[:1]
  number, end = next(
    (n, text[at : at + 2])
    for n, text in enumerate(texts)
    for at in range(1, len(text) - 1)
    if text[at : at + 2].isascii()
  )
  before = texts[number][: texts[number].index(end)]
  assert model.generate([prompts[number]], 8, [end]) == [before]


@pytest.mark.slow
def test_what_is_written_is_the_likeliest_token(trained):
  model = opened(trained, "--rows=2", "--cache=plain")
  prompt = model.encode("router stream")[:7]  # within the window, where early exit is exact
  (text,) = model.generate([prompt], 1)
  row = build_layout([Document(prompt)], slots=64, ratios=model.cfg.ratios, hashing=model.hashing)
  logits_TV = logits(Model(model.cfg).apply(model.variables, row))[0]
  assert text == model.tokenizer.decode([int(np.argmax(logits_TV[len(prompt) - 1]))])


def test_continuations_are_asked_for_from_where_they_part(model):
  context, texts = "router stream", [" entry", " expert", "s"]
  asked = continuations(model, context, texts)
  start = asked[0].start
  assert {one.start for one in asked} == {start} and start >= 1
  for one, text in zip(asked, texts, strict=True):
    decode = lambda ids: model.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
    assert decode(one.tokens) == context + text
    assert context.startswith(decode(one.tokens[:start]))
    np.testing.assert_array_equal(one.tokens[:start], asked[0].tokens[:start])
  assert continuations(model, "", ["a"])[0].start == 1


def test_no_sequences_need_no_model(model):
  assert dataclasses.replace(model, variables=None).log_likelihoods([]) == []


def test_a_checkpoint_is_measured_as_its_stage_has_it(model):
  pool = {"model.indexer.pool_source": None}
  stage = Stage(name="later", tokens=4 * 64 * 4, changes=pool)
  settings = dataclasses.replace(model.settings, stages=(stage,))
  sources = [settings_at(settings, n).model.indexer.pool_source for n in (0, 1, 4, 5, 8, 99)]
  assert sources == [3, 3, 3, None, None, None]
  assert settings_at(model.settings, 99) == model.settings


def test_rows_are_filled_up_to_what_a_mesh_cuts(trained):
  spread = opened(trained, "--rows=3", "--mesh=fsdp=2,context=2,expert=2")
  assert (spread.rows_of(64), spread.rows_of(256)) == (4, 4)
  assert (spread.slots_of(65), spread.slots_of(3, 34), spread.slots_of(33, 34)) == (128, 36, 36)
  assert lay_mesh(spread.settings.mesh).size == 1
