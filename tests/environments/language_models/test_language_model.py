"""A language model's answers on disk: none is lost or paid twice; and its budget."""

import asyncio
import json
import os
import signal
from types import SimpleNamespace

import pytest

from pipeline.config.settings import CustomerSettings
from pipeline.environments.faults import Outage
from pipeline.environments.language_models.language_model import (
    AnswerCache,
    LanguageModel,
    key_of,
)
from tests.support.endpoint import serving
from tests.support.messages import refusal, says

YES = {"role": "assistant", "content": "Yes."}


def test_a_key_depends_on_every_part():
    parts = ["m", 0.5, 7, [YES], []]
    keys = {key_of(*parts)}
    for place, other in enumerate(["n", 0.6, 8, [YES, YES], [{}]]):
        keys.add(key_of(*parts[:place], other, *parts[place + 1 :]))
    assert len(keys) == 6
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})


def test_a_rank_knows_what_all_ranks_have_paid(tmp_path):
    for rank in range(2):
        AnswerCache(tmp_path, f"rank-{rank}").put(f"key-{rank}", YES, 10)
    AnswerCache(tmp_path, "rank-0").put("", None, 5)
    cache = AnswerCache(tmp_path, "rank-0")
    assert (cache.get("key-0"), cache.get("key-1"), cache.get("key-2")) == (YES, YES, None)
    assert (cache.num_calls, cache.num_tokens) == (3, 25)


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_torn_last_line_is_dropped(tmp_path, cut):
    first = AnswerCache(tmp_path, "rank-0")
    for name in ("a", "b"):
        first.put(name, YES, 10)
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    cache = AnswerCache(tmp_path, "rank-0")
    assert (cache.get("a"), cache.get("b"), cache.num_calls) == (YES, None, 1)
    cache.put("b", YES, 10)
    assert AnswerCache(tmp_path, "rank-1").num_calls == 2


@pytest.mark.parametrize("line", ["{}", "x", "[1]", '{"key": "a"}', ""])
def test_a_line_that_is_no_answer_is_refused_by_its_number(tmp_path, line):
    AnswerCache(tmp_path, "rank-0").put("a", YES, 10)
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write(f"{line}\n")
    says(
        refusal(AnswerCache, tmp_path, "rank-1"),
        "rank-0.jsonl, line 2: holds no answer ",
        "; remove",
    )


def customers_of(url, folder, **settings):
    return LanguageModel("customer", CustomerSettings(url=url, model="m", **settings), 120, folder)


async def talk(customers, number, until=None):
    """A conversation of six calls; the process is killed after `until` answers."""
    messages = [{"role": "user", "content": f"Conversation {number}"}]
    for turn in range(6):
        messages.append(await customers.ask(messages, [], number))
        messages.append({"role": "user", "content": f"Go on {turn}"})
        if customers.cache.num_calls == until:
            os.kill(os.getpid(), signal.SIGKILL)
    return messages


async def talk_all(customers, until=None):
    return await asyncio.gather(*(talk(customers, n, until) for n in range(4)))


def test_killed_five_times_nothing_is_paid_twice_and_the_result_is_the_same(tmp_path):
    with serving(lambda body: f"{body['seed']} {len(body['messages'])}") as server:
        undisturbed = asyncio.run(talk_all(customers_of(server.url, tmp_path / "undisturbed")))
        server.paid.clear()
        for until in (1, 5, 9, 14, 20):
            if (child := os.fork()) == 0:
                try:
                    asyncio.run(talk_all(customers_of(server.url, tmp_path / "killed"), until))
                finally:
                    os._exit(1)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert asyncio.run(talk_all(customers_of(server.url, tmp_path / "killed"))) == undisturbed
        again = customers_of(server.url, tmp_path / "killed")
        assert asyncio.run(talk_all(again)) == undisturbed
    known = set(server.paid.elements())
    assert len(known) == 24
    # Answers that were on their way at a kill were not received: at most three others at each.
    assert sum(server.paid.values()) - 24 <= 5 * 3


@pytest.mark.parametrize(("name", "most"), [("max_calls", 8), ("max_tokens", 80)])
def test_a_spent_budget_ends_the_calls_and_more_goes_on(tmp_path, name, most):
    with serving() as server:
        spending = customers_of(server.url, tmp_path, **{name: most})

        async def one_after_the_other(customers):
            return [await talk(customers, number) for number in range(4)]

        line = f"customer_{name}: got {most}, which is spent; go on with"
        with pytest.raises(Outage, match=line):
            asyncio.run(one_after_the_other(spending))
        assert spending.ended.startswith(f"customer_{name}: got {most}, which is spent")
        assert sum(server.paid.values()) == 8
        asyncio.run(one_after_the_other(customers_of(server.url, tmp_path, **{name: 10 * most})))
    assert set(server.paid.values()) == {1} and len(server.paid) == 24


def test_ranks_share_what_is_left(tmp_path):
    AnswerCache(tmp_path / "customers", "rank-0").put("a", YES, 10)
    settings = CustomerSettings(url="http://x", model="m", max_calls=12)
    found = list[int]()
    for rank in range(3):
        ranks = SimpleNamespace(rank=rank, num_ranks=3)
        model = LanguageModel("customer", settings, 120, tmp_path, ranks)
        found.append(model._most_calls)
    assert found == [1 + 4, 1 + 4, 1 + 3]


def cut_off(content):
    choice = {"message": {"content": content}, "finish_reason": "length"}
    return json.dumps({"choices": [choice], "usage": {"total_tokens": 10}})


@pytest.mark.parametrize("text", [cut_off("Score: 1"), cut_off(""), '{"choices": []}'])
def test_what_has_no_answer_is_not_paid_again_when_it_is_asked_again(tmp_path, text):
    with serving() as server:
        customers = customers_of(server.url, tmp_path)
        server.faults = [text] * 9
        for _ in range(3):  # as reward functions are called again after an Outage
            with pytest.raises(Outage, match=r"cut off|without a message"):
                asyncio.run(customers.ask([YES]))
        assert len(server.bodies) == (3 if "[]" in text else 1)
        server.faults = []
        assert asyncio.run(customers.ask([YES], max_tokens=99))["content"] == "Yes."
        assert customers.ended == ""


@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        ("'temperature' does not support 0", "mend the temperature of the call"),
        ("unknown field `top_k`", "mend the top_k of the call"),
        ("no such model", "mend customer_url, customer_model or the key in OPENAI_API_KEY"),
    ],
)
def test_a_refusal_names_what_to_mend(tmp_path, refusal, remedy):
    with serving() as server:
        server.refusal, server.faults = refusal, [400]
        customers = customers_of(server.url, tmp_path)
        with pytest.raises(Outage):
            asyncio.run(customers.ask([YES], top_k=3))
        assert remedy in customers.ended
