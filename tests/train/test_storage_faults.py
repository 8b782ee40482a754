"""What storage refuses: at the start wrong usage where only the user can help, later a crash."""

import errno

import pytest

from train.errors import Exit, UsageError
from train.pretrain import starting


def test_a_full_disk_at_the_start_is_wrong_usage_and_told_in_a_sentence():
  with pytest.raises(UsageError) as error, starting("/runs/a"):
    raise OSError(errno.ENOSPC, "No space left on device", "/runs/a/metrics.jsonl")
  assert error.value.problems == ("/runs/a/metrics.jsonl cannot be used: No space left on device.",)


def test_a_passing_fault_at_the_start_is_left_to_a_restart():
  with pytest.raises(OSError, match="Stale file handle"), starting("/runs/a"):
    raise OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.slow
def test_a_fault_in_the_middle_of_a_run_is_a_crash_told_in_a_sentence(runs, tmp_path):
  no_large_files = ("sh", "-c", 'ulimit -f 64; exec "$@"', "sh")  # no file above 32 KiB
  workdir = tmp_path / "run"
  changes = {"checkpoint__every_steps": 1000, "total_steps": 1000, "validation__every_steps": 0}
  code, output = runs.finish(workdir, inside=no_large_files, **changes)
  assert code == Exit.CRASHED, output
  assert output.splitlines()[-1].endswith(" cannot be used: File too large.")
  assert "Traceback" not in output
  *whole, torn = (workdir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
  assert len(whole) > 10 and not torn.endswith(b"\n")
