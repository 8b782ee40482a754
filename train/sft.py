r"""Fine-tunes a model on conversations, as it will be served: with bounded replay.

  python -m train sft --config configs/sft.py:tiny --workdir runs/tiny_tools --init runs/tiny_text

What a start begins from, the first of these that is there:
  1. the newest good checkpoint of the run folder, with its place in the data
  2. parameters and router biases of --init: a run folder, one of its checkpoints, or what `convert`
     has made of a released one; the optimizer is new

The loop, the folder and the exit codes are those of pretraining. Validation also measures what
replay, FP4 entries and the candidate pool cost (train/replay_report.py).
"""

from collections.abc import Sequence

from train import pretrain
from train.settings import SFT


def main(argv: Sequence[str]) -> int:
  """Runs the verb. Returns its exit code; raises UsageError with every problem."""
  return pretrain.main(argv, verb=SFT)
