"""Rendering of a report: data -> Markdown -> an HTML page that needs no network.

The Markdown consists of headings, paragraphs, lists, tables and pictures, with empty lines between
them. Names from a run folder are escaped, so that a name cannot begin a block or a table cell. The
template of the page escapes texts of models and environments, or writes the texts as JSON. The
content security policy of the page allows only the shipped script.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from pipeline.files.untrusted import printable
from pipeline.plots import pictures
from pipeline.report.reader_data import Reader
from pipeline.report.tables import METRICS, duration, metric, share, shown
from pipeline.tracking.run_files import after_name, number

TEMPLATES = Path(__file__).resolve().parent / "templates"
# patterns and HTML elements of `code`, **importance** and *emphasis*
MARKS = ((r"`([^`]+)`", "code"), (r"\*\*([^*]+)\*\*", "strong"), (r"\*([^*]+)\*", "em"))
COLUMN_CHARACTERS = 84  # a table with longer rows takes the width of both columns of the page
PICTURE = re.compile(r"!\[(?P<caption>.*)\]\((?P<name>\w+)\.png\)")


def write_files(
    path: Path, template: str, figures: Mapping[str, Any], reader: Reader | None = None, **data: Any
) -> None:
    """Write the pictures, the Markdown file and the HTML page; `path` has no suffix."""
    pictures.save(figures, path.parent)
    text = printable(render(template, drawn=figures, **data))  # no control characters
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    made = environment(autoescape=True)
    made.filters["rich"] = rich
    style, script = ((TEMPLATES / name).read_text("utf-8") for name in ("page.css", "page.js"))
    page = made.get_template("page.html").render(
        title=printable(data["title"]),
        sections=sections_of(text),
        svgs={name: Markup(pictures.inline_svg(figure, name)) for name, figure in figures.items()},
        reader=reader if reader and reader.chunks else None,
        style=Markup(style),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    path.with_suffix(".html").write_text(page, encoding="utf-8")


def sections_of(markdown: str) -> list[dict[str, Any]]:
    """Parse Markdown into sections, each with a title, an anchor and a list of (kind, content)."""
    sections: list[dict[str, Any]] = []
    for block in markdown.strip().split("\n\n"):
        if block.startswith("#"):
            title = block[3:] if block.startswith("## ") else ""
            anchor = re.sub(r"\W+", "-", title.lower()).strip("-")
            sections.append({"title": title, "anchor": anchor, "blocks": []})
        else:
            sections[-1]["blocks"].append(_parsed(block))
    return sections


def _parsed(block: str) -> tuple[str, Any]:
    if picture := PICTURE.fullmatch(block):
        return "picture", picture.groupdict()
    lines = block.split("\n")
    if block.startswith("| "):
        cells = [re.split(r" ?(?<!\\)\| ?", line)[1:-1] for line in lines]
        header, aligned, *rows = [[cell.replace("\\|", "|") for cell in row] for row in cells]
        is_left = [cell == ":--" for cell in aligned]
        columns = zip(is_left, *rows, strict=True)
        widths = [max([14 * left, *map(len, cells)]) for left, *cells in columns]
        is_wide = sum(widths) + 3 * len(widths) > COLUMN_CHARACTERS
        return "table", {"header": header, "is_left": is_left, "rows": rows, "is_wide": is_wide}
    lines = [line.replace("\\|", "|") for line in lines]
    if block.startswith("- "):
        return "list", [line.removeprefix("- ") for line in lines]
    return "text", "\n".join(lines)


def rich(text: str) -> Markup:
    """Escape a text for HTML, and replace Markdown marks by HTML elements."""
    words = str(escape(text))
    for pattern, tag in MARKS:
        words = re.sub(pattern, rf"<{tag}>\1</{tag}>", words)
    return Markup(words)


def environment(**options: Any) -> Environment:
    """Return a Jinja environment with the templates of reports."""
    made = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, **options)
    made.trim_blocks = made.lstrip_blocks = True
    return made


def render(template: str, **data: Any) -> str:
    """Render a Markdown template, and join the lines of each paragraph."""
    # The Markdown has no HTML escapes, because `page.html` escapes the texts later.
    made = environment(autoescape=False, finalize=plain)
    made.filters |= {"shown": shown, "metric": metric, "number": number, "median": median}
    made.filters |= {"table": table, "after_name": after_name, "duration": duration, "share": share}
    text = made.get_template(template).render(METRICS=METRICS, row=row, **data)
    text = re.sub(r"(?<=[^\n])\n *(?=[^\s|#!-])", " ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


class Markdown(str):
    """Text that is already Markdown; `plain` escapes all other values in a template."""


def plain(value: Any) -> str:
    """Return a value as one line with escaped column separators; Markdown stays unchanged."""
    if isinstance(value, Markdown):
        return value
    return re.sub(r"(?<!\\)\|", r"\|", re.sub(r"\s+", " ", str(value)))


def row(*cells: Any, left: int | None = None) -> Markdown:
    """Return a table row; a list in `cells` becomes several cells.

    If `left` is given, the row is a header whose first `left` columns are aligned left.
    """
    texts = [plain(c) for cell in cells for c in ([cell] if isinstance(cell, str | int) else cell)]
    aligned = [":--" if i < (left or 0) else "--:" for i in range(len(texts))]
    lines = [texts] if left is None else [texts, aligned]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))


def table(rows: Sequence[Sequence[str]]) -> Markdown:
    """Return a table as Markdown; the first of `rows` is the header."""
    return Markdown("\n".join([row(rows[0], left=1), *map(row, rows[1:])]))
