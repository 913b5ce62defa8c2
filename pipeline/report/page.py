"""Sections, pictures and episodes as one page that needs no network: it opens from a file.

Texts of models and environments are data: the template escapes them, JSON holds them, and the
page's own policy lets only the shipped script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from pipeline.plots.pictures import inline_svg
from pipeline.report.reader_data import Reader
from pipeline.report.sections import Section

TEMPLATES = Path(__file__).resolve().parent / "templates"
# In escaped text: `code`, **importance**, *emphasis*.
MARKS = ((r"`([^`]+)`", "code"), (r"\*\*([^*]+)\*\*", "strong"), (r"\*([^*]+)\*", "em"))


def write_page(
    path: Path,
    title: str,
    sections: Sequence[Section],
    figures: Mapping[str, Any],
    reader: Reader | None = None,
) -> None:
    """Write the page, without a reader if it has no episodes."""
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.filters |= {"rich": rich, "data": data, "kind": lambda block: type(block).__name__}
    style, script = ((TEMPLATES / name).read_text("utf-8") for name in ("page.css", "page.js"))
    text = environment.get_template("page.html").render(
        title=title,
        sections=[(re.sub(r"\W+", "-", of.title.lower()).strip("-"), of) for of in sections],
        svgs={name: Markup(inline_svg(figure, name)) for name, figure in figures.items()},
        reader=reader if reader and reader.chunks else None,
        style=Markup(style),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    path.write_text(text, encoding="utf-8")


def rich(text: str) -> Markup:
    """Escape the text and turn its marks into elements, and lines with "- " into a list."""
    words = str(escape(text))
    for pattern, tag in MARKS:
        words = re.sub(pattern, rf"<{tag}>\1</{tag}>", words)
    lines = words.split("\n")
    if all(line.startswith("- ") for line in lines):
        return Markup("<ul>" + "".join(f"<li>{line[2:]}</li>" for line in lines) + "</ul>")
    return Markup(f"<p>{words}</p>")


def data(value: Any) -> Markup:
    """JSON for a script element: ASCII, without characters that could end the element."""
    text = json.dumps(value, separators=(",", ":"))
    return Markup(re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text))
