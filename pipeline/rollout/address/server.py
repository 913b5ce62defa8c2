"""The address at which an agent's own client finds the policy: an HTTP server in each rank.

It serves the APIs of OpenAI and Anthropic on the loopback device, in a thread of its own. Each
episode has a secret key in the path of its address; clients may also give it as their API key. A
message whose client is gone is kept for the next equal request, so that a client that tries again
gets what was sampled for it. What nobody has got when the episode ends is not trained.
"""

import asyncio
import json
import os
import resource
import secrets
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from aiohttp import web

from pipeline.common.console import say
from pipeline.common.untrusted import one_line, parse_json, reason_of
from pipeline.rollout.address import chat_completions, messages, responses
from pipeline.rollout.address.dialect import Dialect, Refusal, Request
from pipeline.rollout.asked import Answer, Asked, EpisodeOver
from pipeline.rollout.trajectory import StopReason

HOST = "127.0.0.1"
MAX_BODY = 16 << 20  # bytes of a request
BACKLOG = 2048  # clients of all episodes connect at the same time
FIRST_SIGN_S = 1.0  # in this time, a refusal still has its status
SIGN_S = 2.0  # between signs of life while a message is sampled; some clients wait for 5 s
LATE_S = 1.0  # pause before an agent is refused again, so that an endless one takes little time
MAX_ENDED = 1 << 14  # keys of ended episodes that are told from unknown ones
NO_RETRY = {"x-should-retry": "false"}  # which clients of OpenAI and Anthropic obey
ENDED = "the episode of this key is over"


@dataclass(eq=False)
class Kept:
    """The messages of a request, for whoever fetches them."""

    asked: list[Asked]
    waits: web.Request  # the latest request for them
    is_delivered: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether nobody waits for the messages any more, and nobody has got them."""
        return not self.is_delivered and is_gone(self.waits)

    @property
    def is_taken_back(self) -> bool:
        return any(asked.is_taken_back for asked in self.asked)


@dataclass(eq=False)
class Address:
    """Where the agent of one episode finds the policy."""

    policy: Any  # a LoopPolicy
    server: "Server"
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")
    kept: dict[str, list[Kept]] = field(default_factory=lambda: defaultdict(list))

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.server.port}/{self.key}/v1"

    def ask(self, request: Request, http: web.Request) -> Kept:
        """Ask for the messages of a request, or take those that were made for it before."""
        same = [kept for kept in self.kept[request.key] if not kept.is_taken_back]
        again = http.headers.get("x-stainless-retry-count", "0") != "0"
        for kept in [kept for kept in same if kept.is_lost] or same[-1:] * again:
            kept.waits = http
            return kept
        kept = Kept([], http)
        ask = self.policy.ask
        for _ in range(request.n):
            kept.asked.append(ask(**request.asked(), is_lost=lambda: kept.is_lost))
        self.kept[request.key] = [*same, kept]
        return kept

    def deliver(self, kept: Kept, answers: list[Answer]) -> None:
        """Note, before the last byte is sent, that messages reach their agent, or do not."""
        kept.is_delivered = not is_gone(kept.waits)
        for asked, answer in zip(kept.asked, answers, strict=True):
            if kept.is_delivered:
                self.policy.arrived(asked, answer)
            asked.has_arrived = kept.is_delivered

    def close(self) -> None:
        """End the episode, in any thread."""
        self.server.loop.call_soon_threadsafe(self.server.forget, self.key)


class Server:
    """The HTTP server of this process; a thread serves until the process ends."""

    def __init__(self) -> None:
        self.addresses = dict[str, Address]()
        self._ended = OrderedDict[str, None]()  # keys
        self._has_warned = False
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="address", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result()

    async def _start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY)
        dialects: list[Dialect] = [chat_completions, messages, responses]
        for prefix in ("/{key}/v1", "/{key}", "/v1"):
            for dialect in dialects:
                app.router.add_post(prefix + dialect.PATH, self._refusing(dialect, self._message))
            count = self._refusing(messages, self._count)
            app.router.add_post(f"{prefix}{messages.PATH}/count_tokens", count)
            domain = self._refusing(chat_completions, self._domain)
            app.router.add_post(prefix + "/{what:reply}", domain)
            app.router.add_post(prefix + "/{what:tools}/{name}", domain)
            models = self._refusing(chat_completions, self._models)
            app.router.add_get(prefix + "/models", models)
            app.router.add_get(prefix + "/models/{model:.+}", models)
        app.router.add_route("*", "/{rest:.*}", self._refusing(chat_completions, self._nothing))
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        site = web.TCPSite(runner, HOST, 0, backlog=BACKLOG)
        await site.start()
        self.port: int = runner.addresses[0][1]

    def forget(self, key: str) -> None:
        """End an episode, in the server's thread."""
        del self.addresses[key]
        self._ended[key] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _refusing(
        self, dialect: Dialect, handler: Callable[..., Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler whose refusals have the dialect's form."""

        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                return await handler(http, dialect)
            except Refusal as error:
                refusal = error
            except web.HTTPRequestEntityTooLarge:
                refusal = Refusal(413, f"the body has more than {MAX_BODY >> 20} MiB")
            except Exception as error:  # of a body that is not of the API
                refusal = Refusal(400, f"the body is not of the API: {reason_of(error)}")
            body = dialect.error(refusal.status, one_line(str(refusal)), refusal.code)
            return web.json_response(body, status=refusal.status, headers=NO_RETRY)

        return handle

    async def _address(self, http: web.Request) -> Address:
        bearer = http.headers.get("Authorization", "").removeprefix("Bearer ")
        keys = [http.match_info.get("key", ""), bearer, http.headers.get("x-api-key", "")]
        for key in keys:
            if (address := self.addresses.get(key)) is not None:
                return address
        if any(key in self._ended for key in keys):
            await asyncio.sleep(LATE_S)
            raise Refusal(410, ENDED, "episode_over")
        raise Refusal(401, "no episode has this key; give policy.api_key", "invalid_api_key")

    async def _read(self, http: web.Request, dialect: Dialect) -> Request:
        request = dialect.read(parse_json(await http.text()))
        if request.ignored and not self._has_warned:
            self._has_warned = True
            if os.environ.get("RANK", "0") == "0":
                say(
                    f"warning: agents ask for {one_line(', '.join(request.ignored))}, which is "
                    "left out: what is trained is the policy as it is, at the run's temperature"
                )
        return request

    async def _message(self, http: web.Request, dialect: Dialect) -> web.StreamResponse:
        address = await self._address(http)
        request = await self._read(http, dialect)
        if address.policy.end is not None:  # an agent that asks on
            await asyncio.sleep(LATE_S)
        reply = Reply(http, dialect, request)
        while True:
            try:
                kept = address.ask(request, http)
            except (ValueError, EpisodeOver) as error:
                return await reply.fail(self._refusal(error, address))
            made = asyncio.gather(
                *(asyncio.wrap_future(asked.answer) for asked in kept.asked), return_exceptions=True
            )
            while not (await asyncio.wait({made}, timeout=reply.patience_s))[0]:
                await reply.wait()
            # What a client had given up may have been taken back while another one came for it.
            if not kept.is_taken_back or address.policy.is_over or is_gone(http):
                break
        for result in made.result():
            if isinstance(result, BaseException):
                for asked in kept.asked:  # what they continue may be told otherwise
                    address.policy.give_up(asked)
                return await reply.fail(self._refusal(result, address))
        answers = [result for result in made.result() if isinstance(result, Answer)]
        address.deliver(kept, answers)  # before it is sent: who has it may end the episode
        await reply.send(answers)
        if is_gone(http):
            address.deliver(kept, answers)
        return reply.response

    def _refusal(self, error: BaseException, address: Address) -> Refusal:
        """Return what an agent is told of an error of the policy."""
        if isinstance(error, EpisodeOver):
            address.policy.refused = error.reason
            if error.reason is StopReason.MAX_TOKENS:
                why = "maximum context length: no room for a message (max_tokens of the run)"
                return Refusal(400, why, "context_length_exceeded")
            return Refusal(400, str(error), "episode_over")
        if isinstance(error, asyncio.CancelledError):
            return Refusal(410, ENDED, "episode_over")
        return Refusal(400, one_line(reason_of(error)))

    async def _count(self, http: web.Request, dialect: Dialect) -> web.StreamResponse:
        address = await self._address(http)
        request = await self._read(http, dialect)
        count = await address.policy.num_prompt_tokens(request.messages, request.tools)
        return web.json_response({"input_tokens": count})

    async def _domain(self, http: web.Request, dialect: Dialect) -> web.StreamResponse:
        """Call a tool of the domain, or let its customer answer."""
        address = await self._address(http)
        body = await http.text()
        try:
            if http.match_info["what"] == "reply":
                said = await address.policy.reply(str(parse_json(body)["content"]))
                return web.json_response({"content": said})
            return web.json_response(await address.policy.call(http.match_info["name"], body))
        except (ValueError, EpisodeOver) as error:
            raise self._refusal(error, address) from None

    async def _models(self, http: web.Request, dialect: Dialect) -> web.StreamResponse:
        await self._address(http)
        name = http.match_info.get("model")
        model = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "policy"}
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _nothing(self, http: web.Request, dialect: Dialect) -> web.StreamResponse:
        paths = ", ".join(d.PATH for d in (chat_completions, responses, messages))
        raise Refusal(404, f"{http.method} {http.path}: not here; POST {paths}", "not_found")


class Reply:
    """The reply to a request; while its messages are sampled, it may begin as a sign of life."""

    def __init__(self, http: web.Request, dialect: Dialect, request: Request) -> None:
        self.http = http
        self.dialect = dialect
        self.request = request
        self.is_stream = bool(request.body.get("stream"))
        kind = "text/event-stream" if self.is_stream else "application/json"
        self.response = web.StreamResponse(headers={"Content-Type": kind, **NO_RETRY})

    @property
    def patience_s(self) -> float:
        return SIGN_S if self.response.prepared else FIRST_SIGN_S

    async def wait(self) -> None:
        """Send a sign of life, which clients skip."""
        await self._write(b": wait\n\n" if self.is_stream else b" ")

    async def send(self, answers: list[Answer]) -> None:
        """Send the messages."""
        if self.is_stream:
            parts = (event_of(*event) for event in self.dialect.events(answers, self.request))
        else:
            parts = iter([json.dumps(self.dialect.whole(answers, self.request)).encode()])
        await self._write(b"".join(parts), is_last=True)

    async def fail(self, refusal: Refusal) -> web.StreamResponse:
        """Refuse the request. Raises the refusal if the reply has not begun."""
        if not self.response.prepared:
            raise refusal
        if self.is_stream:
            body = self.dialect.error(refusal.status, str(refusal), refusal.code)
            await self._write(event_of("error", body), is_last=True)
        elif self.http.transport is not None:  # the status is sent; who tries again gets the error
            self.http.transport.abort()
        return self.response

    async def _write(self, part: bytes, is_last: bool = False) -> None:
        with suppress(ConnectionError):  # the client is gone
            if not self.response.prepared:
                await self.response.prepare(self.http)
            await self.response.write(part)
            if is_last:
                await self.response.write_eof()


def event_of(name: str, data: Any) -> bytes:
    """Return a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\n" * bool(name) + f"data: {text}\n\n").encode()


def is_gone(http: web.Request) -> bool:
    """Return whether the client of a request has closed its connection."""
    return http.transport is None or http.transport.is_closing()


def address_of(policy: Any) -> Address:
    """Return a new address of the policy of an episode; the first call starts the server."""
    with _lock:  # loops may run in threads
        address = Address(policy, _server())
    address.server.addresses[address.key] = address
    return address


_lock = threading.Lock()


@cache
def _server() -> Server:
    # An episode may have several connections.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # A proxy that the environment names is for other hosts.
    for name in ("NO_PROXY", "no_proxy"):
        hosts = dict.fromkeys([*os.environ.get(name, "").split(","), HOST, "localhost"])
        os.environ[name] = ",".join(filter(None, hosts))
    return Server()
