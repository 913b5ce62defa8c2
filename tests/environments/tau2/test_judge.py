"""The official reward with a judge: what the judge is asked, and what becomes of its answers."""

import json

import pytest

from pipeline.config.settings import Config
from pipeline.environments.domains import load_domains
from pipeline.environments.language_models.customers import judge_of
from pipeline.environments.tau2.environment import JUDGE_FILE, judge_prompt
from pipeline.rollout.trajectory import StopReason
from tests.environments.tau2.conftest import SOURCE
from tests.environments.tau2.test_customers import LIMITS, task_of
from tests.support.endpoint import serving
from tests.support.helpers import (
    ALONE,
    call,
    played,
    say,
)
from tests.support.messages import refusal, says

pytestmark = pytest.mark.skipif(SOURCE != "miniature", reason="judges the miniature's tasks")
MOVE = call("change_address", user_id="bob", address="42 Elm")
FENCED = "Here it is:\n```json\n%s\n```"


def verdict(*met):
    results = [
        {"expectedOutcome": "Tells it.", "reasoning": "as said", "metExpectation": holds}
        for holds in met
    ]
    return json.dumps({"results": results})


def config_of(path, url="http://x"):
    data = {"tau2": str(path), "domains": ["retail"], "tau2_arguments": {"reward": "official"}}
    return Config(data=data, judge={"url": url, "model": "m", "temperature": 0.5})


def play(path, folder, url, script):
    """Play a task of retail whose reward basis is DB and NL_ASSERTION."""
    config = config_of(path, url)
    domain = load_domains(config)["retail"]
    judge = judge_of(config, folder, ALONE)
    tasks, environments = [task_of(domain, "0")], {"retail": domain.environment}
    (trajectory,), _ = played([script], environments, LIMITS, tasks, judge=judge.ask)
    judge.close()
    return trajectory


@pytest.mark.parametrize(
    ("said", "reward", "part"),
    [(verdict(True), 1.0, 1.0), (FENCED % verdict(True), 1.0, 1.0), (verdict(False), 0.0, 0.0)],
)
def test_the_judges_verdict_is_a_factor_of_the_reward(checkout_path, tmp_path, said, reward, part):
    with serving(lambda body: said) as server:
        trajectory = play(checkout_path, tmp_path, server.url, [MOVE, say("It is 42.")])
        again = play(checkout_path, tmp_path, server.url, [MOVE, say("It is 42.")])
        (body,) = server.bodies  # the second answer comes from the disk
    assert (trajectory.error, trajectory.reward) == ("", reward)
    assert trajectory.reward_breakdown == {"graded": 1.0, "DB": 1.0, "NL_ASSERTION": part}
    differs = {} if reward else {"Tells it.": ["not met: as said", "met"]}
    assert trajectory.difference == again.difference == differs
    assert (body["temperature"], body["seed"], body["model"]) == (0.5, 0, "m")
    assert [path.name for path in (tmp_path / "judges").iterdir()] == ["rank-0.jsonl"]


def test_the_judge_gets_the_checkouts_own_question(checkout_path, tmp_path):
    ended = say("<think>42?</think>It is 42.")
    with serving(lambda body: verdict(True)) as server:
        trajectory = play(checkout_path, tmp_path, server.url, [MOVE, ended])
        (body,) = server.bodies
    ticket, result = trajectory.messages[1]["content"], trajectory.messages[3]["content"]
    told = f"user: {ticket}\nassistant: None\ntool: {result}\nassistant: It is 42."
    talk = f"\n        talk:\n        {told}\nuser: ###STOP###\n"
    assert [message["content"] for message in body["messages"]] == [
        "Judge.",
        f"{talk}        outcomes:\n        ['Tells it.']\n        ",
    ]


def test_the_judge_is_not_asked_where_another_part_is_0(checkout_path, tmp_path):
    with serving() as server:
        trajectory = play(checkout_path, tmp_path, server.url, [say("It is 42.")])
        assert server.bodies == []
    assert trajectory.reward == 0.0
    assert trajectory.reward_breakdown == {"graded": 1.0, "DB": 0.0}


@pytest.mark.parametrize("said", ["no JSON", verdict(), verdict(True, True), verdict("yes"), "[]"])
def test_an_answer_that_cannot_be_read_is_asked_for_again(checkout_path, tmp_path, said):
    answers = [said, said, verdict(True)]
    with serving(lambda body: answers.pop(0)) as server:
        trajectory = play(checkout_path, tmp_path, server.url, [MOVE, say("It is 42.")])
        assert [body["seed"] for body in server.bodies] == [0, 1, 2]
    assert (trajectory.error, trajectory.reward) == ("", 1.0)


def test_an_episode_without_a_verdict_is_left_out(checkout_path, tmp_path):
    with serving(lambda body: "I cannot say.") as server:
        trajectory = play(checkout_path, tmp_path, server.url, [MOVE, say("It is 42.")])
    assert (trajectory.stop_reason, trajectory.left_out) == (
        StopReason.ENVIRONMENT_ERROR,
        "outage",
    )
    assert trajectory.error == (
        "Outage: judge: no verdict on 1 assertions in 3 answers: I cannot say."
    )


def test_a_judge_is_needed_for_the_official_reward(checkout_path):
    data = {"tau2": str(checkout_path), "domains": ["retail"]}
    config = Config(data=data | {"tau2_arguments": {"reward": "official"}})
    assert refusal(load_domains, config) == (
        "tau2: reward: official needs a judge for 2 tasks of retail (0, 2); give judge_url and "
        "judge_model, or verifiable"
    )


def test_a_checkout_with_another_judge_is_refused(miniature):
    (miniature / JUDGE_FILE).write_text(
        "def evaluate():\n    system_prompt = 1\n", encoding="utf-8"
    )
    says(
        refusal(judge_prompt, miniature, [], ["Tells it."]),
        "evaluator_nl_assertions.py has no function with traj",
    )
