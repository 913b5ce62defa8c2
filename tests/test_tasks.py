"""Tasks: files are read with every mistake named; steps and ranks get each task exactly once."""

import json
from collections import Counter
from dataclasses import FrozenInstanceError

import pytest

from pipeline.config import UserError
from pipeline.environments.retail import generate_tasks
from pipeline.tasks import Task, count_by, load_tasks, save_tasks, shard_tasks, tasks_for_step

PROMPT = [{"role": "system", "content": "bank"}, {"role": "user", "content": "my card is lost"}]
ROW = {"id": "a", "prompt": PROMPT, "payload": {"card": "lost"}}


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


def refusal(path) -> str:
    """What the user reads, without the folder."""
    with pytest.raises(UserError) as caught:
        load_tasks(path, "bank")
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{path.parent}/", "")


# a task


def test_the_identity_of_a_task_is_its_domain_and_its_id():
    airline = Task(domain="airline", id="1", prompt=tuple(PROMPT), payload="{}")
    retail = Task(domain="retail", id="1", prompt=tuple(PROMPT), payload="{}")
    assert airline.key == ("airline", "1")
    assert airline.key != retail.key


def test_a_task_cannot_be_altered_by_itself_or_through_its_row():
    prompt = [{"role": "user", "content": "x", "tool_calls": [{"arguments": {"a": 1}}]}]
    task = Task(domain="bank", id="1", prompt=tuple(prompt), payload='{"b": 2}')
    with pytest.raises(FrozenInstanceError):
        task.id = "2"
    row = task.row()
    assert row == {"domain": "bank", "id": "1", "prompt": prompt, "payload": '{"b": 2}'}
    row["prompt"][0]["tool_calls"][0]["arguments"]["a"] = 7
    row["prompt"][0]["content"] = "y"
    assert task.prompt[0]["content"] == "x"
    assert task.prompt[0]["tool_calls"] == [{"arguments": {"a": 1}}]


def test_tasks_are_counted_by_what_they_are():
    assert count_by(generate_tasks(0, 30, "train", "medium"), "family") == {
        "cancel": 10,
        "exchange": 10,
        "refund": 10,
    }


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


def test_a_payload_may_be_missing(write):
    path = write("tasks.jsonl", {"id": "a", "prompt": PROMPT})
    assert load_tasks(path, "bank")[0].payload == "{}"


def test_saved_tasks_are_read_back_equal(tmp_path):
    tasks = generate_tasks(3, 40, "train", "hard")
    save_tasks(tasks, tmp_path / "retail.jsonl")
    assert load_tasks(tmp_path / "retail.jsonl", "retail") == tasks


def test_any_text_survives_saving(tmp_path):
    """Line separators of Unicode are no line ends of a JSONL file."""
    text = "one\u2028two\u2029three\x85four\x0bfive\nsix \U0001f600 \"'\\ <|im_end|>"
    prompt = ({"role": "user", "content": text},)
    tasks = [Task(domain="bank", id=text, prompt=prompt, payload=json.dumps({"x": text}))]
    save_tasks(tasks, tmp_path / "bank.jsonl")
    (read,) = load_tasks(tmp_path / "bank.jsonl", "bank")
    assert (read.id, read.prompt, json.loads(read.payload)) == (text, prompt, {"x": text})


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (3, "line 1: got int; a task is one JSON object"),
        (
            {**ROW, "goal": 1},
            "line 1: unknown key ['goal']; a task has branch, domain, family, id, payload, prompt",
        ),
        ({"prompt": PROMPT}, "line 1: id: got None; give a non-empty string"),
        ({**ROW, "id": ""}, "line 1: id: got ''; give a non-empty string"),
        ({**ROW, "id": 7}, "line 1: id: got 7; give a non-empty string"),
        (
            {**ROW, "domain": "shop"},
            "line 1 (task 'a'): domain: got 'shop' in a file of bank tasks; move it or mend it",
        ),
        ({**ROW, "prompt": []}, "line 1 (task 'a'): prompt: give a non-empty list of messages"),
        ({**ROW, "prompt": "hi"}, "line 1 (task 'a'): prompt: give a non-empty list of messages"),
        (
            {**ROW, "prompt": [{"role": "boss", "content": "x"}]},
            "line 1 (task 'a'): prompt: bad message {'role': 'boss', 'content': 'x'}; "
            "give role and content",
        ),
        (
            {**ROW, "prompt": [{"role": "user", "content": None}]},
            "line 1 (task 'a'): prompt: bad message {'role': 'user', 'content': None}; "
            "give role and content",
        ),
        (
            {**ROW, "prompt": ["hi"]},
            "line 1 (task 'a'): prompt: bad message 'hi'; give role and content",
        ),
        (
            {**ROW, "prompt": PROMPT[:1]},
            "line 1 (task 'a'): prompt: the last message must be the user's request",
        ),
        ({**ROW, "payload": 3}, "line 1 (task 'a'): payload: got int; give an object"),
        (
            {**ROW, "payload": "{'a': 1}"},
            "line 1 (task 'a'): payload: not JSON (Expecting property name enclosed in double "
            "quotes); give an object",
        ),
        ({**ROW, "family": 3}, "line 1 (task 'a'): family: got 3; give a string"),
        ({**ROW, "branch": None}, "line 1 (task 'a'): branch: got None; give a string"),
    ],
)
def test_what_is_wrong_with_a_task_is_named_with_its_place(write, row, problem):
    assert refusal(write("tasks.jsonl", row)) == f"tasks.jsonl, {problem}"


def test_the_line_is_counted_with_blank_lines(write):
    path = write("tasks.jsonl", "", ROW, "", {**ROW, "id": 5})
    assert refusal(path) == "tasks.jsonl, line 4: id: got 5; give a non-empty string"


def test_a_broken_line_is_named(write):
    path = write("tasks.jsonl", ROW, '{"id": "b", ')
    assert refusal(path) == (
        "tasks.jsonl, line 2: not JSON (Expecting property name enclosed in double quotes); "
        "mend the line"
    )


def test_a_broken_array_is_named_by_its_line(write):
    path = write("tasks.json", "[", json.dumps(ROW), json.dumps(ROW), "]")
    assert refusal(path) == "tasks.json, line 3: not JSON (Expecting ',' delimiter); mend the file"


def test_a_place_in_an_array_is_counted_from_one(write):
    path = write("tasks.json", json.dumps([ROW, {**ROW, "id": 0}]))
    assert refusal(path) == "tasks.json, task 2: id: got 0; give a non-empty string"


def test_a_json_file_that_is_no_array_is_refused(write):
    assert refusal(write("tasks.json", ROW)) == (
        "tasks.json: got a dict; a .json task file is one array of tasks"
    )


def test_an_id_used_twice_is_refused_with_both_places(write):
    path = write("tasks.jsonl", ROW, {**ROW, "id": "b"}, ROW)
    message = refusal(path)
    assert message.startswith("tasks.jsonl, line 3: task id 'a' was already used at ")
    assert message.endswith("tasks.jsonl, line 1; give every task its own id")


@pytest.mark.parametrize("text", ["", "\n \n", "[]"])
def test_a_file_without_tasks_is_refused(write, text):
    assert refusal(write("tasks.jsonl", text)) == (
        "tasks.jsonl: holds no tasks; expected one JSON object per line or one JSON array"
    )


def test_a_missing_or_unreadable_file_is_refused(tmp_path):
    assert refusal(tmp_path / "none.jsonl").startswith(
        "none.jsonl: cannot be read as a UTF-8 task file ([Errno 2] No such file"
    )
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9"}')
    assert refusal(tmp_path / "latin.jsonl").startswith(
        "latin.jsonl: cannot be read as a UTF-8 task file ('utf-8' codec can't decode byte 0xe9"
    )


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


def test_a_step_takes_from_any_sized_and_indexed_source():
    class Numbered:
        def __len__(self):
            return 1000

        def __getitem__(self, index):
            return make_tasks(1)[0].__class__(
                domain="bank", id=str(index), prompt=tuple(PROMPT), payload="{}"
            )

    ids = [task.id for task in tasks_for_step(Numbered(), 5, 0, "key")]
    assert len(set(ids)) == 5
    assert all(0 <= int(number) < 1000 for number in ids)


def test_more_tasks_than_there_are_cannot_be_asked():
    with pytest.raises(AssertionError, match="a step of 3 tasks cannot come from 2"):
        tasks_for_step(make_tasks(2), 3, 0)


# ranks


def test_no_group_is_lost_or_played_twice_whatever_the_ranks():
    """Also where ranks outnumber groups; shares differ by one at most."""
    for num_ranks in range(1, 18):
        for count in range(0, 40):
            shares = [shard_tasks(count, rank, num_ranks) for rank in range(num_ranks)]
            assert sorted(index for share in shares for index in share) == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_domains_listed_one_after_another_spread_over_the_ranks():
    domains = ["airline"] * 8 + ["retail"] * 8 + ["telecom"] * 8
    for rank in range(4):
        mine = Counter(domains[index] for index in shard_tasks(24, rank, 4))
        assert mine == {"airline": 2, "retail": 2, "telecom": 2}


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(AssertionError):
        shard_tasks(4, 2, 2)
