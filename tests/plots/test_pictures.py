"""Pictures of runs of any kind: drawn in the colours of their domains, and nothing is cut off."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from PIL import Image

from pipeline.plots import drawing
from pipeline.plots.pictures import OF_RUN, smooth, zero_std_groups
from pipeline.tracking.run_files import load_run
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
    code = "from pipeline.plots import drawing; from matplotlib import pyplot; print('drawn')"
    environ = {**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    environ |= {"MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "drawn\n"), done.stderr
