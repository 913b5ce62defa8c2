"""Customers of τ²-bench who talk: a script, and a language model behind a real server."""

import json

import pytest

from pipeline.config.settings import Config, RolloutSettings
from pipeline.environments.domains import load_domains
from pipeline.environments.language_models.customers import Customers
from pipeline.environments.language_models.language_model import LanguageModel
from pipeline.rollout.trajectory import StopReason
from tests.environments.tau2.conftest import SOURCE
from tests.support.endpoint import calling, serving
from tests.support.helpers import (
    Desk,
    call,
    make_task,
    played,
    say,
)

LIMITS = RolloutSettings(
    max_turns=12, max_tokens_per_turn=400, max_tokens=60_000, max_tool_result_tokens=8000
)
MINIATURE = pytest.mark.skipif(SOURCE != "miniature", reason="plays the miniature's phone")
BROKEN = "[service_issue]airplane_mode_on|overdue_bill_suspension[PERSONA:None]"


def config_of(domains=("telecom",), customer="llm", url="http://x", **data):
    data = {"domains": list(domains), **data}
    if customer == "llm":
        return Config(data=data, customer={"url": url, "model": "m", "temperature": 0.5})
    return Config(data=data | {"tau2_arguments": {"customer": customer}})


def task_of(domain, task_id):
    splits = ("train", "validation", "test")
    tasks = [task for s in splits for task in domain.generate_tasks(0, 99, s, "medium")]
    return next(task for task in tasks if task.id == task_id)


def play(config, domain, task, script, folder):
    opening_messages = {}
    if config.customer.url is not None:
        model = LanguageModel("customer", config.customer, 120, folder)
        opening_messages = Customers(model, [domain.name]).opening_messages
    environments = {domain.name: domain.environment}
    return played([script], environments, LIMITS, [task], opening_messages=opening_messages)[0][0]


PHONE_SCRIPT = [  # of the agent
    call("resume_line", line_id="L1"),
    say("<think>It is the plane.</think>Switch the airplane mode off."),
    say("Your line works again."),
]


def phone_owner(body):
    """The language model of a customer with a phone."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return f"It says {last['content']}"
    steps = {
        "Welcome, what can I do for you?": "My phone is dead.",
        "Switch the airplane mode off.": calling("toggle_airplane_mode"),
        "Your line works again.": "Thank you. ###STOP###",
    }
    return steps[last["content"]]


@MINIATURE
def test_the_phone_is_the_customers_and_the_line_is_the_agents(checkout_path, tmp_path):
    """The customer calls the phone's tools on the same episode, and ends it as in the benchmark."""
    script = [call("toggle_airplane_mode"), *PHONE_SCRIPT]  # first, no tool of the agent
    with serving(phone_owner) as server:
        config = config_of(url=server.url, tau2=str(checkout_path))
        domain = load_domains(config)["telecom"]
        trajectory = play(config, domain, task_of(domain, BROKEN), script, tmp_path)
        again = play(config, domain, task_of(domain, BROKEN), script, tmp_path)
    assert trajectory.error == ""
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.COMPLETED, 1.0)
    assert trajectory.reward_breakdown == {"graded": 1.0, "ENV_ASSERTION": 1.0}
    told = [(m["role"], m["content"]) for m in trajectory.messages]
    assert told[1:3] == [
        ("assistant", "Welcome, what can I do for you?"),
        ("user", "My phone is dead."),
    ]
    assert told[4][0] == "tool" and told[4][1].startswith("Error: ")
    assert ("user", "It says Airplane mode: False") in told
    assert "Airplane mode: True" not in str(told)
    assert trajectory.tools["customer/toggle_airplane_mode"] == [1, 0]
    assert trajectory.tools["unknown"] == [1, 1]
    seen = [m["content"] for m in trajectory.customer]
    assert seen[0].startswith("# Play a customer_tools.\n\n\n<scenario>\n")
    assert seen[0].endswith("\n</scenario>")
    assert seen[1:] == [
        *("Welcome, what can I do for you?", "My phone is dead."),
        *("Switch the airplane mode off.", "", "Airplane mode: False"),
        *("It says Airplane mode: False", "Your line works again.", "Thank you. ###STOP###"),
    ]
    names = {tool["function"]["name"] for tool in server.bodies[0]["tools"]}
    assert "toggle_airplane_mode" in names and "resume_line" not in names
    agents = {schema["function"]["name"] for schema in domain.environment.schemas}
    assert "resume_line" in agents and not agents & (names | {"done"})
    assert again == trajectory
    assert set(server.paid.values()) == {1}


@MINIATURE
def test_an_episode_whose_customer_fails_is_left_out(checkout_path, tmp_path):
    with serving(lambda body: calling("set_apn", apn="x")) as server:
        config = config_of(url=server.url, tau2=str(checkout_path))
        domain = load_domains(config)["telecom"]
        trajectory = play(config, domain, task_of(domain, BROKEN), [], tmp_path)
    assert (trajectory.stop_reason, trajectory.left_out) == (StopReason.ENVIRONMENT_ERROR, "outage")
    assert "customer: 30 messages with calls of tools" in trajectory.error


def test_an_episode_without_the_customers_stop_earns_nothing(checkout_path, tmp_path):
    with serving(lambda body: "And then?") as server:
        config = config_of(["airline"], url=server.url, tau2=str(checkout_path))
        domain = load_domains(config)["airline"]
        task = domain.generate_tasks(0, 1, "test", "medium")[0]
        trajectory = play(config, domain, task, [say("Well.")] * 12, tmp_path)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.MAX_TURNS, 0.0)
    assert trajectory.reward_breakdown == {"graded": 0.0}


def test_before_a_run_no_call_is_made_and_the_first_words_are_the_scenarios(checkout_path):
    domain = load_domains(config_of(["retail"], tau2=str(checkout_path)))["retail"]
    task = domain.generate_tasks(0, 1, "test", "medium")[0]
    environment = domain.make()
    assert task.prompt[1]["role"] == "assistant" and task.prompt[2]["content"] == ""
    assert environment.reset(**task.row()) == environment.user.first_words != ""
    about = domain.about()
    assert about["customer"] == "m at temperature 0.5, with the benchmark's user prompt"


def test_a_scripted_customer_plays_whole_episodes(checkout_path, tmp_path):
    config = config_of(["airline"], "scripted", tau2=str(checkout_path))
    domain = load_domains(config)["airline"]
    task = domain.generate_tasks(0, 1, "test", "medium")[0]
    script = [say("Who are you?")] * 8 + [say("That is all.")] * 4
    first, second = (play(config, domain, task, script, tmp_path) for _ in range(2))
    assert first == second
    assert first.stop_reason is StopReason.COMPLETED
    assert first.messages[2]["content"] and first.customer == []


def test_a_domain_of_ones_own_has_scenarios_in_its_tasks(tmp_path):
    columns = json.dumps({"scenario": "You own a lamp."})
    with_scenario = make_task(columns=columns, payload='{"addition": " there"}')
    with serving(lambda body: "###STOP###" if len(body["messages"]) > 4 else "It hums.") as server:
        model = LanguageModel("customer", config_of(url=server.url).customer, 120, tmp_path)
        (talked, alone), _ = played(
            [[say("What is wrong?"), say("done")]] * 2,
            {"desk": Desk},
            LIMITS,
            [with_scenario, make_task("t2")],
            opening_messages=Customers(model, ["desk"]).opening_messages,
        )
    said = [m["content"] for m in talked.messages[1:]]
    assert said == ["hello there", "What is wrong?", "It hums.", "done"]
    assert talked.reward == 1.0
    assert server.bodies[0]["messages"][0]["content"].endswith("You own a lamp.")
    assert server.bodies[0]["messages"][2] == {"role": "assistant", "content": "hello there"}
    assert len(server.bodies) == 2
    assert [m["content"] for m in alone.messages[1:]] == ["hello", "What is wrong?"]
    assert alone.customer == []
