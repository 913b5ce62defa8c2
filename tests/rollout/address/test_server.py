"""The address of an episode: any client's requests are sampled once, and trained as they were."""

import asyncio
import json
import os
import socket
import sys
import time
from contextlib import suppress

import aiohttp
import httpx
import pytest

from pipeline.rollout.address import server
from pipeline.rollout.own_loop import is_refusal
from pipeline.rollout.trajectory import StopReason
from tests.rollout.test_agents import Shop, act
from tests.rollout.test_agents import play as play_in
from tests.rollout.test_own_loop import LOOK, Held, Sampler, ids_of, play, sampled, user
from tests.support.helpers import call, chat, say
from tests.support.messages import says


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    for name in ("SIGN_S", "LATE_S"):
        monkeypatch.setattr(server, name, 0.05)
    monkeypatch.setattr(server, "FIRST_SIGN_S", 60)  # a slow machine changes no status


@pytest.fixture
def early_signs(monkeypatch):
    monkeypatch.setattr(server, "FIRST_SIGN_S", 0.05)


async def post(policy, path="/chat/completions", given=None, timeout=30, headers=None, **body):
    headers = {"Authorization": f"Bearer {policy.api_key}", **(headers or {})}
    async with httpx.AsyncClient(timeout=timeout) as client:
        return await client.post(
            policy.base_url + path, content=json.dumps(given or body), headers=headers
        )


async def message(policy, messages, **body):
    reply = await post(policy, messages=messages, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


def with_ids(message, number):
    """A message as some client writes it: its own ids, arguments in another order and form."""
    calls = [
        {
            **call,
            "id": f"mine-{number}-{place}",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(
                    dict(reversed(json.loads(call["function"]["arguments"]).items())), indent=2
                ),
            },
        }
        for place, call in enumerate(message.get("tool_calls", ()))
    ]
    content = message["content"] and [{"type": "text", "text": message["content"]}]
    further = {"refusal": None, "audio": None, "annotations": [], "reasoning_content": "hm"}
    return {**message, **further, "content": content, "tool_calls": calls or None, "name": "me"}


# What is sampled is what policy.message would sample


def test_an_agent_at_the_address_has_the_same_episode_as_one_in_the_process():
    script = [call("look", item="lamp", colour="red"), say("blue"), say("bye")]

    async def served(policy, task):
        messages = [{"role": "developer", "content": "desk"}, user("colour?")]
        for turn in range(3):
            said = await message(policy, messages, tools=[LOOK], tool_choice="auto")
            messages.append(with_ids(said, turn))
            for one in messages[-1]["tool_calls"] or ():
                result = {"role": "tool", "tool_call_id": one["id"], "content": "blue"}
                messages.append(result)
            if not messages[-1].get("tool_call_id"):
                messages.append(user("sure?"))
        return 1.0

    async def direct(policy, task):
        messages = [{"role": "system", "content": "desk"}, user("colour?")]
        for _ in range(3):
            messages.append(await policy.message(messages, [LOOK]))
            for one in messages[-1].get("tool_calls", ()):
                name = one["function"]["name"]
                messages.append({"role": "tool", "name": name, "content": "blue"})
            if messages[-1]["role"] != "tool":
                messages.append(user("sure?"))
        return 1.0

    first, second = (play(loop, [*script])[0] for loop in (served, direct))
    assert (first.error, first.further, first.num_turns) == ("", [], 3)
    assert first.ids == second.ids and first.loss_mask == second.loss_mask
    assert first.record() == second.record()


def test_results_of_calls_stand_in_the_order_of_the_calls():
    both = call("look", item="lamp")
    both["tool_calls"] += call("look", item="desk")["tool_calls"]

    async def loop(policy, task):
        said = await message(policy, [user("look")], tools=[LOOK])
        results = [
            {"role": "tool", "tool_call_id": one["id"], "content": f"result {number}"}
            for number, one in enumerate(said["tool_calls"])
        ]
        await message(policy, [user("look"), said, *reversed(results)], tools=[LOOK])
        return 1.0

    (episode,) = play(loop, [both, say("seen")])
    assert (episode.error, episode.further) == ("", [])
    shown = [m for m in episode.messages if m["role"] == "tool"]
    assert [m["content"] for m in shown] == ["result 0", "result 1"]
    assert [m["name"] for m in shown] == ["look", "look"]


def test_ids_of_calls_depend_on_the_request_alone():
    async def loop(policy, task):
        first, second = [await message(policy, [user("look")], tools=[LOOK]) for _ in range(2)]
        return float(first["tool_calls"][0]["id"] == second["tool_calls"][0]["id"] != "")

    (episode,) = play(loop, [call("look", item="lamp")], [call("look", item="lamp")])
    assert (episode.reward, episode.error) == (1.0, "")


def test_ids_of_calls_are_new_where_an_agent_shows_the_latest_messages_alone():
    async def loop(policy, task):
        talk = [user("look")]
        ids = []
        for _ in range(3):
            talk.append(await message(policy, talk, tools=[LOOK]))
            ids.append(talk[-1]["tool_calls"][0]["id"])
            result = {"role": "tool", "tool_call_id": ids[-1], "content": "blue"}
            talk = [user("look"), talk[-1], result]
        return float(ids[0] != ids[1] != ids[2])

    (episode,) = play(loop, [call("look", item="lamp")] * 2, [call("look", item="desk")])
    assert (episode.reward, episode.error) == (1.0, "")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda talk: [{"role": "system", "content": "now"}, *talk], "system"),
        (lambda talk: [talk[0], say("my words"), *talk[2:]], "history"),
        (lambda talk: [user("summary")], "new"),
        (lambda talk: talk, "tools"),
        (lambda talk: talk, ""),
    ],
)
def test_a_history_that_an_agent_rewrites_begins_a_sequence_whose_cause_is_counted(change, cause):
    async def loop(policy, task):
        talk = [user("colour?")]
        talk += [await message(policy, talk), user("sure?")]
        await message(policy, change(talk), tools=[LOOK] if cause == "tools" else [])
        return 1.0

    scripts = [[say("red")], [say("blue")]] if cause else [[say("red"), say("blue")]]
    (episode,) = play(loop, *scripts)
    assert episode.error == ""
    assert episode.record().new_sequences == ({cause: 1} if cause else {})
    assert episode.num_turns == 2 and len(episode.sequences) == 1 + bool(cause)


def test_a_message_after_one_that_was_cut_or_stopped_begins_a_sequence():
    async def loop(policy, task):
        talk = [user("write")]
        reply = (await post(policy, messages=talk, max_tokens=2)).json()["choices"][0]
        assert reply["finish_reason"] == "length"
        await message(policy, [*talk, reply["message"], user("on")])
        talk = [user("think")]
        reply = (await post(policy, messages=talk, stop=["END"])).json()["choices"][0]
        assert (reply["finish_reason"], reply["message"]["content"]) == ("stop", "one ")
        await message(policy, [*talk, reply["message"], user("on")])
        return 1.0

    words = [[say("a b c d")], [say("more")], [say("one END two")], [say("more")]]
    (episode,) = play(loop, *words)
    assert episode.error == ""
    assert episode.record().new_sequences == {"cut": 1, "new": 1, "stop": 1}
    first, _, third, _ = episode.sequences
    assert sampled(first) == ids_of(say("a b c d"))[:2]
    whole = ids_of(say("one END two"))
    ids = sampled(third)
    assert ids == whole[: len(ids)] and len(ids) < len(whole)  # what follows is not trained


def test_answers_have_what_a_request_asks_for():
    async def loop(policy, task):
        body = {"messages": [user("hi")], "n": 2, "logprobs": True, "return_token_ids": True}
        reply = (await post(policy, **body)).json()
        ids = ids_of(say("yes it is"))
        assert [c["token_ids"] for c in reply["choices"]] == [ids] * 2
        content = reply["choices"][0]["logprobs"]["content"]
        assert "".join(t["token"] for t in content).startswith("yes it is")
        assert len(content) == len(ids)
        num_prompt = len(reply["prompt_token_ids"])
        assert reply["usage"]["prompt_tokens"] == num_prompt
        assert reply["usage"]["completion_tokens"] == 2 * len(ids)
        counted = await post(policy, "/messages/count_tokens", messages=[user("hi")])
        assert counted.json() == {"input_tokens": num_prompt}
        async with httpx.AsyncClient() as client:
            models = (await client.get(policy.base_url + "/models")).json()["data"]
        assert [model["id"] for model in models] == ["policy"]
        return 1.0

    (episode,) = play(loop, [say("yes it is")], [say("yes it is")])
    assert (episode.reward, episode.error, episode.num_turns) == (1.0, "", 2)


# Faults of clients


def play_held(loop, *scripts, held=1, **settings):
    sampler = Held(scripts, held)

    async def with_event(policy, task):
        try:
            return await loop(policy, sampler.goes_on.set)
        finally:
            sampler.goes_on.set()

    (episode,) = play(with_event, sampler=sampler, **settings)
    return episode


@pytest.mark.parametrize("header", [{}, {"x-stainless-retry-count": "1"}])
def test_a_client_that_tries_again_gets_what_was_sampled_for_it(header):
    async def loop(policy, goes_on):
        body = {"messages": [user("colour?")]}
        with pytest.raises(httpx.ReadTimeout):
            await post(policy, timeout=httpx.Timeout(10, read=0.02), **body)
        reply = asyncio.ensure_future(post(policy, headers=header, **body))
        await asyncio.sleep(0.1)
        goes_on()
        said = (await reply).json()["choices"][0]["message"]
        await message(policy, [*body["messages"], said, user("sure?")])
        return 1.0

    episode = play_held(loop, [say("red"), say("yes")])
    assert (episode.error, episode.further, episode.num_turns) == ("", [], 2)
    assert sampled(episode) == ids_of(say("red"), say("yes"))


def test_a_message_that_a_client_gives_up_is_not_trained_and_its_conversation_goes_on():
    async def loop(policy, goes_on):
        talk = [user("colour?")]
        talk.append(await message(policy, talk))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post(policy, messages=[*talk, user("never mind")]), 0.2)
        goes_on()
        await message(policy, [*talk, user("sure?")])
        return 1.0

    episode = play_held(loop, [say("red"), say("yes"), say("yes")], held=2)
    assert (episode.error, episode.num_turns) == ("", 2)
    assert [ids for one in episode.sequences if (ids := sampled(one))] == [
        ids_of(say("red"), say("yes"))
    ]


class Late(Sampler):
    """Samples the second message only when a conversation with `sure?` is opened."""

    num_sampled, is_asked = 0, False

    def open(self, prompts, keys, num_drawn=()):
        self.is_asked |= any("sure?" in chat().tokenizer.decode(ids) for ids in prompts)
        return super().open(prompts, keys, num_drawn)

    def sample(self, handles, *given):
        self.num_sampled += 1
        if self.num_sampled == 1 or self.is_asked:
            return super().sample(handles, *given)
        time.sleep(0.01)
        return [None] * len(handles)


def test_a_message_that_is_given_up_before_it_is_sampled_makes_room_for_another_one():
    async def loop(policy, task):
        talk = [user("colour?")]
        talk.append(await message(policy, talk))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post(policy, messages=[*talk, user("never mind")]), 0.2)
        await message(policy, [*talk, user("sure?")])
        await asyncio.sleep(0.2)  # nobody asks again for what was given up
        await message(policy, [user("other")])
        return 1.0

    sampler = Late([[say("red"), say("yes")], [say("other")]])
    (episode,) = play(loop, sampler=sampler)
    assert (episode.error, episode.num_turns) == ("", 3)
    assert [ids for one in episode.sequences if (ids := sampled(one))] == [
        ids_of(say("red"), say("yes")),
        ids_of(say("other")),
    ]
    assert episode.new_sequences == {"new": 1}


def test_what_nobody_has_fetched_when_the_episode_ends_is_not_trained():
    async def loop(policy, goes_on):
        with suppress(httpx.ReadTimeout):
            await post(policy, timeout=httpx.Timeout(10, read=0.02), messages=[user("colour?")])
        goes_on()
        await asyncio.sleep(0.2)
        return 1.0

    episode = play_held(loop, [say("red")])
    assert (episode.error, episode.num_turns, sampled(episode)) == ("", 0, [])


@pytest.mark.usefixtures("early_signs")
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_takes_long_gives_signs_of_life(stream):
    async def loop(policy, goes_on):
        asyncio.get_running_loop().call_later(0.5, goes_on)
        reply = await post(policy, timeout=0.3, messages=[user("colour?")], stream=stream)
        return float("red" in reply.text and reply.status_code == 200)

    episode = play_held(loop, [say("red")])
    assert (episode.error, episode.reward) == ("", 1.0)


def test_an_agent_that_asks_for_ever_ends_with_reward_0_and_no_error():
    async def raises(policy, task):
        while True:
            (await post(policy, messages=[user("more")])).raise_for_status()

    async def catches(policy, task):
        reply = None
        for _ in range(6):
            reply = await post(policy, messages=[user("more")])
        error = reply.json()["error"]
        assert reply.headers["x-should-retry"] == "false"
        return float((reply.status_code, error["code"]) == (400, "episode_over"))

    for loop, reward in ((raises, 0.0), (catches, 1.0)):
        (episode,) = play(loop, *[[say("x")]] * 4)
        assert (episode.error, episode.num_turns, episode.reward) == ("", 4, reward)
        assert episode.stop_reason is StopReason.MAX_TURNS


def test_a_message_too_many_is_refused_while_others_are_sampled():
    async def loop(policy, goes_on):
        await message(policy, [user("one")])
        second = asyncio.ensure_future(message(policy, [user("two")]))
        await asyncio.sleep(0.3)
        reply = await post(policy, messages=[user("three")])
        goes_on()
        await second
        return float(reply.status_code == 400)

    episode = play_held(loop, [say("a")], [say("b")], held=2, max_turns=2)
    assert (episode.error, episode.reward, episode.num_turns) == ("", 1.0, 2)


def test_a_refusal_in_a_stream_is_known_by_its_message():
    async def loop(policy, task):
        for talk in ([user("x " * 900)], [user("hi")], [user("more")]):
            reply = await post(policy, messages=talk, stream=True)
            error = reply.json()["error"] if reply.status_code == 400 else {"message": ""}
            # OpenAI's client shows the message alone if a stream has the error.
            assert is_refusal(RuntimeError(error["message"])) == (reply.status_code == 400)
        return float(reply.status_code == 400)

    (episode,) = play(loop, [say("hi")], max_turns=2)
    assert (episode.error, episode.reward) == ("", 1.0)


def test_an_equal_request_that_wants_more_of_its_answer_is_another_one():
    async def loop(policy, goes_on):
        body = {"messages": [user("colour?")]}
        with pytest.raises(httpx.ReadTimeout):
            await post(policy, timeout=httpx.Timeout(10, read=0.02), **body)
        goes_on()
        await asyncio.sleep(0.2)
        reply = await post(policy, logprobs=True, stream=True, stream_options=7, **body)
        return float(reply.status_code == 200 and "blue" in reply.text)

    episode = play_held(loop, [say("red"), say("blue")])
    assert (episode.error, episode.reward, episode.num_turns) == ("", 1.0, 1)


def test_a_conversation_without_room_is_refused_and_may_be_told_shorter():
    async def loop(policy, task):
        reply = await post(policy, messages=[user("x " * 900)])
        assert (reply.status_code, reply.json()["error"]["code"]) == (
            400,
            "context_length_exceeded",
        )
        await message(policy, [user("x")])
        return 1.0

    (episode,) = play(loop, [say("yes")])
    assert (episode.error, episode.reward, episode.num_turns) == ("", 1.0, 1)


def test_a_bug_of_the_agent_after_a_refusal_is_told():
    async def loop(policy, task):
        await post(policy, messages=[user("x " * 900)])
        raise KeyError("stock")

    (episode,) = play(loop, [say("yes")])
    assert "KeyError: 'stock'" in episode.error


BAD = [
    ({}, "messages"),
    ({"messages": []}, "non-empty"),
    ({"messages": [{"role": "user"}, say("begun")]}, "assistant"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "king"),
    ({"messages": [user([{"type": "image_url", "image_url": {}}])]}, "image_url"),
    ({"messages": [user("hi")], "max_tokens": "ten"}, "ten"),
    ({"messages": [user("hi")], "n": 0.5}, "0.5"),
    ({"messages": [user("hi")], "stop": [1]}, "stop"),
    ({"messages": [user("hi")], "tools": [{"type": "web_search"}]}, "function"),
    ({"messages": [user("hi")], "tools": [{"type": "function"}]}, "name"),
    ({"messages": [user("hi")], "functions": [1]}, "tools"),
    ({"messages": [user({"text": "hi"})]}, "type"),
    ({"messages": [user("\ud800")]}, "surrogate"),
]


def test_what_cannot_be_served_is_refused_in_one_line():
    async def loop(policy, task):
        for body, word in BAD:
            reply = await post(policy, **body)
            why = reply.json()["error"]["message"]
            assert (reply.status_code, "\n" in why) == (400, False), body
            assert word in why, why
            assert reply.headers["x-should-retry"] == "false"
        counted = await post(policy, "/messages/count_tokens", messages=[{"content": "hi"}])
        assert (counted.status_code, "role" in counted.text) == (400, True)
        async with httpx.AsyncClient() as client:
            for path in ("/reply", "/tools/look", "/messages"):
                for bad in ({}, {"Content-Encoding": "gzip"}):
                    url = policy.base_url + path
                    reply = await client.post(url, content=b"\xff", headers=bad)
                    assert (reply.status_code, reply.headers["x-should-retry"]) == (400, "false")
                    assert reply.json()["error"]["message"]
            broken = await client.post(policy.base_url + "/chat/completions", content=b"{")
            nowhere = await client.post(policy.base_url + "/embeddings", json={})
            large = b" " * (server.MAX_BODY + 1)
            too_large = await client.post(policy.base_url + "/messages", content=large)
        assert [r.status_code for r in (broken, nowhere, too_large)] == [400, 404, 413]
        assert too_large.json()["error"]["type"] == "request_too_large"
        return 1.0

    (episode,) = play(loop)
    assert (episode.error, episode.reward, episode.num_turns) == ("", 1.0, 0)


def test_only_the_key_of_an_episode_opens_its_address():
    seen = []

    async def loop(policy, task):
        seen.append(policy)
        async with httpx.AsyncClient() as client:
            root = policy.base_url.rpartition("/sk-")[0]
            body = {"messages": [user("hi")]}
            wrong = await client.post(f"{root}/sk-other/v1/chat/completions", json=body)
            bare = await client.post(f"{root}/v1/chat/completions", json=body)
            keyed = await client.post(
                f"{root}/v1/chat/completions", json=body, headers={"x-api-key": policy.api_key}
            )
        assert [r.status_code for r in (wrong, bare, keyed)] == [401, 401, 200]
        return 1.0

    (episode,) = play(loop, [say("hi")])
    assert (episode.error, episode.reward) == ("", 1.0)
    late = asyncio.run(post(seen[0], messages=[user("hi")]))
    assert (late.status_code, late.json()["error"]["code"]) == (410, "episode_over")
    port = int(seen[0].base_url.split(":")[2].split("/")[0])
    others = {i[4][0] for i in socket.getaddrinfo(socket.gethostname(), port)} - {"127.0.0.1"}
    for host in others:  # loopback alone
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
            assert other.connect_ex((host, port)) != 0


def test_what_would_train_another_distribution_is_left_out_with_one_warning(capsys, monkeypatch):
    monkeypatch.setattr(server, "_server", server.cache(server.Server))

    async def loop(policy, task):
        for _ in range(2):
            body = {"temperature": 0.2, "tool_choice": "required", "parallel_tool_calls": False}
            await message(policy, [user("hi")], tools=[LOOK], **body)
        return 1.0

    play(loop, [say("hi")], [say("hi")])
    lines = [line for line in capsys.readouterr().err.splitlines() if "agents ask" in line]
    assert len(lines) == 1
    assert "temperature 0.2" in lines[0] and "tool_choice" in lines[0]


def test_a_proxy_is_not_asked_for_the_address(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setattr(server, "_server", server.cache(server._server.__wrapped__))

    async def loop(policy, task):
        await message(policy, [user("hi")])
        return 1.0

    (episode,) = play(loop, [say("hi")])
    assert (episode.error, episode.reward) == ("", 1.0)
    assert os.environ["NO_PROXY"] == "example.org,127.0.0.1,localhost"


def test_a_thousand_requests_at_once_end_the_episode_and_nothing_hangs():
    async def loop(policy, task):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            body = {"messages": [user("more")]}
            url = policy.base_url + "/chat/completions"
            replies = await asyncio.gather(*(client.post(url, json=body) for _ in range(1000)))
        return float(sum(reply.status == 200 for reply in replies) == 4)

    begun = time.monotonic()
    (episode,) = play(loop, *[[say("x")]] * 4)
    assert (episode.error, episode.reward, episode.num_turns) == ("", 1.0, 4)
    assert time.monotonic() - begun < 300


def test_episodes_at_once_have_each_its_own_address():
    async def loop(policy, task):
        said = await message(policy, [user("hi")])
        return float(said["content"] == "x")

    episodes = play(loop, sampler=Sampler([[say("x")]] * 24), trials=24)
    assert [episode.reward for episode in episodes] == [1.0] * 24


def test_a_program_calls_tools_and_asks_the_customer_over_http():
    async def loop(policy, task):
        talk = list(task.prompt)
        while True:
            talk.append(await message(policy, talk, tools=policy.tools))
            for one in talk[-1].get("tool_calls", ()):
                function = one["function"]
                path = f"/tools/{function['name']}"
                result = await post(policy, path, **json.loads(function["arguments"]))
                content = result.json()["content"]
                talk.append({"role": "tool", "tool_call_id": one["id"], "content": content})
            if talk[-1]["role"] == "assistant":
                answer = (await post(policy, "/reply", content=talk[-1]["content"])).json()
                if answer["content"] is None:
                    bad = await post(policy, "/tools/look", 7)
                    assert bad.status_code == 400 and "by name" in bad.text
                    return talk[-1]["content"]
                talk.append(user(answer["content"]))

    said = [say("which one?"), call("look", item="lamp"), say("done")]
    served, direct = (play_in(shape, Shop, *said) for shape in (loop, act))
    assert (served.error, served.reward) == ("", 0.5)
    assert served.ids == direct.ids and served.messages == direct.messages
    assert served.record() == direct.record()


def test_a_client_that_goes_while_it_sends_its_request_is_no_fault_of_the_server(caplog):
    async def loop(policy, task):
        host, port = policy.base_url.split("/")[2].split(":")
        path = policy.base_url.partition(port)[2] + "/chat/completions"
        with socket.create_connection((host, int(port))) as half:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n"
            half.sendall(f"{head}{{".encode())
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.2)
        return float((await message(policy, [user("colour?")]))["content"] == "blue")

    (episode,) = play(loop, [say("blue")])
    assert (episode.reward, episode.num_turns, episode.error) == (1.0, 1, "")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_refusal_that_comes_after_signs_of_life_is_no_lost_connection():
    async def loop(policy, task):
        assert (await post(policy, messages=[user("x " * 900)])).status_code == 400
        raise httpx.RemoteProtocolError("the connection ends")  # as the server does it then

    (episode,) = play(loop)
    assert (episode.error, episode.left_out, episode.reward) == ("", "", 0.0)
    assert episode.stop_reason is StopReason.MAX_TOKENS


def test_a_machine_without_aiohttp_is_told_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.endswith("address.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)

    async def loop(policy, task):
        return policy.base_url

    (episode,) = play(loop)
    says(episode.error, "policy.base_url", "aiohttp", "three-domain-grpo[agents]", "line ")


def test_no_key_stands_in_the_error_of_an_episode():
    async def loop(policy, task):
        raise ValueError(f"{policy.base_url} does not know {policy.api_key}")

    (episode,) = play(loop)
    says(episode.error, "ValueError: http://127.0.0.1:", "/***/v1 does not know ***")
    assert "sk-" not in episode.error
