"""A Chinese page has the headings, commands, tables and links of its English page."""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from tests.end_to_end import test_documents
from tests.end_to_end.test_documents import README, headings, name_of, targets, without_blocks
from tests.support import ROOT

ENGLISH = {  # of each Chinese page
    page: README if page.parent == ROOT else ROOT / "docs" / page.name
    for page in test_documents.CHINESE
}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def code_of(page: Path) -> list[tuple[str, object]]:
    """Return the code blocks without shell comments; of a block without language, its length."""
    found: list[tuple[str, object]] = []
    for language, text in FENCED.findall(page.read_text(encoding="utf-8")):
        if language in ("bash", "sh"):
            lines = text.replace("\\\n", " ").splitlines()
            words = (shlex.split(line, comments=True) for line in lines)
            found.append((language, [line for line in words if line]))
        else:
            found.append((language, text if language else len(text.splitlines())))
    return found


def tables_of(page: Path) -> list[list[int]]:
    """Return the number of cells in each row of each table."""
    tables = re.findall(r"(?:^\|.*\n)+", without_blocks(page), re.M)
    return [
        [len(re.findall(r"(?<!\\)\|", row)) - 1 for row in table.splitlines()] for table in tables
    ]


def places_of(page: Path) -> Counter[tuple[Path, int | None]]:
    """Count the files to which a page links, Chinese pages as their English ones.

    A section is the number of its heading, so that it is the same in both languages.
    """
    found: Counter[tuple[Path, int | None]] = Counter()
    for target in targets(page):
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        number = [anchor_ for _, anchor_ in headings(path)].index(anchor) if anchor else None
        found[ENGLISH.get(path, path), number] += 1
    return found


chinese_pages = pytest.mark.parametrize("page", ENGLISH, ids=name_of)


def test_every_chinese_page_has_an_english_one() -> None:
    assert len(ENGLISH) == 4 and all(english.is_file() for english in ENGLISH.values())


@chinese_pages
def test_headings_have_the_same_levels_in_the_same_order(page: Path) -> None:
    levels, wanted = ([level for level, _ in headings(p)] for p in (page, ENGLISH[page]))
    assert levels == wanted


@chinese_pages
def test_code_is_the_same(page: Path) -> None:
    for block, wanted in zip(code_of(page), code_of(ENGLISH[page]), strict=True):
        assert block == wanted


@chinese_pages
def test_tables_have_the_same_shapes(page: Path) -> None:
    assert tables_of(page) == tables_of(ENGLISH[page])


@chinese_pages
def test_links_lead_to_the_same_sections(page: Path) -> None:
    found, wanted = places_of(page), places_of(ENGLISH[page])
    english, chinese = (ENGLISH[page], None), {(other, None) for other in ENGLISH.values()}
    found.subtract(wanted)
    others = {place: n for place, n in found.items() if n and place not in chinese}
    assert others == {}  # too many where n > 0, too few where n < 0
    assert found[english] >= 0


@chinese_pages
def test_links_lead_to_chinese_pages_where_there_are_some(page: Path) -> None:
    files = {(page.parent / target.partition("#")[0]).resolve() for target in targets(page)}
    assert {file for file in files if file in ENGLISH.values()} == {ENGLISH[page]}
    assert {*ENGLISH} - {page} <= files  # each Chinese page leads to the others
