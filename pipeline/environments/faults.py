"""Exceptions that end a call of environment code."""


class CallTimeout(BaseException):
    """Interrupts a late call; a BaseException, so that `except Exception` does not catch it."""


class Outage(Exception):
    """An error that an environment raises if a service is down.

    `reset`, a tool, the user's `reply` and `get_reward` may raise an Outage. The episode ends, and
    training leaves out the episode. Never raise an Outage for a situation that a policy can cause.
    """


class EnvironmentFault(Exception):
    """A failure of an environment's call; the text is one line.

    `timed_out`: the call exceeded the deadline. `outage`: a service is down, or the rollout has
    stopped calling the domain.
    """

    def __init__(self, text: str, timed_out: bool = False, outage: bool = False) -> None:
        super().__init__(text)
        self.timed_out, self.outage = timed_out, outage


def too_long(name: str, seconds: float) -> EnvironmentFault:
    return EnvironmentFault(f"CallTimeout: {name} took more than {seconds:g} s", timed_out=True)
