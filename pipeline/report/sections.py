"""The parts of a report, for the page and for Markdown: sections of text, tables and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """Cells of plain text; the first `num_left` columns hold words."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_left: int = 1


class Picture(NamedTuple):
    """A plot by its name: `<name>.png` in the folder, drawn into the page itself."""

    name: str
    caption: str


# Text may have `code`, *emphasis* and **importance**; lines that begin with "- " are a list.
Block = str | Table | Picture


class Section(NamedTuple):
    """Blocks under a title; blocks without a title continue the section before."""

    title: str
    blocks: Sequence[Block]


def with_content(sections: Iterable[Section]) -> list[Section]:
    """The sections that have blocks, and rows if they have tables."""
    kept = []
    for section in sections:
        tables = [block for block in section.blocks if isinstance(block, Table)]
        if any(table.rows for table in tables) if tables else section.blocks:
            kept.append(section)
    return kept


def markdown(sections: Iterable[Section]) -> str:
    parts: list[str] = []
    for section in sections:
        if section.title:
            parts.append(f"## {section.title}")
        parts += [_markdown_of(block) for block in section.blocks]
    return "\n\n".join(parts)


def _markdown_of(block: Block) -> str:
    if isinstance(block, Picture):
        return f"![{block.caption}]({block.name}.png)"
    if isinstance(block, str):
        return block
    aligned = [":--" if i < block.num_left else "--:" for i in range(len(block.header))]
    header, *rows = [[c.replace("|", "\\|") for c in row] for row in (block.header, *block.rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, aligned, *rows))


def text_table(table: Table) -> str:
    """For a terminal: the first column on the left, the others on the right."""
    rows = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)
