"""A checkpoint becomes a plain folder that transformers and PEFT load, with a card of its run.

Uploads go to a stand-in of the hub; the real hub was never tried.
"""

import gzip
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.checkpoints.checkpoint import save
from pipeline.checkpoints.run_folder import FORMAT, write_manifest
from pipeline.commands.folders import export_checkpoint as main
from pipeline.common.errors import RunError
from pipeline.config.cli import parse
from pipeline.config.recipe import dump, load_recipe
from pipeline.models import lora
from pipeline.models.loading import load_folder
from pipeline.preflight.parts import prepare
from pipeline.report.card import command_of, without_places
from pipeline.report.export import push_after_training
from pipeline.report.run_files import load_run
from pipeline.report.tables import report_data
from pipeline.report.write import render
from tests.support import SMALL_RUN, http
from tests.support.hub import Hub
from tests.support.messages import refusal, says
from tests.support.report_runs import edited, make_run

STEP = SMALL_RUN / "checkpoints" / "step-000001"


def run_with(at: Path, step: int, state: Any = None, **settings) -> Path:
    """A run of two stages of ten steps; its checkpoint has the weights of the small run."""
    run = make_run(at, ["airline", "retail"], settings=settings)
    checkpoint = run / "checkpoints" / f"step-{step:06d}"
    shutil.copytree(STEP, checkpoint)
    (checkpoint / "state.json").write_text(
        json.dumps({"format": FORMAT, "step": step, **(state or {})})
    )
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, 1)
    return run


def text_of(run: Path, out: Path, *flags: str) -> str:
    assert main([str(run), str(out), *flags]) == 0
    return (out / "README.md").read_text()


def test_an_exported_folder_is_loaded_with_the_weights_of_the_checkpoint(tmp_path, capsys):
    out = tmp_path / "deep" / "out"
    assert main([str(SMALL_RUN), str(out)]) == 0
    assert "checkpoint step-000001 (step 1)" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {
        *("README.md", "chat_template.jinja", "config.json", "generation_config.json"),
        *("example.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }
    model = AutoModelForCausalLM.from_pretrained(out)
    named = dict(model.named_parameters())
    for name, tensor in load_file(STEP / "model.safetensors").items():
        assert torch.equal(named[name], tensor)
    tokenizer = AutoTokenizer.from_pretrained(out)
    named = json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert named == "PreTrainedTokenizerFast"  # transformers 4 knows it
    request = [{"role": "user", "content": "hello"}]
    assert "user\nhello" in tokenizer.apply_chat_template(request, tokenize=False)
    assert list(out.parent.iterdir()) == [out]


def test_adapters_stay_adapters_or_are_merged(tmp_path):
    run = make_run(tmp_path / "run", [], settings={"model": {"use_peft": True, "lora_r": 2}})
    config = load_recipe(run / "config.yaml")
    tokenizer = AutoTokenizer.from_pretrained(STEP)
    shutil.copytree(STEP, run / "checkpoints" / "warm-start")
    base = run / "checkpoints" / "warm-start"
    model = lora.attach(load_folder(base, config.model), config.model, "/elsewhere/warm-start", 1)
    for tensor in lora.adapters_of(model).values():
        torch.nn.init.normal_(tensor, std=0.1)
    model.get_base_model().generation_config.eos_token_id = [2, 1]  # what ended messages
    save(run / "checkpoints", "step-000002", model, tokenizer, {"step": 2})
    text = text_of(run, tmp_path / "adapters")
    assert "library_name: peft" in text
    content = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == str(base)  # and not where the run was before
    assert "library_name: transformers" in text_of(run, tmp_path / "whole", "--merge")
    assert not list((tmp_path / "whole").glob("adapter*"))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "whole" / name).read_text())["eos_token_id"] == [2, 1]
    ids, logits = torch.arange(12)[None], []
    for name in ("adapters", "whole"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        logits.append(loaded(ids).logits)
    assert torch.allclose(logits[0], model(ids).logits, atol=1e-5)
    assert torch.allclose(logits[0], logits[1], atol=1e-5)
    assert not torch.allclose(logits[0], load_folder(base, config.model)(ids).logits, atol=1e-2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["RUN", "FULL"], ["not empty", "new or empty folder"]),
        (["RUN", "FULL/file"], ["no folder"]),
        (["RUN", "OUT", "--checkpoint", "best-of"], ["'best-of'", "checkpoints", "step-000020"]),
        (["RUN", "OUT", "--checkpoint", "../checkpoints/step-000020"], ["checkpoints of"]),
        (["FULL", "OUT"], ["holds no run", "config.yaml"]),
        (["EMPTY", "OUT"], ["holds no whole checkpoint", "there is none"]),
        (["DAMAGED", "OUT"], ["no whole checkpoint", "SHA-256"]),
        (["DAMAGED", "OUT", "--checkpoint", "step-000020"], ["damaged", "SHA-256"]),
        (["RUN"], ["OUT", "--help"]),
        (["RUN", "OUT", "--checkpont", "x"], ["--checkpont"]),
    ],
)
def test_what_cannot_be_exported_is_told_in_one_line(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    run_with(Path("RUN"), 20)
    damaged = run_with(Path("DAMAGED"), 20) / "checkpoints" / "step-000020" / "config.json"
    damaged.write_text(damaged.read_text() + " ")
    make_run(Path("EMPTY"), [])
    Path("FULL").mkdir()
    Path("FULL/file").write_text("mine")
    says(refusal(main, arguments), *words)
    assert {path.name for path in tmp_path.iterdir()} == {"RUN", "DAMAGED", "EMPTY", "FULL"}
    assert Path("FULL/file").read_text() == "mine"


def test_a_failure_leaves_nothing_half_written(tmp_path, monkeypatch):
    run = run_with(tmp_path / "run", 20)
    (run / "results.json").write_text("{")
    assert "results.json is not what a run writes" in refusal(main, [str(run), str(tmp_path / "o")])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_card_has_the_numbers_of_the_report(tmp_path):
    run = run_with(tmp_path / "run", 20)
    text = text_of(run, tmp_path / "out")
    report = render("run.md.jinja", drawn={}, **report_data(load_run(run)))
    tables = text.partition("## Results")[2].partition("## How to use")[0]
    rows = [line for line in tables.splitlines() if line.startswith("|")]
    assert sum("[" in row for row in rows) >= 8
    assert set(rows) <= set(report.splitlines())
    assert "after retail (step 20)" in text
    assert ModelCard(text).data.to_dict() == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "reinforcement-learning", "tool-use"],
    }
    assert str(tmp_path) not in text


@pytest.mark.parametrize(("step", "after"), [(10, "after airline (step 10)"), (0, "warm start")])
def test_the_card_of_an_earlier_checkpoint_has_no_later_number(tmp_path, step, after):
    text = text_of(run_with(tmp_path / "run", step), tmp_path / "out")
    assert after in text and "no evaluation of its own" not in text
    assert "0.88 [" not in text  # greedy success after retail
    assert f"{step} steps of GRPO" in text


def test_a_card_says_where_its_checkpoint_was_not_measured(tmp_path):
    text = text_of(run_with(tmp_path / "run", 15), tmp_path / "out")
    assert "**This checkpoint is of step 15 and has no evaluation of its own.**" in text
    assert "after airline (step 10)" in text
    best = {"best": {"checkpoint": "step-000015", "step": 15, "success": 0.8125}}
    text = text_of(run_with(tmp_path / "kept", 15, best), tmp_path / "best")
    assert "mean success 0.812 on 20 tasks of each domain" in text


def test_a_card_names_base_model_settings_and_limits(tmp_path):
    model = {"model": "Qwen/Qwen3-4B", "chat_template_kwargs": {"enable_thinking": False}}
    data = {"tasks": {"airline": "/home/me/tasks.jsonl"}}
    text = text_of(run_with(tmp_path / "run", 20, model=model, data=data), tmp_path / "out")
    assert ModelCard(text).data.base_model == "Qwen/Qwen3-4B"
    held_out(run := run_with(tmp_path / "other", 20, model=model, data=data))
    other = text_of(run, tmp_path / "with-tools")
    assert 'tools=example["tools"], enable_thinking=False, add_generation_prompt=True' in other
    assert "The licence of the base model `Qwen/Qwen3-4B` is not known here." in text
    assert """--tasks '{"airline": "tasks.jsonl"}'""" in text
    with edited(run / "results.json") as results:
        results["tools"] = {key: [] for key in results["tools"]}
    text = text_of(run, tmp_path / "without-tools")
    assert ModelCard(text).data.tags == ["grpo", "reinforcement-learning"]
    assert "tools" not in text.partition("## How to use")[2].partition("## Limits")[0]
    assert "/home/me" not in text and "tiny" not in text.partition("## How it was made")[0]


def held_out(run: Path) -> list[dict[str, Any]]:
    """Write the transcript of an episode; returns what its model was asked."""
    asked = [{"role": "system", "content": "Serve."}, {"role": "user", "content": "where is R1"}]
    answer = {"role": "assistant", "content": "here"}
    line = {"domain": "retail", "task_id": "R1", "trial": 0}
    folder = run / "trajectories" / "evaluation-retail"
    folder.mkdir(parents=True)
    with gzip.open(folder / "step-000020.rank-0.jsonl.gz", "wt") as file:
        file.write(json.dumps({**line, "messages": [*asked, answer]}) + "\n")
    return asked


@pytest.mark.parametrize("has_transcripts", [True, False])
def test_the_snippet_of_a_card_runs_in_its_folder(tmp_path, monkeypatch, capsys, has_transcripts):
    run = run_with(tmp_path / "run", 20)
    asked = held_out(run) if has_transcripts else [{"role": "user", "content": "Hello"}]
    text = text_of(run, tmp_path / "out")
    example = json.loads((tmp_path / "out" / "example.json").read_text())
    assert example["messages"] == asked
    names = [tool["function"]["name"] for tool in example["tools"]]
    assert names == ["look_up"] * has_transcripts
    snippet = text.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path / "out")
    found: dict[str, Any] = {}
    capsys.readouterr()
    exec(snippet, found)
    begin = found["tokenizer"].decode(found["inputs"]["input_ids"][0])
    assert asked[-1]["content"] in begin and ("look_up" in begin) == has_transcripts
    assert found["output"].shape[1] > found["inputs"]["input_ids"].shape[1]
    assert capsys.readouterr().out  # what the model says


def test_the_licence_of_a_base_model_is_that_of_its_card(tmp_path, monkeypatch):
    base = tmp_path / "models--org--name" / "snapshots" / "main"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: gemma\n---\n# Base\n")
    data = ModelCard(
        text_of(run_with(tmp_path / "a", 20, model={"model": str(base)}), tmp_path / "o")
    )
    assert (data.data.license, data.data.license_name) == ("other", "gemma")
    assert data.data.base_model == "org/name"
    assert "is not known here" not in data.content
    (base / "README.md").write_text("no metadata")
    other = text_of(run_with(tmp_path / "b", 20, model={"model": str(base)}), tmp_path / "p")
    assert "The licence of the base model `main` is not known here. Look it up" in other


def test_the_command_of_a_card_makes_a_run_with_the_same_settings(tmp_path):
    flags = ["--config", "mixed", "--use-peft", "--no-share-prefixes", "--epsilon-high", "null"]
    flags += ["--domains", "retail,bank", "--environments", "{bank: my.bank:Bank}", "--seed", "7"]
    flags += ["--learning-rate", "1e-5", "--domain-weights", "{bank: 2}", "--tags", "a,b"]
    flags += ["--chat-template-kwargs", "{enable_thinking: false}", "--stage-lr-decay", "cosine"]
    config = parse(flags)
    again = parse(shlex.split(command_of(config))[2:])
    assert again == config.model_copy(update={"tracking": again.tracking})
    assert "'{bank: my.bank:Bank}'" not in command_of(parse([]))
    path = tmp_path / "mine.yaml"
    path.write_text(dump(config).replace("recipe: mixed", "recipe: mine"))
    other = load_recipe(path)
    again = parse(shlex.split(command_of(other))[2:])
    assert again.model_copy(update={"recipe": "mine", "tracking": other.tracking}) == other
    assert without_places(other) == other


# Uploads

TOKEN = "hf_" + "standin" * 4


@pytest.fixture
def account(tmp_path, monkeypatch):
    """A user who is logged in, and nothing of this machine's own account."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.mark.usefixtures("account")
def test_the_command_uploads_exactly_the_folder_that_it_wrote_and_training_its_checkpoint(
    tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    with http.running(Hub()) as hub:
        hub.files = {"notes.txt": b"mine", "adapter_config.json": b"of an earlier upload"}
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        main([str(SMALL_RUN), str(out), "--push-to-hub", "me/desk", "--private"])
        done = capsys.readouterr()
        calls = list(hub.calls)
        files = dict(hub.files)
        config = load_recipe(SMALL_RUN / "config.yaml")
        flags = {"push_to_hub": True, "hub_model_id": "desk"}
        push_after_training(SMALL_RUN, config.changed("run", **flags))
    assert done.out.endswith(f"uploaded: {hub.url}/me/desk/commit/1\n")
    assert f"uploaded step-000001: {hub.url}/me/desk/commit/1" in capsys.readouterr().out
    assert "optimizer.pt" not in hub.files
    assert files == {
        "notes.txt": b"mine",
        **{path.name: path.read_bytes() for path in out.iterdir()},
    }
    assert hub.tokens == {f"Bearer {TOKEN}", ""}  # objects are put where LFS says, without it
    created, _ = hub.created
    assert (created["name"], created["organization"]) == ("desk", "me")
    assert created.get("private") is True or created.get("visibility") == "private"
    assert sum("/commit/" in call for call in calls) == 1
    text = (out / "README.md").read_text()
    assert 'place = "me/desk"' in text and "\n# desk\n" in text
    assert TOKEN not in text + done.out + done.err


@pytest.mark.usefixtures("account")
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
    config = config.changed("run", **flags)
    capsys.readouterr()
    push_after_training(SMALL_RUN, config)
    (line,) = capsys.readouterr().err.splitlines()
    says(line, "warning: push_to_hub", "what was trained is whole")
    assert line.endswith(
        f"; python -m pipeline export {SMALL_RUN} OUT --checkpoint latest --push-to-hub me/desk "
        "--private tries again"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--push-to-hub"], ["push_to_hub", "hub_model_id, NAME or ORGANISATION/NAME"]),
        (["--push-to-hub", "--hub-model-id", "a/b/c"], ["hub_model_id", "'a/b/c'"]),
        (["--push-to-hub", "--hub-model-id", "me/desk"], ["no token", "HF_TOKEN"]),
        (["--hub-token", "x"], ["hub-token", "HF_TOKEN"]),
    ],
)
@pytest.mark.usefixtures("account")
def test_a_run_that_could_not_upload_is_refused_before_it_starts(monkeypatch, flags, words):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    says(refusal(lambda: prepare(parse(flags))), *words)
