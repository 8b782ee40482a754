"""A checkpoint as the model of lm-eval (extra `eval`).

  from lm_eval import simple_evaluate
  simple_evaluate(LmEvalModel(model), tasks=[...])

which is what `--tasks lm_eval:TASK` does.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports], an extra

from deepseek_jax.sampling.generate import Sampling
from train.evaluation.continuations import continuations
from train.evaluation.model import EvaluatedModel, Scored

_MAX_NEW_TOKENS = 256  # where a task names none, as lm-eval's own models have it


class LmEvalModel(LM):
  """Answers lm-eval's three kinds of requests; an instance's `args` are its values."""

  def __init__(self, model: EvaluatedModel) -> None:
    super().__init__()
    self._model = model

  def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
    """Of (context, continuation): nats of the continuation, and whether greedy decoding gives it.

    A token that the tokenizer makes of the context's end and the continuation counts to the latter.
    """
    pairs = [request.args for request in requests]
    asked = [continuations(self._model, before, [text])[0] for before, text in pairs if text]
    found = iter(self._model.log_likelihoods(asked))
    likelihoods = [next(found) if text else None for _, text in pairs]
    return [(one.total, bool(one.is_top.all())) if one else (0.0, True) for one in likelihoods]

  def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
    """Of (text,): nats of the whole text behind BOS. A text is one row, however long it is."""
    tokens = [self._model.encode(request.args[0]) for request in requests]
    asked = [Scored(own, 1) for own in tokens if len(own) > 1]
    found = iter(self._model.log_likelihoods(asked))
    return [next(found).total if len(own) > 1 else 0.0 for own in tokens]

  def generate_until(self, requests: Sequence[Any]) -> list[str]:
    """Of (prompt, arguments): what follows, up to one of arguments["until"].

    Known beside it are max_gen_toks, do_sample, temperature and top_p. Raises ValueError for more.
    """
    alike = defaultdict(list)  # requests that differ in nothing but their prompt
    for number, request in enumerate(requests):
      alike[_arguments(dict(request.args[1]))].append(number)
    texts = {}
    for (stop, tokens, temperature, top_p), numbers in alike.items():
      prompts = [self._model.encode(requests[n].args[0]) for n in numbers]
      sampling = Sampling(temperature, top_p, self._model.seed)
      texts |= dict(
        zip(numbers, self._model.generate(prompts, tokens, stop, sampling), strict=True)
      )
    return [texts[number] for number in range(len(requests))]


def _arguments(given: dict[str, Any]) -> tuple[tuple[str, ...], int, float, float]:
  """Stop strings, new tokens, temperature and top_p."""
  until = given.pop("until", None) or ()
  stop = (until,) if isinstance(until, str) else tuple(until)
  tokens = int(given.pop("max_gen_toks", _MAX_NEW_TOKENS))
  draws = given.pop("do_sample", "temperature" in given)
  temperature, top_p = float(given.pop("temperature", 1.0)), float(given.pop("top_p", 1.0))
  if given:
    raise ValueError(f"generation arguments {sorted(given)} are not known here.")
  return stop, tokens, temperature if draws else 0.0, top_p
