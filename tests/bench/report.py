"""The table that a benchmark prints; the JSON document has everything."""

from rich.table import Table

WIDTH = 160  # characters; a narrower screen wraps lines of the table
_COLUMNS = (
  "implementation", "what", "shape", "ms", "TFLOP/s", "of peak", "of floor", "temporaries",
  "errors, or why not",
)  # fmt: skip
# Of a record; the others are the shape of the case.
_KNOWN = {
  "benchmark", "implementation", "what", "round", "seconds", "tflops_per_second",
  "fraction_of_matrix_peak", "fraction_of_bandwidth_floor", "argument_bytes", "output_bytes",
  "temporary_bytes", "total_bytes", "device_peak_bytes", "errors", "error", "refused",
}  # fmt: skip


def table(document: dict) -> Table:
  """One line for every record; for `schedule`, whose records are its own, all their fields."""
  title = f"{document['benchmark']} on {document.get('device', 'no device')}, jax {document['jax']}"
  records = document["records"]
  if document["benchmark"] == "schedule":
    columns = list(dict.fromkeys(name for record in records for name in record))
    rows = [[str(record.get(name, "")) for name in columns] for record in records]
  else:
    columns, rows = list(_COLUMNS), [row(record) for record in records]
  result = Table(*columns, title=title)
  for cells in rows:
    result.add_row(*cells)
  return result


def row(record: dict) -> list[str]:
  """Cells of one record, in the order of the columns."""
  shape = " ".join(f"{name} {value}" for name, value in record.items() if name not in _KNOWN)
  cells = [record["implementation"], record["what"], shape]
  if "seconds" in record:
    cells += [
      f"{record['seconds'] * 1e3:.3f}",
      f"{record['tflops_per_second']:.1f}",
      f"{record['fraction_of_matrix_peak']:.0%}",
      f"{record['fraction_of_bandwidth_floor']:.0%}",
    ]
  else:
    cells += [""] * 4
  held = record.get("temporary_bytes")
  cells.append("" if held is None else f"{held / 1e9:.2f} GB")
  errors = " ".join(f"{name} {value:.1e}" for name, value in record.get("errors", {}).items())
  if "total_bytes" in record:
    errors = f"with arguments and results {record['total_bytes'] / 1e9:.2f} GB"
  return [*cells, record.get("refused") or record.get("error") or errors]
