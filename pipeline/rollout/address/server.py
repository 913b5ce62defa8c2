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
import select
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from aiohttp import web

from pipeline.common.console import say
from pipeline.common.untrusted import one_line, parse_json, reason_of
from pipeline.rollout.address import chat_completions, messages, responses
from pipeline.rollout.address.dialect import Refusal, Request
from pipeline.rollout.asked import Asked, EpisodeOver
from pipeline.rollout.trajectory import StopReason

HOST = "127.0.0.1"
MAX_BODY = 16 << 20  # bytes of a request
BACKLOG = 2048  # clients of all episodes connect at the same time
FIRST_SIGN_S = 1.0  # in this time, a refusal still has its status
SIGN_S = 2.0  # between signs of life while a message is sampled; some clients wait for 5 s
LATE_S = 1.0  # pause before an agent is refused again, so that an endless one takes little time
IDLE_S = 75.0  # until a connection without requests is closed
MAX_ENDED = 1 << 14  # keys of ended episodes that are told from unknown ones
NO_RETRY = {"x-should-retry": "false"}  # which clients of OpenAI and Anthropic obey
DIALECTS = (chat_completions, responses, messages)
PREFIX = "/{key:(?:sk-[^/]+/)?}{version:(?:v1/)?}"  # the key may be in a header instead
ENDED = "the episode of this key is over"

Handler = Callable[[web.Request, "Address"], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class Address:
    """Where the agent of one episode finds the policy."""

    policy: Any  # a LoopPolicy
    server: "Server"
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")
    # What was asked for by each request that was ever sent, for whoever sends an equal one.
    kept: dict[str, list[list[Asked]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.server.port}/{self.key}/v1"

    async def fetch(
        self, request: Request, http: web.Request, response: web.StreamResponse, sign: bytes
    ) -> list[Asked]:
        """Return the messages of a request; until they are made, send signs of life.

        Raises EpisodeOver, ValueError or CancelledError.
        """
        while True:
            made = self._ask(request, http)
            results = asyncio.gather(
                *(asyncio.wrap_future(asked.answer) for asked in made), return_exceptions=True
            )
            while not (
                await asyncio.wait({results}, timeout=SIGN_S if response.prepared else FIRST_SIGN_S)
            )[0]:
                await send(http, response, sign)
            # What a client had given up may have been taken back while another one came for it.
            is_made = not any(asked.is_taken_back for asked in made)
            if is_made or self.policy.is_over or is_gone(http):
                break
        for result in results.result():
            if isinstance(result, BaseException):
                for asked in made:  # what they continue may be told otherwise
                    self.policy.give_up(asked)
                raise result
        return made

    def _ask(self, request: Request, http: web.Request) -> list[Asked]:
        wanted = {
            "messages": request.messages,
            "tools": request.tools,
            "max_tokens": request.max_tokens,
            "stop": request.stop,
            "with_texts": bool(request.body.get("logprobs")),
        }
        key = json.dumps([request.n, wanted])  # the same for a request that is sent again
        same = [made for made in self.kept[key] if not any(one.is_taken_back for one in made)]
        lost = [made for made in same if all(map(is_for_another, made))]
        again = http.headers.get("x-stainless-retry-count", "0") != "0"
        for made in lost or same[-1:] * again:
            for asked in made:
                asked.is_lost, asked.is_unread = partial(is_gone, http), False
            return made
        made = [self.policy.ask(**wanted, is_lost=partial(is_gone, http)) for _ in range(request.n)]
        self.kept[key] = [*same, made]
        return made

    def close(self) -> None:
        """End the episode, in any thread."""
        self.server.loop.call_soon_threadsafe(self.server.forget, self.key)


class Server:
    """The HTTP server of this process; a thread serves until the process ends."""

    def __init__(self) -> None:
        self.addresses = dict[str, Address]()
        self._ended = deque[str](maxlen=MAX_ENDED)  # keys
        self.sent = dict[Any, list[Asked]]()  # what was last sent on each connection
        self._has_warned = False
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="address", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result()

    async def _start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY)
        for method, path, handler in (
            *(("POST", dialect.PATH, self._message) for dialect in DIALECTS),
            ("POST", f"{messages.PATH}/count_tokens", self._count),
            ("POST", "/reply", self._domain),
            ("POST", "/tools/{name}", self._domain),
            ("GET", "/models", self._models),
            ("GET", "/models/{model:.+}", self._models),
            ("*", "/{rest:.*}", self._nothing),
        ):
            app.router.add_route(method, PREFIX + path[1:], partial(self._answer, handler))
        runner = web.AppRunner(app, access_log=None, handle_signals=False, keepalive_timeout=IDLE_S)
        await runner.setup()
        assert runner.server is not None
        lose = runner.server.connection_lost

        def lost(connection: web.RequestHandler, error: BaseException | None = None) -> None:
            for asked in self.sent.pop(connection, ()):  # with an error, not all was read
                asked.is_unread = error is not None
            lose(connection, error)

        runner.server.connection_lost = lost  # type: ignore[method-assign]
        site = web.TCPSite(runner, HOST, 0, backlog=BACKLOG)
        await site.start()
        self.port: int = runner.addresses[0][1]

    def forget(self, key: str) -> None:
        """End an episode, in the server's thread."""
        del self.addresses[key]
        self._ended.append(key)

    async def _answer(self, handler: Handler, http: web.Request) -> web.StreamResponse:
        """Answer a request of an episode; a refusal has the form of the API."""
        try:
            return await handler(http, await self._address(http))
        except Refusal as error:
            refusal = error
        except web.HTTPRequestEntityTooLarge:
            refusal = Refusal(413, f"the body has more than {MAX_BODY >> 20} MiB")
        except Exception as error:  # of a body that is not of the API
            refusal = Refusal(400, f"the body is not of the API: {reason_of(error)}")
        body = dialect_of(http).error(refusal.status, one_line(str(refusal)), refusal.code)
        return web.json_response(body, status=refusal.status, reason=refusal.code, headers=NO_RETRY)

    async def _address(self, http: web.Request) -> Address:
        bearer = http.headers.get("Authorization", "").removeprefix("Bearer ")
        keys = [http.match_info["key"][:-1], bearer, http.headers.get("x-api-key", "")]
        for key in keys:
            if (address := self.addresses.get(key)) is not None:
                return address
        if any(key in self._ended for key in keys):
            await asyncio.sleep(LATE_S)
            raise Refusal(410, ENDED, "episode_over")
        raise Refusal(401, "no episode has this key; give policy.api_key", "invalid_api_key")

    async def _read(self, http: web.Request) -> Request:
        request: Request = dialect_of(http).read(parse_json(await http.text()))
        if request.ignored and not self._has_warned:
            self._has_warned = True
            if os.environ.get("RANK", "0") == "0":
                say(
                    f"warning: agents ask for {one_line(', '.join(request.ignored))}, which is "
                    "left out: what is trained is the policy as it is, at the run's temperature"
                )
        return request

    async def _message(self, http: web.Request, address: Address) -> web.StreamResponse:
        request = await self._read(http)
        if address.policy.end is not None:  # an agent that asks on
            await asyncio.sleep(LATE_S)
        dialect = dialect_of(http)
        is_stream = bool(request.body.get("stream"))
        kind = "text/event-stream" if is_stream else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind, **NO_RETRY})
        sign = b": wait\n\n" if is_stream else b" "  # of life, which clients skip
        try:
            made = await address.fetch(request, http, response, sign)
        except (Exception, asyncio.CancelledError) as error:
            refusal = self._refusal(error, address)
            if not response.prepared:
                raise refusal from None
            if is_stream:
                body = dialect.error(refusal.status, str(refusal), refusal.code)
                await send(http, response, event_of("error", body))
            elif http.transport is not None:  # the status is sent; a new try gets the error
                http.transport.abort()
            return response
        answers = [asked.answer.result() for asked in made]
        if is_stream:
            reply = b"".join(event_of(*event) for event in dialect.events(answers, request))
        else:
            reply = json.dumps(dialect.whole(answers, request)).encode()
        close_if_left(http)
        deliver(made)  # before it is sent: who has it may end the episode
        if not is_stream:  # of a stream, clients may leave the last bytes
            self.sent[http.protocol] = made
        await send(http, response, reply)
        deliver(made)
        return response

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

    async def _count(self, http: web.Request, address: Address) -> web.StreamResponse:
        request = await self._read(http)
        count = await address.policy.num_prompt_tokens(request.messages, request.tools)
        return web.json_response({"input_tokens": count})

    async def _domain(self, http: web.Request, address: Address) -> web.StreamResponse:
        """Call a tool of the domain, or let its customer answer."""
        body = await http.text()
        try:
            if (name := http.match_info.get("name")) is not None:
                return web.json_response(await address.policy.call(name, body))
            said = await address.policy.reply(str(parse_json(body)["content"]))
            return web.json_response({"content": said})
        except (ValueError, EpisodeOver, asyncio.CancelledError) as error:
            raise self._refusal(error, address) from None

    async def _models(self, http: web.Request, address: Address) -> web.StreamResponse:
        name = http.match_info.get("model")
        model = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "policy"}
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _nothing(self, http: web.Request, address: Address) -> web.StreamResponse:
        paths = ", ".join(dialect.PATH for dialect in DIALECTS)
        raise Refusal(404, f"{http.method} {http.path}: not here; POST {paths}", "not_found")


def deliver(made: list[Asked]) -> None:
    """Note whether messages reach their agent."""
    for asked in made:
        asked.has_arrived = not asked.is_lost()


def dialect_of(http: web.Request) -> Any:
    """Return the API of a request; see `dialect`."""
    return next((d for d in DIALECTS if d.PATH in http.path), chat_completions)


async def send(http: web.Request, response: web.StreamResponse, part: bytes) -> None:
    """Send a part of a reply, unless its client is gone."""
    with suppress(ConnectionError):
        if not response.prepared:
            await response.prepare(http)
        await response.write(part)


def event_of(name: str, data: Any) -> bytes:
    """Return a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\n" * bool(name) + f"data: {text}\n\n").encode()


def is_gone(http: web.Request) -> bool:
    """Return whether the client of a request has closed its connection."""
    return http.transport is None or http.transport.is_closing()


def close_if_left(http: web.Request) -> None:
    """Close a connection that the client has closed, before the server has noticed it."""
    if (transport := http.transport) is not None and not transport.is_closing():
        poll = select.poll()
        poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        if poll.poll(0):
            transport.close()


def is_for_another(asked: Asked) -> bool:
    """Return whether the client of a message has gone without it, so that the next one gets it."""
    return asked.is_unread or (asked.is_lost() and not asked.has_arrived)


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
