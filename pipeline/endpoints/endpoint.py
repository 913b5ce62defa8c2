"""A client of an OpenAI-compatible chat endpoint, for hundreds of calls at once.

An attempt that meets a lost connection, a status of 429 or 5xx, or a useless answer is repeated
after a pause. The pauses grow and are shortened at random. While the endpoint asks to wait
(Retry-After), no call is made.
"""

import asyncio
import json
import math
import random
import ssl
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import count
from typing import Any

from pipeline.data.tasks import Message
from pipeline.environments.faults import Outage
from pipeline.environments.waits import causes_of, seconds_of
from pipeline.errors import UserError
from pipeline.files.untrusted import (
    in_texts,
    keep_secret,
    masked,
    one_line,
    parse_json,
    reason_of,
    without_secrets,
)

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 20.0
TOLD = 3  # failed attempts without a success between them, before a line says so
QUIET_S = 60.0  # seconds in which the same line is not printed again
MAX_REPLY = 8 << 20  # bytes of a reply, unpacked; a longer one is no message
MAX_TOKENS = 10**12  # of a reply; a larger count is no count
MAX_USELESS = 3  # answers of one call that hold no message; they are paid
NOT_HERE = (401, 403, 404)  # statuses that no other conversation will change
REPEATED = (408, 409, 425, 429)  # statuses below 500 that another attempt may change
LOST = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)  # a lost connection
PROBE_S = 5.0  # seconds to find out whether a server speaks TLS


class Failed(Exception):
    """An attempt failed, and another one may succeed. `wait_s` are the seconds of Retry-After."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class Refused(Exception):
    """The endpoint refuses a request; `for_all` is True if it will refuse all requests.

    `remedy` says what to do, where this is known.
    """

    def __init__(self, why: str, for_all: bool, remedy: str = "") -> None:
        super().__init__(why)
        self.for_all = for_all
        self.remedy = remedy


class Endpoint:
    """The model `model` at `url`; `key` is the API key, or empty. Lines begin with the `role`.

    A call ends at most `patience_s` seconds after its begin, and an attempt after half of this
    time. While the endpoint is away, the patience of all calls runs from the first failure. If the
    endpoint asks for a longer wait, calls wait for `patience_s` and fail, and no attempt is made
    before the time has come. `say` prints one line when the endpoint is busy, one when it is away,
    and one when it is back.

    By default, an answer is useless if it is empty or has a call with unreadable arguments. With
    `as_written`, such an answer is a message: unreadable arguments stay text, and `is_cut` is True
    in a message that the limit of its tokens has cut off. Raises UserError if the package httpx is
    missing, or if the URL, the key or the environment's settings for HTTP cannot be used.
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
        self.url = url.rstrip("/")
        self.model = model
        self.temperature = temperature
        keep_secret(key)
        if not (key.isascii() and key.isprintable()):
            hint = "a header holds printable ASCII alone; set the variable again"
            raise UserError(f"{role}_key: the key in the variable has other characters; {hint}")
        self._loop: object = None
        try:
            is_safe = self._httpx.URL(self.url).scheme == "https"
            # Without https no certificates are needed, nor loaded.
            self._verify = self._httpx.create_ssl_context() if is_safe else False
            self._client = self._new_client()
        except (self._httpx.InvalidURL, ValueError, ImportError, OSError) as error:
            names = "SSL_CERT_FILE, SSL_CERT_DIR, HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY"
            why = f"{self.url} cannot be called ({reason_of(error)}); mend it, or {names}"
            raise UserError(f"{role}_url: {why}") from None
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.patience_s = patience_s
        self._say = say
        self._random = random.Random()
        self.has_answered = False
        self._role = role
        self._as_written = as_written
        self._num_failed = 0
        self._failing_since = 0.0
        self._opens_at = -math.inf
        self._asked = ""  # after a Retry-After
        self._has_probed = False
        self._told = set[str]()
        self._told_at = dict[str, float]()  # by kind of failure

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
        begun = time.monotonic()
        useless = 0
        for attempt in count():
            await self._open(begun)
            try:
                message, num_tokens = await self._post(body)
            except Failed as failed:
                since = self._note(failed, begun)
                pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempt, 9))
                pause *= self._random.uniform(0.5, 1)
                if failed.wait_s:
                    self._close_for(max(pause, failed.wait_s), failed)
                    continue
                if time.monotonic() + pause > since + self.patience_s:
                    waited = time.monotonic() - since
                    why = f"{self.url} is away for {waited:.0f} s ({failed})"
                    raise Outage(f"{self._role}: {why}") from None
                await asyncio.sleep(pause)
                continue
            self._note(None, begun)
            paid(message, num_tokens)
            if message is not None:
                return message
            useless += 1
            if useless == MAX_USELESS:
                raise Outage(f"{self._role}: {self.url} gave {useless} answers without a message")
        raise AssertionError("unreachable")

    async def _open(self, begun: float) -> None:
        """Wait until the endpoint can be asked; raises Outage if this takes too long."""
        while (wait := self._opens_at - time.monotonic()) > 0:
            left = begun + self.patience_s - time.monotonic()
            await asyncio.sleep(max(0.0, min(wait, left)))
            if wait > left:
                raise Outage(f"{self._role}: {self._asked}")

    def _close_for(self, seconds: float, failed: Failed) -> None:
        """Make no call for some seconds, because the endpoint asks for it."""
        if (opens_at := time.monotonic() + seconds) > self._opens_at:
            self._opens_at = opens_at
            self._asked = self._request(failed)
        self._failing_since = self._opens_at  # to wait as asked is no outage

    def _request(self, failed: Failed) -> str:
        asked = f"{self.url} asks to wait {failed.wait_s:.0f} s ({failed})"
        if failed.wait_s <= self.patience_s:
            return asked
        return f"{asked}, and a call waits at most {self.patience_s:.3g} s (0.9 of call_timeout)"

    async def _post(self, body: dict[str, Any]) -> tuple[Message | None, int]:
        client = self._connected()
        address = f"{self.url}/chat/completions"
        try:
            async with asyncio.timeout(self.patience_s / 2):
                request = client.stream("POST", address, json=body, headers=self._headers)
                async with request as response:
                    text = await _text_of(response)
        except TimeoutError:
            raise Failed(f"no answer within {self.patience_s / 2:.3g} s") from None
        except (self._httpx.TransportError, self._httpx.DecodingError, OSError) as error:
            await self._refuse_other_protocol(error)
            raise Failed(f"{type(error).__name__}: {one_line(str(error))}") from None
        status = int(response.status_code)
        if status >= 500 or status in REPEATED:
            wait_s = seconds_of(response.headers.get("Retry-After", ""))
            raise Failed(f"status {status}", wait_s)
        if status != 200:
            why = f"status {status}: {one_line(masked(text)[:300])}"
            raise Refused(why, for_all=status in NOT_HERE or not self.has_answered)
        message, num_tokens = _read(text, self._as_written)
        # Masked after parsing: JSON can write each character in several ways.
        return in_texts(without_secrets, message), num_tokens

    def _connected(self) -> Any:
        """Return the client of the running event loop; a client works in one loop only."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._client = self._new_client()
        return self._client

    def _new_client(self) -> Any:
        limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return self._httpx.AsyncClient(timeout=None, limits=limits, verify=self._verify)

    async def _refuse_other_protocol(self, error: Exception) -> None:
        """Raise Refused if an attempt failed because of TLS, and no other attempt changes this."""
        of_tls = next((e for e in causes_of(error) if isinstance(e, ssl.SSLError)), None)
        if isinstance(of_tls, ssl.SSLCertVerificationError):
            why = f"its certificate is not trusted: {one_line(of_tls.verify_message)}"
            remedy = f"set SSL_CERT_FILE to the file of its authority, or mend {self._role}_url"
            raise Refused(why, True, remedy)
        if self.has_answered:
            return
        if of_tls is not None and not isinstance(of_tls, LOST):
            why = f"TLS fails ({reason_of(of_tls)})"
            raise Refused(why, True, f"give http:// in {self._role}_url if it has no TLS")
        if of_tls is None and not self._has_probed and await self._speaks_tls():
            raise Refused("it speaks TLS alone", True, f"give https:// in {self._role}_url")

    async def _speaks_tls(self) -> bool:
        """Return whether the server of an http URL answers to https; sends no key."""
        self._has_probed = True
        url = self._httpx.URL(self.url)
        if url.scheme == "https":
            return False
        try:
            async with self._httpx.AsyncClient(verify=False, timeout=PROBE_S) as client:
                await client.head(url.copy_with(scheme="https", port=url.port or 80))
        except (self._httpx.ReadError, self._httpx.RemoteProtocolError):
            return True  # these come after the handshake
        except (self._httpx.TransportError, OSError):
            return False
        return True

    def _note(self, failed: Failed | None, begun: float) -> float:
        """Note a failure or, with None, an answer; return since when calls fail."""
        if failed is None:
            self.has_answered = True
            self._num_failed = 0
            if self._told:
                self._say(f"{self._role}: {self.url} answers again")
            self._told.clear()
            return begun
        self._num_failed += 1
        if self._num_failed == 1:
            self._failing_since = begun
        is_busy = failed.wait_s > 0 or str(failed) == "status 429"
        kind = "asks to wait" if is_busy else "does not answer"
        if failed.wait_s > self.patience_s:
            self._tell("asks to wait long", f"{self._request(failed)}; no call is made before")
        elif self._num_failed >= TOLD:
            self._tell(kind, f"{self.url} {kind} ({failed}); calls are tried again")
        return min(begun, self._failing_since)

    def _tell(self, kind: str, line: str) -> None:
        """Print a line about a kind of failure, unless one has been printed."""
        now = time.monotonic()
        if kind not in self._told and now - self._told_at.get(kind, -QUIET_S) >= QUIET_S:
            self._told.add(kind)
            self._told_at[kind] = now
            self._say(f"{self._role}: {line}")


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
        response = parse_json(text.removeprefix("\ufeff"))
        usage = response.get("usage")
        tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
        num_tokens = tokens if type(tokens) is int and 0 < tokens <= MAX_TOKENS else 0
    except (ValueError, AttributeError):
        return None, 0
    try:
        choice = response["choices"][0]
        message = choice["message"]
        content = message.get("content") or ""
        calls = message.get("tool_calls") or []
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
