"""A checkpoint of an earlier version goes on; what cannot be read of one is told in one line.

`checkpoints/v1` is a run as commit 20b4678 left it after its first step, with a model so small that
all of it is below 200 kB. Only names of settings and metrics that changed before version 0.1.0 were
brought up to date. The run was made with

    python pipeline/run.py --model model --domains airline --tasks-per-step 2 --num-generations 2 \
        --max-turns 2 --max-tokens-per-turn 8 --eval-tasks-per-domain 2 --eval-trials 1 \
        --validation-steps 0 --warm-start-steps 0 --max-steps 2 --save-steps 1 \
        --no-drop-zero-std-groups --entropy-coef 0.05 --report-to none --output-dir run --beta 0.1
"""

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoints.checkpoint import TrainState
from pipeline.checkpoints.manifest import write_manifest
from pipeline.checkpoints.run_folder import FORMAT, read_state
from pipeline.checkpoints.transcripts import read_records
from pipeline.config.cli import parse
from pipeline.errors import UserError
from pipeline.run import main
from pipeline.tracking.run_files import load_run
from scripts.proofs.ranks import play_ranks
from tests.support.helpers import start_unwatched

KEPT = Path(__file__).parent
VERSIONS = [path.name for path in sorted(KEPT.glob("v*"))]


def put_down(version: str, at: Path) -> Path:
    """A copy of a run that is kept, beside the model that it was started with."""
    run = at / "run"
    shutil.copytree(KEPT / version, run)
    (checkpoint,) = run.glob("checkpoints/step-*")
    unlike = shutil.ignore_patterns("optimizer.pt", "state.json", "manifest.json")
    shutil.copytree(checkpoint, at / "model", ignore=unlike)
    return run


def go_on(folder: Path) -> int:
    os.chdir(folder)
    run = start_unwatched(parse(["--output-dir", "run", "--resume-from-checkpoint", "latest"]))
    run.train()
    return run.state.step


def test_every_format_so_far_is_kept():
    assert len(VERSIONS) == FORMAT
    sizes = [sum(p.stat().st_size for p in (KEPT / v).rglob("*") if p.is_file()) for v in VERSIONS]
    assert max(sizes) <= 200_000


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_of_an_earlier_version_goes_on_and_trains(tmp_path, version):
    run = put_down(version, tmp_path)
    assert play_ranks(go_on, 1, tmp_path) == [2]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in steps] == [1, 2]
    assert steps[1]["train/grad_norm"] > 0
    first, last = (
        load_file(run / "checkpoints" / name / "model.safetensors")
        for name in ("step-000001", "step-000002")
    )
    assert all(first[name].shape == last[name].shape for name in first)
    assert any(not torch.equal(first[name], last[name]) for name in first)
    state = read_state(run / "checkpoints" / "stage-1-airline")
    assert [e["after"] for e in state["evaluations"]] == ["start", "airline"]
    assert state["training"]["airline"]["episodes"] == 8  # those of before the resume among them
    assert read_state(run / "checkpoints" / "step-000002")["format"] == FORMAT


def changed(checkpoint: Path, **changes) -> None:
    """As another version would have written the state; None takes a field out."""
    path = checkpoint / "state.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "missing"}))
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, 1)


@pytest.fixture
def step(tmp_path) -> Path:
    return put_down("v1", tmp_path) / "checkpoints" / "step-000001"


def test_fields_that_a_version_did_not_write_take_their_defaults(step):
    whole = read_state(step)
    missing = ("validations", "ended_early", "wall_s", "error_counts", "tracker_run_id", "config")
    changed(step, **dict.fromkeys(missing, "missing"), of_a_later_version=[1])
    state, owner, defaults = read_state(step), TrainState(), TrainState()
    assert state.keys() & set(missing) == {"config"}  # empty, so that settings can be compared
    owner.load_state_dict(state)
    for name in ("validations", "ended_early", "wall_s", "config"):
        assert getattr(owner, name) == getattr(defaults, name)
    for name in ("step", "evaluations", "sizes"):
        assert state[name] == whole[name]
    assert owner.step == 1


def test_a_newer_format_is_refused_in_one_line(step, monkeypatch, capsys):
    changed(step, format=FORMAT + 1)
    monkeypatch.chdir(step.parents[2])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert main(["--output-dir", "run", "--resume-from-checkpoint", "latest"]) == 2
    assert (
        f"error: resume_from_checkpoint: step-000001 has format {FORMAT + 1}, and this version "
        f"reads up to {FORMAT}; resume it with a newer version"
    ) in capsys.readouterr().err.splitlines()


def test_transcripts_of_an_earlier_version_count_and_others_are_told(step):
    (path,) = step.parents[1].glob("trajectories/airline/*")
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        del row["tools"], row["num_tool_errors"]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert [record.tools for record in read_records(path.parent, 0, 1)] == [{}] * 4
    for broken in ("[]\n", "{}\n", '{"domain"'):
        with gzip.open(path, "wt") as file:
            file.write(broken)
        with pytest.raises(UserError, match="cannot be read as transcripts"):
            read_records(path.parent, 0, 1)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="cannot be read as transcripts"):
        read_records(path.parent, 0, 1)


def test_a_report_of_other_results_is_refused_in_one_line(step):
    folder = step.parents[1]
    assert load_run(folder).domains == ["airline"]
    for text in ("[1]", "{", "null"):
        (folder / "results.json").write_text(text)
        with pytest.raises(UserError, match=r"results.json is not what a run writes; restore it"):
            load_run(folder)
