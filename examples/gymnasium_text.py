"""An environment of Gymnasium as a domain: the frozen lake as a text, with one tool.

pip install gymnasium
three-domain-grpo train --environments '{lake: examples.gymnasium_text:FrozenLake}' \
    --domains lake --model FOLDER --num-gpus 2 --warm-start-steps 0
"""

import random
from typing import Literal

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

ACTIONS = ("left", "down", "right", "up")


class FrozenLake:
    """Each task has a lake of its own: `reset` draws it from `random`, which the task decides."""

    def reset(self) -> str:
        seed = random.getrandbits(31)
        self.lake = generate_random_map(size=4, seed=seed)
        self.env = FrozenLakeEnv(desc=self.lake, is_slippery=False)
        self.env.reset(seed=seed)
        self.total, self.done = 0.0, False
        return f"Walk from S to G over F, around the holes H.\n{self._seen()}"

    def step(self, direction: Literal["left", "down", "right", "up"]) -> str:
        """Walk one field.

        Args:
            direction: Where to.
        """
        _, reward, is_over, _, _ = self.env.step(ACTIONS.index(direction))
        self.total += float(reward)
        self.done = is_over  # ends the episode
        return self._seen()

    def get_reward(self) -> float:
        return self.total

    def _seen(self) -> str:
        row, column = divmod(self.env.s, len(self.lake))
        return "\n".join([*self.lake, f"You are in row {row + 1}, column {column + 1}."])
