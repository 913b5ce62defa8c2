"""Uploads, against a stand-in of the hub; the real hub was never tried."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest

from pipeline.commands.folders import export_checkpoint as main
from pipeline.config.cli import parse
from pipeline.config.recipe import load_recipe
from pipeline.config.rules import left_out
from pipeline.errors import RunError
from pipeline.export.folder import push_after_training
from pipeline.preflight.prepare import prepare
from tests.support import SMALL_RUN
from tests.support.hub import hub_stand_in
from tests.support.messages import refusal, says

TOKEN = "hf_" + "standin" * 4


@pytest.fixture(autouse=True)
def account(tmp_path, monkeypatch):
    """A user who is logged in, and nothing of this machine's own account."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_command_uploads_exactly_the_folder_that_it_wrote(tmp_path):
    out = tmp_path / "out"
    with hub_stand_in() as hub:
        hub.files = {"notes.txt": b"mine", "adapter_config.json": b"of an earlier upload"}
        own = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        words = ["export", str(SMALL_RUN), str(out), "--push-to-hub", "me/desk", "--private"]
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", *words],
            env={**os.environ, **own, "HF_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"uploaded: {hub.url}/me/desk/commit/1\n")
    assert hub.files == {"notes.txt": b"mine", **contents(out)}
    assert hub.tokens == {f"Bearer {TOKEN}", ""}  # objects are put where LFS says, without it
    (created,) = hub.created
    assert (created["name"], created["organization"]) == ("desk", "me")
    assert created.get("private") is True or created.get("visibility") == "private"
    assert sum("/commit/" in call for call in hub.calls) == 1
    text = (out / "README.md").read_text()
    assert 'place = "me/desk"' in text and "\n# desk\n" in text
    assert TOKEN not in text + done.stdout + done.stderr


def test_an_upload_that_fails_names_the_command_that_tries_again(tmp_path, monkeypatch, capsys):
    nobody = "http://127.0.0.1:9"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", nobody)
    out = tmp_path / "out"
    with pytest.raises(RunError) as caught:
        main([str(SMALL_RUN), str(out), "--push-to-hub", "me/desk"])
    says(str(caught.value), "push_to_hub", "is whole", f"`hf upload me/desk {out}` tries again")
    assert (out / "model.safetensors").is_file()
    flags = {"push_to_hub": True, "hub_model_id": "me/desk", "hub_private_repo": True}
    config = load_recipe(SMALL_RUN / "config.yaml")
    config = config.model_copy(update={"run": config.run.model_copy(update=flags)})
    capsys.readouterr()
    push_after_training(SMALL_RUN, config)
    (line,) = capsys.readouterr().out.splitlines()
    says(line, "warning: push_to_hub", "what was trained is whole")
    assert line.endswith(
        f"; python -m pipeline export {SMALL_RUN} OUT --checkpoint latest --push-to-hub me/desk "
        "--private tries again"
    )


def test_training_uploads_its_checkpoint(monkeypatch, capsys):
    config = load_recipe(SMALL_RUN / "config.yaml")
    run = config.run.model_copy(update={"push_to_hub": True, "hub_model_id": "desk"})
    with hub_stand_in() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        push_after_training(SMALL_RUN, config.model_copy(update={"run": run}))
    assert f"uploaded step-000001: {hub.url}/me/desk/commit/1" in capsys.readouterr().out
    weights = SMALL_RUN / "checkpoints" / "step-000001" / "model.safetensors"
    assert hub.files["model.safetensors"] == weights.read_bytes()
    assert "optimizer.pt" not in hub.files and "state.json" not in hub.files


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--push-to-hub"], ["push_to_hub", "hub_model_id, NAME or ORGANISATION/NAME"]),
        (["--push-to-hub", "--hub-model-id", "a/b/c"], ["hub_model_id", "'a/b/c'"]),
        (["--push-to-hub", "--hub-model-id", "me/desk"], ["no token", "HF_TOKEN"]),
        (["--hub-token", "x"], ["hub-token", "HF_TOKEN"]),
    ],
)
def test_a_run_that_could_not_upload_is_refused_before_it_starts(monkeypatch, flags, words):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    says(refusal(lambda: prepare(parse(flags))), *words)


def test_what_has_no_effect_is_told():
    pushed = ["--push-to-hub", "--hub-model-id", "me/desk", "--keep-best"]
    assert [line.partition(":")[0] for line in left_out(parse([*pushed, "--no-grpo"]))] == [
        *("push_to_hub", "keep_best"),
    ]
    assert [*left_out(parse(pushed))] == []
    assert "without push_to_hub" in next(left_out(parse(["--hub-model-id", "me/desk"])))
