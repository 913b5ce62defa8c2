"""Games of TextArena: the real ones where textarena is installed, and small ones in its form."""

import json
import random
import sys
from types import ModuleType, SimpleNamespace

import pytest

from pipeline.config.cli import parse
from pipeline.config.settings import RolloutSettings
from pipeline.environments import Domain, load_domains
from pipeline.environments.task_checks import try_task
from pipeline.environments.tools import RandomState
from pipeline.rollout.trajectory import StopReason
from tests.support.helpers import played, say
from tests.support.messages import refusal, says

LIMITS = RolloutSettings(max_turns=6, max_tokens_per_turn=100, max_tokens=4000)
PLAYERS = """
import asyncio


def reader(observation):
    return f"I read {len(observation.split())} words"


async def slow_reader(observation):
    await asyncio.sleep(0.01)
    return reader(observation)


def winner(observation):
    return "end"


def quitter(observation):
    raise ValueError("I give up")


def center(observation):
    return "[4]"
"""


def game(name: str, **arguments: object) -> Domain:
    setting = {"desk": {"factory": f"textarena:{name}", "arguments": arguments}}
    return load_domains(parse(["--domains", "desk", "--environments", json.dumps(setting)]))["desk"]


def tasks(domain, n=1, split="train"):
    assert domain.generate_tasks is not None
    return domain.generate_tasks(7, n, split, "medium")


def play(domain, *actions, number=0, trials=1, **given):
    task = tasks(domain, number + 1)[number]
    scripts = [list(map(say, actions))] * trials
    return played(scripts, {"desk": domain}, LIMITS, [task] * trials, **given)[0]


def told(trajectory):
    return [m["content"] for m in trajectory.messages if m["role"] == "user"]


class SinglePlayerState:
    """A game's state, as TextArena's; `seen` holds what each player has not yet read."""

    def __init__(self, num_players, seed):
        random.seed(seed)
        self.role_mapping = {-1: "GAME", 0: "Player 0"}
        self.current_player_id = 0
        self.seen = [[] for _ in range(num_players)]

    def tell(self, sender, text):
        for one in self.seen:
            one.append((sender, text, "kind"))


class Count:
    """Counts what a player says, until "end"; "0" is an invalid move."""

    State = SinglePlayerState

    def __init__(self, largest=3):
        self.largest = largest

    def reset(self, num_players, seed=None):
        self.state = self.State(num_players, seed)
        self.state.tell(-1, f"Count to {random.randint(1, self.largest)}.")
        self.said = 0
        self.rewards = None

    def get_observation(self):
        player = self.state.current_player_id
        seen, self.state.seen[player] = self.state.seen[player], []
        return player, seen

    def step(self, action):
        player = self.state.current_player_id
        self.state.tell(player, action)
        self.said += 1
        self.state.tell(-1, f"{self.said} said, {random.randrange(1000)} drawn.")
        if action in ("end", "0"):
            self.rewards = {player: 1 if action == "end" else "a reason", 1 - player: -1}
        return self.rewards is not None, {}

    def close(self):
        return self.rewards, {}

    def _progress(self):
        return self.said / 10


class Race:
    """Two players in turn; who says "end" wins."""

    def __init__(self):
        self.game = Count()

    def __getattr__(self, name):
        if name == "_progress":
            raise AttributeError(name)
        return getattr(self.game, name)

    def step(self, action):
        result = self.game.step(action)
        self.state.current_player_id = 1 - self.state.current_player_id
        return result


class Wrapper:
    """Tells a player all that it has seen, as TextArena's wrapper for language models does."""

    def __init__(self, env):
        self.env = env
        self.told = {0: "", 1: ""}

    def __getattr__(self, name):
        return getattr(self.env, name)

    def get_observation(self):
        player, seen = self.env.get_observation()
        self.told[player] += "".join(f"\n[{who}] {text}" for who, text, _ in seen)
        return player, self.told[player]


def needs_words():
    raise LookupError("\n****\n  Resource 'words' not found.\n  Please use the Downloader\n****")


def needs_python():
    raise SyntaxError("unmatched '['")


def needs_key():
    raise ValueError("OpenRouter API key not found.")


@pytest.fixture
def players(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "arena_players", raising=False)
    (tmp_path / "arena_players.py").write_text(PLAYERS)


@pytest.fixture
def arena(monkeypatch, players):
    """Small games in the form of TextArena's."""
    kinds = {"Count-v0": Count, "Race-v0": Race, "Words-v0": needs_words}
    kinds |= {"New-v0": needs_python, "Asking-v0": needs_key}
    module = ModuleType("textarena")
    module.__version__ = "0"
    module.make = lambda name, **arguments: Wrapper(kinds[name](**arguments))
    module.envs = SimpleNamespace(registration=SimpleNamespace(ENV_REGISTRY=kinds))
    monkeypatch.setitem(sys.modules, "textarena", module)


def test_the_game_answers_with_what_the_model_has_not_seen(arena):
    (trajectory,) = play(game("Count-v0"), "one", "two", "end")
    start, *answers = told(trajectory)
    assert start.removeprefix("hello") in [f"[GAME] Count to {number}." for number in (1, 2, 3)]
    assert [answer.partition(",")[0] for answer in answers] == ["[GAME] 1 said", "[GAME] 2 said"]
    assert (trajectory.reward, trajectory.stop_reason) == (1, StopReason.COMPLETED)


@pytest.mark.parametrize(
    ("actions", "reward", "stop_reason"),
    [(["one"] * 6, 0.6, StopReason.MAX_TURNS), (["one", "0"], 0.2, StopReason.COMPLETED)],
)
def test_a_game_that_gives_no_number_earns_what_it_has_reached(arena, actions, reward, stop_reason):
    (trajectory,) = play(game("Count-v0"), *actions)
    assert (trajectory.reward, trajectory.stop_reason) == (reward, stop_reason)


def test_the_seed_of_a_task_decides_all_draws_and_is_in_one_split(arena):
    domain = game("Count-v0", largest=10**9)
    first, again = play(domain, "one", "two", "end", trials=2)
    (other,) = play(domain, "one", "two", "end", number=1)
    assert first.messages == again.messages
    assert not {*told(first)} & {*told(other)}
    assert try_task(domain, tasks(domain)[0], "desk", 10) == told(first)[0]
    splits = [{t.payload for t in tasks(domain, 300, s)} for s in ("train", "validation", "test")]
    assert len(set.union(*splits)) == 900


@pytest.mark.parametrize("name", ["reader", "slow_reader"])
def test_an_opponent_reads_its_game_and_the_seat_of_the_model_is_drawn(arena, name):
    domain = game("Race-v0", opponent=f"arena_players:{name}")
    starts = list[str]()
    for number in range(8):
        (trajectory,) = play(domain, "one", "end", number=number)
        assert trajectory.reward == 1
        start, answer = told(trajectory)
        starts.append(start.partition("\n")[2].partition("\n")[0])
        reads = int(starts[-1].startswith("[Player 0] I read 4 words"))
        assert answer.splitlines()[1].startswith(f"[Player {1 - reads}] I read ")
    assert {*starts} == {"", "[Player 0] I read 4 words"}


@pytest.mark.parametrize(("opponent", "reward"), [("winner", -1), ("reader", 0)])
def test_a_lost_game_earns_what_the_game_says_and_an_open_one_nothing(arena, opponent, reward):
    domain = game("Race-v0", opponent=f"arena_players:{opponent}")
    number = next(
        n for n, t in enumerate(tasks(domain, 9)) if json.loads(t.payload)["seed"] % 6 < 3
    )
    (trajectory,) = play(domain, *["one"] * 6, number=number)
    assert trajectory.reward == reward


def test_the_judge_may_be_the_opponent_and_the_model_moves_first(arena):
    async def judge(messages):
        return {"role": "assistant", "content": f"{len(messages[0]['content'].split())} words"}

    domain = game("Race-v0", opponent="judge")
    assert domain.asks_judge
    first, again = play(domain, "one", "end", trials=2, judge=judge)
    assert "\n[Player 1] 11 words\n" in told(first)[1]
    assert (first.messages, first.reward) == (again.messages, 1)


def test_an_opponent_that_fails_is_named_with_its_line(arena):
    (trajectory,) = play(game("Race-v0", opponent="arena_players:quitter"), "one", number=1)
    says(trajectory.error, "ValueError: I give up", "arena_players.py, line 19")


@pytest.mark.parametrize(
    ("name", "arguments", "parts"),
    [
        ("Count-v1", {}, ("no game 'Count-v1'", "did you mean Count-v0?")),
        ("Chess", {}, ("no game 'Chess'", "its games begin with Asking-v0")),
        ("Count-v0", {"smallest": 1}, ("cannot be made", "'smallest'", "mend its arguments")),
        ("Words-v0", {}, ("Resource 'words' not found.)", "python -m nltk.downloader words")),
        ("New-v0", {}, ("unmatched '['", "3.12 reads most")),
        ("Asking-v0", {}, ("OpenRouter API key", "give what it needs")),
        ("Race-v0", {}, ("2 players", "give opponent: module:function, or judge")),
        ("Count-v0", {"opponent": "judge"}, ("1 players", "take opponent out")),
        ("Race-v0", {"opponent": "arena_players:nobody"}, ("opponent: got", "no attribute")),
        ("Race-v0", {"players": "few"}, ("argument players", "got 'few'")),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_in_one_line(arena, name, arguments, parts):
    says(refusal(game, name, **arguments), f"got 'textarena:{name}'", *parts)


def test_a_missing_textarena_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    says(refusal(game, "Count-v0"), "textarena is not installed", "pip install textarena")


REAL = {  # games, and actions of which some are valid
    "2048-v0": "up left down right",
    "Countdown-v0": "0 1 +",
    "FrozenLake-v0": "down right down",
    "GuessTheNumber-v0": "10 5 15",
    "Minesweeper-v0-small": "0 0|4 4|2 2",
    "RushHour-v0": "A+ B- X+",
    "Sokoban-v0": "up left down",
    "ThreeCardMonte-v0": "1",
    "Bandit-v0": "red blue red",
}


@pytest.mark.parametrize("name", REAL)
def test_a_real_game_is_equal_for_a_group(name):
    pytest.importorskip("textarena")
    domain = game(name)
    actions = [f"I say [{a}]" for a in REAL[name].split("|" if "|" in REAL[name] else None)]
    for task in tasks(domain, 3):
        played = list[list[object]]()
        for trial in range(2):
            random.seed(trial)
            environment = domain.make()
            state = RandomState(task)
            with state:
                said = [environment.reset(task.payload)]
            for action in actions:
                random.random()
                with state:
                    said.append(environment.user.reply(action))
            with state:
                played.append([*said, environment.get_reward()])
        assert played[0] == played[1]
        assert not any("I say" in text for text in said if text)


def test_a_number_is_guessed():
    pytest.importorskip("textarena")
    domain = game("GuessTheNumber-v0", max_number=6)
    rewards = [play(domain, *(f"[{n}]" for n in range(1, 7)), number=n)[0].reward for n in range(4)]
    assert rewards == [1.0] * 4


def test_a_real_game_of_two(players):
    pytest.importorskip("textarena")
    domain = game("TicTacToe-v0", opponent="arena_players:center")
    for number in range(4):  # the opponent takes the center, and then again, which is invalid
        (trajectory,) = play(domain, "[0]", "[1]", "[2]", number=number)
        assert trajectory.reward == 1
        assert "[4]" in "".join(told(trajectory))
