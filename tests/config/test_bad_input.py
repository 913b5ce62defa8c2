"""Bad input: whatever is wrong is refused in one line, by what reads it.

One case of each kind goes through the whole command line: exit code 2, one line, and nothing is
written. Of each line, what it must name and what remedies it is asserted.
"""

import json
import math
import os
import shutil
import socket
import sys
import tracemalloc
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from safetensors.torch import load_file, save_file

from pipeline.checkpoints.run_folder import open_folder, take_model_of_run
from pipeline.common import children
from pipeline.common.errors import UserError
from pipeline.config.cli import parse
from pipeline.config.recipe import read_recipe
from pipeline.config.settings import Config, ModelSettings
from pipeline.data.rows import DatasetRows
from pipeline.data.tasks import load_tasks, tasks_of
from pipeline.environments.demonstrations import read_demonstrations, warm_start_demonstrations
from pipeline.environments.domains import load_domains
from pipeline.environments.embedded.airline import generate_tasks
from pipeline.environments.task_sets import split_source, task_sets
from pipeline.models.chat.template import Chat
from pipeline.models.loading import load_folder, load_model, load_tokenizer
from pipeline.models.memory import Memory
from pipeline.models.model_checks import check_model
from pipeline.models.tiny import tiny_model
from pipeline.preflight.check import refuse_full_disk
from pipeline.run import main
from pipeline.training.demonstration_checks import check_demonstrations
from tests.support.helpers import chat, embedded, tokenizer
from tests.support.messages import refusal, says

Usage = namedtuple("Usage", "total used free")
SMALL = [
    *("--domains", "airline", "--tasks-per-domain", "4", "--eval-tasks-per-domain", "2"),
    *("--validation-tasks", "2"),
]
CHECK = ["--check", *SMALL]


@pytest.fixture(autouse=True)
def _alone_on_cpu_without_network(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for module in ("models.loading", "data.datasets"):
        monkeypatch.setattr(f"pipeline.{module}.hub_reachable", lambda: False)


def the_line(said: str, folder: Path) -> str:
    assert said.startswith("error: ")
    assert said.endswith("\n")
    assert said.count("\n") == 1
    assert "Traceback" not in said
    assert os.listdir(folder / "empty") == []
    assert not (folder / "out").exists()
    return said[len("error: ") : -1].replace(str(folder / "in"), "{at}")


@pytest.fixture
def at(tmp_path, monkeypatch):
    """The folder of the input; the working directory is an empty one beside it."""
    (tmp_path / "in").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return tmp_path / "in"


def filled(argv: list[str], at: Path) -> list[str]:
    return [part.replace("{at}", str(at)) for part in argv]


def cases(table: list[tuple]) -> pytest.MarkDecorator:
    """Parametrizes by rows of (name, ..., what the line must say)."""
    return pytest.mark.parametrize("case", [row[1:] for row in table], ids=[r[0] for r in table])


# Numbers of tasks

SIZES = [
    (
        "more tasks than are generated",
        ["--tasks-per-domain", "100001"],
        ("tasks of airline", "100001", "task file"),
    ),
    (
        "more demonstrations than are generated",
        ["--warm-start-steps", "10000"],
        ("warm_start", "10000 steps", "give fewer"),
    ),
]


@cases(SIZES)
def test_more_than_is_generated(case):
    argv, words = case
    config = parse(argv)
    domains = load_domains(config)

    def generate() -> None:
        check_demonstrations(config, domains, warm_start_demonstrations(config, domains), chat())
        task_sets(config, domains["airline"])

    says(refusal(generate), *words)


# Task files

ROW = {"id": "a", "prompt": [{"role": "user", "content": "hello"}], "payload": {}}
GOOD = generate_tasks(9, 1, "train", "medium")[0]


def row(**fields) -> str:
    return json.dumps({**ROW, **fields})


def flawed(**changes) -> str:
    """A task of the airline with other values in its payload."""
    return row(prompt=list(GOOD.prompt), payload={**json.loads(GOOD.payload), **changes})


TASK_FILES = [
    ("an empty file", "", ("no tasks", "expected one JSON object")),
    ("a truncated line", row()[:30], ("line 1", "not JSON", "mend")),
    ("another encoding", row().replace("hello", "h\xe9llo").encode("latin-1"), ("UTF-8", "0xe9")),
    ("two bytes a character", row().encode("utf-16"), ("cannot be read", "UTF-8")),
    ("an id used twice", f"{row()}\n{row()}", ("line 2", "'a'", "already used")),
    ("no id", '{"prompt": []}', ("line 1", "id: got None", "give")),
    ("no prompt", '{"id": "a"}', ("line 1", "prompt", "non-empty list")),
    ("no object", "[3]", ("task 1", "got int", "object")),
    ("an unknown key", row(goal=1), ("line 1", "'goal'", "a task has")),
    (
        "a message without content",
        row(prompt=[{"role": "user"}]),
        ("prompt", "{'role': 'user'}", "role and content"),
    ),
    (
        "a long message of a wrong kind",
        row(prompt=[{"role": "boss", "content": "x" * 100_000}]),
        ("prompt", "'boss'", "xxx...", "role and content"),
    ),
    (
        "a tool call without a name",
        row(prompt=[{"role": "assistant", "content": "", "tool_calls": [{}]}, *ROW["prompt"]]),
        ("prompt", "tool calls [{}]", "give"),
    ),
    ("a payload that is a list", row(payload=[]), ("payload", "got []", "give")),
    ("a payload of text", row(payload="3"), ("payload", "got 3", "object")),
    (
        "a payload that its environment cannot use",
        row(),
        ("task 'a'", "payload", "KeyError: 'database'", "mend"),
    ),
    (
        "facts that are no list",
        flawed(facts="20"),
        ("task 'a'", "payload", "ValidationError", "mend"),
    ),
    (
        "gold actions that do not execute",
        flawed(goal={"family": "cancel", "record": "K99"}),
        ("task 'a'", "KeyError: 'status'", "mend goal"),
    ),
    (
        "gold actions that lead elsewhere",
        flawed(expected={"reservations": {}, "flights": {}}),
        ("task 'a'", "reward 0", "mend goal"),
    ),
    (
        "a request of a million characters",
        row(prompt=[{"role": "user", "content": "x" * 1_000_001}]),
        ("prompt", "1000000 characters", "shorten"),
    ),
    ("a line of 10 MB", row(id="x" * 10_000_000), ("line 1", "8 MiB", "its own")),
    (
        "a row of 10 MB in an array",
        f"[{row(payload={'x': 'x' * 10_000_000})}]",
        ("task 1", "8 MiB", "shorten"),
    ),
    ("deep nesting", "[" * 100_000, ("64 levels", "mend the file")),
    (
        "a payload that is nested deeply",
        row(payload="[" * 100_000),
        ("payload", "64 levels", "give"),
    ),
    (
        "a payload that is nested less deeply than Python can bear",
        '{"id": "a", "payload": ' + '{"a": ' * 70 + "1" + "}" * 71,
        ("line 1", "64 levels", "mend"),
    ),
    ("NaN", row(payload={"x": math.nan}), ("line 1", "NaN", "mend")),
    ("a number too large", '{"id": 1e999}', ("line 1", "1e999", "mend")),
    ("a number without an end", '{"id": ' + "9" * 5000 + "}", ("line 1", "4300 digits", "mend")),
    ("half of a character", '{"id": "\\ud800"}', ("line 1", "surrogate", "mend")),
    ("two lines in an id", row(id="a\nb", prompt=3), ("'a\\nb'", "prompt", "give")),
]


def tasks_in(path: Path) -> None:
    """Read and try the tasks of the airline that a path leads to."""
    config = Config.model_validate({"data": {"tasks": {"airline": str(path)}}})
    split_source(config, embedded("airline")["airline"], [], validation=[], read=None)


@cases(TASK_FILES)
def test_a_bad_task_file(case, at):
    content, words = case
    path = at / "own.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refusal(tasks_in, path)
    says(line, "own.jsonl", *words)
    assert len(line) < 1000 + len(str(at))


def loop(path: Path) -> None:
    path.symlink_to(path)


CONFIG = "configs:\n- config_name: default\n  data_files: own.jsonl\n"


def folder(files: dict[str, str], links: dict[str, str] | None = None):
    """Makes a folder of data with these files and links, beside a file that is no part of it.

    A guarded host would be asked for by `socket`.
    """

    def make(path: Path) -> None:
        (path.parent / "secret.jsonl").write_text(row())
        for name, text in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
        for name, target in (links or {}).items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).symlink_to(target)

    return make


def carded(card: str):
    return folder({"own.jsonl": row(), "README.md": f"---\n{card}---\n"})


def naming(file: str):
    return carded(CONFIG.replace("own.jsonl", file))


LAUGHING = "a0: &a0 [lol]\n" + "".join(  # a few lines whose value has a billion texts
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


TASK_SOURCES = [
    ("no file", "own.jsonl", lambda path: None, ("no file", "existing file")),
    ("a loop of links", "own.jsonl", loop, ("no file", "existing file")),
    (
        "a link to nothing",
        "own.jsonl",
        lambda path: path.symlink_to("nothing"),
        ("no file", "existing file"),
    ),
    ("a pipe", "own.jsonl", os.mkfifo, ("no file", "existing file")),
    (
        "a device",
        "own.jsonl",
        lambda path: path.symlink_to("/dev/zero"),
        ("no file", "existing file"),
    ),
    ("an empty folder", "own.jsonl", Path.mkdir, ("dataset_train_split", "hub id")),
    (
        "a folder that names a file elsewhere",
        "own",
        naming("../secret.jsonl"),
        ("secret.jsonl' outside", "hub id"),
    ),
    (
        "saved data that names a file elsewhere",
        "own",
        folder({"state.json": json.dumps({"_data_files": [{"filename": "../x.arrow"}]})}),
        ("state.json", "'../x.arrow'", "hub id"),
    ),
    (
        "a split elsewhere",
        "own",
        folder({"dataset_dict.json": json.dumps({"splits": ["../../elsewhere"]})}),
        ("dataset_dict.json", "'../../elsewhere'", "hub id"),
    ),
    (
        "a URL",
        "own",
        naming("https://host.invalid/x.jsonl"),
        ("'https://host.invalid/x.jsonl' ou",),
    ),
    (
        "a URL in an archive",
        "own",
        naming("zip://x::s3://b/x.zip"),
        ("'zip://x::s3://b/x.zip' ou",),
    ),
    ("a file of the hub", "own", naming("hf://datasets/a/b/x.jsonl"), ("'hf://datasets/a/b/x.js",)),
    (
        "one URL of two",
        "own",
        naming("[own.jsonl, 's3://b/x.jsonl']"),
        ("'s3://b/x.jsonl' outside",),
    ),
    (
        "a URL of a split",
        "own",
        naming("[{split: train, path: [ftp://host.invalid/x.json]}]"),
        ("README.md names the file 'ftp://host.invalid/x.json' outside",),
    ),
    (
        "a URL of another configuration",
        "own",
        carded(CONFIG + CONFIG.partition("\n")[2].replace("own", "http://host.invalid/x")),
        ("README.md names the file 'http://host.invalid/x.jsonl' outside",),
    ),
    (
        "a URL in a file of settings",
        "own",
        folder({".huggingface.yaml": CONFIG.replace("own.jsonl", "gs://b/x.jsonl")}),
        (".huggingface.yaml names the file 'gs://b/x.jsonl' outside",),
    ),
    ("a path", "own", naming("/etc/hosts.json"), ("'/etc/hosts.json' outside of it", "hub id")),
    ("a folder", "own", carded(CONFIG + "  data_dir: a/../..\n"), ("'a/../..' outside of it",)),
    (
        "a list in itself",
        "own",
        carded("configs:\n- config_name: a\n  data_files: &b [*b, 's3://b/x']\n"),
        ("README.md cannot be read (maximum recursion",),
    ),
    ("a billion texts", "own", carded(LAUGHING), ("README.md takes more than", "shorten it")),
    (
        "a link to a file",
        "own",
        folder({}, {"train.jsonl": "/etc/hosts"}),
        ("'train.jsonl' is a link that leads out of it",),
    ),
    (
        "a deep link",
        "own",
        folder({}, {"data/train.jsonl": "../../secret.jsonl"}),
        ("own/data/train.jsonl' outside of it",),
    ),
    (
        "a linked split",
        "own",
        folder({"dataset_dict.json": '{"splits": ["train"]}'}, {"train": ".."}),
        ("'train' is a link that leads out of it", "hub id"),
    ),
    (
        "files whose rows name files",
        "own",
        folder({"secret.png": ""}),
        ("imagefolder", "json", "hub id"),
    ),
]


@cases(TASK_SOURCES)
def test_a_bad_place_for_tasks(case, at, monkeypatch):
    name, make, words = case
    make(at / name)
    monkeypatch.setattr(children, "MAX_BYTES", 64 << 20)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **_: pytest.fail(f"asked {asked}"))
    says(refusal(tasks_in, at / name), "tasks: airline", f"{at}/{name}", *words)


def test_a_file_of_one_endless_line_is_refused_without_reading_it(tmp_path):
    for name, message in (
        ("a.jsonl", "line 1: more than 8 MiB"),
        ("a.json", "more than 262144 KiB"),
    ):
        with open(tmp_path / name, "wb") as file:
            file.truncate(1 << 32)
        tracemalloc.start()
        with pytest.raises(UserError, match=message):
            load_tasks(tmp_path / name, "airline")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 50_000_000


def test_a_pipe_is_never_opened(tmp_path):
    os.mkfifo(tmp_path / "own.jsonl")
    for read in (lambda path: load_tasks(path, "airline"), read_demonstrations, read_recipe):
        says(refusal(read, tmp_path / "own.jsonl"), "own.jsonl' is no regular file")


def test_rows_of_a_dataset_are_held_to_the_same_limits():
    def refused(dataset: Dataset) -> str:
        return refusal(lambda: tasks_of(DatasetRows(dataset, "desk"), "airline"))

    features = Features({"id": Value("string"), "prompt": List({"content": Image()})})
    rows = {"id": ["a"], "prompt": [[{"content": {"path": "/etc/hostname", "bytes": None}}]]}
    says(refused(Dataset.from_dict(rows, features=features)), "desk", "Image", "take it out")
    struct = Dataset.from_list([{**ROW, "payload": {"x": math.nan}}])
    says(refused(struct), "desk: payload", "struct", "as JSON text")
    long = Dataset.from_list([{**ROW, "payload": f'"{"x" * 10_000_000}"'}])
    says(refused(long), "desk[0] (task 'a'): payload: ", "8 MiB", "shorten")


# Demonstrations

ASK, SAY = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "Done."}


def talk(*messages, **fields) -> str:
    return json.dumps({"messages": list(messages), **fields})


DEMONSTRATIONS = [
    ("an empty file", "", ("no demonstrations", "give")),
    ("a truncated line", talk(ASK, SAY)[:40], ("line 1", "not JSON", "mend")),
    ("no messages", "{}", ("line 1", "messages", "give")),
    ("no answer", talk(ASK), ("line 1", "assistant message")),
    ("no request", talk(SAY, ASK), ("line 1", "starts with a request")),
    (
        "an unknown role",
        f"{talk(ASK, SAY)}\n{talk({**ASK, 'role': 'boss'}, SAY)}",
        ("line 2", "'boss'", "give"),
    ),
    (
        "a call without a name",
        talk(ASK, {**SAY, "tool_calls": [{"function": {}}]}),
        ("line 1", "tool calls", "give"),
    ),
    ("tools that are no list", talk(ASK, SAY, tools="x"), ("line 1", "tools", "'x'", "give")),
    ("tools without names", talk(ASK, SAY, tools=[{"x": 1}]), ("chat template refuses", "user")),
    ("deep nesting", "[" * 100_000, ("line 1", "64 levels", "mend")),
    (
        "an answer of a million characters",
        talk(ASK, {**SAY, "content": "x" * 1_000_001}),
        ("line 1", "1000000 characters", "shorten"),
    ),
    ("a line of 10 MB", talk({**ASK, "content": "x" * 10_000_000}, SAY), ("line 1", "8 MiB")),
    ("NaN", talk(ASK, SAY, x=math.nan), ("line 1", "NaN", "mend")),
]


@cases([*DEMONSTRATIONS, ("no file", None, ("No such file", "check the path"))])
def test_bad_demonstrations(case, at):
    content, words = case
    path = at / "own.jsonl"
    if content is not None:
        path.write_text(content)
    config = Config.model_validate({"data": {"demonstrations": {"airline": str(path)}}})
    domains = embedded("airline")
    shown = warm_start_demonstrations(config, domains)
    says(refusal(check_demonstrations, config, domains, shown, chat()), "own.jsonl", *words)


# Models


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    tiny_model(tokenizer(), 0).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def holding(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


def setting(name: str, **values):
    def change(folder: Path) -> None:
        held = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**held, **values}))

    return change


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": torch.ones(128)}, folder / "pytorch_model.bin")


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def incomplete(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def indexed(name: str):
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "shard.safetensors")
        index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def linked(name: str, to: str = "outside"):
    """A model whose file, or folder, is a link to one beside the model's folder."""

    def change(folder: Path) -> None:
        target, link = folder.parent / to, folder / name
        link.parent.mkdir(exist_ok=True)
        if link.exists():
            link.rename(target)
        else:
            target.mkdir()
        link.symlink_to(os.path.relpath(target, link.parent))

    return change


def adapters(has_weights: bool = True, **values):
    def change(folder: Path) -> None:
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "x/y"}
        (folder / "adapter_config.json").write_text(json.dumps({**config, **values}))
        torch.save({}, folder / "adapter_model.bin")
        if has_weights:
            save_file({}, folder / "adapter_model.safetensors")

    return change


MODELS = [
    (
        "an empty folder",
        lambda folder: [path.unlink() for path in folder.iterdir()],
        ("tokenizer", "without config.json", "save_pretrained"),
    ),
    (
        "a chat template that is broken",
        holding("chat_template.jinja", "{% for x in %}"),
        ("chat template refuses",),
    ),
    ("a pickle only", pickled, ("no file named model.safetensors", "save_pretrained")),
    (
        "no weights",
        lambda folder: (folder / "model.safetensors").unlink(),
        ("no file named model.safetensors", "save_pre"),
    ),
    ("weights cut short", cut, ("its model cannot be loaded", "not fully covered")),
    ("a missing shard", indexed("other.safetensors"), ("other.safetensors", "No such file")),
    ("a shard outside", indexed("../outside.safetensors"), ("names '../outside.safetensors' ou",)),
    ("a shard of the system", indexed("/etc/hosts"), ("it names '/etc/hosts' outside of it",)),
    (
        "a shard behind a folder",
        indexed("a/../../outside.safetensors"),
        ("it names 'a/../../outside.safetensors' outside of it",),
    ),
    (
        "weights outside",
        setting("config.json", transformers_weights="../outside.safetensors"),
        ("it names '../outside.safetensors' outside of it",),
    ),
    (
        "weights that are no text",
        setting("config.json", transformers_weights=5),
        ("its model cannot be loaded",),
    ),
    ("a linked tokenizer", linked("tokenizer.json"), ("'tokenizer.json' is a link that leads",)),
    ("linked weights", linked("model.safetensors"), ("'model.safetensors' is a link that leads",)),
    (
        "linked settings",
        linked("config.json"),
        ("'config.json' is a link that leads", "links may lead only inside", "cp -rL FOLDER COPY"),
    ),
    (
        "linked templates",
        linked("additional_chat_templates"),
        ("'additional_chat_templates' is a link that leads out of it", "save_pretrained"),
    ),
    ("not all weights", incomplete, ("model.norm.weight", "config.json", "take both")),
    (
        "settings that are no JSON",
        holding("config.json", "{no"),
        ("config.json", "not a valid JSON", "give"),
    ),
    (
        "settings that are no object",
        holding("config.json", "[1]"),
        ("tokenizer cannot be loaded", "give"),
    ),
    (
        "settings of another size",
        setting("config.json", head_dim=64),
        ("k_norm", "[32]", "[64]", "take both"),
    ),
    (
        "weights of its own choice",
        setting("config.json", transformers_weights="adapter_model.bin"),
        ("its model cannot be loaded", "adapter_model.bin"),
    ),
    (
        "a setting of a wrong type",
        setting("config.json", hidden_size="x"),
        ("tokenizer cannot be loaded", "Validation error"),
    ),
    (
        "a kind of model that nobody knows",
        setting("config.json", model_type="zzz"),
        ("configuration cannot be loaded", "checkpoint you are"),
    ),
    (
        "code of its own",
        setting(
            "config.json",
            model_type="own",
            auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
        ),
        ("configuration cannot be loaded", "custom code", "trust_remote_code"),
    ),
    (
        "a tokenizer of more words",
        setting("config.json", vocab_size=898, pad_token_id=0, eos_token_id=1),
        ("tokenizer", "898", "trained with"),
    ),
    (
        "a tokenizer that is no JSON",
        holding("tokenizer.json", "{no"),
        ("tokenizer cannot be loaded", "Expecting property name"),
    ),
    (
        "a tokenizer that is no object",
        holding("tokenizer.json", "[]"),
        ("tokenizer cannot be loaded", "give"),
    ),
    (
        "a response template that is none",
        setting("tokenizer_config.json", response_template={"fields": {}}),
        ("response template", "response_template.fields"),
    ),
    (
        "adapters in a pickle",
        adapters(has_weights=False),
        ("adapter_model.safetensors", "No such file", "copy it again"),
    ),
    ("adapters of another kind", adapters(peft_type="IA3"), ("adapter_config.json", "plain LoRA")),
    (
        "adapters that import a module",
        adapters(megatron_config={}, megatron_core="antigravity"),
        ("adapter_config.json", "plain LoRA"),
    ),
    (
        "adapters of themselves",
        adapters(base_model_name_or_path="own"),
        ("base_model_name_or_path", "mend"),
    ),
    (
        "adapters of nothing",
        adapters(base_model_name_or_path=None),
        ("no base model", "adapter_config.json", "enter"),
    ),
]


def load(name: str | Path, **settings: str) -> None:
    """All that is checked of a model before its weights are loaded."""
    config = Config.model_validate({"model": {"model": str(name), **settings}})
    tokenizer = load_tokenizer(config.model)
    Chat(tokenizer)
    check_model(config, tokenizer)


@cases(MODELS)
def test_a_bad_model(case, whole, at):
    change, words = case
    folder = at / "own"
    shutil.copytree(whole, folder)
    change(folder)
    line = refusal(load, folder)
    says(line, "model: ", *words)
    assert len(line) < 1000 + 2 * len(str(at))


def test_links_inside_a_folder_or_a_repository_of_the_hubs_cache_are_followed(whole, at):
    repository = at / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0123", repository / "blobs"
    shutil.copytree(whole, blobs)
    indexed("shard.safetensors")(blobs)
    index = json.loads((blobs / "model.safetensors.index.json").read_text())
    names = load_file(blobs / "shard.safetensors")
    index["weight_map"] = dict.fromkeys(names, "shard.safetensors")
    (blobs / "model.safetensors.index.json").write_text(json.dumps(index))
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    load(snapshot)
    (at / "other").symlink_to(snapshot)  # the user's own link
    load(at / "other")
    (snapshot / "chat_template.jinja").unlink(missing_ok=True)
    (snapshot / "chat_template.jinja").symlink_to("../../../template")
    says(refusal(load, at / "other"), "'chat_template.jinja' is a link that leads out of it")


NAMES = [
    ("no folder", "{at}/none", "there is no such folder"),
    ("a file", "{at}/file", "which is no folder"),
    ("a device", "/dev/zero", "which is no folder"),
    ("a name of three parts", "a/b/c", "there is no such folder"),
]


@cases(NAMES)
def test_a_bad_name_of_a_model(case, at):
    name, reason = case
    (at / "file").write_text("")
    [name] = filled([name], at)
    says(refusal(load, name), f"model: got '{name}'", reason, "save_pretrained")


def test_a_run_without_a_whole_checkpoint_is_no_model(at):
    (at / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    (at / "new").mkdir()
    (at / "new" / "config.yaml").write_text("run: {}")
    for name, why in (("run", "step-000001 is passed over: it has no manifest"), ("new", "none")):
        line = refusal(take_model_of_run, parse(["--model", str(at / name)]))
        says(line, f"model: got '{at}/{name}', a run without", why, "or give another model")


def test_an_attention_that_there_is_not_is_refused(whole):
    line = refusal(partial(load, whole, attn_implementation="flesh"))
    says(line, f"model: got '{whole}'", "its model cannot be loaded", "flesh")


# The folder of the run

FOLDERS = [
    ("a file in its place", "{at}/file", ("{at}/file' is no folder", "another folder")),
    ("a file on its way", "{at}/file/a/b", ("{at}/file' is no folder", "another folder")),
    (
        "a place that cannot be written to",
        "/proc/own",
        ("'/proc/own'", "'/proc' is no folder that can be written to", "another folder"),
    ),
    ("a link to nothing", "{at}/link", ("{at}/link' is no folder", "another folder")),
    (
        "a name too long",
        "{at}/" + "x" * 300,
        ("cannot be written to", "too long", "another folder"),
    ),
    ("another run", "{at}/run", ("{at}/run holds a run", "--resume-from-checkpoint")),
]


@cases(FOLDERS)
def test_a_bad_folder_for_the_run(case, at):
    name, words = case
    (at / "file").write_text("")
    (at / "link").symlink_to("nothing")
    (at / "run").mkdir()
    (at / "run" / "config.yaml").write_text("run: {}")
    before = sorted(at.rglob("*"))
    line = refusal(lambda: open_folder(parse(filled(["--output-dir", name], at))))
    says(line, "output_dir: ", *filled(words, at))
    assert sorted(at.rglob("*")) == before


def test_a_disk_without_room_for_two_checkpoints_is_refused(tmp_path, monkeypatch):
    config = Config.model_validate({"run": {"output_dir": str(tmp_path / "out")}})
    memory = Memory(config)
    refuse_full_disk(memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total=1 << 40, used=0, free=1 << 20))
    line = refusal(refuse_full_disk, memory)
    says(line, "output_dir", "two checkpoints", "make room")


# Weights as they are loaded


def test_weights_that_a_model_does_not_use_are_told(whole, tmp_path, capsys):
    folder = tmp_path / "own"
    shutil.copytree(whole, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "other": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    load_folder(folder, ModelSettings())
    said = capsys.readouterr().err
    says(said, f"warning: {folder} holds 1 weights that the model does not use, such as other")


def test_code_that_comes_with_a_model_runs_only_where_it_is_allowed(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    folder = tmp_path / "own"
    shutil.copytree(whole, folder)
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    setting("config.json", model_type="own", auto_map=classes)(folder)
    (folder / "own.py").write_text("raise RuntimeError('the code ran')")
    says(
        refusal(load_model, ModelSettings(model=str(folder)), tokenizer(), 0),
        "set trust_remote_code, which runs it",
    )
    says(
        refusal(
            load_model, ModelSettings(model=str(folder), trust_remote_code=True), tokenizer(), 0
        ),
        "the code ran",
    )


# One of each kind as a person sees it

LINES = [
    (
        "a recipe",
        ["--config", "{at}/own.yaml"],
        ("{at}/own.yaml: ", "grpo.betta", "did you mean beta?"),
    ),
    (
        "a flag",
        ["--group-size", "1"],
        ("--num-generations: got 1", "greater than or equal to 2"),
    ),
    (
        "tasks",
        ["--tasks", "{airline: '{at}/tasks.jsonl'}"],
        ("{at}/tasks.jsonl, line 2: task id 'a'", "{at}/tasks.jsonl, line 1", "its own id"),
    ),
    (
        "a place for tasks",
        ["--tasks", "{airline: '{at}/none.jsonl'}"],
        ("tasks: airline: got '{at}/none.jsonl'", "give an existing file"),
    ),
    (
        "demonstrations",
        ["--demonstrations", "{airline: '{at}/talk.jsonl'}"],
        ("{at}/talk.jsonl, line 1: messages: give", "role and content"),
    ),
    (
        "a model",
        ["--model", "{at}/model"],
        ("model: {at}/model ", "k_norm", "[32]", "[64]", "take both"),
    ),
    (
        "a folder",
        ["--output-dir", "{at}/own.yaml"],
        ("output_dir: got '{at}/own.yaml'", "no folder", "name another folder"),
    ),
    (
        "a world",
        ["--num-gpus", "0"],
        ("--num-gpus: got 0", "greater than 0"),
    ),
    (
        "an environment",
        ["--domains", "bank", "--environments", "{bank: no_bank:Bank}"],
        ("environments: bank: got 'no_bank:Bank'", "No module named", "module:name"),
    ),
    (
        "an environment that interrupts",
        ["--domains", "bank", "--environments", "{bank: interrupts:Bank}"],
        ("environments: bank: ", "KeyboardInterrupt (interrupts.py, line 1: raise Key", "mend"),
    ),
    (
        "a checkpoint",
        ["--resume-from-checkpoint", "latest"],
        ("resume_from_checkpoint: ", "give --output-dir"),
    ),
]


@pytest.fixture
def mistakes(whole, at, monkeypatch):
    """The folder of the input with one mistake of each kind."""
    shutil.copytree(whole, at / "model")
    setting("config.json", head_dim=64)(at / "model")
    (at / "own.yaml").write_text("grpo: {betta: 1}")
    (at / "tasks.jsonl").write_text(f"{row()}\n{row()}")
    (at / "talk.jsonl").write_text("{}")
    (at / "interrupts.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(str(at))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return at


@cases(LINES)
def test_the_command_line_ends_with_code_2_and_one_line(case, mistakes, tmp_path, capsys):
    argv, (start, *words) = case
    code = main([*CHECK, *filled(argv, mistakes)])
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    line = the_line(said.err, tmp_path)
    assert line.startswith(start)
    says(line, *words)
