"""Bad input: whatever is wrong is refused with exit code 2 and one line, and nothing is written."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from safetensors.torch import load_file, save_file

from pipeline.config.recipe import read_recipe
from pipeline.config.settings import Config, ModelSettings
from pipeline.data.demonstrations import read_demonstrations
from pipeline.data.rows import DatasetRows
from pipeline.data.tasks import load_tasks, tasks_of
from pipeline.embedded.airline import generate_tasks
from pipeline.errors import UserError
from pipeline.models import lora
from pipeline.models.loading import load_folder, load_model
from pipeline.models.tiny import tiny_model
from pipeline.preflight.check import refuse_full_disk
from pipeline.run import main
from tests.support import ROOT
from tests.support.helpers import tokenizer

Usage = namedtuple("Usage", "total used free")
SMALL = ["--domains", "airline", "--tasks-per-domain", "4", "--eval-tasks-per-domain", "2"]
SMALL += ["--eval-steps-tasks", "2"]
CHECK = ["--check", *SMALL]


@pytest.fixture(autouse=True)
def _alone_on_cpu_without_network(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for module in ("models.loading", "models.shapes", "data.datasets"):
        monkeypatch.setattr(f"pipeline.{module}.hub_reachable", lambda: False)


@pytest.fixture
def refuse(tmp_path, monkeypatch, capsys):
    """Runs a command line in an empty folder; its one line, with {at} for the input's folder."""
    (tmp_path / "in").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")

    def run(argv: list[str]) -> str:
        capsys.readouterr()
        code = main(argv)
        said = capsys.readouterr()
        assert (code, said.out) == (2, "")
        return the_line(said.err, tmp_path)

    return run


def the_line(said: str, folder: Path) -> str:
    assert said.startswith("error: ")
    assert said.endswith("\n")
    assert said.count("\n") == 1
    assert "Traceback" not in said
    assert os.listdir(folder / "empty") == []
    assert not (folder / "out").exists()
    return said[len("error: ") : -1].replace(str(folder / "in"), "{at}")


def cases(table: list[tuple]) -> pytest.MarkDecorator:
    """Parametrizes by rows of (name, ..., message)."""
    return pytest.mark.parametrize("case", [row[1:] for row in table], ids=[r[0] for r in table])


# Recipes

RECIPES = [
    ("an unknown key", "grpo: {betta: 1}", "unknown setting grpo.betta; did you mean beta?"),
    ("an unknown section", "gpro: {}", "unknown section gpro; did you mean grpo?"),
    ("a wrong type", "run: {seed: one}", "run.seed: got 'one'; give a whole number at least 0"),
    (
        "a negative number",
        "warm_start: {steps: -1}",
        "warm_start.steps: got -1; give a whole number at least 0",
    ),
    (
        "a group of one",
        "rollout: {num_generations: 1}",
        "rollout.num_generations: got 1; give a whole number at least 2",
    ),
    (
        "a turn longer than an episode",
        "rollout: {max_tokens: 30}",
        "max_tokens: got 30, with max_tokens_per_turn 40; give an episode (prompt included) more "
        "than one turn",
    ),
    (
        "replaced groups that are kept",
        "grpo: {dynamic_sampling: true, drop_dead_groups: false}",
        "drop_dead_groups: got false with dynamic_sampling, which trains on others in their "
        "place; take one of the two out",
    ),
    (
        "a bound that its loss does not use",
        "grpo: {loss_type: cispo, epsilon_high: 5, delta: 7}",
        "delta: not used by loss_type cispo; take it out",
    ),
    (
        "a scaled learning rate without its reference",
        "grpo: {scale_lr: sqrt}",
        "scale_lr: got sqrt without reference_tasks_per_step; give the tasks_per_step that "
        "learning_rate was chosen for",
    ),
    (
        "a batch size per device",
        "grpo: {per_device_train_batch_size: 4}",
        "per_device_train_batch_size is not used here: a step is tasks_per_step groups of "
        "num_generations over all ranks, whatever the number of ranks, and micro-batches come "
        "from max_tokens_per_microbatch; set these",
    ),
    (
        "an empty file",
        "",
        "got no mapping; write sections (model, data, warm_start, curriculum, rollout, grpo, "
        "evaluation, run, tracking)",
    ),
    (
        "no YAML",
        "run: {seed: 1",
        "expected ',' or '}', but got '<stream end>'; correct the YAML",
    ),
    ("two values of a key", "run: {seed: 1, seed: 2}", "seed is given twice; correct the YAML"),
    (
        "deep nesting",
        "model: " + "[" * 30000,
        "nested more than 16 levels deep; correct the YAML",
    ),
    (
        "aliases that multiply",
        "a: &a [x, x, x]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\nd: [*c, *c, *c]",
        "*a stands for a list, a mapping or a long text; write it out; correct the YAML",
    ),
    (
        "an alias of itself",
        "model: &a {chat_template_kwargs: *a}",
        "*a stands for a list, a mapping or a long text; write it out; correct the YAML",
    ),
    (
        "aliases of a long text",
        f"tracking: {{tags: [&a {'x' * 9000}, *a, *a, *a, *a, *a, *a, *a, *a]}}",
        "*a stands for a list, a mapping or a long text; write it out; correct the YAML",
    ),
    (
        "a tag",
        "run: {seed: !!python/object/apply:os.getpid []}",
        "could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.getpid'; correct the YAML",
    ),
    (
        "a tag that does not fit",
        "run: {check: !!bool perhaps}",
        "'perhaps' cannot be read as bool; correct the YAML",
    ),
    (
        "a number without an end",
        f"run: {{seed: {'9' * 5000}}}",
        f"'{'9' * 199}... cannot be read as int; correct the YAML",
    ),
    (
        "a number that no library takes",
        "run: {seed: 4294967296}",
        "run.seed: got 4294967296; give at most 4294967295",
    ),
    (
        "a number that no library takes, with a point",
        "grpo: {max_steps: 4294967296.0}",
        "grpo.max_steps: got 4294967296; give at most 4294967295",
    ),
    (
        "no number",
        "model: {chat_template_kwargs: {a: .nan}}",
        "model.chat_template_kwargs: got nan; give a finite number",
    ),
    ("another encoding", b"run: {seed: 1} # \xe9", "cannot be read ('utf-8' codec can't decode "),
    ("two bytes a character", "run: {}".encode("utf-16-le"), "unacceptable character #x0000: "),
    ("a large file", "#" * 70_000, "got more than 64 KiB, which is no recipe; give the path of "),
    (
        "half of a character",
        'tracking: {project: "\\ud800"}',
        "tracking.project: got '\\ud800'; give text that UTF-8 can write",
    ),
    (
        "a path that no system takes",
        'run: {output_dir: "a\\0b"}',
        "run.output_dir: got 'a\\x00b'; give text that UTF-8 can write",
    ),
    (
        "a name that leaves the folder",
        "recipe: ../../x",
        "recipe: got '../../x', after which run folders are called; give a name of at most 100 "
        "characters without / (recipe: NAME)",
    ),
    ("a key of two lines", '"a\\nb": 1', "unknown section a b; --help lists all"),
    (
        "a password",
        "model: {model: 'https://me:secret@hub.example/x'}",
        "model.model: holds a password or a token, which the run's files would show; give it in "
        "the environment, as HF_TOKEN or WANDB_API_KEY",
    ),
]


@cases(RECIPES)
def test_a_bad_recipe(case, refuse, tmp_path):
    content, message = case
    path = tmp_path / "in" / "own.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refuse(["--check", "--config", str(path)])
    told = re.sub(r"^\{at\}/own\.yaml(, line \d+)?: ", "", line)
    assert told[: len(message)] == message
    assert len(line) < 600
    assert "secret" not in line


# The command line

FLAGS = [
    ("an unknown flag", ["--sed", "1"], "unknown flag --sed; did you mean --seed?"),
    ("a flag without its value", ["--seed"], "--seed: expected one argument; --help shows what "),
    ("a wrong value", ["--seed", "{"], "--seed: got '{'; give a whole number at least 0"),
    ("a folder as recipe", ["--config", "{at}"], "--config: got '{at}', which is no file; give "),
    ("a device as recipe", ["--config", "/dev/zero"], "--config: got '/dev/zero', which is no "),
    ("a name too long", ["--config", "x" * 5000], f"--config: got '{'x' * 199}..., which is no "),
    ("deep nesting", ["--stage-weights", "{a: " * 5000], "--stage-weights: got '{a: {a: {a: "),
    ("no text", ["--run-name", "\udcff"], "--run-name: got '\\udcff'; give text"),
    (
        "more tasks than are generated",
        ["--tasks-per-domain", "100001"],
        "tasks of airline: got 100001, but at most 100000 are generated; give a task file",
    ),
    (
        "more demonstrations than are generated",
        ["--warm-start-steps", "10000"],
        "warm_start: got 10000 steps of 32 demonstrations, but the experts give at most 100000 a "
        "domain; give fewer",
    ),
    ("a token", ["--tags", "hf_" + "a" * 34], "--tags: holds a password or a token, which the "),
    (
        "a password in a wrong place",
        ["--config", "https://me:my@secret@hub.example/x"],
        "--config: got 'https://***@hub.example/x', which is no file; give ",
    ),
]


@cases(FLAGS)
def test_a_bad_command_line(case, refuse, tmp_path):
    argv, message = case
    line = refuse(["--check", *(part.replace("{at}", str(tmp_path / "in")) for part in argv)])
    assert line[: len(message)] == message
    assert len(line) < 600
    assert "secret" not in line


# Task files

ROW = {"id": "a", "prompt": [{"role": "user", "content": "hello"}], "payload": {}}
GOOD = generate_tasks(9, 1, "train", "medium")[0]


def row(**fields) -> str:
    return json.dumps({**ROW, **fields})


def flawed(**changes) -> str:
    """A task of the airline with other values in its payload."""
    return row(prompt=list(GOOD.prompt), payload={**json.loads(GOOD.payload), **changes})


TASK_FILES = [
    ("an empty file", "", "holds no tasks; expected one JSON object per line or one JSON array"),
    ("a truncated line", row()[:30], "line 1: not JSON (Expecting "),
    (
        "another encoding",
        row().replace("hello", "h\xe9llo").encode("latin-1"),
        "cannot be read as a UTF-8 task file ('utf-8' codec can't decode byte 0xe9 in ",
    ),
    ("two bytes a character", row().encode("utf-16"), "cannot be read as a UTF-8 task file ("),
    (
        "a byte order mark",
        "\ufeff" + row(),
        "line 1: not JSON (it starts with a byte order mark); ",
    ),
    ("an id used twice", f"{row()}\n{row()}", "line 2: task id 'a' was already used at {at}/"),
    ("no id", '{"prompt": []}', "line 1: id: got None; give a non-empty string"),
    ("no prompt", '{"id": "a"}', "line 1 (task 'a'): prompt: give a non-empty list of messages"),
    ("no object", "[3]", "task 1: got int; a task is one JSON object"),
    ("an unknown key", row(goal=1), "line 1: unknown key ['goal']; a task has branch, domain, "),
    (
        "a message without content",
        row(prompt=[{"role": "user"}]),
        "line 1 (task 'a'): prompt: bad message {'role': 'user'}; give role and content",
    ),
    (
        "a long message of a wrong kind",
        row(prompt=[{"role": "boss", "content": "x" * 100_000}]),
        f"line 1 (task 'a'): prompt: bad message {{'role': 'boss', 'content': '{'x' * 171}...; "
        "give role and content",
    ),
    (
        "a tool call without a name",
        row(prompt=[{"role": "assistant", "content": "", "tool_calls": [{}]}, *ROW["prompt"]]),
        "line 1 (task 'a'): prompt: bad tool calls [{}]; give a list of ",
    ),
    ("a payload that is a list", row(payload=[]), "line 1 (task 'a'): payload: got list; give an "),
    ("a payload of text", row(payload="3"), "line 1 (task 'a'): payload: got 3; give an object"),
    (
        "a payload that its environment cannot use",
        row(),
        "task 'a': its payload cannot be used (KeyError: 'database'); mend it",
    ),
    (
        "facts that are no list",
        flawed(facts="20"),
        "task 'a': its payload cannot be used (ValidationError: ",
    ),
    (
        "gold actions that do not execute",
        flawed(goal={"family": "cancel", "record": "K99"}),
        "task 'a': the actions that serve its goal do not lead to what it expects (KeyError: "
        "'status'); mend goal, database or expected",
    ),
    (
        "gold actions that lead elsewhere",
        flawed(expected={"reservations": {}, "flights": {}}),
        "task 'a': the actions that serve its goal do not lead to what it expects (reward 0); "
        "mend goal, database or expected",
    ),
    (
        "a request of a million characters",
        row(prompt=[{"role": "user", "content": "x" * 1_000_001}]),
        "line 1 (task 'a'): prompt: more than 1000000 characters; shorten it",
    ),
    ("a line of 10 MB", row(id="x" * 10_000_000), "line 1: more than 8 MiB; give each its own "),
    (
        "a row of 10 MB in an array",
        f"[{row(payload={'x': 'x' * 10_000_000})}]",
        "task 1: more than 8 MiB; shorten it",
    ),
    ("deep nesting", "[" * 100_000, "not JSON (nested more than 64 levels deep); mend the file"),
    (
        "a payload that is nested deeply",
        row(payload="[" * 100_000),
        "line 1 (task 'a'): payload: not JSON (nested more than 64 levels deep); give an object",
    ),
    (
        "a payload that is nested less deeply than Python can bear",
        '{"id": "a", "payload": ' + '{"a": ' * 70 + "1" + "}" * 71,
        "line 1: not JSON (nested more than 64 levels deep); mend the line",
    ),
    ("NaN", row(payload={"x": math.nan}), "line 1: not JSON (NaN is no JSON number); mend the "),
    ("a number too large", '{"id": 1e999}', "line 1: not JSON (a number is too large); mend the "),
    (
        "a number without an end",
        '{"id": ' + "9" * 5000 + "}",
        "line 1: not JSON (a number has more than 4300 digits); mend the line",
    ),
    (
        "half of a character",
        '{"id": "\\ud800"}',
        "line 1: not JSON (it holds half of a surrogate pair); mend the line",
    ),
    ("two lines in an id", row(id="a\nb", prompt=3), "line 1 (task 'a\\nb'): prompt: give a "),
]


@cases(TASK_FILES)
def test_a_bad_task_file(case, refuse, tmp_path):
    content, message = case
    path = tmp_path / "in" / "own.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refuse([*CHECK, "--tasks", f"{{airline: {path}}}"])
    told = line.removeprefix("{at}/own.jsonl").removeprefix(", ").removeprefix(": ")
    assert told[: len(message)] == message
    assert len(line) < 1000


def loop(path: Path) -> None:
    path.symlink_to(path)


def outside(path: Path) -> None:
    """A folder of data whose own description names a file beside it."""
    (path.parent / "secret.jsonl").write_text(row())
    path.mkdir()
    card = "---\nconfigs:\n- config_name: default\n  data_files: ../secret.jsonl\n---\n"
    (path / "README.md").write_text(card)


def saved_outside(path: Path) -> None:
    path.mkdir()
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../x.arrow"}]}))


def split_outside(path: Path) -> None:
    path.mkdir()
    (path / "dataset_dict.json").write_text(json.dumps({"splits": ["../../elsewhere"]}))


def of_images(path: Path) -> None:
    path.mkdir()
    (path / "secret.png").write_bytes(b"")


NO_FILE = "tasks: airline: got '{at}/own.jsonl', which is no file; give an existing file"
NO_DATA = "which is no file, nor a dataset that can be loaded with dataset_train_split train "
TASK_SOURCES = [
    ("no file", "own.jsonl", lambda path: None, NO_FILE),
    ("a loop of links", "own.jsonl", loop, NO_FILE),
    ("a link to nothing", "own.jsonl", lambda path: path.symlink_to("nothing"), NO_FILE),
    ("a pipe", "own.jsonl", os.mkfifo, NO_FILE),
    ("a device", "own.jsonl", lambda path: path.symlink_to("/dev/zero"), NO_FILE),
    (
        "an empty folder",
        "own.jsonl",
        Path.mkdir,
        f"tasks: airline: got '{{at}}/own.jsonl', {NO_DATA}",
    ),
    (
        "a folder that names a file elsewhere",
        "own",
        outside,
        f"tasks: airline: got '{{at}}/own', {NO_DATA}(it names the file "
        "'{at}/own/../secret.jsonl' outside of it); give a file, a folder or a hub id",
    ),
    (
        "saved data that names a file elsewhere",
        "own",
        saved_outside,
        f"tasks: airline: got '{{at}}/own', {NO_DATA}(state.json names '../x.arrow', which is no "
        "file of its folder); give a file, a folder or a hub id",
    ),
    (
        "a split elsewhere",
        "own",
        split_outside,
        f"tasks: airline: got '{{at}}/own', {NO_DATA}(dataset_dict.json names '../../elsewhere', "
        "which is no file of its folder); give a file, a folder or a hub id",
    ),
    (
        "files whose rows name files",
        "own",
        of_images,
        f"tasks: airline: got '{{at}}/own', {NO_DATA}(its files are imagefolder, not json or "
        "parquet or csv or arrow); give a file, a folder or a hub id",
    ),
]


@cases(TASK_SOURCES)
def test_a_bad_place_for_tasks(case, refuse, tmp_path):
    name, make, message = case
    path = tmp_path / "in" / name
    make(path)
    assert refuse([*CHECK, "--tasks", f"{{airline: {path}}}"])[: len(message)] == message


def test_a_file_of_one_endless_line_is_refused_without_reading_it(tmp_path):
    for name, message in (("a.jsonl", "line 1: more than 8 MiB"), ("a.json", "more than 256 MiB")):
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
        with pytest.raises(UserError, match=r"own\.jsonl' is no regular file"):
            read(tmp_path / "own.jsonl")


def test_rows_of_a_dataset_are_held_to_the_same_limits():
    def refusal(dataset: Dataset) -> str:
        with pytest.raises(UserError) as refused:
            tasks_of(DatasetRows(dataset, "desk"), "airline")
        return str(refused.value)

    features = Features({"id": Value("string"), "prompt": List({"content": Image()})})
    rows = {"id": ["a"], "prompt": [[{"content": {"path": "/etc/hostname", "bytes": None}}]]}
    assert refusal(Dataset.from_dict(rows, features=features)) == (
        "desk: a column holds Image, which no task has; take it out"
    )
    assert refusal(Dataset.from_list([{**ROW, "payload": {"x": math.nan}}])).startswith(
        "desk[0]: payload: a struct with nulls or dates, "
    )
    assert refusal(Dataset.from_list([{**ROW, "payload": f'"{"x" * 10_000_000}"'}])) == (
        "desk[0] (task 'a'): payload: more than 8 MiB; shorten it"
    )


# Demonstrations

ASK, SAY = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "Done."}


def talk(*messages, **fields) -> str:
    return json.dumps({"messages": list(messages), **fields})


DEMONSTRATIONS = [
    ("an empty file", "", "holds no demonstrations; give one JSON object per line"),
    ("a truncated line", talk(ASK, SAY)[:40], "line 1: not JSON (Expecting "),
    ("no messages", "{}", "line 1: messages: give a list of objects with role and content"),
    ("no answer", talk(ASK), "line 1: a demonstration starts with a request and holds an "),
    ("no request", talk(SAY, ASK), "line 1: a demonstration starts with a request and holds an "),
    (
        "an unknown role",
        f"{talk(ASK, SAY)}\n{talk({**ASK, 'role': 'boss'}, SAY)}",
        "line 2: got the role 'boss'; give one of system, user, assistant, tool",
    ),
    (
        "a call without a name",
        talk(ASK, {**SAY, "tool_calls": [{"function": {}}]}),
        "line 1: bad tool calls [{'function': {}}]; give a list of ",
    ),
    (
        "tools that are no list",
        talk(ASK, SAY, tools="x"),
        "line 1: tools: got 'x'; give a list of ",
    ),
    (
        "tools without names",
        talk(ASK, SAY, tools=[{"x": 1}]),
        "model: its chat template refuses a conversation of user ('dict object' has no attribute ",
    ),
    ("deep nesting", "[" * 100_000, "line 1: not JSON (nested more than 64 levels deep); mend "),
    (
        "an answer of a million characters",
        talk(ASK, {**SAY, "content": "x" * 1_000_001}),
        "line 1: more than 1000000 characters; shorten it",
    ),
    ("a line of 10 MB", talk({**ASK, "content": "x" * 10_000_000}, SAY), "line 1: more than 8 MiB"),
    ("NaN", talk(ASK, SAY, x=math.nan), "line 1: not JSON (NaN is no JSON number); mend the line"),
]


@cases(DEMONSTRATIONS)
def test_bad_demonstrations(case, refuse, tmp_path):
    content, message = case
    path = tmp_path / "in" / "own.jsonl"
    path.write_text(content)
    line = refuse([*CHECK, "--warm-start-data", str(path)])
    told = line.removeprefix("{at}/own.jsonl").removeprefix(", ").removeprefix(": ")
    assert told[: len(message)] == message


def test_missing_demonstrations(refuse):
    assert refuse([*CHECK, "--warm-start-data", "none.jsonl"]) == (
        "--warm-start-data: got 'none.jsonl', which is no file; give an existing file"
    )


# Models


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    tiny_model(tokenizer(), 0).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def without(*names: str):
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


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
        index = {"weight_map": {"model.norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

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
        "model: got '{at}/own', but its tokenizer cannot be loaded (a folder without config.json); "
        "give a folder made by save_pretrained",
    ),
    (
        "no chat template",
        without("chat_template.jinja"),
        "model: its tokenizer has no chat template; use a chat model or set "
        "tokenizer.chat_template",
    ),
    (
        "a chat template that is broken",
        holding("chat_template.jinja", "{% for x in %}"),
        "model: its chat template refuses a conversation of ",
    ),
    (
        "a chat template that ignores tools",
        holding(
            "chat_template.jinja", "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
        ),
        "model: its chat template ignores tools or their results; use a model whose template ",
    ),
    (
        "a pickle only",
        pickled,
        "model: {at}/own holds its weights as a pickle only (pytorch_model.bin), which could run "
        "code; load and save it once with save_pretrained, which writes safetensors",
    ),
    (
        "no weights",
        without("model.safetensors"),
        "model: {at}/own holds no model.safetensors; give a folder made by save_pretrained",
    ),
    (
        "weights cut short",
        cut,
        "model: {at}/own/model.safetensors cannot be read as safetensors (Error while "
        "deserializing header: incomplete metadata, file not fully covered); copy it again",
    ),
    (
        "a shard elsewhere",
        indexed("../shard.safetensors"),
        "model: {at}/own/model.safetensors.index.json names the file '../shard.safetensors'; it "
        "must name safetensors files of its own folder",
    ),
    (
        "a shard that is a pickle",
        indexed("shard.bin"),
        "model: {at}/own/model.safetensors.index.json names the file 'shard.bin'; it must name ",
    ),
    (
        "a missing shard",
        indexed("other.safetensors"),
        "model: {at}/own/other.safetensors cannot be read as safetensors (No such file or ",
    ),
    (
        "not all weights",
        incomplete,
        "model: {at}/own lacks model.norm.weight that its config.json asks for; take both from one "
        "model",
    ),
    (
        "settings that are no JSON",
        holding("config.json", "{no"),
        "model: got '{at}/own', but its tokenizer cannot be loaded (It looks like the config file "
        "at '{at}/own/config.json' is not a valid JSON file); give ",
    ),
    (
        "settings that are no object",
        holding("config.json", "[1]"),
        "model: got '{at}/own', but its tokenizer cannot be loaded (",
    ),
    (
        "settings of another size",
        setting("config.json", head_dim=64),
        "model: {at}/own holds model.layers.0.self_attn.q_proj.weight as [128, 128], but its "
        "config.json asks for [256, 128]; take both from one model",
    ),
    (
        "weights of its own choice",
        setting("config.json", transformers_weights="adapter_model.bin"),
        "model: {at}/own/config.json names 'adapter_model.bin' as its weights; call them "
        "model.safetensors, and take transformers_weights out",
    ),
    (
        "a setting of a wrong type",
        setting("config.json", hidden_size="x"),
        "model: got '{at}/own', but its tokenizer cannot be loaded (Validation error for field ",
    ),
    (
        "a kind of model that nobody knows",
        setting("config.json", model_type="zzz"),
        "model: got '{at}/own', but its configuration cannot be loaded (The checkpoint you are ",
    ),
    (
        "code of its own",
        setting(
            "config.json",
            model_type="own",
            auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
        ),
        "model: got '{at}/own', but its configuration cannot be loaded (The repository {at}/own "
        "contains custom code which must be executed to correctly load the model. You can inspect "
        "the repository content at {at}/own ); read its code, then set trust_remote_code, which "
        "runs it",
    ),
    (
        "a tokenizer of more words",
        setting("config.json", vocab_size=898, pad_token_id=0, eos_token_id=1),
        "model: its tokenizer has ids up to 898, but the model 898 embeddings; use the tokenizer "
        "that the model was trained with",
    ),
    (
        "a tokenizer that is no JSON",
        holding("tokenizer.json", "{no"),
        "model: got '{at}/own', but its tokenizer cannot be loaded (Expecting property name ",
    ),
    (
        "a tokenizer that is no object",
        holding("tokenizer.json", "[]"),
        "model: got '{at}/own', but its tokenizer cannot be loaded (",
    ),
    (
        "a response template that is none",
        setting("tokenizer_config.json", response_template={"fields": {}}),
        "model: its tokenizer's response template cannot be used (response_template.fields must ",
    ),
    (
        "adapters in a pickle",
        adapters(has_weights=False),
        "model: {at}/own holds its weights as a pickle only (adapter_model.bin), which could run ",
    ),
    (
        "adapters of another kind",
        adapters(peft_type="IA3"),
        "model: {at}/own: adapter_config.json is not of plain LoRA; give such a one",
    ),
    (
        "adapters that import a module",
        adapters(megatron_config={}, megatron_core="antigravity"),
        "model: {at}/own: adapter_config.json is not of plain LoRA; give such a one",
    ),
    (
        "adapters of themselves",
        adapters(base_model_name_or_path="own"),
        "model: the adapters in {at}/own are their own base model; mend base_model_name_or_path in "
        "adapter_config.json",
    ),
    (
        "adapters of nothing",
        adapters(base_model_name_or_path=None),
        "model: the adapters in {at}/own name no base model; enter it in adapter_config.json",
    ),
]


@cases(MODELS)
def test_a_bad_model(case, refuse, whole, tmp_path):
    change, message = case
    folder = tmp_path / "in" / "own"
    shutil.copytree(whole, folder)
    change(folder)
    line = refuse([*CHECK, "--model", str(folder)])
    assert line[: len(message)] == message
    assert len(line) < 1000


NAMES = [
    ("no folder", "{at}/none", "there is no such folder"),
    ("a file", "{at}/file", "which is no folder"),
    ("a device", "/dev/zero", "which is no folder"),
    ("a name of three parts", "a/b/c", "there is no such folder"),
]


@cases(NAMES)
def test_a_bad_name_of_a_model(case, refuse, tmp_path):
    name, reason = case
    (tmp_path / "in" / "file").write_text("")
    assert refuse([*CHECK, "--model", name.replace("{at}", str(tmp_path / "in"))]) == (
        f"model: got '{name}', but its tokenizer cannot be loaded ({reason}); give a folder made "
        "by save_pretrained"
    )


def test_an_attention_that_there_is_not_is_refused(refuse, whole):
    line = refuse([*CHECK, "--model", str(whole), "--attn-implementation", "flesh"])
    assert line.startswith(f"model: got '{whole}', but its model cannot be loaded (")
    assert "flesh" in line


# The folder of the run

FOLDERS = [
    (
        "a file in its place",
        "{at}/file",
        "output_dir: got '{at}/file', but '{at}/file' is no folder; name another folder",
    ),
    (
        "a file on its way",
        "{at}/file/a/b",
        "output_dir: got '{at}/file/a/b', but '{at}/file' is no folder; name another folder",
    ),
    (
        "a place that cannot be written to",
        "/proc/own",
        "output_dir: got '/proc/own', but '/proc' cannot be written to (No such file or "
        "directory); name another folder",
    ),
    (
        "a link to nothing",
        "{at}/link",
        "output_dir: got '{at}/link', but '{at}/link' cannot be written to (No such file or ",
    ),
    (
        "a name too long",
        "{at}/" + "x" * 300,
        "output_dir: got '{at}/" + "x" * 300 + "', but '{at}' cannot be written to (File name too ",
    ),
    (
        "another run",
        "{at}/run",
        "output_dir: {at}/run holds a run; resume it with --resume-from-checkpoint latest, remove "
        "it, or name another folder",
    ),
]


@cases(FOLDERS)
def test_a_bad_folder_for_the_run(case, refuse, tmp_path):
    name, message = case
    there = tmp_path / "in"
    (there / "file").write_text("")
    (there / "link").symlink_to("nothing")
    (there / "run").mkdir()
    (there / "run" / "config.yaml").write_text("run: {}")
    before = sorted(there.rglob("*"))
    line = refuse(["--check", "--output-dir", name.replace("{at}", str(there))])
    assert line[: len(message)] == message
    assert sorted(there.rglob("*")) == before


def test_a_disk_without_room_for_two_checkpoints_is_refused(tmp_path, refuse, monkeypatch):
    config = Config.model_validate({"run": {"output_dir": str(tmp_path / "out")}})
    free = shutil.disk_usage(tmp_path).free
    refuse_full_disk(config, free / 4)
    message = r"two checkpoints take \d+\.\d GiB, and there are \d+\.\d free for '.*/out'; make "
    with pytest.raises(UserError, match=message):
        refuse_full_disk(config, free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total=1 << 40, used=0, free=1 << 20))
    assert refuse([*CHECK, "--output-dir", "out"]) == (
        "output_dir: two checkpoints take 0.0 GiB, and there are 0.0 free for 'out'; make room, or "
        "name another folder"
    )


# The world

WORLD = [
    (
        "processes that would not find each other",
        {"WORLD_SIZE": "2"},
        [],
        "WORLD_SIZE is 2 without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, so the processes ",
    ),
    (
        "other ranks than were launched",
        {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
        ["--num-gpus", "3"],
        "--num-gpus: got 3, but 2 ranks were launched; give --num-gpus 2, or start them with: ",
    ),
    ("no number of ranks", {"WORLD_SIZE": "two"}, [], "WORLD_SIZE: got 'two' in the environment; "),
    (
        "processes of MPI",
        {"OMPI_COMM_WORLD_SIZE": "4"},
        [],
        "MPI started 4 processes, which is not supported; start the ranks with: ",
    ),
    ("no rank", {}, ["--num-gpus", "0"], "--num-gpus: got 0; give a whole number above 0, or null"),
]


@cases(WORLD)
def test_a_bad_world(case, refuse, monkeypatch):
    variables, argv, message = case
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert refuse(argv)[: len(message)] == message


# Environments of one's own

BANK = '''
from pipeline.data.tasks import Task


class Bank:
    def reset(self, **row):
        pass

    def balance(self, account: str) -> str:
        """Tell the balance.

        Args:
            account: Number.
        """
        return "12"

    def get_reward(self):
        return 1.0


def generate_tasks(seed, n, split, difficulty):
    prompt = ({"role": "user", "content": "how much is on A1?"},)
    return [Task(domain="bank", id=f"{split}-{i}", prompt=prompt, payload="{}") for i in range(n)]
'''
ENVIRONMENTS = [
    ("no module", None, "bank: got 'bad_bank:Bank' (No module named 'bad_bank'); give an "),
    (
        "no class",
        BANK.replace("class Bank", "class Bunk"),
        "bank: got 'bad_bank:Bank' (module 'bad_bank' has no attribute 'Bank'); give an ",
    ),
    ("no Python", "class Bank", "bank: got 'bad_bank:Bank', which fails on import (SyntaxError: "),
    (
        "an end of the process",
        "raise SystemExit(0)",
        "bank: got 'bad_bank:Bank', which fails on import (SystemExit: 0, in bad_bank.py, line "
        "1); mend it",
    ),
    (
        "what a person may do",
        "raise KeyboardInterrupt",
        "bank: got 'bad_bank:Bank', which fails on import (KeyboardInterrupt, in bad_bank.py, line "
        "1); mend it",
    ),
    ("no class but a number", "Bank = 3", "bank: got 'bad_bank:Bank', which is 3; name a class"),
    (
        "no get_reward",
        BANK.replace("get_reward", "_reward"),
        "bank: got 'bad_bank:Bank', which has no get_reward(); add it",
    ),
    (
        "no reset",
        BANK.replace("reset", "_reset"),
        "bank: got 'bad_bank:Bank', which has no reset(); add it",
    ),
    (
        "no docstring",
        re.sub(r'""".*?"""', "", BANK, flags=re.DOTALL),
        "bank: got 'bad_bank:Bank', whose tools cannot be told to a model "
        "(DocstringParsingException: Cannot generate JSON schema for balance because it has no "
        "docstring!); give each public method type hints and a Google docstring, or a name with _",
    ),
    (
        "no type hints",
        BANK.replace("account: str", "account"),
        "bank: got 'bad_bank:Bank', whose tools cannot be told to a model "
        "(TypeHintParsingException: Argument account is missing a type hint ",
    ),
    ("no generator", BANK.replace("generate_tasks", "_tasks"), "bad_bank has no generate_tasks("),
    (
        "a generator that gives nothing",
        BANK.replace("range(n)", "range(0)"),
        "tasks of bank: bad_bank.generate_tasks(0, 2, 'validation', 'medium') gave []; return a "
        "list of Task",
    ),
    (
        "a generator that raises",
        BANK.replace("    prompt = (", "    prompt = {}['x'] + ("),
        "tasks of bank: bad_bank.generate_tasks(0, 2, 'validation', 'medium') fails (KeyError: "
        "'x'); mend it",
    ),
    (
        "a generator that gives rows",
        BANK.replace("[Task(", "[dict("),
        "tasks of bank: bad_bank.generate_tasks(0, 2, 'validation', 'medium') gave [{'domain': ",
    ),
]


@cases(ENVIRONMENTS)
def test_a_bad_environment(case, refuse, monkeypatch, tmp_path):
    code, message = case
    if code is not None:
        (tmp_path / "in" / "bad_bank.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path / "in"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    own = ["--domains", "bank", "--environments", "{bank: bad_bank:Bank}"]
    try:
        line = refuse([*CHECK, *own, "--warm-start-steps", "0"])
    finally:
        sys.modules.pop("bad_bank", None)
    told = line.removeprefix("environments: ")
    assert told[: len(message)] == message


# Checkpoints: rows of (name, command line, message)

CHECKPOINTS = [
    (
        "no folder to look for it",
        ["--resume-from-checkpoint", "latest"],
        "resume_from_checkpoint: needs the run's folder; give --output-dir as well",
    ),
    (
        "a folder without one",
        ["--resume-from-checkpoint", "latest", "--output-dir", "runs"],
        "resume_from_checkpoint: runs holds no checkpoint; check --output-dir, or remove the "
        "folder and start anew",
    ),
    (
        "a name that is none",
        ["--resume-from-checkpoint", "step-000007", "--output-dir", "runs"],
        "resume_from_checkpoint: got 'step-000007'; checkpoints here: none",
    ),
]


@cases(CHECKPOINTS)
def test_a_bad_checkpoint(case, refuse):
    argv, message = case
    assert refuse(["--check", *argv]) == message


# Weights as they are loaded


def test_no_pickle_is_loaded_where_a_model_or_adapters_are_asked_for(whole, tmp_path):
    folder = tmp_path / "own"
    shutil.copytree(whole, folder)
    pickled(folder)
    with pytest.raises(UserError, match="holds its weights as a pickle only"):
        load_folder(folder, ModelSettings())
    adapters(has_weights=False, base_model_name_or_path=str(whole))(folder)
    with pytest.raises(UserError, match="holds its weights as a pickle only"):
        load_folder(folder, ModelSettings())
    attached = lora.attach(tiny_model(tokenizer(), 0), ModelSettings(), str(whole), 0)
    with pytest.raises(UserError, match="holds its weights as a pickle only"):
        lora.load(attached, folder)


def test_weights_of_another_model_are_refused_and_unused_ones_told(whole, tmp_path):
    folder = tmp_path / "own"
    shutil.copytree(whole, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "other": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="holds 1 weights that the model does not use, such as ot"):
        load_folder(folder, ModelSettings())
    del weights["model.norm.weight"]
    save_file({**weights, "other": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"own lacks model\.norm\.weight that its"):
        load_folder(folder, ModelSettings())


def test_code_that_comes_with_a_model_runs_only_where_it_is_allowed(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    folder = tmp_path / "own"
    shutil.copytree(whole, folder)
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    setting("config.json", model_type="own", auto_map=classes)(folder)
    (folder / "own.py").write_text("raise RuntimeError('the code ran')")
    with pytest.raises(UserError, match="set trust_remote_code, which runs it"):
        load_model(ModelSettings(model=str(folder)), tokenizer(), 0)
    with pytest.raises(UserError, match="the code ran"):
        load_model(ModelSettings(model=str(folder), trust_remote_code=True), tokenizer(), 0)


# One of each kind, launched as a user would

LAUNCHES = {
    "a recipe": (["--config", "{at}/own.yaml"], "{at}/own.yaml: unknown setting grpo.betta; did "),
    "a flag": (["--group-size", "1"], "--num-generations: got 1; give a whole number at least 2"),
    "a folder": (["--output-dir", "{at}/own.yaml"], "output_dir: got '{at}/own.yaml', but "),
    "a checkpoint": (
        ["--resume-from-checkpoint", "latest"],
        "resume_from_checkpoint: needs the run's folder; give --output-dir as well",
    ),
    "a world": (["--seed", "1"], "WORLD_SIZE is 2 without RANK, LOCAL_RANK, MASTER_ADDR, "),
    "tasks": (
        ["--num-gpus", "2", *SMALL, "--tasks", "{airline: '{at}/tasks.jsonl'}"],
        "{at}/tasks.jsonl, line 2: task id 'a' was already used at {at}/tasks.jsonl, line 1; ",
    ),
    "a model": (
        ["--num-gpus", "2", *SMALL, "--model", "{at}/model"],
        "model: got '{at}/model', but its configuration cannot be loaded (The checkpoint you are ",
    ),
}


@pytest.mark.parametrize("kind", LAUNCHES)
def test_bad_input_ends_a_launched_run_with_code_2_and_one_line(kind, whole, tmp_path):
    argv, message = LAUNCHES[kind]
    at, empty = tmp_path / "in", tmp_path / "empty"
    shutil.copytree(whole, at / "model")
    setting("config.json", model_type="zzz")(at / "model")
    (at / "own.yaml").write_text("grpo: {betta: 1}")
    (at / "tasks.jsonl").write_text(f"{row()}\n{row()}")
    empty.mkdir()
    command = [sys.executable, ROOT / "pipeline" / "run.py"]
    done = subprocess.run(
        [*command, *(part.replace("{at}", str(at)) for part in argv)],
        cwd=empty,
        env={**os.environ, "WORLD_SIZE": "2"} if kind == "a world" else None,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert the_line(done.stderr, tmp_path)[: len(message)] == message
