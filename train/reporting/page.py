"""The page of a report: one HTML file that loads nothing. Text of files is always escaped."""

import base64
import hashlib
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from train.reporting.drawing import Drawn

_HERE = pathlib.Path(__file__).resolve().parent


class Table(NamedTuple):
  head: Sequence[str]
  rows: Sequence[Sequence[Any]]  # the first cell of each is its heading


class Setting(NamedTuple):
  name: str
  value: str
  unit: str
  changed: bool  # from its default


class Section(NamedTuple):
  title: str
  figures: Sequence[Drawn] = ()
  tables: Sequence[Table] = ()
  missing: str = ""  # said where there is nothing else


class Page(NamedTuple):
  name: str  # of the run
  about: str
  facts: Sequence[tuple[str, str, str]]  # what, number, remark
  notes: Sequence[str]
  sections: Sequence[Section]
  settings: Mapping[str, Sequence[Setting]]  # heading -> rows


def render(page: Page) -> str:
  """The whole file."""
  style, script = ((_HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
  # Even if some text were not escaped, a browser would run no other script and load nothing.
  allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  policy = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{allowed}'"
  )
  titles = [section.title for section in page.sections] + list(page.settings)
  return "\n".join(
    [
      "<!DOCTYPE html>",
      '<html lang="en">',
      "<head>",
      '<meta charset="utf-8">',
      f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
      '<meta name="viewport" content="width=device-width, initial-scale=1">',
      f"<title>{escape(page.name)}: report</title>",
      '<link rel="icon" href="data:,">',
      f"<style>\n{style}</style>",
      "</head>",
      "<body>",
      f"<header><h1>{escape(page.name)}</h1><p>{escape(page.about)}</p>",
      _facts(page.facts),
      "</header>",
      f"<nav>{''.join(f'<a href="#{_anchor(t)}">{escape(t)}</a>' for t in titles)}</nav>",
      "<main>",
      _notes(page.notes),
      *(_section(section) for section in page.sections),
      _settings(page.settings),
      "</main>",
      "<footer>Written by <code>python -m train report</code>. Every figure is also a picture "
      "in this file's folder.</footer>",
      f"<script>{script}</script>",
      "</body>",
      "</html>",
      "",
    ]
  )


def _facts(facts: Iterable[tuple[str, str, str]]) -> str:
  cells = [
    f"<div><dt>{escape(what)}</dt><dd>{escape(number)}<small>{escape(remark)}</small></dd></div>"
    for what, number, remark in facts
  ]
  return f'<dl class="facts">{"".join(cells)}</dl>'


def _notes(notes: Sequence[str]) -> str:
  if not notes:
    return ""
  items = "".join(f"<li>{escape(note)}</li>" for note in notes)
  return f'<aside class="notes"><strong>Worth knowing</strong><ul>{items}</ul></aside>'


def _section(section: Section) -> str:
  parts = [f'<section id="{_anchor(section.title)}"><h2>{escape(section.title)}</h2>']
  if section.figures:
    parts.append(f'<div class="figures">{"".join(map(_figure, section.figures))}</div>')
  parts += map(_table, section.tables)
  if not section.figures and not section.tables:
    parts.append(f"<p>{escape(section.missing)}</p>")
  return "\n".join([*parts, "</section>"])


def _figure(drawn: Drawn) -> str:
  picture = f'<a href="{drawn.name}.png">picture</a>'
  caption = f'<span id="{drawn.name}-caption">{escape(drawn.caption)}</span> {picture}'
  return f'<figure id="{drawn.name}">{drawn.svg}<figcaption>{caption}</figcaption></figure>'


def _table(table: Table) -> str:
  head = "".join(f'<th scope="col">{escape(title)}</th>' for title in table.head)
  body = "".join(
    f'<tr><th scope="row">{escape(str(first))}</th>'
    + "".join(f"<td>{escape(str(cell))}</td>" for cell in rest)
    + "</tr>"
    for first, *rest in table.rows
  )
  return (
    f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
  )


def _settings(groups: Mapping[str, Sequence[Setting]]) -> str:
  search = (
    '<div class="search" hidden><input type="search" id="search" '
    'placeholder="Search configuration and environment" '
    'aria-label="Search configuration and environment">'
    '<label><input type="checkbox" id="changed"> changed from the default</label>'
    '<output id="found"></output></div>'
  )
  parts = []
  for heading, settings in groups.items():
    parts.append(f'<section id="{_anchor(heading)}"><h2>{escape(heading)}</h2>')
    parts.append("" if parts[1:] else search)
    if not settings:
      parts.append("<p>The folder does not say.</p></section>")
      continue
    rows = "".join(
      f'<tr{" class=changed" if one.changed else ""}><th scope="row">{escape(one.name)}</th>'
      f'<td>{escape(one.value)}</td><td class="unit">{escape(one.unit)}</td></tr>'
      for one in settings
    )
    table = f"<table><tbody>{rows}</tbody></table>"
    parts.append(f'<div class="scroll settings">{table}</div></section>')
  return "\n".join(parts)


def _anchor(title: str) -> str:
  return title.lower().replace(" ", "-")
