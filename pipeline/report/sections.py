"""What a report is made of, whatever it becomes: sections of text, tables and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells of plain text; the first `num_left` columns hold words."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_left: int = 1


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A plot by its name: `<name>.png` in the folder, drawn into the page itself."""

    name: str
    caption: str


# Text knows `code`, *emphasis* and **importance**; lines that begin with "- " are a list.
Block = str | Table | Picture


@dataclass(frozen=True, kw_only=True)
class Section:
    """Blocks under a title; without a title they go on with what stands before."""

    title: str
    blocks: Sequence[Block]


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
    return markdown_table(block) if isinstance(block, Table) else block


def markdown_table(table: Table) -> str:
    aligned = [":--" if i < table.num_left else "--:" for i in range(len(table.header))]
    rows = [[cell.replace("|", "\\|") for cell in row] for row in (table.header, *table.rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], aligned, *rows[1:]))


def text_table(table: Table) -> str:
    """For a terminal: the first column on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [table.header, *table.rows]
    ]
    return "\n".join(lines)
