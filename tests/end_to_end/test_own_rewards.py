"""The documented dataset, reward functions and loop of one's own train on real ranks."""

import base64
import gzip
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.report.page_episodes import read_episodes
from pipeline.report.write import write_report
from tests.support import ROOT
from tests.support.endpoint import serving
from tests.support.warm import episodes, jsonl, metrics, play, results

PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## A dataset and a reward function")[1]
JUDGED = PAGE.split("## A language model as the judge")[1]
ASK = "Question: {}\nAnswer: {}\nHow good is the answer, from 0 to 10? Say the number alone."
SHORT = [
    *("--max-steps", "2", "--tasks-per-step", "2", "--num-generations", "4"),
    *("--tasks-per-domain", "8", "--eval-tasks-per-domain", "4", "--eval-trials", "1"),
    *("--validation-steps", "0", "--report-to", "none", "--output-dir", "out"),
    *("--max-tokens-per-turn", "8"),
]
AGAIN = ["--resume-from-checkpoint", "latest", "--max-reward-calls", "99", "--override"]


def test_the_documented_functions_train_and_a_budget_of_calls_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code in re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)[:2]:
        assert len(code.splitlines()) <= 10
        name = code.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(code, encoding="utf-8")
    commands = re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)[0].replace("\\\n", "")
    making, words = map(shlex.split, commands.splitlines())
    subprocess.run([sys.executable, *making[1:]], check=True, cwd=tmp_path)
    assert words[:2] == ["three-domain-grpo", "train"]
    argv = [*words[2:], *SHORT]

    # An evaluation asks 2 * 4 times, sampled and greedily; a step asks for each of its 2 tasks.
    spent = play(*argv, "--max-reward-calls", "9", cwd=tmp_path, code=2)
    assert "sums: 1600 tasks: 4 held out, 8 for training" in spent.stdout
    # The rank that comes first tells the error for both.
    assert "max_reward_calls: got 9, and reward functions were called 10 times" in spent.stderr
    assert "Traceback" not in spent.stderr
    out = tmp_path / "out"
    saved = [path.name for path in sorted(out.glob("checkpoints/step-*"))]
    assert saved == ["step-000000", "step-000001"]
    play(*argv, *AGAIN, cwd=tmp_path)
    state = json.loads((out / "checkpoints" / "stage-1-sums" / "state.json").read_text())
    assert json.dumps(state).count('"num_reward_calls": 20') == 1

    steps = metrics(out)
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        by_name = line["rewards/correct/mean"] + 0.5 * line["rewards/digits/mean"]
        assert line["reward/sums"] == pytest.approx(by_name)
        assert line["rewards/digits/std"] > 0
    played = episodes(out)
    assert len(played) == 2 * 4 + 2 * 2 * 4
    for row in played:
        assert set(row["rewards"]) == {"correct", "digits"}
        answer = row["messages"][-1]["content"]
        assert (row["error"], row["extra"]) == ("", {"characters": str(len(answer))})
        weighted = row["rewards"]["correct"] + 0.5 * row["rewards"]["digits"]
        assert row["reward"] == pytest.approx(weighted)
    monkeypatch.setattr("pipeline.report.write.pictures.OF_RUN", {})
    write_report(out)
    report = (out / "report.md").read_text(encoding="utf-8")
    assert re.search(r"## Rewards by name\n.*\| sums \| digits \| 0\.\d+ \|", report, re.DOTALL)
    last = results(out)["evaluations"][-1]["success"]["sums"]
    assert set(last["rewards"]) == {"correct", "digits"}
    weighted = last["rewards"]["correct"] + 0.5 * last["rewards"]["digits"]
    assert last.get("reward", last["mean"]) == pytest.approx(weighted)
    assert f" {last['rewards']['digits']:.2f} |\n" in report.split("| sums: digits |")[1]
    chunk = json.loads(gzip.decompress(base64.b64decode(read_episodes(out).chunks[0])))
    shown = chunk["groups"][0][0]
    assert set(shown["rewards"]) == {"correct", "digits"}
    assert chunk["texts"][shown["extra"]["characters"]].isdigit()


def test_the_documented_judge_is_asked_for_each_completion_alone(tmp_path: Path) -> None:
    """A 429 repeats one question; a budget ends the run, and a resumed run pays nothing twice."""
    code = JUDGED.split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line]) <= 10
    (tmp_path / "my_judge.py").write_text(code, encoding="utf-8")
    rows = "".join(json.dumps({"prompt": f"{n} + 1 ="}) + "\n" for n in range(12))
    (tmp_path / "sums.jsonl").write_text(rows)
    argv = ["--domains", "sums", "--tasks", "{sums: sums.jsonl}", "--warm-start-steps", "0", *SHORT]
    words = shlex.split(JUDGED.split("```bash\n")[1].split("```")[0].replace("\\\n", ""))
    argv += words[words.index("--reward-funcs") :]
    with serving(lambda body: f"{len(body['messages'][0]['content']) % 11}") as server:
        server.faults = [(429, "0.01"), None, (503, "0.02"), "drop", None, 429] * 3
        argv += ["--judge-url", server.url, "--judge-model", "m"]
        spent = play(*argv, "--judge-max-calls", "10", cwd=tmp_path, code=2)
        assert sum(server.paid.values()) == 10
        more = ["--resume-from-checkpoint", "auto", "--judge-max-calls", "null"]
        play(*argv, *more, cwd=tmp_path)
    assert spent.stderr.count("error: judge_max_calls: got 10, which is spent; go on with") == 1
    assert "Traceback" not in spent.stderr
    asked = {body["messages"][0]["content"] for body in server.bodies}
    played = episodes(tmp_path / "out")
    for row in played:
        prompt = row["messages"][0]["content"]
        answer = row["messages"][-1]["content"]
        question = ASK.format(prompt, answer)
        assert question in asked
        assert row["reward"] == pytest.approx(len(question) % 11 / 10)
    kept = [path.read_text() for path in (tmp_path / "out" / "judges").glob("rank-*.jsonl")]
    assert len("".join(kept).splitlines()) == sum(server.paid.values())


def test_what_functions_log_never_makes_a_second_curve_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "logs.py").write_text(
        "def logs(completions, log_metric, **_):\n"
        "    for name in ('loss', 'train/loss', 'train/entropy', 'accuracy', 'train/length'):\n"
        "        log_metric(name, 1e6)\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    rows = "".join(json.dumps({"prompt": f"{n} + 1 ="}) + "\n" for n in range(12))
    (tmp_path / "sums.jsonl").write_text(rows)
    argv = [
        *("--domains", "sums", "--tasks", "{sums: sums.jsonl}", "--reward-funcs", "logs:logs"),
        *(*SHORT, "--warm-start-steps", "0", "--max-steps", "1"),
    ]
    done = play(*argv, cwd=tmp_path, num_ranks=1)
    for line in metrics(tmp_path / "out"):
        kinds = ("loss", "entropy", "accuracy", "length")
        names = [n for n in line if n.endswith(kinds) and not n.startswith("completions/")]
        assert sorted(names) == [
            *("train/accuracy", "train/entropy", "train/length", "train/loss", "train/policy_loss")
        ]
        assert line["train/accuracy"] == line["train/length"] == 1e6
        assert line["train/loss"] < 1e6 and line["train/entropy"] < 1e6
    assert {"eval/accuracy", "eval/loss"} < {*jsonl(tmp_path / "out" / "metrics.jsonl")[0]}
    said = done.stdout + done.stderr
    told = re.findall(r"warning: log_metric: got (\S+), which is the pipeline's", said)
    assert told == ["train/entropy", "train/loss"]


# A loop of one's own

OWN_LOOP = [
    *("--domains", "sums", "--environments", "{sums: examples.plan_and_act:play}"),
    *("--tasks", f"{{sums: {ROOT / 'examples' / 'one_digit_sums.jsonl'}}}"),
    *("--max-steps", "2", "--tasks-per-step", "2", "--num-generations", "3"),
    *("--eval-tasks-per-domain", "3", "--eval-trials", "1", "--validation-steps", "0"),
    *("--warm-start-steps", "0", "--max-tokens-per-turn", "6", "--no-drop-zero-std-groups"),
    *("--entropy-coef", "0.01", "--report-to", "none"),
]


def told(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["task_id"], row["trial"], row["reward"], row["stop_reason"], row["ids"]


def test_an_own_loop_trains_and_draws_the_same_on_one_and_two_ranks(tmp_path: Path) -> None:
    for number in (1, 2):
        play(*OWN_LOOP, "--output-dir", f"out-{number}", cwd=tmp_path, num_ranks=number)
    one, two = (episodes(tmp_path / f"out-{number}") for number in (1, 2))
    assert len(one) == 2 * 3 + 2 * 2 * 3  # two evaluations, two steps
    assert sorted(map(told, one)) == sorted(map(told, two))
    for row in one:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant", "conversation", "system", "user", "assistant"]
        assert row["num_turns"] == len(row["ids"]) == 2
        assert row["num_sampled_tokens"] == sum(map(len, row["ids"]))
        assert row["messages"][3]["content"] == row["messages"][1]["content"]  # the plan
    of_one, of_two = (jsonl(tmp_path / f"out-{n}" / "metrics.jsonl") for n in (1, 2))
    assert [line["kind"] for line in of_one] == [line["kind"] for line in of_two]
    steps = [line for line in of_one if line["kind"] == "train"]
    assert [line["train/grad_norm"] > 0 for line in steps] == [True, True]
    assert [line["rollout/turns"] for line in steps] == [2.0, 2.0]
    for mine, other in zip(of_one, of_two, strict=True):
        assert mine.keys() == other.keys()
        numbers = {name: value for name, value in mine.items() if isinstance(value, float)}
        assert {name: other[name] for name in numbers} == pytest.approx(numbers, 1e-3, 1e-4)
    found = read_episodes(tmp_path / "out-2")  # what the page's reader shows
    assert b"conversation" in gzip.decompress(base64.b64decode(found.chunks[-1]))
