"""A domain in which a tiny model has something to learn after seconds: to say one of two words."""

import json
from pathlib import Path
from typing import Any

from pipeline.data.tasks import Task
from pipeline.environments.faults import Outage
from scripts.proofs.runs import play_run
from tests.support.helpers import make_task, say


class CoinEnvironment:
    """Pays for heads; with an id that is odd for tails; never where it ends in a zero.

    With some odd ids, though, tails end in an outage.
    """

    def reset(self, **row: Any) -> None:
        self.row, self.final_message = row, ""

    def toss(self, hard: bool) -> str:
        """Toss the coin.

        Args:
            hard: How hard.
        """
        return "up"

    def get_reward(self) -> float:
        number = int(self.row["id"].partition("-")[2])
        word = "tails" if number % 2 else "heads"
        if number % 4 == 3 and "tails" in self.final_message:
            raise Outage("the coin is out of stock")
        return float(number % 10 > 0 and self.final_message.lower().startswith(word))


class HeadsEnvironment(CoinEnvironment):
    """Pays for heads, whatever the id."""

    def get_reward(self) -> float:
        return float(self.final_message.lower().startswith("heads"))


def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    return [make_task(f"{split}-{i}", "heads or tails", domain="coin") for i in range(n)]


COIN = [
    *("--domains", "coin", "--environments", f"{{coin: {__name__}:CoinEnvironment}}"),
    *("--eval-tasks-per-domain", "1", "--eval-trials", "1", "--validation-steps", "0"),
    *("--num-generations", "3", "--tasks-per-step", "4", "--tasks-per-domain", "40"),
]


def warm_started(folder: Path) -> list[str]:
    """Flags that start from a model that says one word as often as the other."""
    prompt = list(make_task(request="heads or tails").prompt)
    lines = [{"messages": [*prompt, say(word)], "tools": []} for word in ("heads", "tails")]
    (folder / "said.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [*COIN, "--demonstrations", f"{{coin: {folder / 'said.jsonl'}}}", "--deterministic"]
    flags += ["--warm-start-steps", "30", "--warm-start-batch-size", "4"]
    play_run(1, [*flags, "--max-steps", "0"], folder / "out")
    model = str(folder / "out" / "checkpoints" / "warm-start")
    return ["--model", model, "--warm-start-steps", "0"]
