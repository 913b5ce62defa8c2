"""What ranks say to each other: real processes over gloo."""

import os
import time
from datetime import timedelta

import pytest
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from helpers import play_ranks, small_model

from pipeline.distributed import Ranks, parameter_hash

DEADLINE_S = 3


def talk(how_the_last_rank_is_missing):
    """Every collective once; then the last rank does not come to a barrier."""
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=60))
    accelerator = Accelerator(kwargs_handlers=[timeout])
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    ranks = Ranks(rank, num_ranks, DEADLINE_S)
    results = {
        "is_main": ranks.is_main,
        "sum": ranks.sum([1.0, 10.0 * rank, 2.0**53]),
        "max": ranks.max(7.0 if rank == 1 else -rank),
        "objects": ranks.all_gather_objects({"rank": rank, "items": ["x"] * rank}, "objects"),
    }
    ranks.barrier("all there")
    model = small_model()
    results["same"] = ranks.check_same_parameters(model, "at the start")
    if rank == 1:
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1e-6
    results["different"] = error_of(ranks.check_same_parameters, model, "at step 3")
    results["waited"] = ranks.seconds["wait"]
    missing = rank == num_ranks - 1
    if missing and how_the_last_rank_is_missing == "late":
        time.sleep(2 * DEADLINE_S)
    elif not missing:
        begun = time.perf_counter()
        with ranks.phase("evaluate", "retail", 3):
            results["missing"] = error_of(ranks.barrier, "end of stage")
        results["deadline"] = time.perf_counter() - begun
    return results


def error_of(function, *arguments) -> str:
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module", params=[(2, "late"), (3, "gone")], ids=["2 ranks", "3 ranks"])
def said(request):
    num_ranks, how = request.param
    results = play_ranks(talk, num_ranks, how)
    for result in results:
        assert isinstance(result, dict), result
    return results


def test_sums_and_maxima_are_over_all_ranks(said):
    count = len(said)
    for result in said:
        assert result["sum"] == [count, 10.0 * sum(range(count)), count * 2.0**53]
        assert result["max"] == 7.0


def test_objects_come_in_order_of_ranks_to_every_rank(said):
    expected = [{"rank": rank, "items": ["x"] * rank} for rank in range(len(said))]
    assert [result["objects"] for result in said] == [expected] * len(said)
    assert [result["is_main"] for result in said] == [True] + [False] * (len(said) - 1)


def test_equal_parameters_have_one_hash(said):
    assert {result["same"] for result in said} == {parameter_hash(small_model())}


def test_a_rank_whose_parameters_differ_is_named_everywhere(said):
    for result in said:
        assert result["different"] == (
            "parameters at step 3: ranks [1] differ from rank 0; the run stops here"
        )


def test_a_missing_rank_is_named_within_the_deadline(said):
    message = said[0]["missing"]
    assert message.startswith("barrier 'end of stage' (rank 0 in phase evaluate retail step 3): ")
    assert f"missing: rank {len(said) - 1}; " in message
    assert said[0]["deadline"] < 2 * DEADLINE_S + 1
    for waiting in said[1:-1]:
        assert "(rank 1 in phase evaluate retail step 3)" in waiting["missing"]


def test_the_time_in_collectives_is_counted(said):
    assert all(0 < result["waited"] < 30 for result in said)


def test_one_rank_alone_needs_no_process_group():
    ranks = Ranks(0, 1, 5)
    ranks.barrier("alone")
    assert ranks.is_main
    assert ranks.sum([1.5, 2]) == [1.5, 2]
    assert ranks.max(3.0) == 3.0
    assert ranks.all_gather_objects("x", "alone") == ["x"]
    assert ranks.check_same_parameters(small_model(), "now") == parameter_hash(small_model())


def test_the_hash_sees_one_bit_one_name_and_any_type():
    model = torch.nn.Linear(2, 2)
    before = parameter_hash(model)
    with torch.no_grad():
        model.weight[1, 1] = torch.nextafter(model.weight[1, 1], torch.tensor(9.0))
    assert parameter_hash(model) != before
    renamed = torch.nn.Module()
    renamed.first, renamed.bias = model.weight, model.bias
    assert parameter_hash(renamed) != parameter_hash(model)
    assert parameter_hash(model.to(torch.bfloat16)) != before
    scalar = torch.nn.Module()
    scalar.scale = torch.nn.Parameter(torch.tensor(1.0))
    assert len(parameter_hash(scalar)) == 64


def fail_on_one_rank():
    Accelerator()
    assert os.environ["RANK"] == "0", "rank 1 fails"
    return "fine"


def test_a_failure_on_another_rank_reaches_the_test():
    first, second = play_ranks(fail_on_one_rank, 2)
    assert first == "fine"
    assert "AssertionError: rank 1 fails" in second
