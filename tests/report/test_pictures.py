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
    learning_curves,
    optimization,
    smooth,
    zero_std_groups,
)
from pipeline.report.run_files import load_run
from tests.support.report_runs import (  # noqa: F401
    THREE,
    make_run,
    matplotlib_home,
    pay_any_rewards,
)


def draw(folder: Path, *names: str) -> None:
    """These pictures, or all."""
    wanted = {name: OF_RUN[name] for name in names or OF_RUN}
    drawing.save(drawing.draw(wanted, load_run(folder)), folder)


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


def test_rewards_of_any_size_have_an_axis(tmp_path):
    folder = make_run(tmp_path / "run", ("mixed",))
    pay_any_rewards(folder)
    names = ("learning_curves", "stage_performance", "accuracy_matrix")
    draw(folder, *names)
    for name in names:
        assert_is_a_whole_picture(folder / f"{name}.png")


def test_groups_of_which_too_few_were_left_have_a_layer_of_their_own(tmp_path):
    folder = make_run(tmp_path / "run", ("mixed",))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[0]["rollout/too_few_left"] = 0.25
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (legend,) = zero_std_groups(load_run(folder)).legends
    assert [line.get_text() for line in legend.get_texts()][-1] == "fewer than two left"


def test_smoothing_keeps_a_line_straight_and_its_ends_in_place():
    assert smooth([0.5] * 20) == [0.5] * 20
    assert smooth([0.0, 1.0]) == [0.5, 0.5]
    assert smooth(list(range(20)))[4:16] == [float(i) for i in range(4, 16)]


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


def test_small_rewards_stand_beside_success_rates_on_one_axis(tmp_path):
    folder = make_run(tmp_path / "run", ("mixed",))
    with_metrics(folder, lambda line: line | {"reward/airline": 0.19})
    results = json.loads((folder / "results.json").read_text())
    for entry in results["evaluations"]:  # graded: neither 0 nor 1
        tasks = entry["success"]["airline"]["tasks"]
        entry["success"]["airline"]["tasks"] = {task: [0.19, 1.0] for task in tasks}
    (folder / "results.json").write_text(json.dumps(results))
    axes = learning_curves(load_run(folder)).axes
    airline = [of for of in axes if of.get_ylabel() == "airline"]
    assert [of.get_ylim() for of in airline] == [(-0.03, 1.03)]
    assert not [of for of in axes if of.get_ylabel() == "mean reward"]
    assert [0.19] * 10 in [[*line.get_ydata()] for line in airline[0].get_lines()]
    with_metrics(folder, lambda line: line | {"reward/airline": 1.5})
    labels = [of.get_ylabel() for of in learning_curves(load_run(folder)).axes]
    assert labels.count("mean reward") == 1


@pytest.mark.parametrize(
    ("num_steps", "every", "words"),
    [
        (1, 1, None),
        (4, 1, "mean of 4 steps"),
        (10, 1, "mean of 9 steps"),
        (10, 3, "mean of 4 drawn steps"),
    ],
)
def test_a_mean_is_said_to_be_of_the_steps_that_it_is_of(tmp_path, num_steps, every, words):
    folder = make_run(tmp_path / "run", ("mixed",))
    with_metrics(folder, lambda line: line if line["step"] <= num_steps else None)
    run = load_run(folder)
    run = replace(run, train=run.train[::every])
    (legend,) = learning_curves(run).legends
    means = [text.get_text() for text in legend.get_texts() if "mean of" in text.get_text()]
    assert means == ([words] if words else [])


def test_a_stage_of_one_step_is_seen_and_steps_are_whole_numbers(tmp_path):
    folder = make_run(tmp_path / "run", ("mixed",))
    with_metrics(folder, lambda line: line if line["step"] == 1 else None)
    run = load_run(folder)
    axes = learning_curves(run).axes[0]
    assert "." in [line.get_marker() for line in axes.get_lines() if [*line.get_xdata()] == [1]]
    axes.set_xlim(0, 2)
    assert [*axes.get_xticks()] == [0, 1, 2]


def test_each_metric_of_the_updates_has_a_panel_even_if_it_is_0(tmp_path):
    folder = make_run(tmp_path / "run", ("mixed",))
    assert optimization(load_run(folder)) is None, "a run of an earlier version"
    found = {"train/grad_norm": 0.5, "train/entropy": 1.25, "train/clip_ratio": 0.0}
    with_metrics(folder, lambda line: line | found)
    panels = optimization(load_run(folder)).axes
    assert [of.get_ylabel() for of in panels] == ["gradient\nnorm", "entropy,\nnats", "clip ratio"]
    assert [[*of.get_lines()[0].get_ydata()] for of in panels] == [
        [0.5] * 10,
        [1.25] * 10,
        [0.0] * 10,
    ]
    with_metrics(folder, lambda line: line | {"train/kl": 0.01, "train/grad_norm": None})
    labels = [of.get_ylabel() for of in optimization(load_run(folder)).axes]
    assert labels == ["entropy,\nnats", "KL to the\nreference", "clip ratio"]
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
