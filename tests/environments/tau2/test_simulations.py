"""Episodes in the official form, from what the transcripts of a run have."""

import gzip
import json

import pytest

from pipeline.checkpoints.transcripts import save_transcripts
from pipeline.config.settings import Config
from pipeline.environments.domains import load_domains
from pipeline.environments.tau2.simulations import conversation, results_of
from tests.environments.tau2.conftest import SOURCE
from tests.environments.tau2.test_customers import (
    BROKEN,
    PHONE_SCRIPT,
    config_of,
    phone_owner,
    play,
    task_of,
)
from tests.support.endpoint import serving
from tests.support.helpers import call, say

pytestmark = pytest.mark.skipif(SOURCE != "miniature", reason="plays the miniature's tasks")
OF_AGENT = {"requestor": "assistant"}
OF_USER = {"requestor": "user"}


def exported(config, name, task_id, script, folder):
    """Play one episode; return its official form, by way of a transcript."""
    domain = load_domains(config)[name]
    trajectory = play(config, domain, task_of(domain, task_id), script, folder)
    path = save_transcripts(folder / "trajectories", 0, 0, [trajectory])
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    info = {"git_commit": "c", "seed": 1}
    found = results_of(domain.environment.world, lines, info, {"reward": "verifiable"}, "now")
    return found, found["simulations"][0]


def plain(simulation):
    """The messages without what the format adds to each of them."""
    kept = []
    for number, message in enumerate(simulation["messages"]):
        assert (message.pop("turn_idx"), message.pop("timestamp")) == (number, "now")
        kept.append({name: value for name, value in message.items() if value is not None})
    return kept


def calls(*made, **requestor):
    """The calls of a message: (id, tool, arguments)."""
    return {"tool_calls": [{"id": i, "name": n, "arguments": a, **requestor} for i, n, a in made]}


def test_calls_of_the_customers_phone_stand_where_they_were_made(checkout_path, tmp_path):
    with serving(phone_owner) as server:
        config = config_of(url=server.url, tau2=str(checkout_path))
        found, run = exported(config, "telecom", BROKEN, PHONE_SCRIPT, tmp_path)
    assert found["info"] == {
        "num_trials": 1,
        "environment_info": {"domain_name": "telecom", "policy": "Help by talking.\nAsk."},
        "git_commit": "c",
        "seed": 1,
    }
    assert [task["id"] for task in found["tasks"]] == [run["task_id"]] == [BROKEN]
    assert (run["termination_reason"], run["trial"], run["duration"]) == ("user_stop", 0, 0.0)
    assert run["reward_info"] == {
        "reward": 1.0,
        "reward_basis": ["ENV_ASSERTION"],
        "reward_breakdown": {"ENV_ASSERTION": 1.0},
    }
    assert run["info"] == {"reward": "verifiable", "stop_reason": "completed"}
    thought = {"content": "<think>It is the plane.</think>Switch the airplane mode off."}
    answer_of = {"role": "tool", "error": False}
    assert plain(run) == [
        {"role": "assistant", "content": "Welcome, what can I do for you?"},
        {"role": "user", "content": "My phone is dead."},
        {"role": "assistant", **calls(("call_0", "resume_line", {"line_id": "L1"}), **OF_AGENT)},
        {**answer_of, "id": "call_0", "content": "Resumed.", **OF_AGENT},
        {"role": "assistant", "content": "Switch the airplane mode off.", "raw_data": thought},
        {"role": "user", **calls(("call-1", "toggle_airplane_mode", {}), **OF_USER)},
        {**answer_of, "id": "call-1", "content": "Airplane mode: False", **OF_USER},
        {"role": "user", "content": "It says Airplane mode: False"},
        {"role": "assistant", "content": "Your line works again."},
        {"role": "user", "content": "Thank you. ###STOP###"},
    ]


def test_in_solo_mode_the_last_message_is_the_stop(checkout_path, tmp_path):
    config = Config(data={"tau2": str(checkout_path), "domains": ["telecom"]})
    beside = call("done")
    beside["tool_calls"].insert(0, call("toggle_airplane_mode")["tool_calls"][0])
    script = [call("toggle_airplane_mode"), call("resume_line", line_id="L1"), beside]
    _, run = exported(config, "telecom", BROKEN, script, tmp_path)
    assert (run["termination_reason"], run["reward_info"]["reward"]) == ("agent_stop", 1.0)
    assert [m["role"] for m in run["messages"]] == [*["assistant", "tool"] * 2, "assistant"]
    assert plain(run)[-1] == {"role": "assistant", "content": "###STOP###"}


def test_a_ticket_without_done_is_the_agents_error(checkout_path, tmp_path):
    config = Config(data={"tau2": str(checkout_path), "domains": ["telecom"]})
    _, run = exported(config, "telecom", BROKEN, [say("I cannot help.")], tmp_path)
    assert (run["termination_reason"], run["reward_info"]["reward"]) == ("agent_error", 0.0)
    assert run["reward_info"]["reward_basis"] is None
    assert plain(run) == [{"role": "assistant", "content": "I cannot help."}]


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ([call("cancel_order", order_id="o2")] * 10, "too_many_errors"),
        ([call("get_order", order_id="o1")] * 12, "max_steps"),
        ([say("Goodbye.")], "user_stop"),
    ],
)
def test_each_end_has_its_official_name(checkout_path, tmp_path, script, end):
    config = Config(data={"tau2": str(checkout_path), "domains": ["airline"]})
    _, run = exported(config, "airline", "2", script, tmp_path)
    assert run["termination_reason"] == end
    stop = {"role": "user", "content": "###STOP###"}
    assert (plain(run)[-1] == stop) == (end == "user_stop")


def test_a_call_that_cannot_be_read_is_a_call_of_no_tool():
    told = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "look(lamp"},
        {"role": "tool", "name": "error", "content": "malformed call"},
        {"role": "assistant", "content": "Bye."},
    ]
    made = {"role": "assistant", "content": "look(lamp"}
    result = {"role": "tool", "id": "call_0", "content": "malformed call", "error": False}
    assert conversation(told, (), is_solo=False) == [
        {"role": "user", "content": "Hello."},
        made | calls(("call_0", "malformed_call", {}), **OF_AGENT),
        result | OF_AGENT,
        {"role": "assistant", "content": "Bye.", "tool_calls": None},
    ]
