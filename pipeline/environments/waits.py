"""How long to wait before a call that failed is made again."""

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

MAX_WAIT_S = 1e9  # a longer wait is as good as none
BUSY = (408, 425, 429, 500, 502, 503, 504, 529)  # statuses that another attempt may change
# Classes of a lost connection, by name: Python's own, httpx's, aiohttp's and openai's.
AWAY = {"ConnectionError", "TimeoutError", "NetworkError", "RemoteProtocolError"}
AWAY |= {"TimeoutException", "ClientConnectionError", "APIConnectionError"}


def seconds_of(retry_after: str) -> float:
    """Return the seconds that a header Retry-After asks for; 0 if it is empty or unreadable."""
    try:
        seconds = float(retry_after)
    except ValueError:
        pass
    else:
        return min(max(0.0, seconds), MAX_WAIT_S) if math.isfinite(seconds) else 0.0
    try:
        until = parsedate_to_datetime(retry_after)
        # A date without a zone is in UTC.
        until = until.replace(tzinfo=until.tzinfo or UTC)
        return max(0.0, (until - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, what is in it if it is a group, and what it came from."""
    seen = set[int]()
    left = [error]
    while left:
        if id(found := left.pop()) in seen:
            continue
        seen.add(id(found))
        yield found
        left += found.exceptions if isinstance(found, BaseExceptionGroup) else ()
        left += filter(None, [found.__cause__ or found.__context__])


def wait_of(error: BaseException) -> float | None:
    """Return the seconds that a busy service asks to wait, or None if no service is busy.

    Reads `retry_after`, the header Retry-After and the status of an exception, as clients of HTTP
    have them. A busy service that names no time, and a lost connection, give 0.
    """
    asked = [wait for cause in causes_of(error) if (wait := _asked(cause)) is not None]
    return max(asked, default=None)


def _asked(error: Any) -> float | None:
    try:
        response = getattr(error, "response", None)
        names = "status_code", "status", "code"
        statuses = [getattr(of, name, None) for of in (error, response) for name in names]
        headers = getattr(response, "headers", None) or getattr(error, "headers", None) or {}
        header = next((v for k, v in dict(headers).items() if k.lower() == "retry-after"), "")
        given = getattr(error, "retry_after", None)
        seconds = seconds_of(str(header if given is None else given))
    except Exception:  # the exception is the user's code
        return None
    is_away = any(kind.__name__ in AWAY for kind in type(error).__mro__)
    is_busy = is_away or any(status in BUSY for status in statuses)
    return seconds if seconds or is_busy else None
