"""Agents that are programs: a process for each episode, which ends with it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.config.settings import Config
from pipeline.environments import Domain, load_domains
from pipeline.environments import agent_process as module
from pipeline.environments.agent_process import AgentProcess, agent_process
from pipeline.preflight.made_of import made_of
from pipeline.rollout.rewards import RewardFunction, RewardFunctions
from pipeline.rollout.rollout import Rollout, RolloutRequest, SamplerPolicy
from pipeline.rollout.trajectory import StopReason
from tests.rollout.test_agents import OF_ALL_KINDS, Shop, act
from tests.rollout.test_agents import play as in_shop
from tests.rollout.test_own_loop import LIMITS, SHORT_S, Sampler, sampled
from tests.support import ROOT
from tests.support.helpers import call, chat, make_task, say, tokenizer
from tests.support.messages import refusal, says

pytestmark = pytest.mark.usefixtures("no_stray_processes")

# An agent without a client library: it asks twice, and prints the last answer.
AGENT = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
headers["Content-Type"] = "application/json"

def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]

messages = task["prompt"]
for question in TURNS:
    messages.append(ask(messages))
    messages.append({"role": "user", "content": question})
END
"""


def python(tmp_path, end, turns=("sure?", "")):
    """A command that runs AGENT, with what follows its messages."""
    text = AGENT.replace("TURNS", repr(turns)).replace("END", end)
    file = tmp_path / "agent.py"
    file.write_text(text, encoding="utf-8")
    return f"{sys.executable} -S {file}"


DESK_PROGRAM = f"{sys.executable} -S -P {ROOT / 'tests' / 'support' / 'desk_program.py'}"
PRINTS = 'print(messages[-2]["content"])'


def play(command, *scripts, trials=1, rewards=None, domain=None, task=None, **settings):
    """Trajectories of a command as the agent; each conversation has a script."""
    limits = LIMITS.model_copy(update=settings)
    if domain is None:
        loop = agent_process("agents", command, prints_reward=rewards is None)
        domain = Domain(name="desk", loop=loop)
    policy = SamplerPolicy(Sampler(scripts), chat(), limits)
    rollout = Rollout(policy, chat(), {"desk": domain}, limits, rewards=rewards)
    task = task or make_task(is_text=True)
    return rollout([RolloutRequest(task=task, trial=n, key=n) for n in range(trials)])


def scored(function):
    return RewardFunctions([RewardFunction(function.__name__, function)], 5.0)


def test_what_a_program_prints_is_the_completion(tmp_path):
    def is_blue(prompts, completions, **columns):
        assert prompts == ["hello"] * len(completions)
        return [float(text == "blue") for text in completions]

    said = [[say("red"), say(colour)] for colour in ("blue", "green", "blue")]
    episodes = play(python(tmp_path, PRINTS), *said, trials=3, rewards=scored(is_blue))
    assert sorted(e.reward for e in episodes) == [0.0, 1.0, 1.0]
    assert [(e.error, e.further, e.num_turns) for e in episodes] == [("", [], 2)] * 3
    assert all(e.rewards.keys() == {"is_blue"} for e in episodes)
    texts = sorted(tokenizer().decode(sampled(e), skip_special_tokens=True) for e in episodes)
    assert texts == ["redblue", "redblue", "redgreen"]


def test_a_program_prints_the_reward_where_nothing_else_scores(tmp_path):
    end = 'print("so be it"); print(json.dumps({"reward": 0.25}))'
    (episode,) = play(python(tmp_path, end), [say("red"), say("blue")])
    assert (episode.reward, episode.error, episode.num_turns) == (0.25, "", 2)


@pytest.mark.parametrize("line", ["", "1.0", '{"reward": 1, "more": 2}', "{half"])
def test_a_program_that_prints_no_reward_is_told_to(line):
    command = f"echo {shlex.quote(line)}"
    (episode,) = play(command)
    says(episode.error, f"{command} printed ", "nothing else scores; print ", "give reward_funcs")
    assert episode.left_out == "reset"  # no message has made it so


def test_a_reward_that_is_no_number_names_the_program():
    (episode,) = play("""echo '{"reward": "much"}'""")
    says(episode.error, "returned 'much'; return the reward, a number")


def test_a_model_cannot_print_itself_a_reward_where_functions_score():
    def length(completions, **columns):
        return [float(len(text)) for text in completions]

    (episode,) = play("""echo '{"reward": 7}'""", rewards=scored(length))
    assert (episode.reward, episode.rewards) == (13.0, {"length": 13.0})


def test_a_program_finds_task_tools_and_address_in_its_input_and_variables(monkeypatch):
    seen = []

    def lines(completions, **columns):
        seen.extend(completions)
        return [1.0]

    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    names = "OPENAI_BASE_URL OPENAI_API_BASE ANTHROPIC_BASE_URL NO_PROXY no_proxy "
    names += "OPENAI_API_KEY ANTHROPIC_API_KEY"
    shown = "; ".join(f"echo ${name}" for name in names.split())
    command = f"bash -c {shlex.quote(f'set -e; read -r task; echo $task; {shown}')}"
    task = make_task(columns=json.dumps({"answer": "blue"}))
    rewards = scored(lines)
    play(command, rewards=rewards, task=task)
    row, *values, key, same_key = seen[0][0]["content"].splitlines()
    assert json.loads(row) == task.row()
    base, other_base, anthropic, *no_proxy = values
    assert base == other_base == anthropic + "/v1"
    assert base.startswith("http://127.0.0.1:") and key == same_key and key in base
    assert [hosts.split(",")[-2:] for hosts in no_proxy] == [["127.0.0.1", "localhost"]] * 2


def test_a_program_plays_in_an_environment_as_a_loop_does():
    limits = {"max_turns": 9, "max_tokens": 4000, "max_tool_result_tokens": 64}
    limits["call_timeout"] = 60
    loop = agent_process("agents", DESK_PROGRAM, prints_reward=False)
    (alone, of_program) = (
        in_shop(of, Shop, *OF_ALL_KINDS, limits=LIMITS.model_copy(update=limits))
        for of in (act, loop)
    )
    assert of_program.record() == alone.record()
    assert of_program.completion_ids == alone.completion_ids
    assert of_program.reward_breakdown == alone.reward_breakdown
    assert of_program.tools == alone.tools and alone.tools["buy"] == [1, 0]


def test_a_large_task_that_nobody_reads_stops_nothing():
    task = make_task(columns=json.dumps({"text": "x" * (1 << 20)}))
    (episode,) = play("""echo '{"reward": 1}'""", task=task)
    assert (episode.reward, episode.error) == (1.0, "")


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("print('half', file=sys.stderr); sys.exit('the end')", "exit code 3: half the end"),
        ("os.kill(os.getpid(), 9)", "signal 9 (Killed)"),
        ("raise KeyError('x')", "exit code 1: "),
    ],
)
@pytest.mark.parametrize(("turns", "left_out"), [((), "reset"), (("sure?",), "")])
def test_a_program_that_fails_is_named_with_the_end_of_what_it_complains(
    end, how, turns, left_out, tmp_path
):
    end = end.replace("sys.exit('the end')", "print('the end', file=sys.stderr); sys.exit(3)")
    command = python(tmp_path, end, turns)
    (episode,) = play(command, [say("red")])
    kind = "environment" if left_out else "agent"
    assert (episode.stop_reason, episode.reward) == (f"{kind}_error", 0.0)
    says(episode.error, f"AgentFailed: {command} ended with {how}")
    assert episode.error.endswith("KeyError: 'x'") or "KeyError" not in end
    assert "\n" not in episode.error and episode.left_out == left_out


def test_a_program_that_is_refused_and_dies_of_it_has_no_error(tmp_path):
    command = python(tmp_path, "", turns=["more"] * 9)
    (episode,) = play(command, [say("red")] * 2, max_turns=2)
    assert (episode.stop_reason, episode.error) == (StopReason.MAX_TURNS, "")
    assert (episode.reward, episode.num_turns) == (0.0, 2)


def test_a_program_that_hangs_ends_with_its_children_at_the_deadline():
    command = f"bash -c {shlex.quote('sleep 600 & sleep 600')}"
    (episode,) = play(command, call_timeout=SHORT_S)
    says(episode.error, f"CallTimeout: {command} took more than 0.3 s")


def test_a_child_that_stays_ends_with_the_episode():
    command = shlex.join(["bash", "-c", """sleep 600 & echo '{"reward": 1}'"""])
    (episode,) = play(command)  # the child has the program's standard output
    assert (episode.reward, episode.error) == (1.0, "")


def test_a_fork_of_this_process_does_not_keep_a_program(tmp_path):
    forks = []

    def fork(key):
        started = [p for p in psutil.Process().children() if p.name() == "bash"]
        if started and not forks:
            forks.append(os.fork())
            if forks[0] == 0:
                time.sleep(600)
                os._exit(0)
            (tmp_path / "forked").touch()

    waits = f"until [ -e {tmp_path}/forked ]; do sleep 0.1; done"
    loop = agent_process("agents", f"bash -c {shlex.quote(waits)}", prints_reward=True)
    policy = SamplerPolicy(Sampler([]), chat(), LIMITS)
    domains = {"desk": Domain(name="desk", loop=loop)}
    rollout = Rollout(policy, chat(), domains, LIMITS, on_progress=fork)
    (episode,) = rollout([RolloutRequest(task=make_task(), trial=0, key=0)])
    os.kill(forks[0], signal.SIGKILL)
    os.waitpid(forks[0], 0)
    says(episode.error, "printed '' last")  # and it has not come to its deadline


def test_a_program_that_goes_on_after_the_end_and_dies_is_scored():
    loop = agent_process("agents", DESK_PROGRAM, prints_reward=False)
    episode = in_shop(loop, Shop, call("buy", item="lamp"), call_timeout=60)
    assert (episode.reward, episode.error) == (1.5, "")
    assert (episode.stop_reason, episode.num_turns) == (StopReason.COMPLETED, 1)


def test_a_rollout_that_is_stopped_ends_its_programs():
    class Stop(Exception):
        pass

    def stop(key):
        if any(p.name() == "sleep" for p in psutil.Process().children(recursive=True)):
            raise Stop

    domain = Domain(name="desk", loop=agent_process("agents", "sleep 600", True))
    rollout = Rollout(SamplerPolicy(Sampler([]), chat(), LIMITS), chat(), {"desk": domain}, LIMITS)
    rollout.on_progress = stop
    with pytest.raises(Stop):
        rollout([RolloutRequest(task=make_task(), trial=0, key=0)])


HOST = """
import asyncio, sys
from types import SimpleNamespace
from pipeline.environments.agent_process import agent_process
policy = SimpleNamespace(base_url="http://127.0.0.1:1/k/v1", api_key="k", tools=[])
task = SimpleNamespace(row=dict)
asyncio.run(agent_process("agents", sys.argv[1], True)(policy, task))
"""


def test_programs_end_when_their_rank_is_killed():
    command = f"bash -c {shlex.quote('sleep 600 & sleep 600')}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", HOST, command], env=environ) as host:
        me = psutil.Process(host.pid)
        while len(sleeping := [p for p in me.children(recursive=True) if p.name() == "sleep"]) < 2:
            assert host.poll() is None
            time.sleep(0.02)
        host.send_signal(signal.SIGKILL)
    gone, left = psutil.wait_procs(sleeping, timeout=10)
    assert (len(gone), left) == (2, [])


def test_a_program_that_floods_is_stopped_unless_it_is_the_standard_error():
    (episode,) = play("yes")
    says(episode.error, "yes printed more than 1024 KiB", "print less")
    noise = "head -c 3000000 /dev/zero >&2; echo the end >&2; false"
    (episode,) = play(f"bash -c {shlex.quote(noise)}")
    assert episode.error.endswith("the end")


def test_no_more_than_max_agents_run_at_once_and_waiting_is_no_delay(tmp_path):
    script = 'touch $0/$$; ls $0 | wc -l; sleep 0.3; rm $0/$$; echo "{\\"reward\\": 1}"'
    counts = []

    def count(completions, **columns):
        counts.extend(int(text.split()[0]) for text in completions)
        return [1.0] * len(completions)

    (tmp_path / "here").mkdir()
    command = shlex.join(["bash", "-c", script, str(tmp_path / "here")])
    # Eight in a row take longer than one may take.
    episodes = play(command, trials=8, rewards=scored(count), max_agents=1, call_timeout=2)
    assert [e.error for e in episodes] == [""] * 8
    assert counts == [1] * 8


# Settings


def config(command, **data):
    data = {"domains": ["sums"], "tasks": {"sums": "x.jsonl"}, **data}
    return Config(data={**data, "agents": {"sums": command}})


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("no-such-program x", ["there is no program 'no-such-program'"]),
        ("bash 'half", ["is no command (No closing quotation)"]),
        ("python3 -u nowhere.py", ["there is no file 'nowhere.py' here"]),
        (" ", ["there is no program ''"]),
    ],
)
def test_a_command_that_cannot_run_is_refused_before_the_run(command, words):
    line = refusal(load_domains, config(command))
    says(line, f"agents: sums: got {command!r}", *words, "such as 'python my_agent.py', or module:")


def test_a_command_without_aiohttp_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    line = refusal(load_domains, config("echo"))
    says(line, "an agent in a process needs aiohttp; install three-domain-grpo[agents]")


@pytest.mark.parametrize(
    ("data", "own", "prints_reward"),
    [
        ({}, "agent", True),
        ({"reward_funcs": ["tests.rollout.test_own_loop:by_answer"]}, "", False),
        ({"environments": {"sums": "tests.support.helpers:Desk"}}, "Desk", False),
    ],
)
def test_the_last_line_is_a_reward_only_where_nothing_else_scores(data, own, prints_reward):
    (domain,) = load_domains(config("echo", **data)).values()
    assert isinstance(domain.loop, AgentProcess)
    assert (domain.own_reward, domain.loop.prints_reward) == (own, prints_reward)


def test_the_file_of_an_agent_is_part_of_what_a_run_is_made_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text("print(1)", encoding="utf-8")
    settings = config(f"{sys.executable} agent.py --fast")
    before = made_of(settings, {}, tokenizer())
    Path("agent.py").write_text("print(2)", encoding="utf-8")
    after = made_of(settings, {}, tokenizer())
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["file agent.py of the agent of sums"]
