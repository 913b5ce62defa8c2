"""The returns desk: only the policy in the prompt says what is right, and the expert quotes it."""

import json

import pytest

from examples import returns_desk
from examples.returns_desk import ACTIONS, STATES, ReturnsEnvironment, expert, generate_tasks
from pipeline.environments.experts import run_expert

TASKS = generate_tasks(0, 200, "test", "medium")


def test_the_expert_quotes_the_rule_of_the_prompt_in_the_message_that_acts():
    for task in TASKS[:40]:
        messages, reward = run_expert(ReturnsEnvironment(), expert, task)
        assert reward == 1.0
        state = json.loads(messages[3]["content"])["state"]
        assert messages[4]["content"] in task.prompt[0]["content"].splitlines()
        assert messages[4]["content"] == f"- {state}: {task.branch}"
        assert messages[4]["tool_calls"][0]["function"]["name"] == task.branch
        assert len(messages) == 6  # the decision ends the episode


def test_every_state_has_every_action_somewhere_so_that_no_action_alone_earns_much():
    rules = {rule for task in TASKS for rule in task.prompt[0]["content"].splitlines()[2:]}
    assert rules == {f"- {state}: {action}" for state in STATES for action in ACTIONS}
    for action in ACTIONS:  # at most a quarter, and two standard deviations of 200 draws
        assert sum(task.branch == action for task in TASKS) <= 0.31 * len(TASKS)


def test_a_demonstration_that_breaks_the_policy_quotes_the_rule_that_it_follows():
    broken = 0
    for seed in range(30):
        messages, reward = run_expert(ReturnsEnvironment(), expert, TASKS[seed], 0.0, seed)
        action = messages[4]["tool_calls"][0]["function"]["name"]
        assert messages[4]["content"].endswith(f": {action}")
        assert reward == (action == TASKS[seed].branch)
        broken += reward == 0
    assert broken > 15


@pytest.mark.parametrize("split", ["train", "validation"])
def test_splits_share_no_order(split):
    def orders(tasks):
        return {json.loads(task.payload)["goal"]["order"] for task in tasks}

    assert not orders(TASKS) & orders(returns_desk.generate_tasks(0, 200, split, "medium"))
