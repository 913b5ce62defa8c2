"""The parts of a report, for the page and for Markdown: sections of text, tables and pictures."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
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


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def with_content(sections: Iterable[Section], drawn: Container[str]) -> list[Section]:
    """Drop pictures that were not drawn, empty tables, and sections without rows or blocks."""
    kept = []
    for title, blocks in sections:
        shown = [b for b in blocks if not isinstance(b, Picture) or b.name in drawn]
        tables = [block for block in shown if isinstance(block, Table)]
        if any(table.rows for table in tables) if tables else shown:
            kept.append(Section(title, [b for b in shown if not isinstance(b, Table) or b.rows]))
    return kept


def markdown(sections: Iterable[Section]) -> str:
    parts: list[str] = []
    for title, blocks in sections:
        parts += [f"## {title}"] if title else []
        parts += map(_markdown_of, blocks)
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
    columns = []
    for i, column in enumerate(zip(table.header, *table.rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if i else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(row) for row in zip(*columns, strict=True))
