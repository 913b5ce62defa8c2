"""Exceptions that end a call of environment code."""

from __future__ import annotations


class CallTimeout(BaseException):
    """Interrupts a late call. It is no Exception, so that `except Exception` does not catch it."""


class Outage(Exception):
    """An environment raises it if a service is down, which is no fault of the policy.

    It may be raised in `reset`, a tool, the user's `reply` and `get_reward`: the episode ends, and
    training leaves it out. Never raise it for a situation that a policy can cause.
    """


class EnvironmentFault(Exception):
    """Code of an environment raised, or took too long; the text is one line.

    `outage`: a service is down, or the domain is not called any more.
    """

    def __init__(self, text: str, timed_out: bool = False, outage: bool = False) -> None:
        super().__init__(text)
        self.timed_out, self.outage = timed_out, outage


def too_long(name: str, seconds: float) -> EnvironmentFault:
    return EnvironmentFault(f"CallTimeout: {name} took more than {seconds:g} s", timed_out=True)
