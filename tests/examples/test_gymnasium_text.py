"""The frozen lake of Gymnasium as a text, where gymnasium is installed."""

import pytest

pytest.importorskip("gymnasium")

from examples.gymnasium_text import ACTIONS, FrozenLake
from pipeline.environments import Domain, call_tool
from pipeline.environments.domains import _self_sampled
from pipeline.environments.task_checks import try_task

STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def ways(lake, place=(0, 0), way=(), seen=None):
    """All ways to the goal and into holes, each field once."""
    seen = {place} if seen is None else seen
    for action in ACTIONS:
        row, column = (a + b for a, b in zip(place, STEPS[action], strict=True))
        if not (0 <= row < len(lake) and 0 <= column < len(lake)) or (row, column) in seen:
            continue
        if lake[row][column] in "GH":
            yield (*way, action), lake[row][column] == "G"
        else:
            seen.add((row, column))
            yield from ways(lake, (row, column), (*way, action), seen)


def test_a_way_around_the_holes_earns_1_and_a_hole_ends_the_episode():
    walked = set[bool]()
    for _ in range(4):
        environment = FrozenLake()
        for way, is_goal in ways(environment.reset().splitlines()[1:5]):
            environment.env.reset()
            environment.total = 0.0
            for action in way:
                assert not environment.done or action != way[-1]
                call_tool(environment, "step", {"direction": action})
            assert environment.done
            assert environment.get_reward() == is_goal
            walked.add(is_goal)
            environment.done = False
    assert walked == {True, False}


def test_the_task_decides_the_lake():
    domain = Domain(name="lake", environment=FrozenLake)
    requests = [try_task(domain, t, "lake", 10) for t in _self_sampled("lake", 0, 6, "train")]
    assert len({*requests}) > 1
    says = call_tool(FrozenLake(), "step", {"direction": "away"})
    assert "wrong arguments: direction" in says
