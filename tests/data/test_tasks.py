"""Tasks: files and datasets are read with every mistake named; steps and ranks get each task
exactly once.
"""

import bz2
import gzip
import json
import lzma
import os
import tarfile
import tracemalloc
import zipfile
from collections import Counter
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict, Features, Json, Value, config

from pipeline.common.errors import UserError
from pipeline.config.settings import Config
from pipeline.data.datasets import open_tasks
from pipeline.data.rows import DatasetRows, messages_problem, with_usual_messages
from pipeline.data.tasks import Task, load_tasks, tasks_for_step, tasks_of
from pipeline.distributed.ranks import Ranks
from pipeline.environments.embedded.airline import AirlineEnvironment
from pipeline.environments.embedded.airline import generate_tasks as airline_tasks
from pipeline.environments.task_sets import split_source
from tests.support.helpers import embedded, save_tasks
from tests.support.messages import refusal, says

PROMPT = [{"role": "system", "content": "bank"}, {"role": "user", "content": "my card is lost"}]
ROW = {"id": "a", "prompt": PROMPT, "payload": {"card": "lost"}}
OF_A = "line 1 (task 'a'): "


def make_tasks(count: int) -> list[Task]:
    return [
        Task(domain="bank", id=f"t{number}", prompt=tuple(PROMPT), payload="{}")
        for number in range(count)
    ]


@pytest.fixture
def write(tmp_path):
    """Writes rows (or text) to a file of that name and returns its path."""

    def write(name: str, *rows):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines), encoding="utf-8")
        return path

    return write


# files


def test_json_lines_are_read_blank_lines_left_out(write):
    path = write("tasks.jsonl", ROW, "", {**ROW, "id": "b", "family": "loss", "branch": "card"}, "")
    first, second = load_tasks(path, "bank")
    assert first == Task(domain="bank", id="a", prompt=tuple(PROMPT), payload='{"card": "lost"}')
    assert (second.family, second.branch) == ("loss", "card")


def test_an_array_is_read_under_either_name(write):
    text = json.dumps([ROW, {**ROW, "id": "b"}], indent=2)
    for name in ("tasks.json", "tasks.jsonl"):
        assert [task.id for task in load_tasks(write(name, text), "bank")] == ["a", "b"]


def test_a_payload_may_be_json_text_and_is_kept_as_it_is(write):
    path = write("tasks.jsonl", {**ROW, "payload": '{ "b": 1,  "a": 2 }'})
    assert load_tasks(path, "bank")[0].payload == '{ "b": 1,  "a": 2 }'


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (3, (": got int", "one JSON object")),
        ({**ROW, "goal": 1}, (OF_A, "unknown key ['goal']", "a task has branch, domain")),
        ({"prompt": PROMPT}, (": id: got None", "give a non-empty string")),
        ({**ROW, "id": ""}, (": id: got ''", "give a non-empty string")),
        ({**ROW, "id": 7}, (": id: got 7", "give a non-empty string")),
        ({**ROW, "domain": "shop"}, (OF_A, "domain: got 'shop'", "bank", "mend")),
        ({**ROW, "prompt": []}, (OF_A, "prompt: ", "give a non-empty list")),
        ({**ROW, "prompt": "hi"}, (OF_A, "prompt: ", "give a non-empty list")),
        (
            {**ROW, "prompt": [{"role": "boss", "content": "x"}]},
            (OF_A, "prompt: ", "{'role': 'boss', 'content': 'x'}", "give role and content"),
        ),
        (
            {**ROW, "prompt": [{"role": "user", "content": None}]},
            (OF_A, "prompt: ", "{'role': 'user', 'content': None}", "give role and content"),
        ),
        ({**ROW, "prompt": ["hi"]}, (OF_A, "prompt: ", "'hi'", "give role and content")),
        ({**ROW, "prompt": PROMPT[:1]}, (OF_A, "prompt: ", "the user's request")),
        ({**ROW, "payload": 3}, (OF_A, "payload: got 3", "give an object")),
        ({**ROW, "payload": "{'a': 1}"}, (OF_A, "payload: not JSON", "give an object")),
        ({**ROW, "family": 3}, (OF_A, "family: got 3", "give a string")),
        ({**ROW, "branch": 1}, (OF_A, "branch: got 1", "give a string")),
    ],
)
def test_what_is_wrong_with_a_task_is_named_with_its_place(write, row, words):
    says(refusal(load_tasks, write("tasks.jsonl", row), "bank"), "tasks.jsonl, line 1", *words)


def test_line_ends_of_windows_and_wide_characters_do_not_move_a_row(write):
    path = write("tasks.jsonl", {**ROW, "id": "a"}, {**ROW, "id": "ü\u2028\U0001f600"})
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n\r\n") + b"\r\n")
    save_tasks(tasks := load_tasks(path, "bank"), again := path.with_name("again.jsonl"))
    assert [task.id for task in tasks] == ["a", "ü\u2028\U0001f600"]
    assert list(load_tasks(again, "bank")) == list(tasks)


def test_the_texts_of_json_lines_stay_in_the_file(tmp_path):
    prompt = ({"role": "system", "content": "x" * 4000}, {"role": "user", "content": "hi"})
    tasks = [replace(task, prompt=prompt) for task in make_tasks(2000)]
    save_tasks(tasks, tmp_path / "bank.jsonl")
    tracemalloc.start()
    loaded = load_tasks(tmp_path / "bank.jsonl", "bank")
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert loaded[1999] == tasks[1999]
    assert kept < 200_000  # bytes, of 8 million
    assert most < 2_000_000


@pytest.mark.parametrize("change", ["altered", "shifted", "cut", "gone"])
def test_a_file_that_changes_under_a_run_never_gives_other_tasks(write, change):
    path = write("tasks.jsonl", ROW, {**ROW, "id": "b"})
    tasks = load_tasks(path, "bank")
    text = path.read_text()
    path.write_text(text + "\n" + json.dumps({**ROW, "id": "c"}))
    assert [task.id for task in tasks] == ["a", "b"]  # what was added is not looked at
    path.write_text(
        {
            "altered": text.replace("bank", "shop"),
            "shifted": "\n" + text,
            "cut": text[:-1],
            "gone": "",
        }[change]
    )
    if change == "gone":
        path.unlink()
    with pytest.raises(UserError) as caught:
        tasks[1]
    says(str(caught.value), str(path), "changed", "put it back")
    path.write_text(text)
    assert tasks[1].id == "b"


# datasets


def dataset_tasks(dataset):
    return tasks_of(DatasetRows(dataset, "bank, train"), "bank")


def test_a_dataset_gives_the_tasks_that_its_rows_would_give_in_a_file(write):
    """Although Arrow gives every message the keys of all, and every row all columns."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"card": "A1"}}}
    asked = [{"role": "assistant", "content": "", "tool_calls": [call]}, PROMPT[1]]
    rows = [
        {"id": "a", "prompt": PROMPT, "payload": '{"b": null}', "family": "loss", "branch": ""},
        {"id": "b", "prompt": asked, "payload": "{}", "branch": "card"},
        {"id": "c", "prompt": [{**PROMPT[1], "name": "ann"}]},
    ]
    dataset = Dataset.from_list(rows)
    assert dataset[0]["prompt"][0]["tool_calls"] is None
    assert dataset[2]["branch"] is None
    in_file = list(load_tasks(write("tasks.jsonl", *rows), "bank"))
    assert list(dataset_tasks(dataset)) == in_file
    assert dataset_tasks(dataset.with_format("numpy"))[1:][0] == in_file[1]


def test_payloads_that_arrow_may_have_altered_are_refused():
    first, second = {**ROW, "payload": {"card": "x", "n": 1}}, {**ROW, "id": "b"}
    said = refusal(dataset_tasks, Dataset.from_list([first, second]))
    says(said, "bank, train: payload", "struct", "as JSON text")
    features = Features(
        {"id": Value("string"), "prompt": [{n: Value("string") for n in ROW["prompt"][0]}]}
    )
    exact = Dataset.from_list([first, second], features=Features({**features, "payload": Json()}))
    assert [json.loads(task.payload) for task in dataset_tasks(exact)] == [
        {"card": "x", "n": 1},
        {"card": "lost"},
    ]


def test_what_is_wrong_with_a_row_of_a_dataset_is_named_with_its_place():
    def of(*rows):
        return refusal(dataset_tasks, Dataset.from_list(list(rows)))

    text = {**ROW, "payload": "{}"}
    says(of(text, {**text, "id": None}), "bank, train[1]: id", "got None", "give")
    says(
        of(text, {**text, "id": "b", "prompt": None}), "bank, train[1] (task 'b')", "prompt", "give"
    )
    says(of({**text, "goal": 1}), "bank, train[0] (task 'a'): unknown key ['goal']; a task has ")
    says(of(text, text), "bank, train[1]: task id 'a'", "bank, train[0]", "its own id")
    says(refusal(dataset_tasks, Dataset.from_list([text]).select([])), "bank, train", "no tasks")


def test_a_dataset_whose_files_change_under_a_run_is_refused(tmp_path):
    Dataset.from_list([{**ROW, "payload": "{}"}]).save_to_disk(tmp_path / "bank")
    tasks = dataset_tasks(Dataset.load_from_disk(str(tmp_path / "bank")))
    assert tasks[0].id == "a"
    (file,) = (tmp_path / "bank").glob("*.arrow")
    os.utime(file, (1, 1))
    with pytest.raises(UserError, match="bank, train: changed since it was read; put it back"):
        tasks[0]


# what settings name


def loaded(source, environment=AirlineEnvironment, held_out=(), **data):
    settings = {"tasks": {"airline": str(source)}, **data}
    domain = replace(embedded("airline")["airline"], environment=environment, factory=None)
    config = Config.model_validate({"data": settings})
    sets = split_source(config, domain, held_out, validation=[], read=None)
    return sets.train, sets.longest


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_files_and_folders_of_datasets_give_the_same_tasks(tmp_path, own_cache):
    tasks, path = airline_tasks(5, 12, "train", "medium"), tmp_path / "files" / "a.jsonl"
    path.parent.mkdir()
    save_tasks(tasks, path)
    rows = [{**task.row(), "family": task.family, "branch": task.branch} for task in tasks]
    dataset, other = Dataset.from_list(rows), Dataset.from_list([rows[0]])
    dataset.save_to_disk(tmp_path / "one")
    DatasetDict(train=other, dev=dataset).save_to_disk(tmp_path / "two")
    (tmp_path / "parquet").mkdir()
    dataset.to_parquet(tmp_path / "parquet" / "dev.parquet")
    for source, split in (
        (path, "train"),
        (path.parent, "train"),
        (tmp_path / "one", "train"),
        (tmp_path / "two", "dev"),
        (tmp_path / "parquet", "validation"),
    ):
        found, _ = loaded(source, dataset_train_split=split)
        assert list(found) == tasks, source
    assert len(loaded(tmp_path / "two")[0]) == 1


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.json", "rows.json with lines", "rows.jsonl after a blank line"]
)
def test_a_folder_of_json_files_gives_the_values_of_its_files(tmp_path, own_cache, name):
    """Arrow's types would make dates of texts, floats of large integers, and nulls of nothing."""
    rows = [
        {"prompt": "when?", "answer": "2024-05-01", "zone": "2024-05-01T10:00:00+02:00", "n": 1},
        {"prompt": "when?", "answer": "2024-05-01 07:00", "zone": "", "n": 2**63 + 5},
        {"prompt": [PROMPT[1]], "answer": 7, "deep": {"at": ["2024-05-01"], "none": None}},
        {"prompt": "when?", "answer": "2024", "deep": {"other": [{"a": 1}, {"b": "1e400"}]}},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "folder").mkdir()
    held = json.dumps(rows) if name == "rows.json" else lines
    held = "\n \n" * name.endswith("blank line") + held
    (tmp_path / "folder" / name.split()[0]).write_text(held)
    (tmp_path / "rows.jsonl").write_text(lines)
    of_file, of_folder = (
        list(open_tasks("d", str(tmp_path / at), "train", True)) for at in ("rows.jsonl", "folder")
    )
    assert of_folder == of_file
    assert json.loads(of_folder[0].columns)["answer"] == "2024-05-01"
    assert json.loads(of_folder[1].columns)["n"] == 2**63 + 5


def test_a_csv_file_holds_texts(tmp_path, own_cache):
    """Its reader would make numbers, truth values and nulls of them."""
    values = ["007", "1.50", "NA", "True", "null"]
    (tmp_path / "folder").mkdir()
    lines = "".join(f"what is {n}?,{value}\n" for n, value in enumerate(values))
    (tmp_path / "folder" / "train.csv").write_text("prompt,answer\n" + lines)
    tasks = open_tasks("d", str(tmp_path / "folder"), "train", True)
    assert [json.loads(task.columns)["answer"] for task in tasks] == values


def test_the_old_form_of_calls_is_not_dropped(tmp_path):
    old = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}
    row = {"id": "a", "prompt": [PROMPT[1], old, PROMPT[1]]}
    (path := tmp_path / "rows.jsonl").write_text(json.dumps(row))
    says(refusal(loaded, path), "prompt: a message has a function_call", "write it as tool_calls")


PACKED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def pack(folder: Path, kind: str, content: bytes) -> None:
    """Write a folder of data with one packed file of JSON Lines."""
    folder.mkdir()
    if kind == "zip":
        with zipfile.ZipFile(folder / "train.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("train.jsonl", content)
    elif kind == "tar":
        info = tarfile.TarInfo("train.jsonl")
        info.size = len(content)
        with tarfile.open(folder / "train.jsonl.gz", "w:gz") as archive:
            archive.addfile(info, BytesIO(content))
    else:
        (folder / f"train.jsonl.{kind}").write_bytes(PACKED[kind](content))


@pytest.mark.parametrize("kind", [*PACKED, "zip", "tar"])
def test_packed_files_are_read(kind, tmp_path, own_cache, monkeypatch):
    monkeypatch.setattr(config, "EXTRACTED_DATASETS_PATH", str(tmp_path / "cache" / "extracted"))
    rows = "".join(
        json.dumps({"prompt": f"when? {n}", "at": "2024-05-01"}) + "\n" for n in range(3)
    )
    pack(tmp_path / "data", kind, rows.encode())
    tasks = open_tasks("d", str(tmp_path / "data"), "train", True)
    assert [json.loads(task.columns)["at"] for task in tasks] == ["2024-05-01"] * 3


def test_the_files_of_a_folder_in_the_hubs_cache_are_links(tmp_path, own_cache):
    repository = tmp_path / "datasets--org--name"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "0123").write_text(json.dumps({"prompt": "when?"}))
    card = "---\nconfigs:\n- config_name: a\n  data_files: data/*.jsonl\n---\n"
    (repository / "blobs" / "4567").write_text(card)
    (repository / "snapshots" / "89" / "data").mkdir(parents=True)
    (repository / "snapshots" / "89" / "README.md").symlink_to("../../blobs/4567")
    (repository / "snapshots" / "89" / "data" / "a.jsonl").symlink_to("../../../blobs/0123")
    (tmp_path / "mine").symlink_to(repository / "snapshots" / "89")
    assert len(open_tasks("d", str(tmp_path / "mine"), "train", True)) == 1


def test_the_nulls_that_arrow_adds_inside_of_columns_do_not_reach_reward_functions():
    asked = {"id": "a", "prompt": PROMPT, "goal": {"fee": 20, "steps": [{"a": 1}, {"b": 2}]}}
    dataset = Dataset.from_list([asked, {**asked, "id": "b", "goal": {"seat": "A1"}}])
    assert dataset[1]["goal"]["fee"] is None
    first, second = (
        json.loads(task.columns) for task in tasks_of(DatasetRows(dataset, "d"), "d", True)
    )
    assert first == {"goal": {"fee": 20, "steps": [{"a": 1}, {"b": 2}]}}
    assert second == {"goal": {"seat": "A1"}}


def test_a_source_that_is_not_there_is_refused_in_one_line(tmp_path, own_cache, monkeypatch):
    says(refusal(loaded, "missing.jsonl"), "tasks: airline", "missing.jsonl", "existing file")
    DatasetDict(dev=Dataset.from_list([ROW])).save_to_disk(tmp_path / "dev")
    says(
        refusal(loaded, tmp_path / "dev"),
        "tasks: airline",
        f"{tmp_path}/dev",
        "the split train",
        "no split 'train' but dev",
        "hub id",
    )
    (tmp_path / "empty").mkdir()
    assert "empty doesn't contain any data files); give" in refusal(loaded, tmp_path / "empty")
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("pipeline.data.datasets.hub_reachable", lambda: False)
    said = refusal(loaded, "org/name")
    assert said.startswith("tasks: airline: got 'org/name', which is no file, nor a dataset that ")
    assert "(Couldn't reach 'org/name' on the Hub" in said
    assert config.HF_HUB_OFFLINE  # so nothing was asked of a hub that is not there


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_dataset_is_refused_in_one_line(tmp_path, own_cache, kind, damage):
    """A read of an Arrow file with wrong offsets would end the process."""
    rows = Dataset.from_list([{**ROW, "id": f"row-{n}", "payload": "{}"} for n in range(3000)])
    folder = tmp_path / "bank"
    if kind == "arrow":
        rows.save_to_disk(folder)
    else:
        folder.mkdir()
        rows.to_parquet(folder / "train.parquet")
    (path,) = folder.glob(f"*.{kind}")
    whole = path.read_bytes()
    middle, size = len(whole) // 2, len(whole) // 3
    flipped = bytes(byte ^ 0x5A for byte in whole[middle - size : middle])
    rest = whole[middle:] if damage == "flipped" else b""
    path.write_bytes(whole[: middle - size] + flipped + rest)
    says(refusal(loaded, folder), "tasks: airline", str(folder), "the split train (")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.csv"])
def test_a_file_of_a_dataset_says_that_its_folder_is_wanted(tmp_path, name):
    (tmp_path / name).write_bytes(b"PAR1")
    says(refusal(loaded, tmp_path / name), "tasks: airline", name, "give its folder")


def test_a_held_out_task_is_found_among_those_that_train(tmp_path):
    tasks = airline_tasks(5, 6, "train", "medium")
    save_tasks(tasks, path := tmp_path / "airline.jsonl")
    alike = replace(tasks[2], id="x", payload=json.dumps(json.loads(tasks[2].payload), indent=1))
    says(
        refusal(loaded, path, held_out=[tasks[0], alike], tasks_per_domain=6),
        str(path),
        f"task '{tasks[0].id}'",
        "held-out",
        "take it out",
    )
    assert f"task '{tasks[2].id}' is also a held-out task" in refusal(
        loaded, path, held_out=[alike]
    )
    as_text = {"id": "t", "prompt": tasks[4].prompt, "payload": tasks[4].payload}
    (other_path := tmp_path / "text.jsonl").write_text(json.dumps(as_text))
    said = refusal(loaded, other_path, held_out=tasks[3:])
    says(said, str(other_path), "task 't'", "held-out", "take it out")
    other = replace(tasks[2], payload="{}")
    assert len(loaded(path, held_out=[other])[0]) == 6


# steps


def test_a_step_depends_on_source_count_step_and_key_alone():
    tasks = make_tasks(10)
    step = tasks_for_step(tasks, 4, 3, 1, "airline")
    assert step == tasks_for_step(tasks, 4, 3, 1, "airline")
    assert step != tasks_for_step(tasks, 4, 4, 1, "airline")
    assert step != tasks_for_step(tasks, 4, 3, 2, "airline")
    assert [task.id for task in tasks_for_step(tasks, 4, 0, 1)] == ["t1", "t2", "t4", "t5"]


def test_no_task_comes_twice_in_a_step_and_every_task_comes_up_in_time():
    for size in range(1, 9):
        for count in range(1, size + 1):
            seen = set()
            for step in range(40):
                ids = [task.id for task in tasks_for_step(make_tasks(size), count, step, "key")]
                assert len(set(ids)) == count
                seen |= set(ids)
            assert len(seen) == size, f"{count} of {size}"


def test_tasks_come_equally_often():
    tasks = make_tasks(12)
    counts = Counter(
        task.id for step in range(300) for task in tasks_for_step(tasks, 4, step, "key")
    )
    assert set(counts.values()) == {100}


# ranks


def shard(rank, num_ranks, count):
    return Ranks.shard(SimpleNamespace(rank=rank, num_ranks=num_ranks), count)


def test_no_group_is_lost_or_played_twice_whatever_the_ranks():
    """Also where ranks outnumber groups; shares differ by one at most."""
    for num_ranks in range(1, 18):
        for count in range(0, 40):
            shares = [shard(rank, num_ranks, count) for rank in range(num_ranks)]
            assert sorted(index for share in shares for index in share) == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


CALL = {"type": "function", "id": "c1", "function": {"name": "look", "arguments": {"card": "A1"}}}
AS_TEXT, LIST, BROKEN = (
    {**CALL, "function": {"name": "look", "arguments": text}}
    for text in ('{"card": "A1"}', "[1]", "{")
)


@pytest.mark.parametrize(
    ("given", "usual"),
    [
        ({"role": "developer", "content": "rules"}, {"role": "system", "content": "rules"}),
        (
            {"role": "assistant", "content": None, "tool_calls": [AS_TEXT]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        (
            {"role": "assistant", "tool_calls": [CALL], "refusal": None},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
            {"role": "user", "content": "ab"},
        ),
    ],
)
def test_messages_as_the_api_of_openai_has_them_are_read(write, given, usual):
    row = {**ROW, "prompt": [given, PROMPT[1]]}
    (task,) = load_tasks(write("own.jsonl", row), "bank")
    assert list(task.prompt) == [usual, PROMPT[1]]
    assert messages_problem(list(task.prompt)) == ""


@pytest.mark.parametrize(
    "given",
    [
        {"role": "assistant", "content": None},  # says nothing
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "look", "arguments": "[1]"}}],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "look", "arguments": "{"}}],
        },
    ],
)
def test_messages_that_are_ambiguous_are_refused(given):
    assert messages_problem(with_usual_messages([given, PROMPT[1]]))


@pytest.mark.parametrize("name", ["own.jsonl", "own.json"])
def test_a_byte_order_mark_and_null_keys_mean_nothing(tmp_path, name):
    row = {**ROW, "domain": None, "family": None, "branch": None}
    text = json.dumps([row] if name == "own.json" else row)
    (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
    (task,) = load_tasks(tmp_path / name, "bank")
    assert (task.id, task.family, task.branch) == (ROW["id"], "", "")
    (tmp_path / name).write_text(text.replace(json.dumps(ROW["id"]), "null"), encoding="utf-8")
    (task,) = load_tasks(tmp_path / name, "bank", has_columns=True)
    assert task.id == "0"


def test_a_column_of_another_meaning_is_told_to_be_renamed(write):
    says(
        refusal(loaded, write("own.jsonl", {**ROW, "domain": "maths"})), "rename a column `domain`"
    )
