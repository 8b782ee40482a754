"""Preparing and describing data needs no JAX."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def run(code: str, *arguments: str) -> None:
  subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, check=True)


def test_importing_any_part_of_data_imports_no_jax():
  modules = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "data").rglob("*.py"))
    if path.name != "__init__.py"
  ]
  assert "data.pipeline" in modules
  code = "import importlib, sys\nfor m in sys.argv[1:]: importlib.import_module(m)\n"
  run(code + "assert 'jax' not in sys.modules, sorted(sys.modules)", *modules, "train.prepare")


def test_preparing_imports_no_jax(text_folder, tmp_path):
  code = (
    "import sys; from train import prepare; code = prepare.main(sys.argv[1:]);"
    "assert 'jax' not in sys.modules and 'grain' not in sys.modules; sys.exit(code)"
  )
  arguments = ["--source", f"folder:{text_folder}", "--out", str(tmp_path / "out")]
  run(code, *arguments, "--tokenizer", "train:300", "--validation-share", "0.25")
  assert (tmp_path / "out" / "metadata.json").exists()
