"""A client of an OpenAI-compatible chat endpoint, for hundreds of calls at once.

An attempt that meets a lost connection, a status of 429 or 5xx, or a useless answer is repeated
after a pause. The pauses grow and are shortened at random. While the endpoint asks to wait
(Retry-After), no call is made.
"""

import asyncio
import json
import math
import random
import re
import ssl
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import count
from typing import Any

from pipeline.common.errors import UserError
from pipeline.common.untrusted import (
    in_texts,
    keep_secret,
    masked,
    one_line,
    parse_json,
    reason_of,
    without_secrets,
)
from pipeline.data.tasks import Message
from pipeline.environments.faults import Outage, causes_of, seconds_of

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 20.0
TOLD = 3  # failed attempts without a success between them, before a line says so
QUIET_S = 60.0  # seconds between two lines that say so
MAX_REPLY = 8 << 20  # bytes of a reply, unpacked; a longer one is no message
MAX_USELESS = 3  # answers of one call that hold no message; they are paid
NOT_HERE = (401, 403, 404)  # statuses that no other conversation will change
REPEATED = (408, 409, 425, 429)  # statuses below 500 that another attempt may change
LOST = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)  # a lost connection
# Fields of a request that some services refuse, and what these take instead.
REFUSED = {"seed": "", "max_tokens": "max_completion_tokens"}
_CUT = "its answer was cut off at the limit of tokens; give it more"
_FILTERED = "its content filter has cut the answer"
NO_ANSWERS = {  # values of `finish_reason`
    **dict.fromkeys(("length", "max_tokens", "model_length"), _CUT),
    **dict.fromkeys(("content_filter", "safety"), _FILTERED),
}
BROKEN_OFF = ("abort", "error", "insufficient_system_resource")  # another attempt may end
_TAG = "(?:seed:)?(?:think|thinking|thought|reasoning|scratchpad)>"
THOUGHTS = {  # regular expressions: how models begin a thought -> how they end it
    f"<{_TAG}": f"</{_TAG}",
    r"\[THINK\]": r"\[/THINK\]",
    "◁think▷": "◁/think▷",
    r"<\|begin_of_thought\|>": r"<\|end_of_thought\|>",
    r"<\|channel\|>analysis<\|message\|>": r"<\|channel\|>final<\|message\|>",
}
_BEGIN = f"(?:{'|'.join(THOUGHTS)})"
_END = f"(?:{'|'.join(THOUGHTS.values())})"


def spoken(text: str) -> str:
    """Return a message without the thoughts of a reasoning model, also without an open thought."""
    text = re.sub(f"(?is){_BEGIN}.*?{_END}", "", text)
    return re.split(f"(?i){_BEGIN}", re.split(f"(?i){_END}", text)[-1])[0].strip()


class Useless(Outage):
    """The endpoint answers a call without a message, again and again."""


class Failed(Exception):
    """An attempt failed, and another one may succeed. `wait_s` are the seconds of Retry-After."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class Refused(Exception):
    """The endpoint refuses a request; `for_all` is True if it will refuse all requests."""

    def __init__(self, why: str, for_all: bool) -> None:
        super().__init__(why)
        self.for_all = for_all


class Endpoint:
    """The model `model` at `url`; `key` is the API key, or empty. Lines begin with the `role`.

    A call ends at most `patience_s` seconds after its begin, and an attempt after half of this
    time. While the endpoint is away, the patience of all calls runs from the first failure. If the
    endpoint asks for a longer wait, calls wait for `patience_s` and fail, and no attempt is made
    before the time has come. `say` prints one line when the endpoint is away, and one when it is
    back.

    By default, an answer is useless if it is empty or has a call with unreadable arguments, a
    message has no thoughts, and one that was cut off is none. With `as_written`, such an answer is
    a message: unreadable arguments stay text, and `is_cut` is True if it was cut off. Raises
    UserError if the package httpx is missing, or if the URL, the key or the environment's settings
    for HTTP cannot be used.
    """

    def __init__(
        self,
        url: str,
        model: str,
        temperature: float,
        key: str,
        patience_s: float,
        *,
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
        self._num_failed = 0  # since the last answer
        self._failing_since = 0.0
        self._last_failure = ""
        self._opens_at = -math.inf  # the end of a Retry-After
        self._is_told = False
        self._told_at = -math.inf
        self._refused = list[str]()  # fields of REFUSED that the endpoint does not take

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
        Refused, also for an answer that is none and would be the same again.
        """
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "seed": seed}
        body |= {"temperature": self.temperature, "stream": False, **options}
        body |= {"tools": list(tools)} if tools else {}
        for name in self._refused:
            body = _without(body, name)
        begun = time.monotonic()
        num_useless = 0
        left_out = list[str]()
        for attempt in count():
            await self._wait_until(self._opens_at, begun)
            try:
                message, num_tokens, why = await self._post(body)
            except Refused as refused:
                if not (name := _refused_field(body, str(refused))):
                    raise
                left_out.append(name)
                body = _without(body, name)
                continue
            except Failed as failed:
                self._note(failed, begun)
                pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempt, 9))
                pause *= self._random.uniform(0.5, 1)
                ends = time.monotonic() + max(pause, failed.wait_s)
                if failed.wait_s:
                    self._opens_at = max(self._opens_at, ends)
                    self._failing_since = self._opens_at  # to wait as asked is no outage
                else:
                    await self._wait_until(ends, min(begun, self._failing_since))
                continue
            self._note_answer()
            self._note_refused(left_out)
            paid(message, num_tokens)
            if message is not None:
                return message
            if why:
                raise Refused(why, for_all=False)
            num_useless += 1
            if num_useless == MAX_USELESS:
                why = f"{self.url} gave {num_useless} answers without a message"
                raise Useless(f"{self._role}: {why}")
        raise AssertionError("unreachable")

    async def _wait_until(self, moment: float, since: float) -> None:
        """Wait; raises Outage when the patience of a call that fails `since` then is at its end."""
        now = time.monotonic()
        if moment <= now:
            return
        ends = since + self.patience_s
        await asyncio.sleep(max(0.0, min(moment, ends) - now))
        if moment > ends:
            waited = time.monotonic() - since
            why = f"{self.url} is away for {waited:.0f} s ({self._last_failure})"
            raise Outage(f"{self._role}: {why}")

    async def _post(self, body: dict[str, Any]) -> tuple[Message | None, int, str]:
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
            self._refuse_without_tls(error)
            raise Failed(f"{type(error).__name__}: {one_line(str(error))}") from None
        status = int(response.status_code)
        if status >= 500 or status in REPEATED:
            wait_s = seconds_of(response.headers.get("Retry-After", ""))
            asks = f", which asks to wait {wait_s:.0f} s" if wait_s else ""
            raise Failed(f"status {status}{asks}", wait_s)
        if status != 200:
            why = f"status {status}: {one_line(masked(text)[:300])}"
            raise Refused(why, for_all=status in NOT_HERE or not self.has_answered)
        message, num_tokens, why = _read(text, self._as_written)
        # Masked after parsing: JSON can write each character in several ways.
        return in_texts(without_secrets, message), num_tokens, why

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

    def _refuse_without_tls(self, error: Exception) -> None:
        """Raise Refused if an attempt failed because of TLS, and no other attempt changes this."""
        of_tls = next((e for e in causes_of(error) if isinstance(e, ssl.SSLError)), None)
        if of_tls is None or isinstance(of_tls, LOST):
            return
        if isinstance(of_tls, ssl.SSLCertVerificationError) or not self.has_answered:
            hint = (
                "where it has no TLS, give http://; where it has, SSL_CERT_FILE with its authority"
            )
            raise Refused(f"TLS fails: {reason_of(of_tls)}; {hint}", for_all=True)

    def _note(self, failed: Failed, begun: float) -> None:
        """Note a failure; print a line after some failures, or at once about a long wait."""
        self._num_failed += 1
        self._last_failure = str(failed)
        if self._num_failed == 1:
            self._failing_since = begun
        if self._num_failed < TOLD and failed.wait_s <= self.patience_s:
            return
        now = time.monotonic()
        if not self._is_told and now - self._told_at >= QUIET_S:
            self._is_told = True
            self._told_at = now
            self._say(f"{self._role}: {self.url} does not answer ({failed}); calls wait for it")

    def _note_refused(self, names: Sequence[str]) -> None:
        """Leave out what the endpoint has refused, from now on; say so once."""
        for name in (name for name in names if name not in self._refused):
            self._refused.append(name)
            other = REFUSED[name]
            instead = f"gets {other}" if other else "gets none, so its answers may vary"
            self._say(f"{self._role}: {self.url} refuses {name}, and {instead}")

    def _note_answer(self) -> None:
        self.has_answered = True
        self._num_failed = 0
        if self._is_told:
            self._say(f"{self._role}: {self.url} answers again")
        self._is_told = False


async def _text_of(response: Any) -> str:
    """Return the text of a response up to MAX_REPLY bytes, or an empty one if it is longer."""
    received = bytearray()
    async for part in response.aiter_bytes():
        received += part
        if len(received) > MAX_REPLY:
            return ""
    return received.decode(errors="replace")


def _refused_field(body: dict[str, Any], why: str) -> str:
    """Return the field of REFUSED that a refusal names, or an empty text."""
    is_of_form = why.startswith(("status 400", "status 422"))
    named = (
        n for n, other in REFUSED.items() if n in body and re.search(rf"\b{other or n}\b", why)
    )
    return next(named, "") if is_of_form else ""


def _without(body: dict[str, Any], name: str) -> dict[str, Any]:
    rest = {key: value for key, value in body.items() if key != name}
    return {**rest, REFUSED[name]: body[name]} if REFUSED[name] and name in body else rest


def _text_of_parts(content: Any) -> Any:
    """Return the text of a content in parts, whose thoughts are parts of another type."""
    if not isinstance(content, list):
        return content or ""
    texts = [part["text"] for part in content if part.get("type") in ("text", "output_text")]
    return "".join(texts)


def _read(text: str, as_written: bool) -> tuple[Message | None, int, str]:
    """Return the message of a response, or None for a useless one, and the number of tokens.

    The text says why the same request would get no message again, or is empty.
    """
    num_tokens = 0
    try:
        response = parse_json(text)
        usage = response.get("usage")
        if isinstance(usage, dict) and type(usage.get("total_tokens")) is int:
            num_tokens = max(0, usage["total_tokens"])
        choice = response["choices"][0]
        message = choice["message"]
        ended = (choice.get("finish_reason") or "").lower()
        if ended in BROKEN_OFF:
            return None, num_tokens, ""
        why = NO_ANSWERS.get(ended, "")
        if why and not as_written:
            return None, num_tokens, why
        content = _text_of_parts(message.get("content"))
        calls = [
            {
                "id": str(call["id"]),
                "type": "function",
                "function": {
                    "name": str(call["function"]["name"]),
                    "arguments": _arguments(call["function"].get("arguments"), as_written),
                },
            }
            for call in message.get("tool_calls") or []
        ]
        thoughts = message.get("reasoning_content") or message.get("reasoning")
    except (LookupError, ValueError, TypeError, AttributeError):
        return None, num_tokens, ""
    if not isinstance(content, str):
        return None, num_tokens, ""
    if not as_written:
        thoughts = thoughts or content.strip()
        content = spoken(content)
        if not (content or calls):
            return None, num_tokens, "it wrote thoughts and no message" if thoughts else ""
    spoken_message: Message = {"role": "assistant", "content": content}
    if calls:
        spoken_message["tool_calls"] = calls
    if why:
        spoken_message["is_cut"] = True
    return spoken_message, num_tokens, ""


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
