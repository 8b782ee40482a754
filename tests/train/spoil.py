"""What spoils a copy of a run folder that ended at step 7."""

import json


def damage(folder):
  files = [p for p in (folder / "checkpoints" / "7").rglob("*") if p.is_file()]
  largest = max(files, key=lambda p: p.stat().st_size)
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 1
  largest.write_bytes(content)


def change_model(folder, **values):
  config = json.loads((folder / "config.json").read_text())
  config["model"] |= values
  (folder / "config.json").write_text(json.dumps(config))
