"""Environments in the forms of TRL's documentation, and reward functions."""

import random
import secrets
from typing import Any, Literal

import numpy as np


class Safe:
    """Draws its number in `reset`, and a sound in a tool; plays on after the safe is open."""

    def reset(self, **kwargs: Any) -> str:
        self.number, self.done = random.randint(1, 50), False
        self._dial = int(np.random.randint(1000))
        return f"Open safe {self.number}, dial at {self._dial}."

    def turn(self, number: int, way: Literal["left", "right"] = "left") -> str:
        """
        Turn the dial.

        Args:
            number: The number to turn to.
            way: Direction.

        Returns:
            A sound.
        """
        if self.done:
            raise ValueError("The safe is open.")
        self.done = number == self.number
        return f"{way} {random.random()} {np.random.random()}"

    @staticmethod
    def describe(text: str) -> str:
        return text

    def get_reward(self) -> float:
        return float(self.done)


class Total:
    """Takes its target from a column; reward functions read the state."""

    def reset(self, target: int, **kwargs: Any) -> None:
        self.target, self.total = target, 0

    def add(self, numbers: list[int]) -> int:
        """Add numbers.

        Args:
            numbers: Numbers to add.
        """
        if sum(numbers) > 100:
            raise ValueError("More than 100.")
        self.total += sum(numbers)
        return self.total

    def done(self) -> str:
        """Say that all is added."""
        return "noted"


class Strict:
    """A `reset` without **kwargs, a tool without a docstring, and an argument of the recipe."""

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit

    def reset(self, target: int) -> str:
        self.value = self.target = target
        return f" Limit {self.limit}."

    def lower(self, step: int) -> int:
        self.value = max(self.value - step, self.target - self.limit)
        return self.value


def make_strict(limit: int) -> Strict:
    return Strict(limit)


def hits(environments: list[Any], target: list[int], **kwargs: Any) -> list[float | None]:
    """Score the environments of the class Total."""
    pairs = zip(environments, target, strict=True)
    return [float(e.total == number) if isinstance(e, Total) else None for e, number in pairs]


def lowered(environments: list[Any], **kwargs: Any) -> list[float | None]:
    """Score the environments of the class Strict."""
    return [float(e.value < e.target) if isinstance(e, Strict) else None for e in environments]


# Environments whose `reset` draws what no task can repeat


class _Guess:
    def get_reward(self) -> float:
        return 0.0


class OwnGenerator(_Guess):
    def reset(self, **kwargs: Any) -> str:
        self.number = random.Random().random()
        return "Guess."


class KeptGenerator(_Guess):
    """Draws in its tools."""

    def __init__(self) -> None:
        self.rng = random.Random()

    def reset(self, **kwargs: Any) -> str:
        return "Guess."


class NumpyGenerator(_Guess):
    def reset(self, **kwargs: Any) -> str:
        self.board = np.random.default_rng().random(3)
        return "Guess."


class _Game:
    def __init__(self, number: int) -> None:
        self.number = number


class Inside(_Guess):
    """Has its number in an object."""

    def reset(self, **kwargs: Any) -> str:
        self.game = _Game(secrets.randbelow(10**9))
        return "Guess."


class Server(_Guess):
    """Asks a server, which gives each client the next game."""

    num_games = 0

    def reset(self, **kwargs: Any) -> str:
        Server.num_games += 1
        return f"Game {Server.num_games}."


class Background(_Guess):
    """Episodes of async environments run beside each other, so `random` cannot be theirs."""

    async def reset(self, **kwargs: Any) -> str:
        return f"Guess {random.randrange(10**9)}."


class KeyedBackground(_Guess):
    async def reset(self, id: str, **kwargs: Any) -> str:
        return f"Guess {random.Random(id).randrange(10**9)}."


class Session(_Guess):
    """Keeps a number that is no part of the task."""

    uses_random_state = False

    def reset(self, **kwargs: Any) -> str:
        self.session = secrets.token_hex()
        return "Guess."
