"""An endpoint as the agent: what it is asked, what its mistakes are, and how it fails."""

import asyncio
import json
from collections import defaultdict

import pytest

from pipeline.config.rules import refuse_placeholders
from pipeline.config.settings import Config
from pipeline.environments import Domain
from pipeline.environments.agent_process import agent_process
from pipeline.environments.experts import run_expert
from pipeline.environments.language_models.language_model import LanguageModel
from pipeline.evaluation.agents import agent_rollout, evaluate_agent
from pipeline.rollout.rollout import RolloutRequest
from pipeline.rollout.trajectory import StopReason
from tests.rollout.test_agent_process import DESK_PROGRAM
from tests.rollout.test_agents import act, act_in_a_thread
from tests.support.endpoint import agent_of, calling, seed_of, serving
from tests.support.helpers import (
    ALONE,
    Desk,
    ScriptedSampler,
    call,
    chat,
    embedded,
    make_task,
    rollout_of,
    say,
)
from tests.support.messages import refusal


class User:
    def reply(self, message):
        return "Go on." if message == "What now?" else None


class Talk(Desk):
    """A desk whose user answers one question. Its episodes run one after the other."""

    wait = None

    def reset(self, **row):
        self.user = User()
        return super().reset(**row)


def config_of(url, **limits):
    limits = {"max_tokens_per_turn": 9, "temperature": 0.8, "call_timeout": 5, **limits}
    settings = {"url": url, "model": "m"}
    return Config(rollout=limits, evaluation={"eval_trials": 2}, agent=settings)


def agent(url, folder, environments, **limits):
    config = config_of(url, **limits)
    model = LanguageModel(
        "agent", config.agent, config.rollout.call_timeout, folder, as_written=True
    )
    rollout = rollout_of(ScriptedSampler({}), chat(), environments, config.rollout)
    return agent_rollout(rollout, model, config.rollout.temperature), config


def play(answer, folder, *tasks, environment=Talk, faults=(), **limits):
    """Trajectories of one trial of each task, and the bodies of the requests."""
    with serving(answer) as server:
        server.faults = list(faults)
        rollout, _ = agent(server.url, folder, {"desk": environment}, **limits)
        requests = [RolloutRequest(task=task, trial=0, key=7) for task in tasks or [make_task()]]
        return rollout(requests), server.bodies


def in_turn(*answers):
    left = list(answers)
    return lambda body: left.pop(0)


def body_of(message, finish_reason="stop"):
    return json.dumps({"choices": [{"message": message, "finish_reason": finish_reason}]})


def test_an_agent_that_makes_the_experts_calls_earns_1_and_is_paid_once(tmp_path):
    domain = embedded("airline")["airline"]
    tasks = domain.generate_tasks(0, 3, "test", "medium")
    scripts = {}
    for task in tasks:
        messages, reward = run_expert(domain.make(), domain.expert, task)
        assert reward == 1
        said = [message for message in messages if message["role"] == "assistant"]
        scripts |= {seed_of(*task.key, trial): said for trial in (0, 1)}
    with serving(agent_of(scripts)) as server:
        environments = {"airline": domain.environment}
        rollout, config = agent(server.url, tmp_path, environments)
        entry, played = evaluate_agent(rollout, tasks, config, ALONE)
        num_paid = sum(server.paid.values())
        again, config = agent(server.url, tmp_path, environments)
        assert evaluate_agent(again, tasks, config, ALONE) == (entry, played)
    success = entry["success"]["airline"]
    assert (entry["temperature"], success["mean"], success["greedy"]) == (0.8, 1.0, 1.0)
    assert success["pass^k"] == [1.0, 1.0]
    assert set(success["families"]) == {task.family for task in tasks}
    assert [(t.task_id, t.trial) for t in played] == [(t.id, k) for t in tasks for k in (0, 1)]
    assert {t.stop_reason for t in played} == {StopReason.COMPLETED}
    # Two sampled trials and a greedy one of each task, and every call was paid once.
    assert num_paid == 3 * sum(t.num_turns for t in played) / 2 == sum(server.paid.values())
    counts = {0.8: 0, 0.0: 0}
    for body in server.bodies:
        counts[body["temperature"]] += 1
    assert counts == {0.8: num_paid * 2 / 3, 0.0: num_paid / 3}
    assert {body["max_tokens"] for body in server.bodies} == {9}
    assert {body["model"] for body in server.bodies} == {"m"}
    assert server.bodies[0]["tools"] == domain.tools
    assert len(list((tmp_path / "agents").iterdir())) == 1


KINDS = {
    "async": act,
    "thread": act_in_a_thread,
    "process": agent_process("agents", DESK_PROGRAM, prints_reward=False),
}


@pytest.mark.parametrize("loop", KINDS.values(), ids=KINDS)
def test_an_agent_that_was_trained_plays_with_an_endpoints_model_as_it_is(loop, tmp_path):
    said = [call("look", item="lamp"), say("What now?"), say("Done.")]
    domain = Domain(name="desk", environment=Talk, loop=loop)
    with serving(agent_of(defaultdict(lambda: said))) as server:
        rollout, config = agent(server.url, tmp_path, {"desk": domain})
        entry, played = evaluate_agent(rollout, [make_task()], config, ALONE)
    assert entry["success"]["desk"]["mean"] == 1.0
    found = [(t.reward, t.num_turns, t.tools, t.error) for t in played]
    assert found == [(1.0, 3, {"look": [1, 0]}, "")] * 2
    assert {body["max_tokens"] for body in server.bodies} == {9}
    assert server.bodies[0]["tools"] == domain.tools


def test_what_a_loop_asks_of_a_message_is_asked_of_the_endpoint(tmp_path):
    async def loop(policy, task):
        asked = policy.ask(messages=list(task.prompt), tools=[], max_tokens=4, stop=("Bye",))
        return (await asyncio.wrap_future(asked.answer)).message["content"]

    domain = Domain(name="desk", environment=Talk, loop=loop)
    with serving(lambda body: "Done.") as server:
        rollout, _ = agent(server.url, tmp_path, {"desk": domain})
        (episode,) = rollout([RolloutRequest(task=make_task(), trial=0, key=7)])
    assert (episode.reward, episode.error) == (1.0, "")
    ((most, stop),) = [(body["max_tokens"], body["stop"]) for body in server.bodies]
    assert (most, stop) == (4, ["Bye"])


@pytest.mark.parametrize("loop", KINDS.values(), ids=KINDS)
def test_an_endpoint_that_is_away_is_an_outage_for_a_loop_too(loop, tmp_path):
    domain = Domain(name="desk", environment=Talk, loop=loop)
    with serving() as server:
        url = server.url
    rollout, _ = agent(url, tmp_path, {"desk": domain}, call_timeout=1)
    (episode,) = rollout([RolloutRequest(task=make_task(), trial=0, key=7)])
    assert (episode.stop_reason, episode.left_out) == (StopReason.ENVIRONMENT_ERROR, "outage")
    assert "is away for 1 s" in episode.error


def test_the_conversation_is_that_of_the_protocol(tmp_path):
    answers = calling("look", item="lamp"), "What now?", "Done."
    (trajectory,), bodies = play(in_turn(*answers), tmp_path)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.COMPLETED, 1.0)
    assert (trajectory.num_turns, trajectory.tools) == (3, {"look": [1, 0]})
    function = {"name": "look", "arguments": '{"item": "lamp"}'}
    assert bodies[-1]["messages"] == [
        {"role": "system", "content": "desk"},
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00200", "type": "function", "function": function}],
        },
        {"role": "tool", "content": '{"lamp": "seen "}', "tool_call_id": "call00200"},
        {"role": "assistant", "content": "What now?"},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize("arguments", ['{"item": ', "[1]", 7])
def test_unreadable_arguments_are_a_malformed_call(tmp_path, arguments):
    broken = calling("look")
    broken["tool_calls"][0]["function"]["arguments"] = arguments
    (once,), bodies = play(in_turn(broken, "Done."), tmp_path / "once")
    assert (once.num_malformed_calls, once.reward, once.error) == (1, 1.0, "")
    assert bodies[-1]["messages"][2]["content"] == f"look({arguments})"
    assert bodies[-1]["messages"][3] == {
        "role": "user",
        "content": '{"error": "malformed call: the arguments of look are no JSON object"}',
    }
    (often,), bodies = play(in_turn(broken, broken), tmp_path / "often")
    assert (often.stop_reason, len(bodies)) == (StopReason.MALFORMED_CALL, 2)


@pytest.mark.parametrize(("content", "kept"), [("I thi", "I thi"), (None, "")])
def test_a_message_that_is_cut_off_ends_the_episode(tmp_path, content, kept):
    (trajectory,), bodies = play(
        None, tmp_path, faults=[body_of({"content": content}, finish_reason="length")]
    )
    assert (trajectory.stop_reason, trajectory.left_out) == (StopReason.MAX_TOKENS, "")
    assert trajectory.messages[-1] == say(kept)
    assert len(bodies) == 1


def test_a_conversation_that_the_endpoint_refuses_has_failed_and_others_go_on(tmp_path, capsys):
    def answer(body):
        if len(body["messages"]) == 2:
            server.faults = [400]  # of the next request
        return "What now?"

    with serving(answer) as server:
        rollout, _ = agent(server.url, tmp_path, {"desk": Talk})
        (trajectory,) = rollout([RolloutRequest(task=make_task(), trial=0, key=7)])
    assert (trajectory.stop_reason, trajectory.left_out) == (StopReason.MAX_TOKENS, "")
    why = f"agent_url: {server.url} refuses a call (status 400: "
    assert trajectory.messages[-1]["stopped_by"].startswith(why)
    assert f"warning: desk: agent failed on task t1: {why}" in capsys.readouterr().err


def test_turns_and_equal_calls_are_limited_as_for_the_model(tmp_path):
    (long,), bodies = play(lambda body: "What now?", tmp_path / "turns", max_turns=3)
    assert (long.stop_reason, len(bodies)) == (StopReason.MAX_TURNS, 3)
    same = calling("look", item="lamp")
    limits = {"max_repeated_calls": 2, "max_tool_result_tokens": 2}
    (stuck,), _ = play(lambda body: same, tmp_path / "calls", **limits)
    assert stuck.stop_reason is StopReason.REPEATED_CALL
    assert stuck.messages[3]["content"] == '{"error": "result too long"}'


def failed(url, folder):
    rollout, config = agent(url, folder, {"desk": Talk}, call_timeout=0.5)
    entry, played = evaluate_agent(rollout, [make_task(), make_task("t2")], config, ALONE)
    assert {t.stop_reason for t in played} == {StopReason.ENVIRONMENT_ERROR}
    assert [*entry] == ["failed"] and "\n" not in entry["failed"]
    return entry["failed"]


def test_a_wrong_key_is_one_line(tmp_path):
    with serving() as server:
        server.faults = [401] * 4
        line = failed(server.url, tmp_path)
        assert len(server.bodies) <= 4
    assert line.startswith(f"agent_url: {server.url} refuses a call (status 401: ")
    assert line.endswith("; mend agent_url, agent_model or the key in OPENAI_API_KEY")


def test_an_endpoint_that_is_away_is_one_line(tmp_path):
    with serving() as server:
        pass
    line = failed(server.url, tmp_path)
    assert line.startswith("4 of 4 trials failed 3 times; the commonest error, first of desk/t1: ")
    assert f"agent: {server.url} is away for " in line


def test_a_server_without_a_name_is_refused():
    refuse_placeholders(config_of("http://localhost:8000/v1"))
    assert refusal(refuse_placeholders, config_of("http://HOST:8000/v1")).startswith(
        "agent_url: got http://HOST:8000/v1; give the server's"
    )
