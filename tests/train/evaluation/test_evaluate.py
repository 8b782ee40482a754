"""`python -m train evaluate` from end to end."""

import json

from train.__main__ import main
from train.errors import Exit


def evaluate(folder, *words):
  return main(["evaluate", "--checkpoint", str(folder), *words])


def test_perplexity_of_the_newest_step_as_table_and_record(trained, tmp_path, capsys):
  output = tmp_path / "results.json"
  assert evaluate(trained, "--tasks=perplexity", "--limit=4", f"--output={output}") == Exit.DONE
  (record,) = json.loads(output.read_text())
  measured = record["results"]["perplexity"]
  assert record["step"] == 7
  assert f"{measured['bits_per_byte']:.6g}" in capsys.readouterr().out
