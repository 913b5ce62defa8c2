"""Exceptions that end a call of environment code."""


class CallTimeout(BaseException):
    """Interrupts a call that passes the deadline; `except Exception` does not catch CallTimeout."""


class Outage(Exception):
    """The exception that an environment raises if an external service is down.

    `reset`, a tool, the user's `reply` and `get_reward` may raise an Outage. An Outage ends the
    episode, and training leaves the episode out. A mistake of the trained model must never cause an
    Outage.
    """


class EnvironmentFault(Exception):
    """The failure of a call of environment code, with a message of one line.

    `timed_out` is True if the call took too long. `outage` is True if a service is down, or if the
    rollout has stopped calling the domain's environments because of late calls.
    """

    def __init__(self, text: str, timed_out: bool = False, outage: bool = False) -> None:
        super().__init__(text)
        self.timed_out, self.outage = timed_out, outage


def too_long(name: str, seconds: float) -> EnvironmentFault:
    return EnvironmentFault(f"CallTimeout: {name} took more than {seconds:g} s", timed_out=True)
