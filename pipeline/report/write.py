"""A run folder -> `report.md`, `report.html` and pictures; several -> a comparison.

Made from the files alone: `python -m pipeline.report FOLDER` makes it again, and
`python -m pipeline.report RUN RUN ... --output FOLDER`, or a folder of runs, compares runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.files.untrusted import printable
from pipeline.plots import pictures
from pipeline.plots.comparison import pareto
from pipeline.report import comparison
from pipeline.report.page import write_page
from pipeline.report.reader_data import read_episodes
from pipeline.report.report_sections import change, sections_of
from pipeline.report.sections import Block, Picture, Section, markdown, text_table
from pipeline.report.transfer_sections import reward_lines, terminal_lines
from pipeline.tracking.run_files import load_run


def write_report(folder: Path) -> None:
    """Write the report and its pictures into a run folder; UserError if it holds no run."""
    run = load_run(folder)
    figures = pictures.pictures_of(run)
    pictures.save(figures, folder)
    sections = _without_empty_pictures(sections_of(run), figures)
    name = folder.resolve().name
    episodes = read_episodes(folder, run.success_threshold)
    write_page(folder / "report.html", name, sections, figures, episodes)
    _write_markdown(folder / "report.md", name, sections)


def write_comparison(folders: Sequence[Path], output: Path) -> None:
    """Write the comparison of runs into `output`; UserError if they cannot be compared."""
    runs, left_out = comparison.finished(folders)
    for run in left_out:
        print(f"warning: {run.folder} is not finished and is left out", file=sys.stderr)
    rows = comparison.rows_of(runs)
    output.mkdir(parents=True, exist_ok=True)
    figures = pictures.drawings(pareto=lambda: pareto(rows))
    pictures.save(figures, output)
    sections = comparison.sections_of(rows, left_out)
    title = f"Comparison of {len(runs)} runs"
    _write_markdown(output / "comparison.md", title, sections)
    write_page(output / "comparison.html", title, sections, figures)


def _without_empty_pictures(
    sections: Iterable[Section], figures: Mapping[str, Any]
) -> list[Section]:

    def is_shown(block: Block) -> bool:
        return not isinstance(block, Picture) or block.name in figures

    return [Section(title, list(filter(is_shown, blocks))) for title, blocks in sections]


def _write_markdown(path: Path, title: str, sections: Sequence[Section]) -> None:
    text = f"# {title}\n\n{markdown(sections)}\n"
    path.write_text(printable(text), encoding="utf-8")  # a terminal may show it


def final_table(results: Mapping[str, Any]) -> str:
    """The end of a run for the terminal: success before and after GRPO, rewards, transfer."""
    transfer = results.get("transfer", {})
    table = text_table(change(results["evaluations"], transfer))
    return "\n\n".join(filter(None, [table, reward_lines(transfer), terminal_lines(transfer)]))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.report", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of runs")
    parser.add_argument("--output", type=Path, help="folder for the comparison of several runs")
    options = parser.parse_args(arguments)
    try:
        print(_write(options.folders, options.output))
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def _write(folders: Sequence[Path], output: Path | None) -> Path:
    """Write the report or the comparison; returns its main file."""
    runs = comparison.runs_in(folders)
    if len(folders) == 1 and (runs == list(folders) or not runs):
        if output is not None:
            raise UserError("report: --output is for comparisons; the report of a run is in it")
        write_report(folders[0])
        return folders[0] / "report.md"
    if len(folders) > 1 and output is None:
        raise UserError("report: got several runs; say where the comparison goes: --output FOLDER")
    output = output or folders[0]
    write_comparison(runs, output)
    return output / "comparison.md"
