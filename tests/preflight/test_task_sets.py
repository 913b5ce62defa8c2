"""A dataset of one's own: what trains, what is held out, and what is told before the run."""

import datetime
import json

import pytest
from datasets import Dataset

from pipeline.config.settings import Config
from pipeline.environments.domains import load_domains
from pipeline.preflight.rewards import check_reward_functions
from pipeline.preflight.tasks import task_sets
from tests.support.messages import refusal, says

FUNCTIONS = """
def correct(completions, answer, **kwargs): return [0.0 for _ in completions]
def plain(completions, answer): return [0.0 for _ in completions]
def typo(completions, anwser): return [0.0 for _ in completions]
def first(completions, **kwargs): return [float(text[0] == "4") for text in completions]
async def judge(completions, **kwargs): raise RuntimeError("called before the run")
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder with reward functions, without a hub."""
    (tmp_path / "own_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("pipeline.data.datasets.hub_reachable", lambda: False)
    return tmp_path


def rows(count, **changed):
    found = [{"prompt": f"{n} + 1", "answer": str(n + 1)} for n in range(count)]
    return [{**row, **changed} for row in found]


def lines(path, found):
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(path)


def prepared(source, function="correct", **data):
    """The task sets of the domain `sums`, and the notes before the run."""
    config = Config.model_validate(
        {
            "data": {
                "domains": ["sums"],
                "tasks": {"sums": source},
                "reward_funcs": [f"own_rewards:{function}"],
                "eval_tasks_per_domain": 6,
                **data,
            }
        }
    )
    domains = load_domains(config.data)
    sets = task_sets(config, domains["sums"])
    tasks = {"sums": sets.train}, {"sums": sets.held_out}
    return sets, [*sets.notes, *check_reward_functions(config, domains, *tasks)]


def requests(tasks):
    return [task.prompt[-1]["content"] for task in tasks]


def test_the_last_rows_of_a_file_are_held_out_with_a_note(place):
    sets, notes = prepared(lines(place / "sums.jsonl", rows(40)))
    assert requests(sets.held_out) == [f"{n} + 1" for n in range(34, 40)]
    assert requests(sets.validation) == [f"{n} + 1" for n in range(26, 34)]
    assert requests(sets.train) == [f"{n} + 1" for n in range(26)]
    assert (sets.train[2].id, json.loads(sets.train[2].columns)) == ("2", {"answer": "3"})
    assert notes == [
        "sums: the last 6 of 40 tasks are held out",
        "sums: tasks 27 to 34 of 40 are for validations",
    ]


@pytest.mark.parametrize(("step", "seen"), [(7, 2), (10, 0)])
def test_generated_tasks_that_train_and_are_held_out_are_counted_in_a_note(place, step, seen):
    (place / f"own_{step}.py").write_text(f"""
from pipeline.data.tasks import Task

class Environment:
    def reset(self, **row): pass
    def get_reward(self): return 0.0

def generate_tasks(seed, n, split, difficulty):
    first = {step} * ["train", "validation", "test"].index(split) // 2
    prompts = ({{"role": "user", "content": f"{{first + i}}"}} for i in range(n))
    return [
        Task(domain="own", id=f"{{split}}-{{i}}", prompt=(prompt,), payload="{{}}")
        for i, prompt in enumerate(prompts)
    ]
""")
    config = Config.model_validate(
        {
            "data": {
                "domains": ["own"],
                "environments": {"own": f"own_{step}:Environment"},
                "tasks_per_domain": 9,
                "eval_tasks_per_domain": 6,
            }
        }
    )
    notes = task_sets(config, load_domains(config.data)["own"]).notes
    told = f"own: {seen} of 6 held-out tasks are training tasks too; make the splits from other"
    assert any(note.startswith(told) for note in notes) == (seen > 0)


def test_eval_tasks_or_a_test_split_are_held_out(place):
    both = rows(30)
    for split, found in (("train", both[:20]), ("test", both[20:])):
        (place / "gsm").mkdir(exist_ok=True)
        Dataset.from_list(found).to_parquet(place / "gsm" / f"{split}-00000.parquet")
    split, _ = prepared("gsm")
    assert requests(split.held_out) == [f"{n} + 1" for n in range(20, 26)]
    assert requests([*split.train, *split.validation]) == [f"{n} + 1" for n in range(20)]
    source, other = lines(place / "a.jsonl", both[:20]), lines(place / "b.jsonl", both[20:23])
    given, notes = prepared(source, eval_tasks={"sums": other}, tasks_per_domain=9)
    assert requests(given.held_out) == ["20 + 1", "21 + 1", "22 + 1"]
    assert "sums: trains on the first 9 tasks (tasks_per_domain)" in notes


def test_columns_keep_their_values(place):
    """But for nulls of keys inside of a column, which Arrow adds to objects without the key."""
    day, nested = datetime.date(2026, 1, 2), {"a": [1, None], "b": None}
    found = rows(10, day=day, nested=nested, hint=None)
    found[0] |= {"hint": "x", "nested": {"a": [], "b": "y"}}
    (place / "own").mkdir()
    Dataset.from_list(found).to_parquet(place / "own" / "train-00000.parquet")
    sets, _ = prepared("own")
    assert json.loads(sets.train[1].columns) == {
        **{"answer": "2", "day": "2026-01-02", "nested": {"a": [1, None]}, "hint": None}
    }
    uneven = [{**row, **({"hint": "x"} if number else {})} for number, row in enumerate(rows(10))]
    of_file, _ = prepared(lines(place / "uneven.jsonl", uneven))
    assert json.loads(of_file.train[0].columns) == {"answer": "1", "hint": None}


@pytest.mark.parametrize(
    ("function", "noted"),
    [
        ("judge", "reward function judge is async, so its first call is in the run"),
        ("plain", "sums: no one reads the column level"),
    ],
)
def test_notes_tell_what_is_not_tried_or_not_read(function, noted, place):
    _, notes = prepared(lines(place / "sums.jsonl", rows(10, level=3)), function)
    assert notes[2:] == [noted]


QUESTION = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(9)]


@pytest.mark.parametrize(
    ("found", "function", "data", "words"),
    [
        (QUESTION, "correct", {}, ("no request", "question", "give a column prompt")),
        (rows(9), "typo", {}, ("typo", "no domain", "no anwser", "answer", "rename")),
        (rows(9), "first", {}, ("empty answer", "'0'", "function first", "IndexError", "mend")),
        ([], "correct", {}, ("no tasks of sums", "one JSON object per line")),
        (rows(2), "correct", {}, ("holds 2 tasks", "3 or more", "eval_tasks")),
        (rows(9, id="x"), "correct", {}, ("line 2", "'x'", "already used", "own id")),
        (rows(9, id=2.5), "correct", {}, ("line 1", "id", "2.5", "string")),
        (rows(9, prompt=None), "correct", {}, ("line 1", "prompt", "messages")),
        (rows(9, prompt=[{"role": "user"}]), "correct", {}, ("line 1", "prompt", "content")),
        (rows(9, environment="other"), "correct", {}, ("no tasks of sums",)),
        (
            rows(9),
            "correct",
            {"eval_tasks": {"sums": "no.jsonl"}},
            ("eval_tasks: sums",),
        ),
        (
            rows(9),
            "correct",
            {"eval_tasks": {"sums": "own.jsonl"}},
            ("also a held-out task",),
        ),
    ],
)
def test_a_mistake_is_told_in_one_line(found, function, data, words, place):
    says(refusal(lambda: prepared(lines(place / "own.jsonl", found), function, **data)), *words)


def test_held_out_tasks_without_a_column_that_a_function_needs_are_refused(place):
    """They would all score 0, as if the model had failed."""
    held_out = lines(place / "held.jsonl", [{"prompt": f"{n} + 7"} for n in range(6)])
    trained = lines(place / "own.jsonl", rows(9))
    message = refusal(lambda: prepared(trained, eval_tasks={"sums": held_out}))
    says(
        message, "reward_funcs: correct needs what its training tasks have, but the held-out tasks"
    )
    says(message, "of sums have no answer; add it to them")


def test_held_out_rows_that_are_trained_too_are_told(place):
    _, notes = prepared(lines(place / "own.jsonl", rows(6) + rows(6)))
    assert any("2 of 2 held-out tasks are training tasks too; take out equal" in n for n in notes)
    _, notes = prepared(lines(place / "own.jsonl", rows(12)))
    assert not any("training tasks too" in note for note in notes)


def test_an_unknown_split_is_refused(place):
    (place / "own").mkdir()
    Dataset.from_list(rows(9)).to_parquet(place / "own" / "train-00000.parquet")
    for split in ("train", "test"):
        message = refusal(lambda: prepared("own", **{f"dataset_{split}_split": "dev"}))  # noqa: B023
        says(message, "sums", "'own'", "split dev", f"set dataset_{split}_split")
