"""`--check` plays the longest group and does one update, and says what both took."""

import json
import re

import pytest
import torch

from pipeline.config.cli import parse
from pipeline.preflight import check, measure
from tests.support.messages import refusal, says

pytestmark = pytest.mark.whole_run

TINY = [
    *("--domains", "airline", "--num-generations", "4", "--max-tokens", "96"),
    *("--tasks-per-domain", "60"),
]
PEAK = r"  peak of its (rollout|update) +(\d+\.\d\d)   in \d+\.\d s"


@pytest.mark.parametrize("flags", [("--use-peft", "--beta", "0.1"), ("--no-grpo",)])
def test_the_longest_group_is_played_and_trained(flags, capsys):
    assert check.main(parse([*TINY, *flags]), measures=True) == 0
    said = capsys.readouterr().out
    says(
        said,
        "\nsampler and trainer compute the same log-probabilities\n",
        "for a group of 4 episodes of 96 tokens\n",
    )
    peaks = re.findall(PEAK, said)
    trains = "--no-grpo" not in flags
    assert [name for name, _ in peaks] == ["rollout", "update"][: 1 + trains]
    assert all(0.2 < float(size) < 20 for _, size in peaks)  # in GiB, with Python and libraries


@pytest.mark.parametrize(
    ("flags", "variables", "why"),
    [
        ((), {"RANK": "0"}, "a launcher has started this process"),
        (("--num-gpus", "64"), {}, "the recipe is for another machine"),
        (("--model", "Qwen/Qwen3-0.6B"), {}, "the weights of Qwen/Qwen3-0.6B are not on this"),
    ],
)
def test_what_cannot_be_measured_says_why(flags, variables, why, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    memory = measure.Memory(parse([*TINY, *flags]))
    (line,) = measure.measured(memory, parts=None)
    assert line.startswith(f"not measured: {why}")


@pytest.mark.parametrize("flags", [("--num-generations", "1000000"), ("--max-tokens", "80000")])
def test_a_group_that_would_take_hours_is_not_played(flags, capsys):
    assert check.main(parse([*TINY, *flags]), measures=True) == 0
    (line,) = re.findall(r"not measured: the rollout of a group of .*", capsys.readouterr().out)
    says(line, "1,000,000 episodes" if "1000000" in flags else "80,000 tokens", "would take about")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            (),
            "evaluations 3 x 9 episodes in ",
        ),  # the start, the warm start and a stage; greedy, too
        (("--no-grpo",), "evaluations 1 x 9 episodes in "),
        (("--warm-start-steps", "0", "--eval-trials", "9"), "evaluations 2 x 30 episodes in "),
        (("--no-eval-on-start", "--no-eval-greedy"), "evaluations 2 x 6 episodes in "),
    ],
)
def test_the_time_of_evaluations_is_told(flags, told, capsys):
    few = ["--eval-tasks-per-domain", "3", "--validation-tasks", "2", "--max-steps", "50"]
    assert check.main(parse([*TINY, *few, *flags]), measures=True) == 0
    said = capsys.readouterr().out
    assert told in said
    trained = "validations 2 x 2 in " in said and "rollouts 4,800 in " in said
    assert trained == ("--no-grpo" not in flags)
    assert "at the speed of 3 held-out tasks" in said


def test_a_group_that_does_not_fit_is_refused_in_one_line(monkeypatch, capsys):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(measure, "play_longest", fails)
    says(
        refusal(check.main, parse(TINY), measures=True),
        "memory: a group of 4 episodes of 96 tokens",
        "lower max_tokens",
    )


PLAY = """
async def talks(policy, task):
    await policy.message([{"role": "user", "content": "one"}])
    await policy.message([{"role": "user", "content": "two"}])
    return "my text"

def fails(policy, task):
    raise ValueError("no desk")

def shows(completions, **columns):
    return [float(len(text)) for text in completions]

async def asks(completions, **columns):
    raise AssertionError("it costs money")
"""


def of_agent(agent, *flags):
    """Flags of a check of a small dataset that an agent plays."""
    files = ["--tasks", "{sums: sums.jsonl}", "--warm-start-steps", "0", "--num-generations", "4"]
    return parse(["--domains", "sums", *files, "--agents", f"{{sums: {agent!r}}}", *flags])


@pytest.fixture
def sums(tmp_path, monkeypatch):
    rows = (json.dumps({"prompt": f"{a} + 1", "answer": str(a + 1)}) for a in range(60))
    (tmp_path / "sums.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "sums_agent.py").write_text(PLAY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_an_agent_plays_one_episode_and_what_it_did_is_said(sums, capsys):
    config = of_agent("sums_agent:talks", "--reward-funcs", "sums_agent:shows")
    assert check.main(config, measures=True) == 0
    (line,) = re.findall(r"^sums: an episode .*", capsys.readouterr().out, re.M)
    says(line, "of talks; 2 messages in 2 sequence(s); new ones by 1 new; ", " tokens sampled; ")
    says(line, ", reward 7; ")


def test_a_program_plays_one_episode_and_what_it_complained_is_said(sums, capsys):
    program = """bash -c 'echo careful >&2; echo "{\\"reward\\": 0.5}"'"""
    config = of_agent("x").changed("data", agents={"sums": program})
    assert check.main(config, measures=True) == 0
    (line,) = re.findall(r"^sums: an episode .*", capsys.readouterr().out, re.M)
    says(line, "0 messages in 1 sequence(s)", "completed, reward 0.5; ", "standard error: careful")


def test_an_agent_that_fails_before_its_first_message_is_refused(sums):
    line = refusal(check.main, of_agent("sums_agent:fails"), measures=True)
    says(line, "sums: its agent fails before its first message: ValueError: no desk (sums_agent.py")


def test_an_agent_whose_episode_may_cost_money_is_not_played(sums, capsys):
    config = of_agent("sums_agent:talks", "--reward-funcs", "sums_agent:asks")
    assert check.main(config, measures=True) == 0
    why = "sums: no episode is played: the reward function asks is async, which may cost money"
    assert why in capsys.readouterr().out
