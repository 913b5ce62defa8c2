"""Checkpoints: whole or not there, loadable by others, restored exactly."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.checkpoint import TrainState, save
from pipeline.checkpoints.resume import refuse_other_origin
from pipeline.checkpoints.run_folder import (
    find_checkpoint,
    newest_first,
    number_of,
    problem,
    prune,
    put_aside,
    read_state,
    refuse_changes,
)
from pipeline.common.errors import UserError
from pipeline.config.settings import Config
from scripts.proofs.grid import small_model
from tests.support.helpers import tokenizer
from tests.support.messages import refusal, says


def at(step=0):
    return TrainState(step=step).state_dict()


def state_of(model):
    return torch.optim.AdamW(model.parameters()).state_dict()


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def save_plain(folder, name, step=0, seed=0):
    return save(folder, name, small_model(seed), tokenizer(), at(step))


# What is saved


def test_others_load_a_checkpoint_by_from_pretrained(tmp_path):
    model = small_model()
    path = save(tmp_path, "stage-1-airline", model, tokenizer(), at(), state_of(model))
    assert path == tmp_path / "stage-1-airline"
    assert (path / "model.safetensors").is_file()
    assert same(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), model)
    loaded = AutoTokenizer.from_pretrained(path)
    assert loaded("cancel K07")["input_ids"] == tokenizer()("cancel K07")["input_ids"]
    assert loaded.chat_template == tokenizer().chat_template


def test_a_checkpoint_of_another_format_is_refused_in_one_line(tmp_path):
    path = save_plain(tmp_path, "step-000050")
    state = json.loads((path / "state.json").read_text())
    assert state["format"] == 1
    for changed, given in (({**state, "format": 2}, "2"), ({"step": 50}, "None")):
        (path / "state.json").write_text(json.dumps(changed))
        assert refusal(read_state, path) == (
            f"checkpoint: got step-000050 with format {given}, but this version reads 1; "
            "use the version of the package that wrote it"
        )


# On other ranks, with moments spread over them or not


# Interrupted


def latest(output_dir):
    return find_checkpoint(output_dir, "latest")[0]


def fail(*arguments, **options):
    raise OSError("no space left on device")


@pytest.mark.parametrize(
    ("moment", "step"),
    [
        *(("torch.save", 1), ("write_manifest", 1), ("sync", 1), ("Path.rename", 1)),
        ("write_text", 2),  # of the pointer, after the renames
    ],
)
def test_at_no_moment_of_a_replacement_is_there_no_whole_checkpoint(
    tmp_path, monkeypatch, moment, step
):
    """Of the renames, the second fails."""
    save_plain(tmp_path / "checkpoints", "base", step=1)
    model = small_model(seed=1)
    with monkeypatch.context() as broken:
        fails = after(1, fail, Path.rename) if moment == "Path.rename" else fail
        broken.setattr(f"pipeline.checkpoints.checkpoint.{moment}", fails)
        with pytest.raises(OSError, match="no space left"):
            save(tmp_path / "checkpoints", "base", model, tokenizer(), at(2), state_of(model))
    assert read_state(latest(tmp_path))["step"] == step
    if moment in ("torch.save", "write_manifest"):
        assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"base", "latest"}
    save_plain(tmp_path / "checkpoints", "base", step=3)
    assert read_state(latest(tmp_path))["step"] == 3


# Found and pruned


def after(count, then, before=lambda *arguments: None):
    """A function that is `before` so many times, and `then` from there on."""
    calls = iter(range(1000))
    return lambda *arguments: (before if next(calls) < count else then)(*arguments)


def plain(folder, *names):
    """Checkpoints in the order that they were written."""
    return [save_plain(folder, name, step=step) for step, name in enumerate(names)]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_the_newest_inside_stages_are_kept_and_all_of_stages(tmp_path):
    steps = ["step-000050", "step-000100", "step-000150"]
    newest = plain(tmp_path, "warm-start", "stage-1-airline", *steps)[-1]
    kept = ["stage-1-airline", "step-000100", "step-000150", "warm-start"]
    prune(tmp_path, 2, {newest.name})
    assert names_in(tmp_path) == kept
    prune(tmp_path, 1, {newest.name})
    assert names_in(tmp_path) == ["stage-1-airline", "step-000150", "warm-start"]


def test_what_unfinished_saves_left_goes_with_the_next_one(tmp_path):
    (newest,) = plain(tmp_path, "warm-start")
    for name in (".writing-step-000050", ".aside-step-000100", "base.previous"):
        (tmp_path / name).mkdir()
    prune(tmp_path, 2, {newest.name})
    assert names_in(tmp_path) == ["warm-start"]


def test_a_checkpoint_is_found_by_name_path_or_as_the_latest(tmp_path):
    folder = tmp_path / "checkpoints"
    stage, step = plain(folder, "stage-1-airline", "step-000050")
    assert find_checkpoint(tmp_path, "latest") == (step, [])
    assert find_checkpoint(tmp_path, "auto") == (step, [])
    assert find_checkpoint(tmp_path / "new", "auto") == (None, [])
    assert find_checkpoint(tmp_path, "stage-1-airline") == (stage, [])
    assert find_checkpoint(tmp_path, str(stage)) == (stage, [])
    assert [path.name for path in newest_first(folder)] == ["step-000050", "stage-1-airline"]
    assert (number_of(stage), number_of(step)) == (1, 2)


def test_a_run_goes_on_with_the_facts_of_its_domains_alone():
    began = {"about": {"bank": {"commit": "a", "tasks": 3}}}
    same, other = began["about"], {"bank": {"commit": "b", "tasks": 3}}
    for state, about in (({}, other), (began, same), (began, {"bank": {"mode": "new"}})):
        assert refuse_other_origin(state, {}, "step-1", False, about) == []
    note = "warning: overridden: step-1 was made with other commit of bank"
    assert refuse_other_origin(began, {}, "step-1", True, other) == [note]
    with pytest.raises(
        UserError, match=r"^made_of: step-1 was made with other commit of bank; put"
    ):
        refuse_other_origin(began, {}, "step-1", False, other)


# Damaged


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path):
    path.unlink()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two checkpoints with everything in them."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (10, 20):
        model = small_model(seed=step)
        state = at(step)
        save(folder, f"step-0000{step}", model, tokenizer(), state, state_of(model))
    return folder.parent


FILES = [
    *("config.json", "generation_config.json", "manifest.json", "model.safetensors"),
    *("optimizer.pt", "state.json", "tokenizer.json", "tokenizer_config.json"),
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [flip, remove])
def test_whatever_is_damaged_the_newest_whole_checkpoint_is_taken(tmp_path, whole, harm, name):
    shutil.copytree(whole, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-000020"
    names = {path.name for path in newest.iterdir()}
    assert names - {"chat_template.jinja"} == set(FILES)  # none is forgotten here
    harm(newest / name)
    path, notes = find_checkpoint(tmp_path / "run", "latest")
    assert path == newest.with_name("step-000010")
    (note,) = notes
    why = "is missing" if harm is remove else "is not what was written (its SHA-256 differs)"
    if name == "manifest.json":
        why = "is damaged"
    if name == "manifest.json" and harm is remove:
        name, why = "it has no", "manifest.json"
    assert note == f"warning: checkpoint step-000020 is passed over: {name} {why}"
    says(
        refusal(find_checkpoint, tmp_path / "run", "step-000020"),
        "got 'step-000020', but",
        "is passed over:",
        "; give latest",
    )


def link(folder):
    (folder / "config.json").rename(folder.parent / "elsewhere.json")
    (folder / "config.json").symlink_to(folder.parent / "elsewhere.json")


def link_a_folder(folder):
    (folder / "processor").symlink_to(folder.parent)


def add(name):
    def put(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")

    return put


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (link, "config.json is a link"),
        (link_a_folder, "processor is a link"),
        (add("adapter_config.json"), "adapter_config.json is not in its manifest.json"),
        (add("modeling_own.py"), "modeling_own.py is not in its manifest.json"),
        (add("processor/vocab.txt"), "processor/vocab.txt is not in its manifest.json"),
        (add("README.md"), None),
        (add(".gitattributes"), None),
    ],
)
def test_what_a_save_did_not_write_is_no_part_of_a_checkpoint(tmp_path, whole, harm, why):
    shutil.copytree(whole, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-000020"
    harm(newest)
    assert problem(newest) == why
    found, notes = find_checkpoint(tmp_path / "run", "latest")
    assert found.name == ("step-000020" if why is None else "step-000010")
    assert notes == (
        [] if why is None else [f"warning: checkpoint step-000020 is passed over: {why}"]
    )


def test_a_checkpoint_that_is_a_link_is_passed_over(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-000020"
    newest.rename(tmp_path / "elsewhere")
    newest.symlink_to(tmp_path / "elsewhere")
    assert problem(newest) == "it is a link"
    assert find_checkpoint(tmp_path / "run", "latest")[0].name == "step-000010"


UNSEALED = json.dumps({"number": 1, "files": {}})
FORGED = json.dumps({"number": 1, "files": {}, "sha256": "0" * 64})


@pytest.mark.parametrize("text", ["[]", "null", "{}", "{", UNSEALED, FORGED])
def test_a_manifest_that_is_none_is_damaged(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    assert problem(tmp_path) == "manifest.json is damaged"


def test_where_all_are_damaged_the_run_is_refused_or_starts_afresh(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        flip(path / "optimizer.pt")
    why = "step-000020 is passed over: optimizer.pt"
    line = refusal(find_checkpoint, tmp_path / "run", "latest")
    says(line, "resume_from_checkpoint", f"{tmp_path}/run", why, "start anew")
    path, notes = find_checkpoint(tmp_path / "run", "auto")
    assert path is None
    assert len(notes) == 2


def test_later_and_damaged_checkpoints_are_put_aside_and_stay_until_the_next_save(tmp_path):
    _, second, _ = plain(tmp_path, "warm-start", "step-000050", "step-000100")
    (tmp_path / "torn").mkdir()
    put_aside(tmp_path, second)
    assert names_in(tmp_path) == [
        *(".aside-step-000100", ".aside-torn", "step-000050", "warm-start"),
    ]
    newest = save_plain(tmp_path, "step-000100", step=100)
    assert number_of(newest) == 3
    prune(tmp_path, 2, {newest.name})
    assert names_in(tmp_path) == ["step-000050", "step-000100", "warm-start"]
    put_aside(tmp_path, None)
    assert newest_first(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("latest", ("new holds no checkpoint", "--output-dir", "start anew")),
        ("step-000050", ("got 'step-000050'", "here: stage-1-airline, warm-start")),
        ("../other/checkpoints/step-000050", ("other/checkpoints/step-000050'", "run", "--model")),
    ],
)
def test_a_missing_checkpoint_is_refused_with_what_there_is(tmp_path, name, words):
    folder = tmp_path / "run" / "checkpoints"
    plain(folder, "stage-1-airline", "warm-start")
    (folder / ".writing-step-000010").mkdir()
    save_plain(tmp_path / "other" / "checkpoints", "step-000050")
    run = tmp_path / ("new" if name == "latest" else "run")
    given = str(tmp_path / "run" / name) if "/" in name else name
    says(refusal(find_checkpoint, run, given), "resume_from_checkpoint: ", *words)


# What is hashed


def test_a_checkpoint_of_before_a_setting_existed_resumes_with_its_default():
    config = Config()
    before = config.model_dump(mode="json")
    del before["evaluation"]["eval_greedy"], before["curriculum"]["even_branches"]
    assert refuse_changes(config, {"config": before}, "step-000001") == []
    changed = config.changed("curriculum", even_branches=True)
    says(
        refusal(refuse_changes, changed, {"config": before}, "step-000001"),
        "settings (even_branches false -> true); resume with",
    )


def test_settings_that_affect_results_are_changed_with_override_alone():
    before = {"config": Config().model_dump(mode="json")}
    changed = Config().changed("rollout", temperature=0.9).changed("run", timeout=300)
    line = refusal(refuse_changes, changed, before, "step-1")
    says(
        line, "step-1 was made with other settings (temperature 1.0 -> 0.9); ", "or add --override"
    )
    overridden = changed.changed("run", override=True)
    notes = refuse_changes(overridden, before, "step-1")
    assert notes == ["overridden since step-1: temperature 1.0 -> 0.9"]


def test_a_checkpoint_with_another_value_of_a_setting_that_is_gone_is_refused():
    before = Config().model_dump(mode="json")
    before["curriculum"]["plateau_delta"] = 0.01
    assert refuse_changes(Config(), {"config": before}, "step-000001") == []
    before["curriculum"]["plateau_delta"] = 0.05
    says(
        refusal(refuse_changes, Config(), {"config": before}, "step-000001"),
        "(plateau_delta 0.05 -> 0.01, which is fixed now)",
    )


def test_a_file_that_may_not_be_so_large_is_a_fault_of_the_machine(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as `ulimit -f` does
    try:
        with pytest.raises(Exception, match="File too large") as caught:
            save(tmp_path, "step-000001", small_model(), tokenizer(), at(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    says(str(checkpoint.full_disk(tmp_path, caught.value, "resume")), "ulimit -f", "then resume")
    assert not [*tmp_path.glob("*/model.safetensors")]
