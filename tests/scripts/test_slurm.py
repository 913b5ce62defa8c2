"""scripts/slurm.sbatch on a stand-in for SLURM, with a stand-in for Python that ends at once."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import ROOT, slurm

# Each rank notes its place and its flags, and ends with $CODE, after a requeue with 0.
PYTHON = """#!/bin/sh
trap 'exit 75' TERM USR1
shift
place="$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE"
echo "$place, $MASTER_ADDR:$MASTER_PORT $*" >> "$LOG"
test "$SLURM_RESTART_COUNT" = 1 && exit 0
test "$CODE" = wait || exit "$CODE"
while :; do sleep 0.05; done
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    slurm.put_into(tmp_path / "bin")
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    for name, value in {"PATH": path, "STAND_IN": tmp_path, "PYTHON": python}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("STAND_IN_NODES", "10.0.0.1 10.0.0.2")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("OUTPUT_DIR", "out")


def submit(code: str, *options: str) -> subprocess.Popen[str]:
    words = ["sbatch", *options, "scripts/slurm.sbatch", "--config", "mine"]
    return subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, "CODE": code}, stdout=subprocess.PIPE, text=True
    )


def lines(folder: Path) -> list[str]:
    path = folder / "log"
    return sorted(path.read_text().splitlines()) if path.is_file() else []


@pytest.mark.usefixtures("cluster")
def test_every_rank_gets_its_place_and_each_task_of_the_array_its_seed(tmp_path):
    job = submit("0", "--ntasks-per-node=2", "--array=3-4")
    assert job.communicate()[0] == "" and job.returncode == 0
    runs = ("24001 --seed 3 --output-dir out/seed-3", "24002 --seed 4 --output-dir out/seed-4")
    flags = "--resume-from-checkpoint auto --config mine --num-gpus 4"
    places = ("0 of 4, 0 of 2", "1 of 4, 1 of 2", "2 of 4, 0 of 2", "3 of 4, 1 of 2")
    assert lines(tmp_path) == [f"{at}, 10.0.0.1:{run} {flags}" for at in places for run in runs]


@pytest.mark.parametrize("code", ["1", "2"])
@pytest.mark.usefixtures("cluster")
def test_a_run_that_fails_does_not_queue_again(tmp_path, code):
    job = submit(code, "--ntasks-per-node=1", "--array=1")
    assert job.communicate()[0] == "" and job.returncode == int(code)
    assert len(lines(tmp_path)) == 2


@pytest.mark.parametrize(
    ("options", "said", "starts", "end"),
    [
        ([], "", 1, 75),
        (
            ["--signal=USR1"],
            "interrupted with a checkpoint: job 4001 queues again\n",
            2,
            0,
        ),
    ],
    ids=["cancelled", "before the time limit"],
)
@pytest.mark.usefixtures("cluster")
def test_only_an_interrupted_job_that_nobody_has_cancelled_queues_again(
    tmp_path, options, said, starts, end
):
    job = submit("wait", "--ntasks-per-node=1", "--array=1")
    while len(lines(tmp_path)) < 2:
        assert job.poll() is None
        time.sleep(0.02)
    subprocess.run(["scancel", *options, "4001"], check=True)
    assert job.communicate()[0] == said and job.returncode == end
    assert len(lines(tmp_path)) == 2 * starts
