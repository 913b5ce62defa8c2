"""OpenEnv's servers: their tools, tasks and rewards, and what goes wrong with a server."""

import gc
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pipeline.config.cli import parse
from pipeline.environments.calls import guarded
from pipeline.environments.domains import load_domains
from pipeline.environments.faults import Outage
from pipeline.environments.task_checks import try_task
from pipeline.environments.tools import call_tool, started
from tests.rollout.test_rollout import LIMITS
from tests.support.helpers import call, make_task, played, say
from tests.support.messages import refusal, says
from tests.support.openenv_server import serving

PATIENT_S = 30.0


@pytest.fixture
def server(request):
    with serving(**getattr(request, "param", {})) as server:
        yield server


def domain_of(url, **arguments):
    environment = {"factory": f"openenv:{url}", "arguments": arguments}
    argv = ["--domains", "desk", "--environments", json.dumps({"desk": environment})]
    return load_domains(parse(argv))["desk"]


def play(server, *scripts, tasks=(), limits=LIMITS, **arguments):
    """The trajectories of episodes, after which no session is open."""
    domain = domain_of(server.url, **arguments)
    trajectories, _ = played(scripts, {"desk": domain}, limits, tasks)
    return trajectories


def answers(trajectory):
    return [m["content"] for m in trajectory.messages if m["role"] == "tool"]


def begun(server, name="t0"):
    """An episode that no rollout plays, and so nobody closes."""
    domain = domain_of(server.url)
    return guarded("reset", PATIENT_S, lambda: started(domain.make, make_task(name).row()))


def target_of(server, name="t0"):
    """The target that the server draws for a task."""
    return json.loads(begun(server, name).addition)["target"]


def test_the_schema_of_the_action_is_a_tool_and_the_server_tells_its_name(server):
    domain = domain_of(server.url + "/")
    parameters = {
        "type": "object",
        "properties": {"by": {"description": "how much to add", "title": "By", "type": "integer"}},
        "required": ["by"],
        "additionalProperties": False,
    }
    function = {"name": "step", "description": "Add to the counter.", "parameters": parameters}
    assert domain.tools == [{"type": "function", "function": function}]
    facts = {"environment": f"openenv:{server.url}", "server": "Counter", "version": "1.0.0"}
    assert domain.about() == facts


def test_a_group_plays_one_task_to_its_end_and_no_session_is_left(server):
    target = target_of(server)
    once = [call("step", by=target)]
    slowly = [*[call("step", by=1)] * target, say("never said")]
    missed = [call("step", by=target + 1)]
    given_up = [call("step", by=1), say("bye")]
    tasks = [make_task("t0", "")] * 4
    trajectories = play(server, once, slowly, missed, given_up, tasks=tasks)
    assert [t.reward for t in trajectories] == [1.0, 1.0, 0.0, 0.0]
    assert not any(t.error for t in trajectories)
    assert {t.messages[1]["content"] for t in trajectories} == {
        json.dumps({"count": 0, "target": target})
    }
    assert answers(trajectories[1])[-1] == json.dumps({"count": target, "target": target})
    seeds = [data["seed"] for data in server.resets]
    assert len(set(seeds)) == 1
    assert 0 <= seeds[0] < 1 << 31
    assert server.closed.wait(PATIENT_S)


@pytest.mark.parametrize(("how", "reward"), [("last", 0.0), ("sum", 1.0)])
def test_the_reward_is_the_last_of_the_steps_or_their_sum(server, how, reward):
    target = target_of(server)
    server.faults = ['{"type": "observation", "data": {"observation": {"count": 1}, "reward": 1}}']
    (trajectory,) = play(server, [call("step", by=1), call("step", by=1), say("bye")], reward=how)
    assert target > 1
    assert trajectory.reward == reward


def test_a_step_without_a_reward_changes_none(server):
    server.faults = [
        json.dumps({"type": "observation", "data": {"observation": {}, "reward": reward}})
        for reward in (0.5, None)
    ]
    (trajectory,) = play(server, [call("step", by=1), call("step", by=1), say("bye")])
    assert trajectory.reward == 0.5
    assert answers(trajectory) == ["", ""]


def test_reset_gets_the_columns_of_the_row_and_a_seed_of_theirs_wins(server):
    columns = [{"level": 3, "note": None}, {"seed": 7}]
    tasks = [make_task(f"t{n}", columns=json.dumps(of)) for n, of in enumerate(columns)]
    play(server, [say("bye")], [say("bye")], tasks=tasks)
    first, second = sorted(server.resets, key=lambda data: "level" not in data)
    assert first.keys() == {"seed", "level"}
    assert second == {"seed": 7}


def test_what_an_action_does_wrong_is_told_to_the_model(server):
    (trajectory,) = play(
        server,
        [
            call("step", by="x", to=1),
            call("fly"),
            call("step", by=13),
            call("step", by=1),
            say("bye"),
        ],
    )
    wrong, unknown, unlucky, right = answers(trajectory)
    says(wrong, "by: Input should be a valid integer", "to: Extra inputs are not permitted")
    assert json.loads(unknown) == {"error": "unknown tool fly"}
    assert json.loads(unlucky) == {"error": "unlucky"}
    assert json.loads(right)["count"] == 1
    assert trajectory.num_tool_errors == 1  # the environment's own exception
    assert not trajectory.error


@pytest.mark.parametrize("server", [{"mcp": True}], indirect=True)
def test_tools_of_mcp_are_tools(server):
    assert [tool["function"]["name"] for tool in domain_of(server.url).tools] == ["add"]
    (trajectory,) = play(server, [call("add", by=1), call("add", by="x"), call("add", by=9)])
    first, wrong, last = answers(trajectory)
    assert (first, last) == ("the counter is at 1", "the counter is at 10")
    assert json.loads(wrong)["message"] == "by is no integer"
    assert trajectory.num_turns == 3


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"said": "ready"}, "ready"),
        ({"at": 3}, '{"at": 3}'),
        ({"a": "é", "b": 1}, '{"a": "é", "b": 1}'),
    ],
)
def test_an_observation_of_one_text_is_this_text_and_others_are_json(server, observation, text):
    data = {"observation": {**observation, "metadata": {"solution": 3}}, "reward": 0, "done": True}
    server.faults = [json.dumps({"type": "observation", "data": data})]
    (trajectory,) = play(server, [call("step", by=1)])
    assert answers(trajectory) == [text]


@pytest.mark.parametrize("server", [{"sessions": 2}], indirect=True)
def test_more_episodes_than_sessions_wait_for_one(server):
    trajectories = play(server, *[[call("step", by=9)] for _ in range(6)])
    assert not any(t.error for t in trajectories)
    assert server.most_open == 2
    assert server.num_refused > 0


@pytest.mark.parametrize("server", [{"sessions": 0}], indirect=True)
def test_an_episode_that_gets_no_session_in_time_is_an_outage(server):
    (trajectory,) = play(server, [say("bye")], wait_s=0)
    assert trajectory.left_out == "outage"
    says(trajectory.error, "0/0 sessions active", "a larger max_concurrent_envs")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("die", ("has closed the session",)),
        ("no JSON", ("sent 'no JSON'",)),
        ('{"type": "observation", "data": {}}', ("sent", "observation")),
        ('{"type": "observation"}', ("sent",)),
        ("3", ("sent '3'",)),
        ('{"type": "observation", "data": {"observation": {}, "reward": "much"}}', ("much",)),
        ('{"type": "error", "data": {"code": "SESSION_ERROR", "message": "lost"}}', ("lost",)),
    ],
)
def test_a_session_that_breaks_is_an_outage(server, fault, words):
    server.faults = [fault]
    (trajectory,) = play(server, [call("step", by=1), say("bye")])
    assert trajectory.left_out == "outage"
    says(trajectory.error, *words)
    assert server.closed.wait(PATIENT_S)


def test_a_server_that_is_away_is_an_outage(server):
    domain = domain_of(server.url)
    server.stop()
    (trajectory,), _ = played([[say("bye")]], {"desk": domain}, LIMITS)
    assert trajectory.left_out == "outage"
    says(trajectory.error, "Outage", "opens no session", str(server.port))


def test_a_step_that_takes_too_long_ends_its_episode(server):
    server.faults = ["wait"]
    limits = LIMITS.model_copy(update={"call_timeout": 1.0})
    (trajectory,) = play(server, [call("step", by=1), say("bye")], limits=limits)
    says(trajectory.error, "CallTimeout", "step took more than 1 s")


def test_a_session_lives_while_the_model_thinks(server):
    server.heartbeat_s = 0.2  # the server ends a session whose client does not answer its pings
    episode = begun(server)
    time.sleep(1.0)
    assert json.loads(call_tool(episode.environment, "step", {"by": 1}))["count"] == 1


def test_a_server_that_goes_away_between_two_steps_is_an_outage(server):
    episode = begun(server)
    server.stop()
    for _ in range(2):
        with pytest.raises(Outage, match="has closed the session"):
            call_tool(episode.environment, "step", {"by": 1})


def test_an_environment_that_nobody_closes_is_closed_when_it_is_gone(server):
    episode = begun(server)
    assert server.num_open == 1
    del episode
    gc.collect()
    assert server.closed.wait(PATIENT_S)


TASK = make_task("t0", "")
ANOTHER = "reset starts another episode each time"


@pytest.mark.parametrize("server", [{"sessions": 1}], indirect=True)
def test_a_task_is_tried_on_a_server_of_one_session(server):
    assert json.loads(try_task(domain_of(server.url), TASK, "desk", PATIENT_S))["count"] == 0
    assert len(server.resets) == 2
    assert server.closed.wait(PATIENT_S)


@pytest.mark.parametrize(
    ("server", "what"),
    [({"seeded": "nothing"}, "its text differs"), ({"seeded": "text"}, "self.state differs")],
    indirect=["server"],
)
def test_a_server_that_ignores_the_seed_is_refused(server, what):
    line = refusal(try_task, domain_of(server.url), TASK, "desk", PATIENT_S)
    says(line, f"{ANOTHER} ({what})", "draw from random.Random(seed)", "compare_state: false")


@pytest.mark.parametrize("server", [{"seeded": "text"}], indirect=True)
def test_a_state_that_may_differ_is_not_compared_if_the_user_says_so(server):
    assert try_task(domain_of(server.url, compare_state=False), TASK, "desk", PATIENT_S)


class NoOpenEnv(BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"detail": "Not Found"}' if self.path == "/json/schema" else b"<html>"
        self.send_response(404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("path", ["", "/json"])
def test_another_server_is_refused(path):
    with HTTPServer(("127.0.0.1", 0), NoOpenEnv) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        line = refusal(domain_of, f"http://127.0.0.1:{other.server_port}{path}")
        other.shutdown()
    says(line, f"openenv:http://127.0.0.1:{other.server_port}", "no server of OpenEnv", "address")


def test_what_cannot_be_used_is_refused_before_the_run(server, monkeypatch):
    says(refusal(domain_of, "localhost"), "no server of OpenEnv", "openenv:http://localhost:8000")
    says(refusal(domain_of, server.url, reward="mean"), "argument reward", "'last' or 'sum'")
    server.stop()
    says(refusal(domain_of, server.url), "no server answers", "uvicorn", "docker")
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    says(refusal(domain_of, server.url), "aiohttp is not installed", "three-domain-grpo[agents]")
