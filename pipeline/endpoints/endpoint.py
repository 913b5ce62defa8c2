"""A client of an OpenAI-compatible chat endpoint, for hundreds of calls at once.

An attempt that meets a lost connection, a status of 429 or 5xx, or a useless answer is repeated
after a pause. The pauses grow, are shortened at random, and last at least as long as the header
Retry-After says.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib import import_module
from itertools import count
from typing import Any

from pipeline.data.tasks import Message
from pipeline.environments.faults import Outage
from pipeline.errors import UserError
from pipeline.files.untrusted import keep_secret, one_line, parse_json, without_secrets

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 20.0
TOLD = 3  # failed attempts without a success between them, before a line says so
QUIET_S = 60.0  # seconds in which the same line is not printed again
MAX_REPLY = 8 << 20  # bytes of a reply, unpacked; a longer one is no message
MAX_USELESS = 3  # answers of one call that hold no message; they are paid
NOT_HERE = (401, 403, 404)  # statuses that no other conversation will change
REPEATED = (408, 409, 425, 429)  # statuses below 500 that another attempt may change


class Failed(Exception):
    """An attempt failed, and another one may succeed, `pause_s` seconds later at the earliest."""

    def __init__(self, why: str, pause_s: float = 0.0) -> None:
        super().__init__(why)
        self.pause_s = pause_s


class Refused(Exception):
    """The endpoint refuses a request; `for_all` is True if it will refuse all requests."""

    def __init__(self, why: str, for_all: bool) -> None:
        super().__init__(why)
        self.for_all = for_all


class Endpoint:
    """The model `model` at `url`; `key` is the API key, or empty. Lines begin with the `role`.

    A call ends at most `patience_s` seconds after its begin, and an attempt after half of this
    time. While the endpoint is away, the patience of all calls runs from the first failure. `say`
    prints one line when the endpoint is busy, one when it is away, and one when it is back.

    By default, an answer is useless if it is empty or has a call with unreadable arguments. With
    `as_written`, such an answer is a message: unreadable arguments stay text, and `is_cut` is True
    in a message that the limit of its tokens has cut off. Raises UserError if the package httpx is
    missing.
    """

    def __init__(
        self,
        url: str,
        model: str,
        temperature: float,
        key: str,
        patience_s: float,
        say: Callable[[str], None],
        role: str = "customer",
        as_written: bool = False,
    ) -> None:
        try:
            self._httpx = import_module("httpx")
        except ModuleNotFoundError:
            hint = "pip install 'three-domain-grpo[endpoints]'"
            raise UserError(f"{role}_url: needs the package httpx; {hint}") from None
        self._loop: object = None
        self._client: Any = None
        self.url, self.model, self.temperature = url.rstrip("/"), model, temperature
        keep_secret(key)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.patience_s, self._say, self._random = patience_s, say, random.Random()
        self.has_answered, self._role, self._as_written = False, role, as_written
        self._num_failed, self._failing_since = 0, 0.0
        self._told, self._told_at = set[str](), dict[str, float]()  # by kind of failure

    async def answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        seed: int,
        paid: Callable[[Message | None, int], None],
        **options: Any,
    ) -> Message:
        """Return the model's next message. `paid` gets each answer with its number of tokens.

        `options` are further fields of the request. Raises Outage if the endpoint stays away, and
        Refused.
        """
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "seed": seed}
        body |= {"temperature": self.temperature, "stream": False, **options}
        body |= {"tools": list(tools)} if tools else {}
        begun, useless = time.monotonic(), 0
        for attempt in count():
            try:
                message, num_tokens = await self._post(body)
            except Failed as failed:
                since = self._note(str(failed), begun)
                pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempt, 9))
                pause = max(failed.pause_s, pause * self._random.uniform(0.5, 1))
                if time.monotonic() + pause > since + self.patience_s:
                    waited = time.monotonic() - since
                    why = f"{self.url} is away for {waited:.0f} s ({failed})"
                    raise Outage(f"{self._role}: {why}") from None
                await asyncio.sleep(pause)
                continue
            self._note("", begun)
            paid(message, num_tokens)
            if message is not None:
                return message
            useless += 1
            if useless == MAX_USELESS:
                raise Outage(f"{self._role}: {self.url} gave {useless} answers without a message")
        raise AssertionError("unreachable")

    async def _post(self, body: dict[str, Any]) -> tuple[Message | None, int]:
        client, address = self._connected(), f"{self.url}/chat/completions"
        try:
            async with asyncio.timeout(self.patience_s / 2):
                request = client.stream("POST", address, json=body, headers=self._headers)
                async with request as response:
                    text = await _text_of(response)
        except TimeoutError:
            raise Failed(f"no answer within {self.patience_s / 2:.3g} s") from None
        except (self._httpx.TransportError, OSError) as error:
            raise Failed(f"{type(error).__name__}: {one_line(str(error))}") from None
        status = int(response.status_code)
        if status >= 500 or status in REPEATED:
            pause = seconds_of(response.headers.get("Retry-After", ""))
            raise Failed(f"status {status}", min(pause, self.patience_s))
        if status != 200:
            why = f"status {status}: {one_line(text[:300])}"
            raise Refused(why, for_all=status in NOT_HERE or not self.has_answered)
        return _read(without_secrets(text), self._as_written)

    def _connected(self) -> Any:
        """Return the client of the running event loop; a client works in one loop only."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=None)
            is_safe = self.url.startswith("https:")  # else no certificates are needed, nor loaded
            made = self._httpx.AsyncClient(timeout=None, limits=limits, verify=is_safe)
            self._loop, self._client = loop, made
        return self._client

    def _note(self, failure: str, begun: float) -> float:
        """Note a failure or, with an empty text, an answer; return since when calls fail."""
        now = time.monotonic()
        if not failure:
            self.has_answered, self._num_failed = True, 0
            if self._told:
                self._say(f"{self._role}: {self.url} answers again")
            self._told.clear()
            return begun
        self._num_failed += 1
        if self._num_failed == 1:
            self._failing_since = begun
        kind = "asks to wait" if failure == "status 429" else "does not answer"
        is_new = kind not in self._told and now - self._told_at.get(kind, -QUIET_S) >= QUIET_S
        if self._num_failed >= TOLD and is_new:
            self._told.add(kind)
            self._told_at[kind] = now
            self._say(f"{self._role}: {self.url} {kind} ({failure}); calls are tried again")
        return min(begun, self._failing_since)


def seconds_of(retry_after: str) -> float:
    """Return the seconds that a header Retry-After asks for; 0 if it is empty or unreadable."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(retry_after)
    except (ValueError, TypeError):
        return 0.0
    # A date without a zone is in UTC.
    return max(0.0, (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


async def _text_of(response: Any) -> str:
    """Return the text of a response up to MAX_REPLY bytes, or an empty one if it is longer."""
    received = bytearray()
    async for part in response.aiter_bytes():
        received += part
        if len(received) > MAX_REPLY:
            return ""
    return received.decode(errors="replace")


def _read(text: str, as_written: bool) -> tuple[Message | None, int]:
    """Return the message of a response, or None for a useless one, and the number of tokens."""
    try:
        response = parse_json(text)
        tokens = (response.get("usage") or {}).get("total_tokens")
        num_tokens = tokens if type(tokens) is int and tokens > 0 else 0
    except (ValueError, AttributeError):
        return None, 0
    try:
        choice = response["choices"][0]
        message = choice["message"]
        content, calls = message.get("content") or "", message.get("tool_calls") or []
        made = [
            {
                "id": str(call["id"]),
                "type": "function",
                "function": {
                    "name": str(call["function"]["name"]),
                    "arguments": _arguments(call["function"].get("arguments"), as_written),
                },
            }
            for call in calls
        ]
    except (LookupError, ValueError, TypeError, AttributeError):
        return None, num_tokens
    if not isinstance(content, str) or not (content.strip() or made or as_written):
        return None, num_tokens
    found: Message = {"role": "assistant", "content": content}
    found |= {"tool_calls": made} if made else {}
    is_cut = as_written and choice.get("finish_reason") == "length"
    return found | ({"is_cut": True} if is_cut else {}), num_tokens


def _arguments(value: Any, as_written: bool) -> str:
    """Return the arguments of a call as JSON; raises ValueError if they are no object."""
    try:
        parsed = parse_json(value or "{}") if isinstance(value, str | None) else value
        if isinstance(parsed, dict):
            return json.dumps(parsed)
    except ValueError:
        pass
    if as_written:
        return value if isinstance(value, str) else json.dumps(value)
    raise ValueError("arguments are no object")
