"""`make setup` from nothing: which Python it takes, and that the lock decides what is installed."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = ("sh", "make", "cmp", "cp", "rm", "dirname")
REFUSAL = "No Python of version 3.12 or newer that can make a virtual environment was found"


@pytest.fixture
def clone(tmp_path):
  """A folder with the Makefile, an empty lock, and a PATH that has no Python."""
  folder, tools = tmp_path / "clone", tmp_path / "bin"
  folder.mkdir()
  tools.mkdir()
  shutil.copy(ROOT / "Makefile", folder)
  (folder / "requirements.lock").write_text("")
  for tool in TOOLS:
    (tools / tool).symlink_to(shutil.which(tool))
  return folder


def program(clone, name, body):
  """Puts a shell script of this name on the PATH."""
  path = clone.parent / "bin" / name
  path.write_text(f"#!/bin/sh\n{body}\n")
  path.chmod(0o755)
  return path


def make_setup(clone, **environment):
  environment |= {"PATH": str(clone.parent / "bin"), "HOME": str(clone)}
  kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
  return subprocess.run(
    ["make", "setup"],
    cwd=clone,
    env=kept | environment,
    capture_output=True,
    text=True,
    check=False,
  )


def wheel(folder, version):
  """A package without code, as a wheel that installs without any index."""
  path = folder / f"demo-{version}-py3-none-any.whl"
  info = f"demo-{version}.dist-info"
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: demo\nVersion: {version}\n")
    archive.writestr(
      f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    archive.writestr(f"{info}/RECORD", "")
  return path


def installed(clone):
  list_packages = [clone / ".venv" / "bin" / "python", "-m", "pip", "list", "--format=freeze"]
  return subprocess.run(list_packages, capture_output=True, text=True, check=True).stdout.split()


REAL = f'exec "{sys.executable}" "$@"'
BROKEN = 'echo "command not found" >&2; exit 127'  # what a pyenv shim does without its version
OLD = "exit 1"  # fails the version check


@pytest.mark.parametrize(
  "programs",
  [{}, {"python3.12": BROKEN, "python3.13": OLD}, {"pyenv": 'echo "no such version"; exit 1'}],
  ids=["none", "broken and old", "pyenv without a version"],
)
def test_without_a_usable_python_it_says_so_in_one_sentence_before_pip(clone, programs):
  for name, body in programs.items():
    program(clone, name, body)
  done = make_setup(clone)
  said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
  assert done.returncode == 2
  assert len(said) == 1
  assert said[0].startswith(REFUSAL)
  assert done.stdout == ""
  assert not (clone / ".venv").exists()


def test_a_named_python_that_does_not_work_is_not_replaced_by_another(clone):
  program(clone, "python3.12", REAL)
  done = make_setup(clone, PYTHON="/nowhere/python")
  assert done.returncode == 2
  assert REFUSAL in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("source", ["PYTHON", "python3.12", "python3.13", "pyenv"])
def test_each_source_of_python_is_used_even_behind_broken_shims(clone, source):
  environment = {}
  for shim in ("python3.12", "python3.13"):
    program(clone, shim, BROKEN)
  real = program(clone, "python-elsewhere", REAL)
  if source == "PYTHON":
    environment["PYTHON"] = str(real)
  elif source == "pyenv":
    program(clone, "pyenv", f'[ "$*" = "which python" ] && echo "{real}"')
  else:
    program(clone, source, REAL)
  done = make_setup(clone, **environment)
  assert done.returncode == 0, done.stderr
  assert "Making .venv with Python 3." in done.stdout
  assert (clone / ".venv" / "requirements.lock").exists()


@pytest.mark.slow
def test_the_lock_is_installed_exactly_once_and_again_when_it_changes(clone):
  program(clone, "python3.12", REAL)
  lock = clone / "requirements.lock"
  lock.write_text(f"{wheel(clone, '1.0')}\n")
  assert make_setup(clone).returncode == 0
  assert any(line.startswith("demo") and "1.0" in line for line in installed(clone))

  again = make_setup(clone)
  assert (again.returncode, again.stdout, again.stderr) == (0, "", "")

  lock.write_text(f"{wheel(clone, '2.0')}\n")
  changed = make_setup(clone)
  assert "Installing requirements.lock" in changed.stdout
  assert "Making" not in changed.stdout
  assert any(line.startswith("demo") and "2.0" in line for line in installed(clone))

  lock.write_text("./missing-1.0-py3-none-any.whl\n")
  assert make_setup(clone).returncode == 2
  assert make_setup(clone).returncode == 2, "a failed installation must not count as done"


def test_the_lock_pins_every_package_and_names_no_index():
  lines = (ROOT / "requirements.lock").read_text().splitlines()
  assert len(lines) > 50
  for line in lines:
    name, equals, version = line.partition("==")
    assert name and equals and version and "/" not in line, line
