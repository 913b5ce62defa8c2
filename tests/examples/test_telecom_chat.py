"""Telecom in conversation: the customer does what words ask for, and nothing else."""

import json

import pytest

from examples import telecom_chat
from examples.telecom_chat import REQUESTS, WORDINGS, TelecomChatEnvironment, asked_for
from pipeline.environments.embedded import telecom
from pipeline.environments.tools import call_tool


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


def test_the_tasks_are_those_of_telecom_under_another_policy():
    for split in ("train", "test"):
        for mine, theirs in zip(
            tasks(60, split), telecom.generate_tasks(0, 60, split, "medium"), strict=True
        ):
            assert (mine.id, mine.payload) == (theirs.id, theirs.payload)
            assert (mine.family, mine.branch) == (theirs.family, theirs.branch)
            assert mine.prompt[1:] == theirs.prompt[1:]
            assert mine.prompt[0]["content"].startswith("telecom_chat\n============\n\nYou serve")
            assert mine.key == ("telecom_chat", theirs.id)


def test_the_policy_names_every_fault_and_its_remedy_in_words_that_are_understood():
    policy = " ".join(telecom_chat.POLICY.split())
    for fault, remedy in telecom.REMEDIES.items():
        words = policy.partition(f"{fault}: ")[2].partition(";")[0]
        assert asked_for(f"Please {words}.") == [remedy]


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


@pytest.mark.parametrize(
    ("message", "actions"),
    [
        ("Please restart the phone and turn off the battery saver.", ["restart", "saver_off"]),
        ("Turn airplane mode off, then check it.", ["fly_off", "check"]),
        ("What does the phone show?", ["check"]),
        ("I need you to reset the APN", ["reset_apn"]),
        ("Check whether airplane mode is off on your phone.", ["check"]),
        ("Please check why your phone does not work.", ["check"]),
        ("Please restart the phone, but never remove the SIM.", ["restart"]),
        ("Next, restart your device", ["restart"]),
    ],
)
def test_longer_requests_are_understood(message, actions):
    assert asked_for(message) == actions


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


def test_a_bill_is_paid_once_it_was_sent():
    environment = started(task_of("due"))
    line = json.loads(task_of("due").payload)["goal"]["record"]
    assert environment.user.reply("Please pay the bill.") == "I have no bill."
    assert environment._db.lines[line].bill == "due"
    call_tool(environment, "send_bill", {"line": line})
    assert environment.user.reply("Would you please settle the bill?") == "I have paid it."
    assert environment._db.lines[line].bill == "paid"


# The reward


def test_asking_for_all_remedies_at_once_earns_nothing():
    task = task_of("check")
    environment = started(task)
    every = [REQUESTS[remedy] for remedy in telecom.REMEDIES.values()]
    assert environment.user.reply(" ".join(every)) == " ".join(["Done."] * 7)
    environment.final_message = "Done."
    assert environment.get_reward() == 0.0
