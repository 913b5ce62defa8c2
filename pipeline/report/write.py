"""A run folder -> `report.md`, `report.html` and pictures; several -> a comparison.

Made from the files alone: `python -m pipeline.report FOLDER` makes it again, and
`python -m pipeline.report RUN RUN ... --output FOLDER`, or a folder of runs, compares runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.files.untrusted import printable
from pipeline.plots import pictures
from pipeline.report import comparison
from pipeline.report.page import write_page
from pipeline.report.reader_data import Reader, read_episodes
from pipeline.report.report_sections import change, sections_of
from pipeline.report.sections import Section, markdown, text_table, with_content
from pipeline.report.transfer_sections import reward_lines, terminal_lines
from pipeline.tracking.run_files import load_run


def write_report(folder: Path) -> None:
    """Write the report and its pictures into a run folder; UserError if it holds no run."""
    run = load_run(folder)
    reader = read_episodes(folder, run.success_threshold)
    figures = pictures.pictures_of(run)
    _write(folder / "report", folder.resolve().name, sections_of(run), figures, reader)


def write_comparison(folders: Sequence[Path], output: Path) -> None:
    """Write the comparison of runs into `output`; UserError if they cannot be compared."""
    runs, unfinished = comparison.finished(folders)
    for run in unfinished:
        print(f"warning: {run.folder} is not finished and is left out", file=sys.stderr)
    rows = comparison.rows_of(runs)
    output.mkdir(parents=True, exist_ok=True)
    figures = pictures.draw(pictures.OF_COMPARISON, rows)
    sections = comparison.sections_of(rows, unfinished)
    _write(output / "comparison", f"Comparison of {len(runs)} runs", sections, figures)


def _write(
    path: Path,
    title: str,
    sections: Sequence[Section],
    figures: Mapping[str, Any],
    reader: Reader | None = None,
) -> None:
    """Write the pictures, then the page and the Markdown file at `path` with their suffixes."""
    pictures.save(figures, path.parent)
    shown = with_content(sections, figures)
    write_page(path.with_suffix(".html"), title, shown, figures, reader)
    text = f"# {title}\n\n{markdown(shown)}\n"
    path.with_suffix(".md").write_text(printable(text), encoding="utf-8")  # for a terminal


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
    folders, output = options.folders, options.output
    try:
        runs = comparison.runs_in(folders)
        if len(folders) == 1 and (runs == folders or not runs):
            if output is not None:
                raise UserError(
                    "report: --output is for comparisons; a run's folder has its report"
                )
            write_report(folders[0])
            print(folders[0] / "report.md")
        elif len(folders) > 1 and output is None:
            raise UserError(
                "report: got several runs; say where the comparison goes: --output FOLDER"
            )
        else:
            write_comparison(runs, output or folders[0])
            print((output or folders[0]) / "comparison.md")
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0
