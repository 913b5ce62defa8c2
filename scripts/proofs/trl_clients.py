"""Stand-ins for the clients of game servers that TRL's examples call; each game runs in-process.

The class names, arguments and results are those of the clients of OpenEnv. The games draw from the
global generator of `random`.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

WORDS = ("apple", "brick", "crane", "delta", "eagle", "flint", "grape", "house", "ivory", "joker")
ROWS, COLUMNS = 10, 5
STAY = 1  # the action between 0 (left) and 2 (right)


class TextArenaAction:
    def __init__(self, message: str) -> None:
        self.message = message


class TextArenaEnv:
    """Wordle or Sudoku, as the URL says. An observation has one message, the text of the game."""

    def __init__(self, base_url: str) -> None:
        self._game: Any = Sudoku() if "sudoku" in base_url else Wordle()
        self._text = ""

    def reset(self) -> SimpleNamespace:
        self._text = self._game.begin()
        return self._result(0.0, False)

    def step(self, action: TextArenaAction) -> SimpleNamespace:
        text, reward, done = self._game.play(action.message.strip("[] "))
        self._text += text
        return self._result(reward, done)

    def close(self) -> None:
        self._game = None

    def _result(self, reward: float, done: bool) -> SimpleNamespace:
        observation = SimpleNamespace(messages=[SimpleNamespace(content=self._text)])
        return SimpleNamespace(observation=observation, reward=reward, done=done)


class Wordle:
    """Six guesses at a word of five letters; G: right place, Y: in the word, X: neither."""

    def begin(self) -> str:
        self.word, self.num_guesses = random.choice(WORDS), 0
        return f"Wordle: guess a word of 5 letters that starts with {self.word[0]}."

    def play(self, guess: str) -> tuple[str, float, bool]:
        if len(guess) != len(self.word) or not guess.isalpha():
            return "\nYou attempted an invalid move: 5 letters are needed.", 0.0, False
        self.num_guesses += 1
        pairs = list(zip(guess.lower(), self.word, strict=True))
        marks = "".join("G" if a == b else "Y" if a in self.word else "X" for a, b in pairs)
        won = marks == "GGGGG"
        reward = 1.0 if won else marks.count("G") / 10
        return f"\n{guess.lower()}\n{marks}", reward, won or self.num_guesses == 6


class Sudoku:
    """A grid of 9 x 9 cells with 8 empty cells; a move is the text "row column number"."""

    def begin(self) -> str:
        digits = random.sample(range(1, 10), 9)
        self.solution = [[digits[(3 * r + r // 3 + c) % 9] for c in range(9)] for r in range(9)]
        self.cells = [list(row) for row in self.solution]
        for cell in random.sample(range(81), 8):
            self.cells[cell // 9][cell % 9] = 0
        return f"Sudoku\n{self._board()}"

    def play(self, move: str) -> tuple[str, float, bool]:
        row, column, number = (int(part) for part in move.split())
        if not (1 <= row <= 9 and 1 <= column <= 9) or self.cells[row - 1][column - 1]:
            return "\nInvalid move: the cell is not empty. Please resubmit.", 0.0, False
        if self.solution[row - 1][column - 1] != number:
            return "\nInvalid move: this number is wrong. Please resubmit.", 0.0, False
        self.cells[row - 1][column - 1] = number
        solved = self.cells == self.solution
        return f"\n{self._board()}", float(solved), solved

    def _board(self) -> str:
        lines = ["    C1 C2 C3 | C4 C5 C6 | C7 C8 C9"]
        for number, row in enumerate(self.cells, 1):
            texts = [str(cell or ".") for cell in row]
            parts = "  |  ".join("  ".join(texts[i : i + 3]) for i in (0, 3, 6))
            lines += [f"R{number}   {parts}"] + ["- " * 16] * (number in (3, 6))
        return "\n".join(lines)


class OpenSpielAction:
    def __init__(self, action_id: int, game_name: str) -> None:
        self.action_id, self.game_name = action_id, game_name


class OpenSpielEnv:
    """Catch: a ball falls through 10 rows of 5 columns; the paddle is in the last row."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def reset(self) -> SimpleNamespace:
        self._row, self._ball, self._paddle = 0, random.randrange(COLUMNS), COLUMNS // 2
        return self._result()

    def step(self, action: OpenSpielAction) -> SimpleNamespace:
        self._row += 1
        self._paddle = min(COLUMNS - 1, max(0, self._paddle + action.action_id - STAY))
        return self._result()

    def close(self) -> None:
        self.base_url = ""

    def _result(self) -> SimpleNamespace:
        grid = [0.0] * (ROWS * COLUMNS)
        grid[self._row * COLUMNS + self._ball] = grid[(ROWS - 1) * COLUMNS + self._paddle] = 1.0
        done = self._row == ROWS - 1
        reward = (1.0 if self._ball == self._paddle else -1.0) if done else 0.0
        return SimpleNamespace(
            observation=SimpleNamespace(info_state=grid, done=done), reward=reward
        )


class EchoAction:
    def __init__(self, message: str) -> None:
        self.message = message


class EchoEnv:
    """Returns each message; the reward is a tenth of the number of characters."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def step(self, action: EchoAction) -> SimpleNamespace:
        text = action.message
        return SimpleNamespace(
            observation=SimpleNamespace(reward=len(text) / 10, echoed_message=text)
        )
