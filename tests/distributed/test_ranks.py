"""What ranks say to each other: real processes over gloo."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from pipeline.distributed.ranks import Ranks, parameter_hash
from scripts.proofs.grid import small_model
from scripts.proofs.ranks import play_ranks

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
        "numbers": ranks.all_gather_numbers([0.1 * rank] * rank),
        "no_numbers": ranks.all_gather_numbers([]),
        "messages": ranks.exchange([f"{rank} to {to}".encode() * to for to in range(num_ranks)]),
        "no_messages": ranks.exchange([b""] * num_ranks),
        "tensors": [t.tolist() for t in ranks.all_gather_tensors(torch.tensor([rank, 7.0]))],
    }
    ranks.barrier("all there")
    model = small_model()
    results["same"] = ranks.check_same_parameters(model.named_parameters(), "at the start")
    if rank == 1:
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1e-6
    results["different"] = error_of(
        ranks.check_same_parameters, model.named_parameters(), "at step 3"
    )
    results["waited"] = ranks.seconds["wait"]
    missing = rank == num_ranks - 1
    if missing and how_the_last_rank_is_missing == "late":
        time.sleep(DEADLINE_S + 1)
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


@pytest.fixture(scope="module")
def talked():
    """By number of ranks; played side by side, because most of the time is that of a deadline."""
    with ThreadPoolExecutor() as pool:
        hows = {2: "late", 3: "gone"}
        yield {count: pool.submit(play_ranks, talk, count, how) for count, how in hows.items()}


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def said(request, talked):
    results = talked[request.param].result()
    for result in results:
        assert isinstance(result, dict), result
    return results


def test_sums_and_maxima_are_over_all_ranks(said):
    count = len(said)
    for result in said:
        assert result["sum"] == [count, 10.0 * sum(range(count)), count * 2.0**53]
        assert result["max"] == 7.0


def test_objects_tensors_and_numbers_come_in_order_of_ranks_to_every_rank(said):
    objects = [{"rank": rank, "items": ["x"] * rank} for rank in range(len(said))]
    assert [result["objects"] for result in said] == [objects] * len(said)
    tensors = [[float(rank), 7.0] for rank in range(len(said))]
    assert [result["tensors"] for result in said] == [tensors] * len(said)
    numbers = [[], [0.1], [0.2, 0.2]][: len(said)]  # as many as each has
    assert [result["numbers"] for result in said] == [numbers] * len(said)
    assert [result["no_numbers"] for result in said] == [[[]] * len(said)] * len(said)
    assert [result["is_main"] for result in said] == [True] + [False] * (len(said) - 1)


def test_each_rank_gets_the_message_that_each_has_for_it(said):
    for to, result in enumerate(said):
        assert result["messages"] == [f"{rank} to {to}".encode() * to for rank in range(len(said))]
        assert result["no_messages"] == [b""] * len(said)


def test_equal_parameters_have_one_hash(said):
    assert {result["same"] for result in said} == {parameter_hash(small_model().named_parameters())}


def test_a_rank_whose_parameters_differ_is_named_everywhere(said):
    for result in said:
        assert result["different"] == (
            "parameters at step 3: ranks [1] differ from rank 0; the run stops here"
        )


def test_a_missing_rank_is_named_within_the_deadline(said):
    message = said[0]["missing"]
    assert message.startswith("end of stage: ")
    assert f"Ranks {len(said) - 1} failed to pass monitoredBarrier" in message
    assert said[0]["deadline"] < 2 * DEADLINE_S + 1
    assert all(0 < result["waited"] < 30 for result in said)
    for waiting in said[1:-1]:
        assert waiting["missing"].startswith("end of stage: ")
