"""`python -m train report`: one HTML page, and pictures, of what a run folder holds.

The page loads nothing and is complete by itself; the run folder is only read, but for the output.
"""

import argparse
import pathlib
from collections.abc import Sequence

from deepseek_jax.storage_path import storage_path, url_problem, write_atomically
from train.errors import Exit, UsageError
from train.reporting import drawing
from train.reporting.contents import make_page
from train.reporting.page import render
from train.reporting.results import read_results
from train.reporting.run_data import read_run

PAGE, FOLDER = "index.html", "report"


def main(argv: Sequence[str]) -> int:
  """Writes the report. Returns 0; raises UsageError with every problem of the arguments."""
  parser = argparse.ArgumentParser("python -m train report", description=__doc__)
  parser.add_argument("--workdir", required=True, metavar="D", help="the run folder")
  parser.add_argument("--results", nargs="+", action="extend", default=[], metavar="FILE.json",
                      help="what `evaluate --output` has written")  # fmt: skip
  parser.add_argument("--output", metavar="FOLDER", help="where to write; D/report without it")
  arguments = parser.parse_args(argv)
  given = {"--workdir": arguments.workdir, "--output": arguments.output}
  problems = [drawing.problem(), *(url_problem(name, text) for name, text in given.items() if text)]
  if found := [problem for problem in problems if problem]:
    raise UsageError(found)
  folder = storage_path(arguments.workdir).absolute()
  run, results = read_run(folder), read_results(arguments.results)
  output = storage_path(arguments.output) if arguments.output else folder / FOLDER
  with drawing.style():
    page = make_page(run, results)
  text = render(page).encode(errors="replace")  # a name may hold half a surrogate pair
  figures = [drawn for section in page.sections for drawn in section.figures]
  try:
    if isinstance(output, pathlib.Path):
      output.mkdir(parents=True, exist_ok=True)
    for drawn in figures:
      write_atomically(output / f"{drawn.name}.png", drawn.png)
    write_atomically(output / PAGE, text)
  except OSError as error:
    raise UsageError([f"--output {output} cannot be written: {error.strerror}."]) from None
  for note in run.notes:
    print(note)
  print(f"{output / PAGE}: {len(figures)} figures, {len(text) / 1e6:.2f} MB.")
  return Exit.DONE
