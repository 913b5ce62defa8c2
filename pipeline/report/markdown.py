"""Templates and data -> Markdown in which each block is a heading, text, list, table or picture.

A block is separated by empty lines. Names from a run folder cannot begin a block or a cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.report.numbers import METRICS, metric, shown
from pipeline.report.tables import duration
from pipeline.tracking.run_files import after_name, number

TEMPLATES = Path(__file__).resolve().parent / "templates"


def environment(**options: Any) -> Environment:
    """A Jinja environment of the templates of this room."""
    made = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, **options)
    made.trim_blocks = made.lstrip_blocks = True
    return made


def render(template: str, **data: Any) -> str:
    """Render a Markdown template; a line of text continues the line before it."""
    # The page escapes HTML; Markdown itself has no HTML to escape.
    made = environment(autoescape=False, finalize=plain)
    made.filters |= {"shown": shown, "metric": metric, "number": number, "median": median}
    made.filters |= {"table": table, "after_name": after_name, "duration": duration}
    text = made.get_template(template).render(METRICS=METRICS, row=row, header=header, **data)
    text = re.sub(r"(?<=[^\n])\n *(?=[^\s|#!-])", " ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def plain(value: Any) -> str:
    """A value as one line without column separators; a table is of type Markup and stays."""
    if isinstance(value, Markup):
        return value
    return re.sub(r"(?<!\\)\|", r"\|", re.sub(r"\s+", " ", str(value)))


def row(*cells: Any) -> Markup:
    """A table row; a cell that is a list becomes several cells."""
    return Markup("| " + " | ".join(map(plain, _flat(cells))) + " |")


def header(*cells: Any, left: int = 1) -> Markup:
    """A table header; the first `left` columns are aligned left, the others right."""
    names = _flat(cells)
    return row(names) + "\n" + row([":--" if i < left else "--:" for i in range(len(names))])


def table(rows: Sequence[Sequence[str]], left: int = 1) -> Markup:
    """A whole table, whose first row is the header."""
    return Markup("\n").join([header(*rows[0], left=left), *(row(*cells) for cells in rows[1:])])


def _flat(cells: Iterable[Any]) -> list[Any]:
    return [c for cell in cells for c in ([cell] if isinstance(cell, str | int) else cell)]
