"""The number of ranks does not change the answer: small versions of `proofs/invariance.py`."""

from pathlib import Path

import pytest

from scripts.proofs.grid import (
    LAYOUTS,
    LOSS_TYPES,
    Cell,
    difference,
    play_updates,
    update_cells,
)
from scripts.proofs.runs import Played, play_run
from tests.support.coin import COIN, warm_started

# The update

GRID = [
    cell
    for cell in update_cells([1, 2], [4], "small")
    if cell.dtype == "float64" or cell.spread == "idle"  # in fp32 the hardest cases
]
WHOLE = [Cell(dtype=dtype) for dtype in ("float64", "float32")]  # what they are compared with
KINDS = [*((kind, "token") for kind in LOSS_TYPES), ("grpo", "sequence"), ("dapo", "sequence")]
LOSSES = [
    Cell(num_ranks=n, count=2, loss_type=loss_type, level=level, layout="token-budget")
    for n in (1, 2)
    for loss_type, level in KINDS
]
TAUGHT = [
    Cell(taught=True),
    Cell(taught=True, num_ranks=2, count=4, layout="balanced"),
    Cell(taught=True, num_ranks=2, count=2, layout="packed", spread="idle"),
]
FAULTY = Cell(num_ranks=2, means=True)


@pytest.fixture(scope="module")
def outcomes():
    return play_updates([*GRID, *WHOLE, *LOSSES, *TAUGHT, FAULTY])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 1e-6)])
def test_ranks_and_micro_batches_change_no_more_than_rounding(outcomes, dtype, bound, layout):
    exact = outcomes[Cell()]
    whole = outcomes[Cell(dtype=dtype)]
    rounding = difference(whole.gradient, exact.gradient)
    assert rounding == 0 if dtype == "float64" else 1e-8 < rounding < 2e-6
    for cell in GRID:
        if (cell.layout, cell.dtype) == (layout, dtype):
            found = outcomes[cell]
            assert difference(found.gradient, whole.gradient) <= bound, cell
            assert difference(found.parameters, whole.parameters) <= bound, cell
            assert difference(found.gradient, exact.gradient) <= max(1.5 * rounding, 1e-12), cell
            if dtype == "float64":
                assert found.statistics == pytest.approx(whole.statistics, rel=1e-6), cell


@pytest.mark.parametrize(("loss_type", "level"), KINDS)
def test_every_loss_is_the_same_on_two_ranks(outcomes, loss_type, level):
    one, two = (outcomes[c] for c in LOSSES if c.loss_type == loss_type and c.level == level)
    assert difference(two.gradient, one.gradient) <= 1e-12
    assert difference(two.parameters, one.parameters) <= 1e-12


def test_an_update_by_teachers_is_the_same_on_two_ranks(outcomes):
    """Three ranks and sharded weights are in `tests/distributed/test_sharding.py`."""
    alone, *others = (outcomes[cell] for cell in TAUGHT)
    assert difference(alone.gradient, outcomes[Cell()].gradient) > 0.01
    for other in others:
        assert difference(other.gradient, alone.gradient) <= 1e-12
        assert difference(other.parameters, alone.parameters) <= 1e-12
        assert other.statistics["train/teacher_kl"] == pytest.approx(
            alone.statistics["train/teacher_kl"], rel=1e-12
        )


def test_means_of_each_rank_would_be_seen(outcomes):
    assert difference(outcomes[FAULTY].gradient, outcomes[Cell()].gradient) > 0.01


def test_all_ranks_end_with_the_same_parameters(outcomes):
    assert all(outcome.same for outcome in outcomes.values())


# The run

FLAGS = [
    *(*COIN, "--num-generations", "16", "--tasks-per-step", "8", "--save-steps", "0"),
    *("--max-tokens-per-turn", "8"),
]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that start from a model that says either word, so that groups are alive."""
    return [*FLAGS, *warm_started(tmp_path_factory.mktemp("start"))]


@pytest.fixture(scope="module")
def alone(start: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Played, Path]:
    """Two steps on one rank, and the folder with the weights after each."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    return play_run(1, [*start, "--max-steps", "2"], folder), folder


def test_the_same_draws_give_the_same_tokens_on_two_ranks(
    start: list[str], alone: tuple[Played, Path], tmp_path: Path
) -> None:
    played, weights = alone
    forced = played.forced_streams(seed=1)
    flags = [*start, "--max-steps", "2"]
    again = play_run(2, flags, tmp_path / "again", forced, weights=weights)
    assert again.num_forced == sum(map(len, forced.values())) > 500
    assert played.largest_gap(again) <= 1e-5
    assert again.update_gap <= 1e-6
    assert all(distance <= 1e-5 for distance in again.ties), again.ties
    print(f"{len(again.ties)} ties in {again.num_forced} tokens")


def test_a_token_forced_against_its_draw_is_noticed(
    start: list[str], alone: tuple[Played, Path], tmp_path: Path
) -> None:
    played, weights = alone
    place = next(place for place in played.episodes if place[1] == 1)  # of the first step
    (key,) = Played(episodes={place: played.episodes[place]}).forced_streams(seed=1)
    forced = played.forced_streams(seed=1)
    forced[key][0] = 5 if forced[key][0] != 5 else 6
    flags = [*start, "--max-steps", "1"]
    again = play_run(1, flags, tmp_path / "again", forced, weights=weights)
    assert max(again.ties) > 1e-5
