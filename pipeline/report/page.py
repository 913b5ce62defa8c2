"""Sections, pictures and episodes as one page that needs no network: it opens from a file.

What a model or an environment wrote is data: the template escapes it, JSON holds it, and the page's
own policy lets no script run but the one that is shipped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from pipeline.plots.pictures import inline_svg
from pipeline.report.reader_data import Reader
from pipeline.report.sections import Block, Picture, Section, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).resolve().parent / "templates"
# In escaped text: `code`, **importance**, *emphasis*.
MARKS = ((r"`([^`]+)`", "code"), (r"\*\*([^*]+)\*\*", "strong"), (r"\*([^*]+)\*", "em"))


def write_page(
    path: Path,
    title: str,
    sections: Sequence[Section],
    figures: Mapping[str, Figure],
    reader: Reader | None = None,
) -> None:
    """Write the page; a `reader` without episodes is left out."""
    style, script = ((TEMPLATES / name).read_text("utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = (
        _environment()
        .get_template("page.html")
        .render(
            title=title,
            sections=[(_anchor(section.title), section) for section in sections],
            svgs={name: Markup(inline_svg(figure, name)) for name, figure in figures.items()},
            reader=reader if reader and reader.chunks else None,
            style=Markup(style),
            script=Markup(script),
            digest=digest,
        )
    )
    path.write_text(text, encoding="utf-8")


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"rich": rich, "data": data, "kind": _kind}
    return environment


def rich(text: str) -> Markup:
    """Escaped text with its marks as elements; lines that begin with "- " as a list."""
    words = str(escape(text))
    for pattern, tag in MARKS:
        words = re.sub(pattern, rf"<{tag}>\1</{tag}>", words)
    lines = words.split("\n")
    if all(line.startswith("- ") for line in lines):
        return Markup("<ul>" + "".join(f"<li>{line[2:]}</li>" for line in lines) + "</ul>")
    return Markup(f"<p>{words}</p>")


def data(value: Any) -> Markup:
    """JSON that can stand in a script element: nothing in it ends the element, all is ASCII."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def _kind(block: Block) -> str:
    if isinstance(block, Picture):
        return "picture"
    return "table" if isinstance(block, Table) else "text"
