"""The shape of the code base: imports point down, files and functions stay short, importing does
nothing."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("deepseek_jax", "data", "configs", "train", "launch")
LIBRARY = "deepseek_jax"

# Lowest first; a file may import from its own row and from those above it in this table.
LAYERS = (
  {"config", "training_config", "ngram", "layout", "types", "flops", "storage_path"},
  {"sharding", "precision"},
  {"by_slots"},
  {"ops"},
  {"nn"},
  {"model", "drafter"},
  {"objective", "optim"},
  {"step"},
  {"checkpoint", "sampling"},
  {"data", "configs"},
  {"train"},
  {"launch"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# What the direction alone would allow.
FORBIDDEN = {
  "ops": {"flax", "nn", "model"},
  "objective": {"nn", "model", "drafter"},
  "optim": {"nn", "model", "drafter"},
  "data": {"jax", "flax", "train"},
  "configs": {"train"},
}
KERNELS = ("pallas_", "hopper_", "triton_", "tpu_")  # files that hold them
BOUNDARY = {"ml_collections", "absl"}  # stop at configs/ and train/


def python_files(*folders):
  return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path):
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module):
  """Row entry of a module: deepseek_jax.nn.moe -> nn; a foreign module -> its top name."""
  first, *rest = module.split(".")
  return rest[0] if first == LIBRARY and rest else first


def imported_modules(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


SOURCES = python_files(*FOLDERS)
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_imports_point_down(path):
  own = layer_of(module_name(path))
  if module_name(path) == LIBRARY:
    assert list(imported_modules(path)) == [], "the package itself imports nothing"
    return
  assert own in RANK, f"{own} has no place in LAYERS"
  for module in imported_modules(path):
    target = layer_of(module)
    assert RANK.get(target, -1) <= RANK[own], f"{own} imports {module}, which is above it"
    assert target not in FORBIDDEN.get(own, ()), f"{own} must not know {module}"
    assert target not in BOUNDARY or own in ("configs", "train"), f"{own} imports {module}"


@pytest.mark.parametrize("path", python_files(*FOLDERS, "tests"), ids=lambda p: p.name)
def test_files_and_functions_stay_short(path):
  text = path.read_text()
  limit = 600 if path.name.startswith(KERNELS) else 400
  assert len(text.splitlines()) <= limit
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.FunctionDef):
      assert node.end_lineno - node.lineno < 80, f"{node.name} is too long"


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_no_file_is_a_drawer(path):
  assert not {"utils", "common", "helpers", "misc"} & {path.stem, path.parent.name}


def test_the_model_has_no_word_for_replay_or_packing():
  files = [*python_files("deepseek_jax/nn"), ROOT / "deepseek_jax" / "model.py"]
  for path in files:
    text = path.read_text().lower()
    assert "replay" not in text, path
    assert "packed" not in text, path


def run_python(program):
  """Output of a fresh interpreter."""
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_data_and_layout_run_without_jax():
  modules = [module_name(path) for path in python_files("data")]
  modules += ["deepseek_jax", "deepseek_jax.config", "deepseek_jax.layout", "deepseek_jax.ngram"]
  program = f"""
import importlib, sys
for name in {modules}:
  importlib.import_module(name)
  found = [m for m in ("jax", "jaxlib", "flax") if m in sys.modules]
  assert not found, (name, found)
print("clean")
"""
  assert run_python(program) == "clean\n"


def test_importing_the_library_changes_nothing():
  modules = [module_name(path) for path in python_files(LIBRARY)]
  program = f"""
import importlib, os
import jax, flax.linen, optax, orbax.checkpoint  # what they set up is theirs
import jax.experimental.pallas.mosaic_gpu
from jax._src import xla_bridge
settings, environment = dict(jax.config.values), dict(os.environ)
for name in {modules}:
  importlib.import_module(name)
  assert dict(jax.config.values) == settings, name
  assert dict(os.environ) == environment, name
  assert not xla_bridge.backends_are_initialized(), name + " computes on import"
print("clean")
"""
  assert run_python(program) == "clean\n"
