"""The paired comparison: responses are told apart, intervals hold what they should, bad pairs are
refused."""

import numpy as np
import pytest

from tests.bench import paired_kl
from tests.bench.paired_kl import Responses
from tests.train.test_match_slots import layouts


def test_a_response_is_the_mean_of_its_own_learned_tokens():
  _, replayed = layouts()
  value_BT = np.arange(replayed.weights.size, dtype=np.float64).reshape(replayed.weights.shape)
  found = paired_kl.by_response(replayed, value_BT, -value_BT, 2 * value_BT)
  expected = []
  for row, weights_T in enumerate(replayed.weights):
    segment_T = replayed.decoder_segment_start[row]
    for begin in dict.fromkeys(segment_T[weights_T > 0]):
      expected.append(value_BT[row, (weights_T > 0) & (segment_T == begin)].mean())
  assert found.exact_R == pytest.approx(expected) and len(expected) == 5
  assert found.replayed_R == pytest.approx(-found.exact_R)
  assert found.kl_R == pytest.approx(2 * found.exact_R)
  assert found.conversation_R.tolist() == [0, 0, 1, 1, 2]


def responses(kl_R, per_conversation=2) -> Responses:
  kl_R = np.asarray(kl_R, float)
  return Responses(np.arange(len(kl_R)) // per_conversation, kl_R, kl_R, kl_R)


def test_the_interval_is_that_of_a_mean_over_conversations():
  random = np.random.default_rng(1)
  noise_C, base_R = random.normal(0, 1, 400), random.normal(5, 3, 800)
  aware = responses(base_R + np.repeat(noise_C, 2) - 0.2)
  mean, low, high = paired_kl.paired_difference(aware, responses(base_R))
  assert mean == pytest.approx(noise_C.mean() - 0.2)
  error = noise_C.std() / 20  # of the mean of 400; of 800 single responses it would be 0.71 of it
  assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.05)
  assert low < mean < high


def test_equal_checkpoints_have_no_difference_and_others_are_no_pair():
  same = responses(range(10))
  assert paired_kl.paired_difference(same, same) == (0, 0, 0)
  with pytest.raises(ValueError, match="other responses"):
    paired_kl.paired_difference(same, responses(range(12)))


def test_what_is_missing_is_said(capsys, tmp_path):
  assert paired_kl.main(["--aware", str(tmp_path), "--plian", "x"]) == 2
  said = capsys.readouterr().err
  assert "--plain is missing." in said and "--plian is not an argument" in said
  assert paired_kl.main(["--aware", str(tmp_path), "--plain", str(tmp_path)]) == 2
  assert "is no run folder with a complete step" in capsys.readouterr().err
