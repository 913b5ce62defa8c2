"""Games of TextArena, such as `textarena:GuessTheNumber-v0`.

The game is the customer of an episode: the first observation is the request, a message of the model
is its action, and the answer is what the model has not seen yet. TextArena's wrappers for language
models tell the whole game again at each turn. Here the conversation is the memory, and the texts
have the form of these wrappers.
"""

import json
from inspect import getsource
from random import Random
from types import SimpleNamespace
from typing import Any

from pipeline.common.console import installed
from pipeline.common.errors import UserError, nearest
from pipeline.common.untrusted import one_line, shown
from pipeline.data.tasks import SPLITS, Task
from pipeline.environments.calls import awaited, run_here
from pipeline.environments.domains import Domain, imported

# Methods that give the reward of a game that has not ended; the games use it for invalid moves.
PARTIAL = ("_get_percentage_completion", "_progress", "_calculate_progress")
REMEDIES: dict[type[Exception], str] = {  # for the exceptions of a game that cannot be made
    LookupError: "run python -m nltk.downloader words averaged_perceptron_tagger_eng",
    SyntaxError: "this Python cannot read it, 3.12 reads most",
}


def textarena(
    name: str, opponent: str | None = None, players: int | None = None, **arguments: Any
) -> Domain:
    """Return the domain of a game.

    The `opponent` plays the other seats: `module:function`, async or not, which gets the
    observation of a TextArena agent and returns an action, or `judge`, the language model at
    `judge_url`. The default of `players` is 1, or 2 for a game of several. The `arguments` are
    those of the game. Raises UserError if the game cannot be played.
    """
    arena = installed("textarena", "pip install textarena")
    games = arena.envs.registration.ENV_REGISTRY
    if name not in games:
        near = nearest(name, games)
        hint = f"did you mean {near}?" if near else f"its games begin with {min(games)}"
        raise UserError(f"TextArena has no game {shown(name)}; {hint}")
    try:
        kind = type(_inner(arena.make(name, **arguments)))
    except Exception as error:
        why = str(error).strip("* \n").partition("\n")[0]
        hint = REMEDIES.get(type(error), "mend its arguments, or give what it needs")
        raise UserError(f"the game cannot be made ({one_line(why)}); {hint}") from None
    count = players or (1 if "SinglePlayerState" in getsource(kind) else 2)
    if (count == 1) != (opponent is None):
        hint = "take opponent out" if opponent else "give opponent: module:function, or judge"
        raise UserError(f"the game has {count} players; {hint}")
    is_named = opponent and opponent != "judge"
    play = imported(f"opponent: got {opponent!r}", opponent)[1] if is_named else None

    class TextArena:
        has_judge = opponent == "judge"
        judge: Any

        def reset(self, payload: str) -> str | None:
            seed = json.loads(payload)["seed"]
            self._game = arena.make(name, **arguments)
            self._game.reset(num_players=count, seed=seed)
            state = self._game.state
            # There is no judge before the end of `reset`, so the model moves first.
            self._seat = state.current_player_id if self.has_judge else seed // len(SPLITS) % count
            self._is_over = False
            self.user = SimpleNamespace(reply=self._reply)
            return run_here(self._until_turn)

        def _reply(self, message: str) -> str | None:
            self._is_over, _ = self._game.step(action=message)
            return run_here(self._until_turn)

        async def _until_turn(self) -> str | None:
            """Let the others play; return what the model has not seen yet, or None at the end."""
            state = self._game.state
            while not self._is_over and state.current_player_id != self._seat:
                _, observation = self._game.get_observation()
                action = await awaited((play or self._ask)(str(observation)))
                self._is_over, _ = self._game.step(action=action)
            if self._is_over:
                return None
            _, seen = _inner(self._game).get_observation()
            names = {who: f"Player {who}" for who, _, _ in seen} | state.role_mapping
            return "\n".join(f"[{names[who]}] {text}" for who, text, _ in seen if who != self._seat)

        async def _ask(self, observation: str) -> str:
            answer = await self.judge([{"role": "user", "content": observation}])
            return answer["content"]

        def get_reward(self) -> float:
            rewards, _ = self._game.close()
            reward = (rewards or {}).get(self._seat)
            if isinstance(reward, int | float):
                return float(reward)
            # The game has not ended; or it gives a reason as the reward of an invalid move, as
            # Countdown of 0.7.4 does.
            scores = [getattr(self._game, part) for part in PARTIAL if hasattr(self._game, part)]
            return float(scores[0]()) if scores else 0.0

    return Domain(
        name="",
        environment=TextArena,
        generate_tasks=_generate_tasks,
        about=lambda: {
            "environment": f"textarena:{name}",
            "version": arena.__version__,
            "held-out games": "have seeds of their own, but may equal trained ones",
        },
    )


def _inner(game: Any) -> Any:
    """Return a game without its wrappers."""
    return _inner(game.env) if "env" in vars(game) else game


def _generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    """Return `n` tasks, each with the seed of a game; no seed is in two splits."""
    seeds = range(SPLITS.index(split), 2**31, len(SPLITS))
    return [
        Task(
            domain="",
            id=f"{split}-{number}",
            prompt=({"role": "user", "content": ""},),
            payload=json.dumps({"seed": number}),
        )
        for number in Random(f"{seed} {split}").sample(seeds, n)
    ]
