"""The client of an endpoint, against a real server that fails in every way."""

import asyncio
import json
from threading import Event
from types import SimpleNamespace

import pytest

from pipeline.common.errors import UserError
from pipeline.common.untrusted import shown
from pipeline.environments.faults import Outage, seconds_of
from pipeline.environments.language_models import endpoint as module
from pipeline.environments.language_models.endpoint import Endpoint, Refused
from tests.support.endpoint import CERTIFICATE, USELESS, SafeServer, calling, serving

ASKED = [{"role": "user", "content": "Hello."}]
BROKEN = calling("look")
BROKEN["tool_calls"][0]["function"]["arguments"] = "[1"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture
def server():
    with serving() as started:
        yield started


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The pauses between attempts. They take no time here, and the clock shows their sum."""
    found, sleep = [], asyncio.sleep

    async def pause(seconds):
        found.append(seconds)
        await sleep(0)

    clock = SimpleNamespace(sleep=pause, timeout=asyncio.timeout, monotonic=lambda: sum(found))
    clock.get_running_loop = asyncio.get_running_loop
    monkeypatch.setattr(module, "asyncio", clock)
    monkeypatch.setattr(module, "time", clock)
    return found


class Client:
    def __init__(self, url, patience_s=60.0, key="", temperature=0.7):
        self.lines, self.paid = [], []
        self.endpoint = Endpoint(url, "m", temperature, key, patience_s, say=self.lines.append)

    async def ask(self, tools=()):
        return await self.endpoint.answer(ASKED, tools, 5, lambda *paid: self.paid.append(paid))

    def __call__(self, *tools):
        return asyncio.run(self.ask(tools))


def test_model_temperature_seed_tools_and_key_arrive(server):
    client = Client(server.url + "/", key="secret")
    assert client(*TOOLS) == {"role": "assistant", "content": "Yes."}
    assert server.bodies == [
        {"model": "m", "temperature": 0.7, "seed": 5, "messages": ASKED}
        | {"tools": TOOLS, "stream": False}
    ]
    assert (server.paths, server.keys) == ({"/v1/chat/completions"}, {"Bearer secret"})
    assert client.paid == [({"role": "assistant", "content": "Yes."}, 10)]
    Client(server.url)()
    assert "tools" not in server.bodies[1] and "" in server.keys


@pytest.mark.parametrize("fault", [429, 500, 503, 408, "drop", "gzip"])
def test_an_attempt_that_fails_is_repeated_and_not_paid(server, fault, pauses):
    server.faults = [fault] * 4
    client = Client(server.url)
    assert client()["content"] == "Yes."
    assert (len(server.bodies), len(client.paid)) == (5, 1)
    assert all(0.25 * 2**n <= pause <= 0.5 * 2**n for n, pause in enumerate(pauses))


def test_a_pause_is_as_long_as_the_endpoint_asks_for(server, pauses):
    server.faults = [(429, "7"), (503, "11.5")]
    Client(server.url)()
    assert pauses == [7, 11.5]


@pytest.mark.parametrize("retry_after", ["3600", "Wed, 21 Oct 2115 07:28:00 GMT"])
def test_an_endpoint_that_asks_for_a_long_wait_is_not_asked_before(server, pauses, retry_after):
    server.faults = [(429, retry_after)]
    client = Client(server.url)
    for calls in (1, 2):  # each waits as long as a call may last
        with pytest.raises(
            Outage, match=r"is away for 60 s \(status 429, which asks to wait \d+ s\)"
        ):
            client()
        assert sum(pauses) == 60 * calls
    assert len(server.bodies) == 1
    (line,) = client.lines
    assert line.startswith(
        f"customer: {server.url} does not answer (status 429, which asks to wait"
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("3", 3), ("-1", 0), ("", 0), ("soon", 0), ("nan", 0), ("inf", 0), ("1e300", 1e9)),
        ("Wed, 21 Oct 99999999999999999999 07:28:00 GMT", 0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Wed, 21 Oct 2015 07:28:00", 0),  # without a zone
    ],
)
def test_retry_after_is_read(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_certificate_that_is_not_trusted_is_no_outage(has_answered, pauses, monkeypatch):
    with serving(kind=SafeServer) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        assert Client(server.url)()["content"] == "Yes."
        monkeypatch.delenv("SSL_CERT_FILE")
        client = Client(server.url)
        client.endpoint.has_answered = has_answered
        with pytest.raises(Refused, match=r"self-signed certificate.* SSL_CERT_FILE") as caught:
            client()
    assert caught.value.for_all and pauses == []


@pytest.mark.parametrize("key", ["schlüssel-17", "key-of\x00a-user", "key-of\na-user"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_printed(key):
    with pytest.raises(UserError, match=r"^customer_key: ") as caught:
        Client("http://x", key=key)
    assert key not in str(caught.value)


def test_one_line_tells_that_the_endpoint_is_away_and_one_that_it_is_back(server):
    server.faults = [429] * 9 + [500] * 9
    client = Client(server.url, patience_s=600)  # one of the calls may meet most of the faults

    async def ask_often():
        return await asyncio.gather(*(client.ask() for _ in range(5)))

    assert len(asyncio.run(ask_often())) == 5
    assert client.lines == [
        f"customer: {server.url} does not answer (status 429); calls wait for it",
        f"customer: {server.url} answers again",
    ]


def test_an_endpoint_that_comes_back_goes_on(pauses):
    with serving() as server:
        port, client = server.server_port, Client(server.url)
        client()
    with pytest.raises(Outage, match=r"is away for \d\d s \(ConnectError: "):
        Client(server.url)()
    assert 30 < sum(pauses) <= 60
    with serving(port=port):
        assert client()["content"] == "Yes."


def test_a_slow_answer_ends_at_a_deadline(server):
    server.faults = [Event(), Event()]
    late = list(server.faults)
    with pytest.raises(Outage, match=r"no answer within 0\.2 s"):
        Client(server.url, patience_s=0.4)()
    for event in late:
        event.set()


@pytest.mark.parametrize(
    "text",
    [
        *("", "<html>", json.dumps(USELESS), '{"choices": [{}]}', "[1]"),
        json.dumps({"choices": [{"message": BROKEN}]}),
    ],
)
def test_a_useless_answer_is_paid_and_asked_for_at_most_three_times(server, text):
    server.faults = [text] * 3
    client = Client(server.url)
    with pytest.raises(Outage, match="gave 3 answers without a message"):
        client()
    assert client.paid == [(None, 0)] * 3
    assert client()["content"] == "Yes."


@pytest.mark.parametrize(
    ("status", "first", "for_all"),
    [(401, False, True), (404, False, True), (400, True, True), (400, False, False)],
)
def test_a_refusal_is_not_repeated(server, status, first, for_all):
    client = Client(server.url)
    if not first:
        client()
    server.faults = [status]
    with pytest.raises(Refused, match=f"status {status}: ") as caught:
        client()
    assert caught.value.for_all == for_all
    assert len(server.bodies) == 1 + (not first)


def test_a_key_that_a_reply_repeats_is_neither_stored_nor_printed(server):
    key = "k3y-of-a-user-17"
    server.answer = lambda body: {"content": f"Your key is {key}."}
    client = Client(server.url, key=key)
    assert client()["content"] == "Your key is ***."
    assert key not in str(client.paid)
    assert shown(f"bad key {key} in the request") == shown("bad key *** in the request")


def test_a_key_that_a_reply_writes_in_another_way_is_masked(server):
    """JSON can write a character as its number."""
    key = "Ab3/dEf+9Kq/Zz81==xyQ"
    client = Client(server.url, key=key)
    for written in (key.replace("/", "\\/"), "\\u0041" + key[1:]):
        server.faults = ['{"choices": [{"message": {"content": "the key: ' + written + '"}}]}']
        assert client()["content"] == "the key: ***"
        assert key not in str(client.paid)
    server.faults = [(401, "y")]
    server.refusal = json.dumps("y" * 290 + key)  # which is cut off within the key
    with pytest.raises(Refused) as caught:
        client()
    assert "yyy" in str(caught.value) and key[:8] not in str(caught.value)


def test_a_reply_without_an_end_is_no_message(server, monkeypatch):
    monkeypatch.setattr(module, "MAX_REPLY", 10_000)
    server.answer = lambda body: {"content": "x" * 20_000}
    client = Client(server.url)
    with pytest.raises(Outage, match="gave 3 answers without a message"):
        client()
    server.answer = lambda body: {"content": "x" * 5_000}
    assert len(client()["content"]) == 5_000


def reply(content, finish_reason="stop", **fields):
    choice = {"message": {"content": content, **fields}, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice], "usage": {"total_tokens": 10}})


@pytest.mark.parametrize(
    "content",
    [
        "<think>At first 3 of 10.</think>8",
        "At first 3 of 10.</think>\n\n8",  # the template has opened the thought
        "<thinking>3</thinking> 8",
        "<reasoning>3</reasoning>8 <think>or 4",
        "[THINK]3[/THINK]8",
        "<Think>3</Think>8",
        "<|begin_of_thought|>3<|end_of_thought|>8",
        "<|channel|>analysis<|message|>3<|end|><|start|>assistant<|channel|>final<|message|>8",
        [{"type": "thinking", "thinking": [{"text": "3"}]}, {"type": "text", "text": "8"}],
    ],
)
def test_the_thoughts_of_a_model_are_no_part_of_its_message(server, content):
    server.faults = [reply(content)]
    client = Client(server.url)
    assert client()["content"] == "8"
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (reply("Score: 1", "length"), "cut off at the limit of tokens"),
        (reply(None, "length", reasoning_content="hm"), "cut off at the limit of tokens"),
        (reply("Score: 1", "model_length"), "cut off at the limit of tokens"),
        (reply("", "content_filter"), "content filter"),
        (reply("<think>3 of 10"), "thoughts and no message"),
        (reply(None, reasoning="3 of 10"), "thoughts and no message"),
    ],
)
def test_an_answer_that_is_none_is_paid_once_and_says_why(server, text, why):
    server.faults = [text]
    client = Client(server.url)
    with pytest.raises(Refused, match=why) as caught:
        client()
    assert (caught.value.for_all, client.paid, len(server.bodies)) == (False, [(None, 10)], 1)


@pytest.mark.parametrize("why", ["error", "abort", "insufficient_system_resource"])
def test_an_answer_that_the_service_broke_off_is_asked_again(server, why):
    server.faults = [reply("Score: 1", why)]
    client = Client(server.url)
    assert client()["content"] == "Yes."
    assert client.paid[0] == (None, 10)


@pytest.mark.parametrize(
    ("refusal", "field", "instead"),
    [
        ('{"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs"}]}', "seed", ""),
        ("Use 'max_completion_tokens' instead.", "max_tokens", "max_completion_tokens"),
    ],
)
def test_a_field_that_an_endpoint_refuses_is_left_out_from_then_on(server, refusal, field, instead):
    server.refusal, server.faults = refusal, [422]
    client = Client(server.url)
    for _ in range(2):
        asked = client.endpoint.answer(ASKED, (), 5, lambda *_: None, max_tokens=8)
        assert asyncio.run(asked)["content"] == "Yes."
    refused, *others = server.bodies
    assert field in refused and len(others) == 2
    for body in others:
        assert field not in body and (not instead or body[instead] == 8)
    (line,) = client.lines
    assert line.startswith(f"customer: {server.url} refuses {field}, and gets ")
