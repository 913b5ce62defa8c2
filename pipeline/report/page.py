"""Markdown, pictures and episodes as one page that needs no network: it opens from a file.

Texts of models and environments are data: the template escapes them, JSON holds them, and the
content security policy of the page lets only the shipped script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from pipeline.files.untrusted import printable
from pipeline.plots import pictures
from pipeline.report.markdown import TEMPLATES, environment, render
from pipeline.report.reader_data import Reader

# Marks in escaped text: `code`, **importance**, *emphasis*.
MARKS = ((r"`([^`]+)`", "code"), (r"\*\*([^*]+)\*\*", "strong"), (r"\*([^*]+)\*", "em"))
PICTURE = re.compile(r"!\[(?P<caption>.*)\]\((?P<name>\w+)\.png\)")


def write_files(
    path: Path, template: str, figures: Mapping[str, Any], reader: Reader | None = None, **data: Any
) -> None:
    """Write the pictures, the Markdown file and the page; `path` has no suffix.

    The page has no reader of episodes if there are no episodes.
    """
    pictures.save(figures, path.parent)
    text = render(template, drawn=figures, **data)
    path.with_suffix(".md").write_text(printable(text), encoding="utf-8")  # for a terminal
    made = environment(autoescape=True)
    made.filters |= {"rich": rich, "data": json_of}
    style, script = ((TEMPLATES / name).read_text("utf-8") for name in ("page.css", "page.js"))
    page = made.get_template("page.html").render(
        title=data["title"],
        sections=sections_of(text),
        svgs={name: Markup(pictures.inline_svg(figure, name)) for name, figure in figures.items()},
        reader=reader if reader and reader.chunks else None,
        style=Markup(style),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    path.with_suffix(".html").write_text(page, encoding="utf-8")


def sections_of(markdown: str) -> list[dict[str, Any]]:
    """The sections of a rendered Markdown template: title, anchor and (kind, content) of blocks."""
    sections: list[dict[str, Any]] = []
    for block in markdown.strip().split("\n\n"):
        if block.startswith("#"):
            title = block.removeprefix("## ") if sections else ""  # the first is the page's title
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
        return "table", {"header": header, "is_left": is_left, "rows": rows}
    lines = [line.replace("\\|", "|") for line in lines]
    if block.startswith("- "):
        return "list", [line.removeprefix("- ") for line in lines]
    return "text", "\n".join(lines)


def rich(text: str) -> Markup:
    """Escape the text and turn its marks into elements."""
    words = str(escape(text))
    for pattern, tag in MARKS:
        words = re.sub(pattern, rf"<{tag}>\1</{tag}>", words)
    return Markup(words)


def json_of(value: Any) -> Markup:
    """JSON for a script element: ASCII, without characters that could end the element."""
    text = json.dumps(value, separators=(",", ":"))
    return Markup(re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text))
