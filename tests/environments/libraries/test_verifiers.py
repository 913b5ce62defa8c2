"""Environments of verifiers play in a process of their own; stand-ins take its package's place.

`scripts/proofs/environments.py` does the same with the real packages.
"""

import gc
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from pipeline.config.cli import parse
from pipeline.environments import load_domains
from pipeline.environments.libraries.verifiers import Worker, verifiers
from pipeline.rollout.rollout import Rollout, RolloutRequest, SamplerPolicy
from pipeline.rollout.trajectory import StopReason
from tests.rollout.test_own_loop import LIMITS, Sampler, sampled
from tests.support import ROOT
from tests.support.helpers import chat, say
from tests.support.messages import refusal, says

pytestmark = pytest.mark.usefixtures("no_stray_processes", "processes_end_with_their_domains")

STAND_INS = ROOT / "tests/support/verifiers_stand_in"
COLOURS = """
import asyncio, os, sys
import verifiers as vf

def rows(first, last, prompt="item {}"):
    return [
        {"prompt": [{"role": "user", "content": prompt.format(n)}], "answer": f"{n}"}
        for n in range(first, last)
    ]

def right(text, answer):
    print("a text on the standard output")
    return float(answer in text)

def short(text, answer):
    return float(len(text) < 5)

def load_environment(last=20, evaluated=(), turns=1, prompt="item {}", **arguments):
    print("loading")
    return vf.Environment(
        rows(0, last, prompt),
        vf.Rubric([right, short], [1.0, 0.5]),
        eval_dataset=rows(*evaluated, prompt) if evaluated else None,
        turns=turns,
        before=BEFORE,
        **arguments,
    )
"""


@pytest.fixture
def processes_end_with_their_domains(no_stray_processes):
    yield
    for worker in [one for one in gc.get_objects() if isinstance(one, Worker)]:
        worker.end()  # whatever still knows it


@pytest.fixture
def colours(tmp_path, monkeypatch):
    """A function that writes the environment `colours`, with code that follows each message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{STAND_INS / 'v0'}")

    def write(before="None", more=""):
        text = f"{more}\n{COLOURS}".replace("BEFORE", before)
        (tmp_path / "colours.py").write_text(text, encoding="utf-8")

    write()
    return write


@pytest.fixture
def tasksets(tmp_path, monkeypatch):
    """The stand-in of v1, and its program uv."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{STAND_INS / 'v1'}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "uv").chmod(0o755)


def play(domain, *scripts, sampler=None, task=0, **settings):
    """The trajectories of episodes of a task of a domain, one for each script."""
    limits = LIMITS.model_copy(update=settings)
    policy = SamplerPolicy(sampler or Sampler(scripts), chat(), limits)
    rollout = Rollout(policy, chat(), {"desk": replace(domain, name="desk")}, limits)
    chosen = replace(domain.generate_tasks(0, 99, "train", "medium")[task], domain="desk")
    return rollout([RolloutRequest(task=chosen, trial=n, key=n) for n in range(len(scripts))])


def requests_of(domain, split, n=99, seed=0):
    tasks = domain.generate_tasks(seed, n, split, "medium")
    return {task.id: task.prompt[-1]["content"] for task in tasks}


def workers():
    """The processes of environments that this one has started."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
        and any(word.endswith("verifiers_worker.py") for word in child.cmdline()[1:2])
    ]


# Tasks


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ({}, (12, 4, 4)),  # of one list, a fifth each is held out and for validations
        ({"evaluated": (20, 30)}, (20, 5, 5)),
        ({"evaluated": (18, 24)}, (18, 3, 3)),  # two rows are in both
        ({"evaluated": (0, 20)}, (12, 4, 4)),  # the same rows
        ({"evaluated": (0, 1)}, (12, 4, 4)),  # too few to hold some out and to validate
        ({"last": 0, "evaluated": (0, 20)}, (12, 4, 4)),
        ({"last": 3}, (1, 1, 1)),
        ({"prompt": "play"}, (12, 4, 4)),  # a game: each row has the same prompt
    ],
)
def test_splits_share_no_task_and_are_always_the_same(colours, arguments, numbers):
    domain = verifiers("colours", **arguments)
    splits = [requests_of(domain, name) for name in ("train", "validation", "test")]
    assert tuple(map(len, splits)) == numbers
    assert len({task for split in splits for task in split}) == sum(numbers)
    if "prompt" not in arguments:
        assert len({text for split in splits for text in split.values()}) == sum(numbers)
    again = verifiers("colours", **arguments)
    assert [requests_of(again, name) for name in ("train", "validation", "test")] == splits


def test_the_seed_draws_the_tasks_of_a_split(colours):
    domain = verifiers("colours", last=100)
    few, others = (requests_of(domain, "train", n=8, seed=seed) for seed in (0, 1))
    assert (len(few), list(few) == list(others)) == (8, False)
    assert few.keys() | others.keys() <= requests_of(domain, "train").keys()


# Episodes


def test_the_weighted_parts_of_the_rubric_are_those_of_the_reward(colours):
    domain = verifiers("colours", turns=2)
    item = domain.generate_tasks(0, 1, "train", "medium")[0].prompt[-1]["content"]
    number = item.removeprefix("item ")
    scripts = [[say("red"), say(number)], [say("blue"), say("so long")]]
    episodes = [episode for script in scripts for episode in play(domain, script)]
    assert [e.error for e in episodes] == ["", ""]
    assert [e.reward for e in episodes] == [1.5, 0.0]
    assert episodes[0].reward_breakdown == {"right": 1.0, "short": 0.5}
    assert [m["role"] for m in episodes[0].messages] == ["user", "assistant"] * 2
    assert [(e.num_turns, len(e.sequences)) for e in episodes] == [(2, 1)] * 2
    about = {"environment": "verifiers:colours", "verifiers": "0.1.14"}
    assert (domain.about(), domain.is_process) == (about, False)


def test_what_a_rubric_adds_by_rules_of_its_own_is_a_part_too(colours):
    (episode,) = play(verifiers("colours", bonus=0.25), [say("no")])
    assert (episode.reward, episode.reward_breakdown["other"]) == (0.75, 0.25)


def test_a_reward_function_that_fails_is_told_once(colours, capfd):
    colours(more="def right(text, answer):\n    return {}[text]\n")
    text = (COLOURS.replace("BEFORE", "None")).replace('print("a text', 'raise KeyError("leg', 1)
    with open("colours.py", "w", encoding="utf-8") as file:
        file.write(text)
    episodes = play(verifiers("colours"), *[[say("no")]] * 4)
    assert [e.reward for e in episodes] == [0.5] * 4
    said = capfd.readouterr().err
    assert said.count("warning: verifiers: Error calling reward function right: ") == 1
    assert "leg on the standard output" in said


def test_a_hundred_episodes_play_at_once(colours):
    waits = "async def wait(row):\n    await asyncio.sleep(0.5)\n"
    colours("wait", waits)
    begun = time.monotonic()
    episodes = play(verifiers("colours"), *[[say("no")]] * 100, max_concurrent_episodes=100)
    assert {(e.reward, e.error) for e in episodes} == {(0.5, "")}
    assert time.monotonic() - begun < 45  # one after another, they take 50 s
    assert len(workers()) == 1


def test_a_refusal_ends_the_episode_as_the_run_says(colours):
    (episode,) = play(verifiers("colours", turns=3), [say("a"), say("b")], max_turns=2)
    assert (episode.stop_reason, episode.reward) == (StopReason.MAX_TURNS, 0.0)
    assert (episode.error, episode.num_turns) == ("", 2)


@pytest.mark.parametrize(
    ("raised", "left_out", "words"),
    [
        ("KeyError('leg')", "", "KeyError: 'leg' (colours.py, line 2: raise KeyError('leg'))"),
        ("vf.SandboxError('gone')", "outage", "SandboxError: gone (colours.py, line 2: "),
    ],
)
def test_code_that_fails_is_shown_with_its_line(colours, raised, left_out, words):
    colours("fail", f"async def fail(row):\n    raise {raised}\n")
    with open("colours.py", "a", encoding="utf-8") as file:
        file.write("\nvf.SandboxError = type('SandboxError', (Exception,), {})\n")
    (episode,) = play(verifiers("colours"), [say("x")])
    assert (episode.reward, episode.left_out) == (0.0, left_out)
    says(episode.error, words)


def test_an_episode_that_is_late_is_cancelled_in_its_process(colours, tmp_path):
    colours(
        "wait",
        "async def wait(row):\n    try:\n        await asyncio.sleep(600)\n"
        "    finally:\n        open('cancelled', 'w').close()\n",
    )
    domain = verifiers("colours")
    (episode,) = play(domain, [say("x")], call_timeout=4.0)
    says(episode.error, "CallTimeout: verifiers took more than")
    until = time.monotonic() + 30
    while not (tmp_path / "cancelled").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert (tmp_path / "cancelled").exists()
    assert len(workers()) == 1


def test_a_process_that_dies_leaves_its_episodes_out_and_says_so(colours):
    colours("end", "async def end(row):\n    os.kill(os.getpid(), 9)\n")
    domain = verifiers("colours")
    for _ in range(2):
        episodes = play(domain, [say("no")], [say("no")])
        assert {e.left_out for e in episodes} == {"outage"}
        says(episodes[0].error, "Outage", "the process of verifiers has ended; resume the run")


def test_who_does_not_know_the_key_plays_nothing(colours):
    worker = verifiers("colours").loop
    with socket.create_connection(("127.0.0.1", worker.told["port"])) as other:
        other.sendall(b'{"key": "", "url": "http://other", "row": {}, "index": 0}\n')
        assert other.recv(9) == b""


def test_nothing_is_left_when_the_rank_is_killed(colours):
    sleeps = "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
    colours("None", sleeps)
    program = "import time; from pipeline.environments.libraries.verifiers import verifiers\n"
    program += "domain = verifiers('colours'); print('loaded', flush=True); time.sleep(600)"
    path = f"{ROOT}:{os.environ['PYTHONPATH']}"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as rank:
        assert rank.stdout.readline() == b"loaded\n"
        started = psutil.Process(rank.pid).children(recursive=True)
        assert {"sleep", "cat"} <= {child.name() for child in started}
        rank.kill()
    assert psutil.wait_procs(started, timeout=30)[1] == []


def test_an_environment_that_blocks_ends_with_the_rank(colours):
    colours("block", "import time\nasync def block(row):\n    time.sleep(600)\n")
    domain = verifiers("colours")
    (episode,) = play(domain, [say("x")], call_timeout=4.0)
    says(episode.error, "CallTimeout")
    started = workers()
    domain.loop.end()  # closes its input, as the kernel does when the rank ends
    assert psutil.wait_procs(started, timeout=30)[1] == []


# What is refused


@pytest.mark.parametrize(
    ("name", "arguments", "parts"),
    [
        ("colours", "python: /no/python", ("there is no Python '/no/python'", "python -m venv")),
        ("colours", "python: /bin/cat", ("has ended", "/bin/cat")),
        ("colours", "python: /bin/true", ("has ended", "/bin/true")),
        ("nothing", "", ("No module named 'nothing'", "mend it, or install", sys.executable)),
        ("broken", "", ("KeyError: 'leg' (broken.py, line 2: ",)),
        ("colours", "lasts: 3", ("TypeError", "unexpected keyword argument 'lasts'")),
        ("colours", "last: 2", ("it has 2 tasks, and too few differ; give 3 or more",)),
        ("colours", "last: 0", ("it has 0 tasks",)),
        ("silent", "", ("its row 1 has no prompt: {'prompt': []",)),
        ("groups", "", ("its rubric compares the episodes of a group",)),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(colours, tmp_path, name, arguments, parts):
    made = {
        "broken": "def load_environment():\n    return {}['leg']\n",
        "silent": "from colours import *\ndef load_environment():\n"
        "    return vf.Environment([*rows(0, 1), {'prompt': []}], vf.Rubric([right]))\n",
        "groups": "from colours import *\ndef load_environment():\n"
        "    env = vf.Environment(rows(0, 9), vf.Rubric([right]))\n"
        "    env.requires_group_rollouts = True\n    return env\n",
    }
    for module, text in made.items():
        (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
    factory = f"{{factory: 'verifiers:{name}', arguments: {{{arguments}}}}}"
    argv = ["--domains", "desk", "--environments", f"{{desk: {factory}}}"]
    says(refusal(lambda: load_domains(parse(argv))), f"desk: got 'verifiers:{name}': ", *parts)


def test_a_python_without_verifiers_is_told_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    says(refusal(verifiers, "colours"), "No module named 'verifiers'", "pip install verifiers")


# v1


def test_a_taskset_plays_and_its_rewards_are_the_parts(tasksets):
    domain = verifiers("words", size=10)
    assert sum(len(requests_of(domain, name)) for name in ("train", "validation", "test")) == 10
    task = domain.generate_tasks(0, 1, "train", "medium")[0]
    assert task.prompt[0] == {"role": "system", "content": "desk"}
    number = task.prompt[1]["content"].removeprefix("say ")
    episodes = [episode for said in (number, "fail") for episode in play(domain, [say(said)])]
    long = 0.25 * len(number)
    assert episodes[0].reward_breakdown == {"right": 1.0, "long": long}
    assert episodes[0].reward == 1.0 + long
    assert episodes[1].left_out == "outage"
    says(episodes[1].error, "SandboxError: it is gone")
    assert sampled(episodes[0])
    assert domain.is_process


def test_a_taskset_without_an_end_has_a_thousand_tasks(tasksets):
    domain = verifiers("words")
    numbers = [
        len(domain.generate_tasks(0, 9999, n, "easy")) for n in ("train", "validation", "test")
    ]
    assert numbers == [600, 200, 200]


def test_the_agent_is_configured_as_verifiers_does(tasksets, tmp_path):
    verifiers("own_agent", size=5)  # with a harness of its own
    says(
        refusal(verifiers, "words", agent={"harness": {"id": "bash"}}),
        "agent: {'runtime': {'type': 'subprocess'}, 'harness': {'id': 'bash'}}",
    )
    (tmp_path / "uv").unlink()
    says(refusal(verifiers, "words"), "verifiers starts its programs with uv; pip install uv")
