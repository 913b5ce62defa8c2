"""Write `report.md`, `report.html` and pictures of a run, or compare several runs.

A report needs only the files of a run folder. `three-domain-grpo report FOLDER` writes the report
of a run again. `three-domain-grpo report RUN RUN ... --output FOLDER` compares runs.
`three-domain-grpo report FOLDER_OF_RUNS` compares all runs in a folder.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import UserError
from pipeline.files.console import command
from pipeline.plots import pictures
from pipeline.report import comparison
from pipeline.report.page import write_files
from pipeline.report.reader_data import read_episodes
from pipeline.report.tables import data_of
from pipeline.tracking.run_files import load_run


def write_report(folder: Path) -> None:
    """Write a run's report into its folder; raise UserError if the folder has no run."""
    run = load_run(folder)
    reader = read_episodes(folder, run.success_threshold, run.results.get("reward_parts"))
    figures = pictures.pictures_of(run)
    title = folder.resolve().name
    write_files(folder / "report", "run.md.jinja", figures, reader, title=title, **data_of(run))


def write_comparison(folders: Sequence[Path], output: Path) -> None:
    """Write a comparison of runs into `output`; raise UserError if runs are not comparable."""
    runs, unfinished = comparison.finished(folders)
    for run in unfinished:
        print(f"warning: {run.folder} is not finished and is left out", file=sys.stderr)
    configurations = comparison.configurations_of(runs)
    output.mkdir(parents=True, exist_ok=True)
    figures = pictures.draw(pictures.OF_COMPARISON, configurations)
    data = comparison.data_of(configurations, unfinished)
    title = f"Comparison of {len(runs)} runs"
    write_files(output / "comparison", "comparison.md.jinja", figures, title=title, **data)


def main(arguments: Sequence[str]) -> int:
    """Run `report FOLDER ...`; raises UserError for a mistake of the user."""
    parser = argparse.ArgumentParser(prog=command("report"), description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of runs")
    parser.add_argument("--output", type=Path, help="folder for the comparison of several runs")
    options = parser.parse_args(arguments)
    folders = options.folders
    output = options.output
    runs = comparison.runs_in(folders)
    if len(folders) == 1 and (runs == folders or not runs):
        if output is not None:
            raise UserError("report: --output is for comparisons; a run's folder has its report")
        write_report(folders[0])
        print(folders[0] / "report.md")
    elif len(folders) > 1 and output is None:
        raise UserError("report: got several runs; say where the comparison goes: --output FOLDER")
    else:
        write_comparison(runs, output or folders[0])
        print((output or folders[0]) / "comparison.md")
    return 0
