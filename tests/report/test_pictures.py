"""Pictures of runs of any kind: drawn in the colours of their domains, and nothing is cut off."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from pipeline.report.plots import drawing
from pipeline.report.plots.pictures import (
    OF_RUN,
    optimization,
)
from pipeline.report.run_files import load_run
from tests.support.report_runs import (  # noqa: F401
    THREE,
    make_run,
    matplotlib_home,
    pay_any_rewards,
)

pytestmark = pytest.mark.whole_run


def draw(folder: Path, *names: str) -> None:
    """These pictures, or all."""
    wanted = {name: OF_RUN[name] for name in names or OF_RUN}
    drawing.save_pictures(drawing.draw(wanted, load_run(folder)), folder)


def assert_is_a_whole_picture(path: Path) -> numpy.ndarray:
    """A picture of some size with a white edge; returns its pixels."""
    pixels = numpy.asarray(Image.open(path).convert("RGB"))
    height, width, _ = pixels.shape
    assert width >= 900
    assert height >= 200
    for edge in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]):
        assert (edge == 255).all(), f"{path.name} is cut off"
    assert (pixels != 255).any(), f"{path.name} is empty"
    return pixels


def assert_has_the_colours_of_its_domains(path: Path, num_colours: int) -> None:
    pixels = assert_is_a_whole_picture(path)
    palette = ["0072B2", "D55E00", "009E73", "CC79A7"]
    found = [(pixels == list(bytes.fromhex(colour))).all(axis=2).sum() for colour in palette]
    assert all(count > 50 for count in found[:num_colours]), found
    assert not any(found[num_colours:]), found


@pytest.mark.parametrize(
    ("stages", "domains", "validation"),
    [
        (("airline",), ("airline",), False),
        ((), THREE, True),
        ((*THREE, "hospital-appointments"), (*THREE, "hospital-appointments"), True),
    ],
    ids=["one domain, no validation", "evaluation only", "four domains"],
)
def test_pictures_of_any_run_are_whole(tmp_path, stages, domains, validation):
    folder = make_run(tmp_path / "run", stages, domains, validation)
    draw(folder)
    for path in folder.glob("*.png"):
        assert_is_a_whole_picture(path)
    for name in ("learning_curves", "stage_performance", *["transfer"] * (len(stages) > 1)):
        assert_has_the_colours_of_its_domains(folder / f"{name}.png", len(domains))


def test_pictures_are_drawn_whatever_backend_a_notebook_has_named(tmp_path: Path) -> None:
    code = (
        "from pipeline.report.plots import drawing; from matplotlib import pyplot; print('drawn')"
    )
    environ = {**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    environ |= {"MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "drawn\n"), done.stderr


def with_metrics(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change each line of the metrics of training, or leave it out."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [change(line) if line["kind"] == "train" else line for line in lines]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in changed if line))


def test_each_metric_of_the_updates_has_a_panel_even_if_it_is_0(tmp_path):
    folder = make_run(tmp_path / "run", ("mixed",))
    assert optimization(load_run(folder)) is None, "a run of an earlier version"
    found = {"train/grad_norm": 0.5, "train/entropy": 1.25, "train/clip_ratio": 0.0}
    with_metrics(folder, lambda line: line | found)
    panels = optimization(load_run(folder)).axes
    assert [of.get_ylabel() for of in panels] == ["gradient\nnorm", "entropy,\nnats", "clip ratio"]
    assert [*panels[2].get_lines()[0].get_ydata()] == [0.0] * 10
    draw(folder, "optimization")
    assert_is_a_whole_picture(folder / "optimization.png")


@pytest.mark.parametrize("num_steps", [0, 1, 2, 11])
def test_pictures_of_a_run_that_goes_on_are_drawn_without_a_warning(tmp_path, num_steps):
    folder = make_run(tmp_path / "run", THREE)
    with_metrics(folder, lambda line: line if line["step"] <= num_steps else None)
    run = load_run(folder)
    first = [*run.results["evaluations"][: 1 + num_steps // 10]]
    run = replace(
        run,
        results={**run.results, "evaluations": first, "validations": []},
        validation=[],
        timings=run.timings[:num_steps],
        transfer={},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        figures = drawing.draw(OF_RUN, run)
        assert "learning_curves" in figures
        for name, figure in figures.items():
            drawing.inline_svg(figure, name)
