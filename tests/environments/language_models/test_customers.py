"""Customers who talk: a language model, with what it sees and may do, and a script."""

import asyncio

import pytest

from pipeline.environments.faults import Outage
from pipeline.environments.language_models.customers import (
    MAX_ERRORS,
    SILENCE,
    LlmCustomer,
    Scenario,
    ScriptedCustomer,
    spoken,
)
from tests.support.endpoint import calling


def customer(*answers, call=None):
    """A customer with these answers of the language model; also what the model was asked."""
    asked, left = [], list(answers)

    async def ask(messages, schemas):
        asked.append([dict(message) for message in messages])
        answer = left.pop(0)
        message = {"content": answer} if isinstance(answer, str) else answer
        return {"role": "assistant", **message, "content": message["content"] or ""}

    scenario = Scenario(system="Play.", greeting="Welcome.", call=call)
    return LlmCustomer(scenario, ask), asked


def talk(made, *messages):
    async def whole():
        return [await made.first_words(), *[await made.reply(message) for message in messages]]

    return asyncio.run(whole())


def test_the_customer_answers_the_greeting_and_then_the_agent():
    made, asked = customer("My lamp is broken.", "No.")
    assert talk(made, "Is it on?") == ["My lamp is broken.", "No."]
    assert asked[1] == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Welcome."},
        {"role": "assistant", "content": "My lamp is broken."},
        {"role": "user", "content": "Is it on?"},
    ]
    assert made.model_messages == [*asked[1], {"role": "assistant", "content": "No."}]


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        ("<think>He lies.</think> Is it on?", "Is it on?"),
        ("He lies.</think>\nIs it on?", "Is it on?"),
        ("Is it on? <think>He lies, so", "Is it on?"),
        ("A<think>b</think>C<think>d</think>", "AC"),
        ("<think>He lies.</think>", ""),
    ],
)
def test_thoughts_are_not_shown(text, heard):
    assert spoken(text) == heard
    made, asked = customer("Hi.", "No.")
    talk(made, text)
    assert "lies" not in str(asked)


def test_thoughts_of_the_customer_are_not_told_to_the_agent():
    made, _ = customer("<think>The lamp.</think>Hello.", "<think>Well</think>")
    with pytest.raises(Outage, match="wrote thoughts and no message"):
        talk(made, "Is it on?")
    assert made.model_messages[2]["content"] == "Hello."


def test_an_empty_message_is_answered_without_a_call():
    made, asked = customer("Hi.")
    assert talk(made, " \n") == ["Hi.", SILENCE]
    assert len(asked) == 1


@pytest.mark.parametrize("stop", ["STOP", "TRANSFER", "OUT-OF-SCOPE"])
def test_a_stop_ends_the_conversation(stop):
    made, _ = customer("Hi.", f"Thanks. ###{stop}###")
    assert talk(made, "Done.") == ["Hi.", None]
    made, _ = customer(f"###{stop}###")
    assert talk(made, "Done.")[1] is None


def test_the_customers_tools_are_called_and_counted_apart():
    calls = []

    def phone(name, arguments):
        calls.append((name, arguments))
        return ("Error: no such app", True) if name == "open" else ("ON", False)

    steps = calling("toggle", 1, on=True), calling("open", 2), "It is on."
    made, asked = customer("Hi.", *steps, call=phone)
    assert talk(made, "Switch it on.") == ["Hi.", "It is on."]
    assert calls == [("toggle", {"on": True}), ("open", {})]
    assert made.tool_counts == {"toggle": [1, 0], "open": [1, 1]}
    results = [message for message in asked[-1] if message["role"] == "tool"]
    assert [result["tool_call_id"] for result in results] == ["call-1", "call-2"]
    assert results[1]["content"] == "Error: no such app"


def test_a_customer_without_tools_gets_an_error():
    made, asked = customer("Hi.", calling("toggle"), "Well.")
    assert talk(made, "Switch it on.")[1] == "Well."
    assert asked[-1][-1]["content"] == "Error: there is no tool toggle"


@pytest.mark.parametrize(("failed", "why"), [(True, "tools failed"), (False, "no other one")])
def test_a_customer_who_never_answers_has_failed(failed, why):
    made, asked = customer("Hi.", *[calling("toggle")] * 40, call=lambda *_: ("", failed))
    with pytest.raises(Outage, match=why):
        talk(made, "Switch it on.")
    assert len(asked) == 1 + (MAX_ERRORS if failed else 30)


# The script

KNOWN = {
    "reason_for_call": "You want to cancel your flight.",
    "known_info": "You are Ada.\nYour user id is ada_1.",
    "unknown_info": None,
    "task_instructions": "You are polite to the agent.",
}


def test_the_script_tells_its_parts_agrees_repeats_and_ends():
    customer = ScriptedCustomer(KNOWN)
    assert customer.first_words == "I want to cancel my flight."
    asked = {
        "What is your user id?": "I am Ada.\nMy user id is ada_1.",
        "Why do you cancel?": "I am polite to the agent.",
        "And your id again?": "I am Ada.\nMy user id is ada_1.",
        "<think>What is the name?</think>Shall I cancel it?": "Yes, please.",
        "It is cancelled. Anything else?": None,
    }
    assert [customer.reply(message) for message in asked] == [*asked.values()]


@pytest.mark.parametrize("message", ["You are being transferred.", "It is done.", "Bye"])
def test_the_script_ends_where_nothing_is_asked(message):
    customer = ScriptedCustomer({"reason_for_call": "You call."})
    assert customer.reply(message) is None
    assert ScriptedCustomer(KNOWN).reply("I am transferring you.") is None


def test_a_script_does_not_talk_for_ever():
    customer = ScriptedCustomer(KNOWN)
    replies = [customer.reply("Really?") for _ in range(30)]
    assert replies.index(None) == 20 and set(replies[20:]) == {None}
