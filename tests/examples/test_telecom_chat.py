"""Telecom in conversation: the customer does what words ask for, and nothing else."""

import json

import pytest

from examples import telecom_chat
from examples.telecom_chat import REQUESTS, WORDINGS, TelecomChatEnvironment, asked_for
from pipeline.environments.embedded import telecom


def tasks(count=120, split="train", difficulty="medium"):
    return telecom_chat.generate_tasks(0, count, split, difficulty)


def started(task):
    environment = TelecomChatEnvironment()
    environment.reset(**task.row())
    return environment


def task_of(branch, fault=None):
    for task in tasks(300):
        device = json.loads(task.payload)["database"]["device"]
        if task.branch == branch and fault in (None, device["fault"]):
            return task
    raise AssertionError(branch)


# The tasks


# What is asked for


@pytest.mark.parametrize(("action", "wanted"), REQUESTS.items())
def test_what_the_expert_says_is_understood_however_it_is_written(action, wanted):
    for text in (
        wanted,
        wanted.upper(),
        wanted.rstrip(".") + "!!",
        f"Thank you.\n{wanted}",
        wanted.removeprefix("Please ").rstrip(".") + ", please",
        "Could you " + wanted.removeprefix("Please ").rstrip(".") + "?",
        wanted.removeprefix("Please ").capitalize(),
        f"  1) {wanted.replace(' ', '  ')}",
    ):
        assert asked_for(text) == [action], text


@pytest.mark.parametrize("action", WORDINGS)
def test_each_wording_asks_for_its_own_action(action):
    for wording in WORDINGS[action]:
        assert asked_for(f"Please {wording}.") == [action]


# The customer


def test_the_right_remedy_mends_the_phone_and_every_try_is_kept():
    for fault, remedy in telecom.REMEDIES.items():
        wrong = next(other for other in telecom.REMEDIES.values() if other != remedy)
        environment = started(task_of("check", fault))
        ask = environment.user.reply
        assert ask(REQUESTS["check"]) == f"It shows {fault}."
        assert ask(REQUESTS[wrong]) == "Done."
        assert environment._db.device.fault == fault
        assert ask(REQUESTS[remedy]) == "Done."
        assert ask(REQUESTS["check"]) == "It shows none."
        assert environment._db.device.remedies == [wrong, remedy]
        environment.final_message = "Done."
        assert environment.get_reward() == 0.0


# The reward


def test_asking_for_all_remedies_at_once_earns_nothing():
    task = task_of("check")
    environment = started(task)
    every = [REQUESTS[remedy] for remedy in telecom.REMEDIES.values()]
    assert environment.user.reply(" ".join(every)) == " ".join(["Done."] * 7)
    environment.final_message = "Done."
    assert environment.get_reward() == 0.0
