"""`rescore`: saved episodes get the rewards that a run would give, and the run stays as it is."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from pipeline.checkpoints.transcripts import save_transcripts
from pipeline.commands.main import COMMANDS
from pipeline.commands.rescore import _has_prompt, _trajectory, main
from pipeline.data.tasks import Task
from pipeline.environments.domains import Domain
from pipeline.report.run_files import episodes_in, transcripts_in
from pipeline.rollout.trajectory import Trajectory
from tests.support.helpers import say
from tests.support.messages import refusal, says
from tests.support.warm import jsonl, play

FUNCTIONS = """
CALLS = []

def right(completions, answer, **columns):
    return [float(text == a) for text, a in zip(completions, answer)]

async def share(completions, log_extra, **columns):
    log_extra("characters", [len(text) for text in completions])
    return [sum(map(ord, text)) % 101 / 101 for text in completions]

def length(completions, answer, trainer_state, **columns):
    CALLS.append((len(completions), answer, trainer_state.global_step, columns))
    return [None if int(answer[0]) % 4 == 0 else len(text) % 7 / 4 for text in completions]

def some_fail(completions, answer, **columns):
    return [1 / (int(a) % 4) for a in answer]

def of_nothing(completions, solution):
    return [0.0]

async def some_away(completions, answer, **columns):
    return [1 / (int(a) % 2) for a in answer]
"""
SHORT = [
    *("--domains", "sums", "--tasks", "{sums: sums.jsonl}", "--warm-start-steps", "0"),
    *("--reward-funcs", "mine:right,mine:share", "--reward-weights", "1,3"),
    *("--max-steps", "2", "--tasks-per-step", "4", "--num-generations", "4"),
    *("--tasks-per-domain", "12", "--eval-tasks-per-domain", "4", "--eval-trials", "2"),
    *("--validation-steps", "0", "--report-to", "none", "--max-tokens-per-turn", "6"),
    *("--output-dir", "out"),
]
BOTH = ["--reward-funcs", "mine:right,mine:share", "--reward-weights", "1,3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run of two steps on two ranks, scored by two functions."""
    folder = tmp_path_factory.mktemp("rescore")
    (folder / "mine.py").write_text(FUNCTIONS)
    rows = [{"prompt": f"{n // 5} and {n % 5}", "answer": str(n)} for n in range(20)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    play(*SHORT, cwd=folder)
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return folder / "out"


def place(of):
    return tuple(of[name] for name in ("stage", "step", "domain", "task_id", "trial"))


def saved(run):
    """The run's episodes by their place."""
    found = {}
    for (stage, step), paths in transcripts_in(run).items():
        for path in paths:
            for episode in episodes_in(path):
                found[place({**episode, "stage": stage, "step": step})] = episode
    return found


def scored(*words, output):
    assert main(["out", *words, "--output", str(output)]) == 0
    return jsonl(output / "rewards.jsonl")


def test_the_functions_of_the_run_give_each_episode_its_reward_again(run, tmp_path, capsys):
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run.rglob("*") if p.is_file()}
    rows = scored(*BOTH, output=tmp_path / "again")
    played = saved(run)
    assert len(rows) == len(played) == 2 * 4 * 4 + 2 * 4 * 2
    for row in rows:
        episode = played[place(row)]
        assert row["old"] == episode["reward"] == pytest.approx(row["new"], abs=1e-12)
        assert row["rewards"] == episode["rewards"] and row["extra"] == episode["extra"]
    assert len({row["old"] for row in rows}) > 5  # the rewards differ, so a mix-up would show
    after = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run.rglob("*") if p.is_file()}
    assert after == before
    assert "None has changed." in (tmp_path / "again" / "rescored.html").read_text()
    assert "sums, evaluation-start" in capsys.readouterr().out


def test_a_call_has_the_episodes_of_a_task_in_a_step_and_the_columns_of_a_run(run, tmp_path):
    rows = scored("--reward-funcs", "mine:length", output=tmp_path / "new")
    calls = sys.modules["mine"].CALLS
    assert Counter(size for size, *_ in calls) == {4: 2 * 4, 2: 2 * 4}  # tasks
    for size, answer, _, columns in calls:
        assert len({*answer}) == 1 and len(answer) == size
        assert columns["environments"] == [None] * size
        assert all(map(len, columns["completion_ids"]))
        assert {*columns} >= {"prompts", "id", "family", "log_extra", "log_metric"}
        assert columns["prompts"][0] == f"{int(answer[0]) // 5} and {int(answer[0]) % 5}"
    assert {step for size, _, step, _ in calls if size == 4} == {0, 1}
    assert {step for size, _, step, _ in calls if size == 2} == {0, 2}
    played = saved(run)
    assert 0 < len(rows) < len(played)  # those with None are left out
    for row in rows:
        assert row["new"] == len(played[place(row)]["messages"][-1]["content"]) % 7 / 4


def test_the_numbers_are_those_of_the_rewards_and_the_page_begins_with_another_success(
    run, tmp_path, capsys
):
    rows = scored("--reward-funcs", "mine:length", output=tmp_path / "new")
    out, err = capsys.readouterr()
    num = len(saved(run))
    assert f"{num - len(rows)} of {num} episodes are left out: every reward function" in err
    header, *table = [re.split(" {2,}", line) for line in out.splitlines()[:-1]]
    assert len(table) == len({r["stage"] for r in rows}) > 1
    for name, *cells in table:
        mine = [r for r in rows if name == f"{r['domain']}, {r['stage']}"]
        by_task = [
            [r for r in mine if r["task_id"] == task] for task in {r["task_id"] for r in mine}
        ]
        cell = dict(zip(header[1:], cells, strict=True))
        for when, word in (("old", "before"), ("new", "now")):
            success = fmean(fmean(r[when] >= 1 for r in group) for group in by_task)
            reward = fmean(fmean(r[when] for r in group) for group in by_task)
            assert float(cell[f"success {word}"].split()[0]) == pytest.approx(success, abs=6e-3)
            assert float(cell[f"reward {word}"].split()[0]) == pytest.approx(reward, abs=6e-3)
        assert int(cell["episodes"]) == len(mine)
        assert int(cell["solved now"]) == sum(r["old"] < 1 <= r["new"] for r in mine)
        assert int(cell["not any more"]) == sum(r["new"] < 1 <= r["old"] for r in mine)
    page = (tmp_path / "new" / "rescored.html").read_text()
    cards = page.split("<article")[1:]
    changes = {place(r): r["new_success"] - r["old_success"] for r in rows}
    most = max(rows, key=lambda r: (changes[place(r)] != 0, abs(r["new"] - r["old"])))
    words = {1: "solved now", -1: "not solved any more"}
    assert words[changes[place(most)]] in cards[0]
    assert f"reward {most['old']:.4g} → <strong>{most['new']:.4g}<" in cards[0]
    changed = sum(r["new"] != r["old"] for r in rows)
    assert len(cards) == min(100, changed) and f"{len(cards)} of {changed}:" in page
    assert {-1, 1} <= {*changes.values()}


def test_one_evaluation_alone_is_scored(run, tmp_path):
    rows = scored(*BOTH, "--stage", "evaluation-start", output=tmp_path / "one")
    assert {row["stage"] for row in rows} == {"evaluation-start"} and len(rows) == 4 * 2
    words = ["out", *BOTH, "--stage", "middle", "--output", str(tmp_path / "two")]
    says(refusal(main, words), "--stage: got 'middle'", "evaluation-start, ")


def test_episodes_whose_task_is_gone_are_counted(run, tmp_path, capsys, monkeypatch):
    text = Path("sums.jsonl").read_text()
    lines = text.splitlines(keepends=True)
    monkeypatch.chdir(tmp_path)
    Path("out").symlink_to(run)
    Path("sums.jsonl").write_text(
        "".join([*lines[:10], *(x.replace("and", "or") for x in lines[10:])])
    )
    rows = scored(*BOTH, output=tmp_path / "few")
    asked = [e["messages"][0]["content"] for e in saved(run).values()]
    kept = sum(int(a.split()[0]) * 5 + int(a.split()[2]) < 10 for a in asked)
    assert 0 < len(rows) == kept < len(asked)
    gone = f"{len(asked) - kept} of {len(asked)} episodes are left out: their task is none"
    assert gone in capsys.readouterr().err
    Path("sums.jsonl").write_text("".join(line.replace("and", "or") for line in lines))
    words = ["out", *BOTH, "--output", "none"]
    says(refusal(main, words), "no episode has a new reward", "their task is none")
    assert not Path("none").exists()


def test_failed_calls_of_an_async_function_leave_their_episodes_out(run, tmp_path, capsys):
    stage = "evaluation-start"
    words = ["--reward-funcs", "mine:some_away,mine:right", "--stage", stage]
    rows = scored(*words, output=tmp_path / "away")
    num = sum(name == stage for name, *_ in saved(run))
    assert 0 < len(rows) < num and all(row["rewards"]["some_away"] for row in rows)
    told = f"{num - len(rows)} of {num} episodes are left out: reward function some_away"
    assert told in capsys.readouterr().err


def test_other_rules_or_a_grown_request_leave_the_task_known_and_another_request_does_not():
    prompt = ({"role": "system", "content": "old"}, {"role": "user", "content": "ask"})
    task = Task(domain="desk", id="t", prompt=prompt, payload="{}")
    for request, is_known in (("ask", True), ("ask, row 1", True), ("as", False)):
        rules = {"role": "system", "content": "new"}
        line = {"messages": [rules, {"role": "user", "content": request}]}
        assert _has_prompt(line, task, Domain(name="desk", environment=object)) is is_known


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere", *BOTH], ["nowhere holds no run"]),
        (["empty", *BOTH], ["transcripts of empty: none"]),
        (["out", "--reward-funcs", "mine:nope"], ["no attribute 'nope'"]),
        (["out", "--reward-funcs", "mine"], ["got 'mine'; write module:function"]),
        (["out", "--reward-funcs", "mine:of_nothing"], ["of_nothing", "no solution", "rename"]),
        (
            ["out", "--reward-funcs", "mine:some_fail"],
            ["some_fail", "ZeroDivisionError", "mine.py, line 16: return [1 / (int(a) % 4)"],
        ),
        ([*("out", *BOTH[:2]), "--reward-weights", "1"], ["1 weights for 2 reward_funcs"]),
        ([*("out", *BOTH[:2]), "--reward-weights", "1,x"], ["--reward-weights: got 'x'"]),
        (["out", *BOTH, "--output", "out"], ["--output: got 'out'", "in the run"]),
        (["out"], ["--reward-funcs"]),
    ],
    ids=lambda value: " ".join(value)[:50],
)
def test_a_mistake_is_told_in_one_line_and_leaves_no_folder(words, told, run):
    Path("empty").mkdir(exist_ok=True)
    Path("empty/config.yaml").write_bytes((run / "config.yaml").read_bytes())
    before = sorted(Path().iterdir())
    says(refusal(main, words), *told)
    assert sorted(p for p in Path().iterdir() if p.name != "__pycache__") == [
        p for p in before if p.name != "__pycache__"
    ]


def test_the_conversations_of_a_loop_are_those_that_were_saved(tmp_path):
    """Functions see the last conversation of an episode and its sampled tokens."""
    ask = {"role": "user", "content": "ask"}
    kinds = {"domain": "desk", "task_id": "t"}

    def conversation(text, ids):
        one = Trajectory(**kinds, messages=[ask, say(text), say("more")], prompt_ids=[1])
        for number in ids:
            one.append([number], [-1.0])
            one.append([99])
        return one

    whole = conversation("first", [5, 6])
    whole.further = [conversation("last", [7, 8])]
    (line,) = episodes_in(save_transcripts(tmp_path, 1, 0, [whole]))
    read = _trajectory(line)
    assert [one.messages for one in read.sequences] == [one.messages for one in whole.sequences]
    assert read.last_conversation.messages[1]["content"] == "last"
    assert read.last_conversation.completion_ids == [7, 8]
    unheard = conversation("first", [5, 6])
    unheard.further = [Trajectory(**kinds, messages=[ask])]
    (line,) = episodes_in(save_transcripts(tmp_path, 1, 0, [unheard]))
    assert _trajectory(line).last_conversation.completion_ids == []
    (line,) = episodes_in(save_transcripts(tmp_path, 1, 0, [Trajectory(**kinds)]))
    assert _trajectory(line).messages == []


def test_the_command_is_in_the_list():
    assert COMMANDS["rescore"].function == "pipeline.commands.rescore:main"
