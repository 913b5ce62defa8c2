"""Holding error messages to what they must name; imports nothing heavy."""

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.common.errors import UserError


def refusal(call: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    """What the UserError of a call says, which is one line."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def says(line: str, *words: str) -> None:
    """Holds a message to what it must name: the setting or the file, what is wrong, the remedy."""
    missing = [word for word in words if word not in line]
    assert not missing, f"{line!r} lacks {missing}"
