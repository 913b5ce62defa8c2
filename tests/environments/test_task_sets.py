"""A dataset of one's own: what trains, what is held out, and what is told before the run."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from datasets import Dataset

from pipeline.config.cli import parse
from pipeline.config.settings import Config
from pipeline.data.curriculum import TaskMixture
from pipeline.data.splits import seen_of
from pipeline.environments.demonstrations import warm_start_demonstrations
from pipeline.environments.domains import load_domains
from pipeline.environments.embedded.airline import generate_tasks
from pipeline.environments.task_sets import task_sets
from pipeline.preflight.parts import prepare
from pipeline.rollout.reward_checks import check_reward_functions
from pipeline.rollout.rewards import callables_of, load_reward_functions
from pipeline.training.demonstration_checks import check_demonstrations
from tests.support.helpers import chat, make_task, save_tasks
from tests.support.messages import refusal, says

FUNCTIONS = """
def correct(completions, answer, **kwargs): return [0.0 for _ in completions]
def plain(completions, answer): return [0.0 for _ in completions]
def typo(completions, anwser): return [0.0 for _ in completions]
def first(completions, **kwargs): return [float(text[0] == "4") for text in completions]
def single(completions, **kwargs): return [1.0]
async def judged(completions, judge): raise RuntimeError("called before the run")
def blocking(completions, judge): return [0.0 for _ in completions]
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


def prepared(source, function="correct", evaluation=None, judge=None, **data):
    """The task sets of the domain `sums`, and the notes before the run."""
    config = Config.model_validate(
        {
            "data": {
                "domains": ["sums"],
                "tasks": {"sums": source},
                "reward_funcs": [f"own_rewards:{function}"],
                "eval_tasks_per_domain": 6,
                **data,
            },
            "evaluation": evaluation or {},
            "judge": judge or {},
        }
    )
    domains = load_domains(config)
    rewards = load_reward_functions(config)
    sets = task_sets(config, domains["sums"], callables_of(rewards))
    notes = check_reward_functions(rewards, config, domains, {"sums": sets})
    return sets, [*sets.notes, *notes]


def requests(tasks):
    return [task.prompt[-1]["content"] for task in tasks]


def test_held_out_rows_are_drawn_wherever_they_stand(place):
    """The parts depend on what a row holds alone: on neither its place nor its id."""
    sets, notes = prepared(lines(place / "sums.jsonl", rows(40)))
    parts = [requests(tasks) for tasks in (sets.held_out, sets.validation, sets.train)]
    assert [len(part) for part in parts] == [6, 8, 26]
    assert {*parts[0], *parts[1], *parts[2]} == {f"{n} + 1" for n in range(40)}
    assert min(int(text.split()[0]) for text in parts[0]) < 20  # the file's first half, too
    first = sets.train[0]
    assert (first.id, json.loads(first.columns)) == ("0", {"answer": "1"})
    assert notes == [
        "sums: 40 tasks: 6 held out, 8 for validations, 26 for training; "
        "drawn by a hash of the task"
    ]
    other, _ = prepared(lines(place / "turned.jsonl", [*reversed(rows(40))]))
    assert sorted(requests(other.held_out)) == sorted(parts[0])
    assert sorted(requests(other.validation)) == sorted(parts[1])


def test_families_in_blocks_are_held_out_evenly(place):
    """Three blocks of unequal length; a family of four rows is too small to share."""
    found = [
        {**row, "family": "a" if n < 30 else "b" if n < 90 else "c" if n < 96 else "rare"}
        for n, row in enumerate(rows(100))
    ]
    sets, notes = prepared(lines(place / "sums.jsonl", found), eval_tasks_per_domain=9)
    of = {name: Counter(t.family for t in getattr(sets, name)) for name in ("held_out", "train")}
    assert of["held_out"] == {"a": 4, "b": 4, "c": 1}
    assert of["train"].keys() == {"a", "b", "c", "rare"}
    assert of["train"]["c"] == 4  # one is held out, one validates
    assert notes[0].endswith("; drawn by a hash of the task, evenly over `family`")
    held_out = lines(
        place / "held.jsonl", [{**row, "prompt": row["prompt"] + "?"} for row in found]
    )
    own, notes = prepared(
        lines(place / "own.jsonl", found), eval_tasks={"sums": held_out}, eval_tasks_per_domain=8
    )
    assert Counter(task.family for task in own.held_out) == {"a": 2, "b": 2, "c": 2, "rare": 2}
    assert notes[0].startswith("sums: 8 of the 100 held-out tasks of ")


@pytest.mark.parametrize("copied", [{}, {"level": 3}])
def test_no_copy_of_a_held_out_row_is_trained_on(place, copied):
    """In a task of one turn, the prompt is all that the model sees."""
    once, twice = rows(12), [{**row, **copied} for row in rows(30)[12:]]
    found = [*once, *twice, *rows(30)[12:]]
    source = lines(place / "sums.jsonl", [{"level": 1, **row} for row in found])
    sets, notes = prepared(source)
    parts = [requests(tasks) for tasks in (sets.held_out, sets.validation, sets.train)]
    assert not {*parts[0], *parts[1]} & {*parts[2]} and not {*parts[0]} & {*parts[1]}
    assert {*parts[0]} <= {f"{n} + 1" for n in range(12)}  # rows without copies, first
    assert [len(part) for part in parts[:2]] == [6, 6]
    every, notes = prepared(lines(place / "all.jsonl", rows(30) + rows(30)))
    assert len(every.train) == 2 * 18
    assert "36 for training, 12 equal to one of these and unused; " in notes[0]


def test_a_scenario_of_the_customer_makes_another_task_of_the_same_prompt():
    """A language model who plays the customer says what the scenario tells it to."""
    same = [{"role": "user", "content": ""}]
    found = [seen_of(same, {"scenario": text, "level": n}) for n, text in enumerate("abca")]
    assert found[0] == found[3] and len({*found}) == 3


def test_all_rows_of_a_source_are_trained_on_and_what_is_left_is_told(place):
    source = lines(place / "sums.jsonl", rows(1000))
    sets, _ = prepared(source)
    assert (len(sets.train), len(sets.validation), len(sets.held_out)) == (974, 20, 6)
    sets, notes = prepared(source, tasks_per_domain=50)
    assert "50 for training, 924 unused (tasks_per_domain); " in notes[0]
    assert max(int(text.split()[0]) for text in requests(sets.train)) > 500
    sets, notes = prepared(source, evaluation={"validation_steps": 0})
    assert (len(sets.train), sets.validation) == (994, [])
    assert notes[0].startswith("sums: 1000 tasks: 6 held out, 994 for training; ")


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
    notes = task_sets(config, load_domains(config)["own"]).notes
    told = f"own: {seen} of 6 held-out tasks are training tasks too; make the splits from other"
    assert any(note.startswith(told) for note in notes) == (seen > 0)


def test_eval_tasks_or_a_test_split_are_held_out(place):
    both = rows(30)
    for split, found in (("train", both[:20]), ("test", both[20:])):
        (place / "gsm").mkdir(exist_ok=True)
        Dataset.from_list(found).to_parquet(place / "gsm" / f"{split}-00000.parquet")
    split, _ = prepared("gsm")
    assert len(split.held_out) == 6
    assert {*requests(split.held_out)} < {f"{n} + 1" for n in range(20, 30)}
    assert {*requests([*split.train, *split.validation])} == {f"{n} + 1" for n in range(20)}
    source, other = lines(place / "a.jsonl", both[:20]), lines(place / "b.jsonl", both[20:23])
    given, notes = prepared(source, eval_tasks={"sums": other}, tasks_per_domain=9)
    assert requests(given.held_out) == ["20 + 1", "21 + 1", "22 + 1"]
    assert notes[0].startswith("sums: 20 tasks: 4 for validations, 9 for training, 7 unused (t")


@pytest.mark.parametrize(
    ("function", "noted"),
    [
        ("judge", "reward function judge is async, so its first call is in the run"),
        ("plain", "sums: no one reads the column level"),
    ],
)
def test_notes_tell_what_is_not_tried_or_not_read(function, noted, place):
    _, notes = prepared(lines(place / "sums.jsonl", rows(10, level=3)), function)
    assert notes[1:] == [noted]


QUESTION = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(9)]


@pytest.mark.parametrize(
    ("found", "function", "data", "words"),
    [
        (
            QUESTION,
            "correct",
            {},
            ("has no request, only id, answer, question; give a column prompt",),
        ),
        (rows(9), "typo", {}, ("typo", "no domain", "no anwser", "answer", "rename")),
        (rows(9), "first", {}, ("empty answer", "'0'", "function first", "IndexError", "mend")),
        (rows(9), "single", {}, ("2 empty answer", "'0'", "single returned 1 rewards, not a list")),
        ([], "correct", {}, ("no tasks of sums", "one JSON object per line")),
        (rows(2), "correct", {}, ("holds 2 different tasks", "3 or more", "eval_tasks")),
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


@pytest.mark.parametrize("first", [0, 4], ids=["all", "some"])
def test_held_out_tasks_without_a_column_that_a_function_needs_are_refused(place, first):
    """They would score 0, as if the model had failed."""
    held = [{"prompt": f"{n} + 7", "answer": str(n + 7)} for n in range(first)]
    held += [{"prompt": f"{n} + 7"} for n in range(first, 6)]
    held_out = lines(place / "held.jsonl", held)
    trained = lines(place / "own.jsonl", rows(9))
    message = refusal(lambda: prepared(trained, eval_tasks={"sums": held_out}))
    says(
        message, "reward_funcs: correct needs what its training tasks have, but the held-out tasks"
    )
    says(message, "of sums have no answer (task ", "); add it to them")


JUDGE = {"judge": {"url": "http://x", "model": "m"}}


@pytest.mark.parametrize(
    ("function", "changed", "data", "words"),
    [
        ("judged", {}, {}, ("judged applies to no domain: its tasks have no judge", "judge_url")),
        ("correct", {}, JUDGE, ("judge_url: got http://x, and no reward function or environment",)),
        ("blocking", {}, JUDGE, ("blocking asks the judge, and is not async", "`async def`")),
        ("judged", {"judge": "Jo"}, JUDGE, ("sums: its tasks have a column judge", "rename the")),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(function, changed, data, words, place):
    source = lines(place / "own.jsonl", rows(9, **changed))
    says(refusal(lambda: prepared(source, function, **data)), *words)


def test_a_judge_is_asked_by_functions_with_this_argument(place):
    source = lines(place / "own.jsonl", rows(9))
    _, notes = prepared(source, "judged", **JUDGE)
    assert "reward function judged is async, so its first call is in the run" in notes
    prepared(lines(place / "other.jsonl", rows(9, judge="Jo")), "blocking")  # a column


def test_held_out_prompts_among_the_trained_ones_are_refused_whatever_their_other_columns(place):
    held_out = lines(place / "held.jsonl", rows(8, level=2)[6:])
    source = lines(place / "own.jsonl", rows(12, level=1))
    message = refusal(lambda: prepared(source, eval_tasks={"sums": held_out}))
    says(message, "task '6' is also a held-out task; take it out")
    _, notes = prepared(source)
    assert not any("training tasks too" in note for note in notes)


def test_an_unknown_split_is_refused(place):
    (place / "own").mkdir()
    Dataset.from_list(rows(9)).to_parquet(place / "own" / "train-00000.parquet")
    for split in ("train", "test"):
        message = refusal(lambda: prepared("own", **{f"dataset_{split}_split": "dev"}))  # noqa: B023
        says(message, "sums", "'own'", "split dev", f"set dataset_{split}_split")


@pytest.mark.parametrize("written", ["{} + 1", " {}  +\t1\n", "{} \uff0b \uff11"])
def test_demonstrations_that_answer_held_out_requests_are_told(place, written):
    shown = [
        {
            "messages": [
                {"role": "user", "content": written.format(n)},
                {"role": "assistant", "content": "2"},
            ]
        }
        for n in range(40)
    ]
    files = {"demonstrations": {"sums": lines(place / "shown.jsonl", shown)}}
    data = {"domains": ["sums"], "tasks": {"sums": lines(place / "sums.jsonl", rows(40))}}
    data |= {"reward_funcs": ["own_rewards:correct"], "eval_tasks_per_domain": 6, **files}
    config = Config.model_validate({"data": data})
    domains = load_domains(config)
    held_out = {"sums": task_sets(config, domains["sums"]).held_out}
    demonstrations = warm_start_demonstrations(config, domains)
    (line,), _ = check_demonstrations(config, domains, demonstrations, chat(), held_out)
    says(line, "demonstrations of sums: 6 of 6 held-out requests are answered in the file")
    unseen = {"sums": [make_task(domain="sums", request="100 + 1")]}
    assert check_demonstrations(config, domains, demonstrations, chat(), unseen)[0] == []


# Rows that are too long


def with_long(path, numbers, count=30, kind=lines):
    """Rows of which those with these numbers have prompts of 100 words more."""
    found = rows(count)
    for number in numbers:
        found[number]["prompt"] += " and" * 100
    return kind(path, found)


def as_array(path, found):
    path.write_text(json.dumps(found))
    return str(path)


def as_dataset(path, found):
    Dataset.from_list(found).save_to_disk(path)
    return str(path)


def limited(source, **data):
    known = {"domains": ["sums"], "tasks": {"sums": source}, "reward_funcs": ["own_rewards:plain"]}
    return Config.model_validate(
        {
            "data": {**known, "eval_tasks_per_domain": 4, **data},
            "rollout": {"max_tokens": 100, "max_tokens_per_turn": 40},
            "warm_start": {"steps": 0},
        }
    )


@pytest.mark.parametrize(
    ("name", "kind", "where"),
    [
        ("sums.jsonl", lines, "sums.jsonl, line 18"),
        ("sums.json", as_array, "sums.json, task 18"),
        ("sums", as_dataset, "sums[17]"),
    ],
)
def test_one_row_that_is_too_long_is_named_and_can_be_left_out(place, name, kind, where):
    source = with_long(place / name, [17], kind=kind)
    message = refusal(lambda: prepare(limited(source)))
    says(message, "limits are too low: a prompt of sums has ", f"(task '17', {place}/{where}")
    says(message, "--skip-long-tasks leaves such rows out")
    parts = prepare(limited(source, skip_long_tasks=True))
    kept = [*parts.train["sums"], *parts.validation["sums"], *parts.held_out["sums"]]
    assert len(kept) == 29 and "17" not in {task.id for task in kept}
    said = f"sums: 1 of the 30 tasks of '{source}' have prompts that leave no room for a turn, the"
    told = f"{said} first is '17', {place}/{where}; they are left out (skip_long_tasks)"
    assert [note for note in parts.notes if "no room" in note] == [told]


def test_rows_that_are_all_too_long_are_refused(place):
    source = with_long(place / "sums.jsonl", range(30))
    message = refusal(lambda: prepare(limited(source, skip_long_tasks=True)))
    says(message, "skip_long_tasks: sums: 30 of the 30 tasks of ", "line 1; give more max_tokens")


def test_a_recipes_shares_of_families_count_for_the_tasks_that_it_generates(place):
    """The default recipe has shares for the airline's families; a file has others."""
    tasks = generate_tasks(3, 12, "train", "easy")
    save_tasks([replace(task, family="") for task in tasks], place / "own.jsonl")
    flags = ["--domains", "airline", "--warm-start-steps", "0", "--tasks-per-step", "4"]
    own = prepare(parse([*flags, "--tasks", f"{{airline: {place}/own.jsonl}}"]))
    assert "family_shares: airline: no task has the family move or cancel or bags" in own.notes[-1]
    assert not isinstance(own.train["airline"], TaskMixture)
    plain = prepare(parse(flags))
    assert plain.train["airline"].shares == {"bags": 0.25, "cancel": 0.25, "move": 0.5}


def test_branches_that_no_task_names_are_not_drawn_evenly(place):
    source = lines(place / "sums.jsonl", rows(9))
    parts = prepare(limited(source).changed("curriculum", even_branches=True))
    assert "even_branches: sums: no task names a branch, so it has no effect" in parts.notes
    assert not isinstance(parts.train["sums"], TaskMixture)


def test_rows_that_are_alike_are_tasks_by_their_ids_where_an_environment_makes_them(place):
    """As TRL's games have them: one prompt a thousand times, and a `reset` that draws."""
    (place / "game.py").write_text(
        "class Game:\n"
        "    def reset(self, id, **row): self.number = id\n"
        "    def get_reward(self): return 1.0\n"
    )
    alike = lines(place / "game.jsonl", [{"prompt": "Play."}] * 30)
    data = {"domains": ["game"], "environments": {"game": "game:Game"}, "tasks": {"game": alike}}
    config = Config.model_validate({"data": {**data, "eval_tasks_per_domain": 6}})
    sets = task_sets(config, load_domains(config)["game"])
    parts = [{task.id for task in part} for part in (sets.train, sets.validation, sets.held_out)]
    assert len(set().union(*parts)) == sum(map(len, parts)) == 30
    assert len(parts[2]) == 6
    says(" ".join(sets.notes), "the rows are alike, so tasks are told apart by the ids")
    told = refusal(lambda: prepared(lines(place / "sums.jsonl", rows(1) * 30)))
    says(told, "holds 1 different tasks")  # without an environment, they are one question


# One request in several rows

NAMED = "def reset(self, answer, **kwargs): self.answer = answer"
WHOLE = "def reset(self, **row): self.row = row"
WRITTEN = {  # what differs between the rows of a request
    "bookkeeping": lambda n, text: {"uuid": f"u{n}", "index": n, "created_at": f"2026-01-{n:02}"},
    "space": lambda n, text: {"prompt": text + " " * (n % 5), "day": n},
    "case and width": lambda n, text: {
        "prompt": [text, text.upper(), text.replace("k", "\uff4b"), text + "\u200b", f"\n{text}"][
            n % 5
        ]
    },
    "id of a message": lambda n, text: {"prompt": [{"role": "user", "content": text, "id": n}]},
}


def desk(place, reset, **data):
    """The task sets of a domain with a tool."""
    name = f"desk_{abs(hash(reset))}"
    (place / f"{name}.py").write_text(
        f"class Desk:\n    {reset}\n    def get_reward(self): return 0.0\n"
        "    def look(self) -> str:\n        '''Look.'''\n        return 'x'\n"
    )
    known = {"domains": ["desk"], "environments": {"desk": f"{name}:Desk"}}
    config = Config.model_validate({"data": {**known, "eval_tasks_per_domain": 6, **data}})
    return task_sets(config, load_domains(config)["desk"])


def asked(count, kind="bookkeeping", first=0):
    """Five rows of each request."""
    for n in range(5 * count):
        text = f"book desk {first + n // 5}"
        yield {"prompt": text, "answer": first + n // 5, **WRITTEN[kind](n, text)}


def answers(tasks):
    return [json.loads(task.columns)["answer"] for task in tasks]


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize(
    "reset",
    [
        NAMED,
        "def reset(self, answer): self.answer = answer",
        "def reset(self, **row): self.answer = row['answer'], row.get('level', 0)",
    ],
    ids=["named", "alone", "by key"],
)
def test_rows_that_differ_in_what_no_one_reads_are_one_task(place, kind, reset):
    source = lines(place / "desk.jsonl", asked(12, kind))
    sets = desk(place, reset, tasks={"desk": source}, eval_tasks_per_domain=2)
    parts = [answers(of) for of in (sets.held_out, sets.validation, sets.train)]
    assert [len(of) for of in parts] == [2, 2, 8 * 5]
    assert len({*parts[0]} | {*parts[1]} | {*parts[2]}) == 12
    says(sets.notes[0], "40 for training, 16 equal to one of these and unused")


@pytest.mark.parametrize(
    "reset",
    [
        WHOLE,
        "def reset(self, **row): self.answer = [*row.values()], row['answer']",
        "def reset(self, **row): super().__init__(); self.answer = str(row)",
        "def reset(self, **row): self.answer = str(locals())",
    ],
    ids=["whole", "values", "passed on", "locals"],
)
def test_requests_that_are_trained_on_and_may_be_one_task_are_counted(place, reset):
    sets = desk(place, reset, tasks={"desk": lines(place / "desk.jsonl", asked(12))})
    seen = sum(answer in answers(sets.train) for answer in answers(sets.held_out))
    assert seen > 0
    told = f"desk: {seen} of 6 held-out tasks have a request that is trained on too, in rows that "
    told += "differ in 'created_at, index, uuid'; take out what makes no other task"
    assert sets.notes[1].startswith(told)


def test_rows_with_a_seed_stay_tasks_of_their_own(place):
    """All rows of a game are alike but for what makes the task."""
    found = [{"prompt": "Play.", "seed": n} for n in range(40)]
    sets = desk(place, WHOLE, tasks={"desk": lines(place / "game.jsonl", found)})
    assert (len(sets.held_out), len(sets.validation), len(sets.train)) == (6, 8, 26)
    assert len(sets.notes) == 1


def test_held_out_rows_that_a_file_gives_are_not_trained_on_in_other_words(place):
    held_out = lines(place / "held.jsonl", asked(3, "space"))
    source = lines(place / "desk.jsonl", [{**row, "uuid": "y"} for row in asked(12, "space")])
    given = {"tasks": {"desk": source}, "eval_tasks": {"desk": held_out}}
    sets = desk(place, NAMED, **given, eval_tasks_per_domain=20)
    assert sorted(answers(sets.held_out)) == [0, 1, 2]  # of 15 rows
    assert {*answers([*sets.train, *sets.validation])} == {*range(3, 12)}
    assert any("equal to a held-out task or one of these and unused" in n for n in sets.notes)
    source = lines(place / "other.jsonl", [{**row, "uuid": "y"} for row in asked(3, "space")])
    message = refusal(lambda: desk(place, NAMED, **{**given, "tasks": {"desk": source}}))
    says(message, "holds 3 different tasks, and each is held out or validates; give others")


def test_all_that_is_summed_into_the_reward_is_named(place):
    (place / "summed.py").write_text(
        "class Desk:\n    def reset(self, **row): pass\n    def get_reward(self): return 1.0\n"
    )
    given = {"environments": {"sums": "summed:Desk"}, "reward_weights": [0.5]}
    _, notes = prepared(lines(place / "sums.jsonl", rows(9)), "plain", **given)
    told = "sums: the reward is the sum of get_reward of Desk (weight 1) and plain (weight 0.5)"
    assert told in notes
