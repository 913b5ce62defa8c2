"""Random numbers of environments that draw from the global generators of `random` and NumPy."""

import random
from types import TracebackType
from typing import Any

import numpy as np

from pipeline.data.rng import stream_key
from pipeline.data.tasks import Task

_numpy: Any = np.random  # mypy does not know the functions for the global bit generator


class RandomState:
    """The state of the global random number generators while one episode's environment runs.

    The task (with `further` numbers) alone decides the initial state, so all episodes of a task
    draw the same numbers, on any rank and after a resume. Inside the context the global generators
    have the episode's state; after the context the generators have their earlier state. Only the
    main thread may enter.
    """

    def __init__(self, task: Task, *further: int) -> None:
        self._key = stream_key("environment", *task.key, *further)
        self._state: Any = None  # state of `random`, or None before the first use
        self._bits = np.random.MT19937(self._key)

    def __enter__(self) -> None:
        self._outer = random.getstate(), _numpy.get_bit_generator()
        if self._state is None:
            random.seed(self._key)
        else:
            random.setstate(self._state)
        _numpy.set_bit_generator(self._bits)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._state = random.getstate()
        random.setstate(self._outer[0])
        _numpy.set_bit_generator(self._outer[1])
