"""A text that grows: what was read before is used, and the logits are those of reading it so."""

import numpy as np
import pytest

from deepseek_jax.sampling.cache import without_windows
from deepseek_jax.sampling.sampler import Sampler
from deepseek_jax.sampling.session import Session
from tests.sampling.small_model import W, assert_close, random_tokens

pytestmark = pytest.mark.slow
TEXT = random_tokens(2, 40)
ROOM = 60  # tokens of most caches here, so that few programs are compiled; a session doubles


class Counted:
  """A sampler that also notes how many tokens it is given."""

  def __init__(self, sampler: Sampler) -> None:
    self._sampler, self.read = sampler, []

  def __getattr__(self, name):
    return getattr(self._sampler, name)

  def prefill(self, cache, prompts, **options):
    self.read.append(("prefill", len(prompts[0])))
    return self._sampler.prefill(cache, prompts, **options)

  def resume(self, cache, held, prompts, **options):
    self.read.append(("resume", len(prompts[0])))
    return self._sampler.resume(cache, held, prompts, **options)


def test_a_text_that_begins_with_what_is_held_goes_on_from_there(small):
  sampler = Counted(small.sampler)
  session = Session(sampler, exact=True)
  session.read(TEXT[:21], room=ROOM // 2 - 21)
  session.step(TEXT[21:22], np.ones(1, bool))
  got = session.read(TEXT[:30], room=5)
  assert sampler.read == [("prefill", 21), ("prefill", 8)]
  _, want = small.sampler.prefill(small.sampler.new_cache(1, ROOM), [TEXT[:30]], exact=True)
  assert_close(got, want)


def test_one_that_parts_from_it_goes_on_from_there_behind_copies(small):
  """What lies behind that place in the cache is not seen."""
  sampler, shared = Counted(small.sampler), 19
  session = Session(sampler)
  session.read(np.append(TEXT[:shared], random_tokens(9, 9)), room=ROOM // 2 - 28)
  got = session.read(TEXT[:31], room=2)
  assert sampler.read == [("prefill", shared + 9), ("resume", 31 - shared)]
  cache, _ = small.sampler.prefill(small.sampler.new_cache(1, ROOM), [TEXT[:shared]])
  held, new = [TEXT[:shared]], [TEXT[shared:31]]
  _, want = small.sampler.resume(without_windows(cache), held, new)
  assert_close(got, want)


def test_one_that_shares_a_window_or_less_or_has_no_room_is_read_whole(small):
  sampler = Counted(small.sampler)
  session = Session(sampler)
  session.read(TEXT[:W], room=ROOM // 2 - W)
  session.read(np.append(TEXT[: W - 1], TEXT[:4]), room=ROOM // 2 - W - 3)
  session.read(TEXT[:30], room=ROOM)
  assert sampler.read == [("prefill", W), ("prefill", W + 3), ("prefill", 30)]
