"""What ranks say to each other: real processes over gloo."""

import io
import os
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta

import pytest
import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from pipeline.distributed.gradients import consolidated_state_dict, sharded_adamw
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


def test_objects_come_in_order_of_ranks_to_every_rank(said):
    expected = [{"rank": rank, "items": ["x"] * rank} for rank in range(len(said))]
    assert [result["objects"] for result in said] == [expected] * len(said)
    assert [result["is_main"] for result in said] == [True] + [False] * (len(said) - 1)


def test_tensors_come_in_order_of_ranks_to_every_rank(said):
    expected = [[float(rank), 7.0] for rank in range(len(said))]
    assert [result["tensors"] for result in said] == [expected] * len(said)


def test_numbers_come_in_order_of_ranks_as_many_as_each_has(said):
    expected = [[], [0.1], [0.2, 0.2]][: len(said)]
    assert [result["numbers"] for result in said] == [expected] * len(said)
    assert [result["no_numbers"] for result in said] == [[[]] * len(said)] * len(said)


def test_each_rank_gets_the_message_that_each_has_for_it(said):
    for to, result in enumerate(said):
        assert result["messages"] == [f"{rank} to {to}".encode() * to for rank in range(len(said))]
        assert result["no_messages"] == [b""] * len(said)


def test_equal_parameters_have_one_hash(said):
    assert {result["same"] for result in said} == {hash_of(small_model())}


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
    for waiting in said[1:-1]:
        assert waiting["missing"].startswith("end of stage: ")


def test_the_time_in_collectives_is_counted(said):
    assert all(0 < result["waited"] < 30 for result in said)


def test_one_rank_alone_needs_no_process_group():
    ranks = Ranks(0, 1, 5)
    ranks.barrier("alone")
    assert ranks.is_main
    assert ranks.sum([1.5, 2]) == [1.5, 2]
    assert ranks.max(3.0) == 3.0
    assert ranks.all_gather_objects("x", "alone") == ["x"]
    assert torch.equal(ranks.all_gather_tensors(torch.arange(3))[0], torch.arange(3))
    assert ranks.all_gather_numbers([1, 2.5]) == [[1.0, 2.5]]
    assert ranks.exchange([b"to myself"]) == [b"to myself"]
    found = ranks.check_same_parameters(small_model().named_parameters(), "now")
    assert found == hash_of(small_model())


def test_between_phases_the_last_one_is_named():
    ranks = Ranks(0, 1, 60)
    assert str(ranks.current) == "start"
    with ranks.phase("evaluate", "start", 0):
        with ranks.phase("checkpoint", "airline", 3):
            pass
        assert str(ranks.current) == "evaluate start step 0"
    assert str(ranks.current) == "after evaluate start step 0"
    with ranks.phase("sample", "airline", 4):
        assert str(ranks.current) == "sample airline step 4"
    assert str(ranks.current) == "after sample airline step 4"


def hash_of(module) -> str:
    return parameter_hash(module.named_parameters())


def test_the_hash_sees_one_bit_one_name_and_any_type():
    model = torch.nn.Linear(2, 2)
    before = hash_of(model)
    with torch.no_grad():
        model.weight[1, 1] = torch.nextafter(model.weight[1, 1], torch.tensor(9.0))
    assert hash_of(model) != before
    renamed = torch.nn.Module()
    renamed.first, renamed.bias = model.weight, model.bias
    assert hash_of(renamed) != hash_of(model)
    assert hash_of(model.to(torch.bfloat16)) != before
    scalar = torch.nn.Module()
    scalar.scale = torch.nn.Parameter(torch.tensor(1.0))
    assert len(hash_of(scalar)) == 64


def fail_on_one_rank():
    Accelerator().wait_for_everyone()  # or the one that is fine could leave before both have met
    assert os.environ["RANK"] == "0", "rank 1 fails"
    return "fine"


def test_a_failure_on_another_rank_reaches_the_test():
    first, second = play_ranks(fail_on_one_rank, 2)
    assert first == "fine"
    assert "AssertionError: rank 1 fails" in second


# The optimizer's moments, spread over the ranks

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.98), "weight_decay": 0.1}


def packed(value) -> bytes:
    """Tensors as bytes: in themselves they would leave a rank as shared memory, which it takes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpacked(value: bytes):
    return torch.load(io.BytesIO(value), weights_only=True)


def three_steps(model, optimizer, start=0):
    """Steps with a gradient that is the same on every rank, and a learning rate that changes."""
    for step in range(start, start + 3):
        ids = torch.randint(0, 16, (2, 9), generator=torch.Generator().manual_seed(step))
        model(ids, labels=ids).loss.backward()
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.step()
        optimizer.zero_grad()


def shard():
    """Steps with a sharded optimizer, and with one that goes on from its whole state."""
    accelerator = Accelerator()
    rank = accelerator.process_index
    model, copy = small_model(), small_model()
    optimizer = sharded_adamw(model.parameters(), **SETTINGS)
    three_steps(model, optimizer)
    state = deepcopy(consolidated_state_dict(optimizer, rank))  # steps change its tensors
    moments = sum(s["exp_avg"].numel() for s in optimizer.optim.state.values())
    halfway = [p.detach().clone() for p in model.parameters()]
    three_steps(model, optimizer, start=3)
    # A second one, on every rank, takes over the state that rank 0 gathered.
    states = Ranks(rank, accelerator.num_processes, 60).all_gather_objects(state, "state")
    with torch.no_grad():
        for own, other in zip(copy.parameters(), halfway, strict=True):
            own.copy_(other)
    resumed = sharded_adamw(copy.parameters(), **SETTINGS)
    resumed.load_state_dict(states[0])
    three_steps(copy, resumed, start=3)
    return packed(
        {
            "state": state,
            "moments": moments,
            "halfway": halfway,
            "parameters": [p.detach() for p in model.parameters()],
            "resumed": [p.detach() for p in copy.parameters()],
        }
    )


TWO = pytest.param(2, marks=pytest.mark.proof)  # which divide more evenly


@pytest.fixture(scope="module", params=[TWO, 3], ids=["2 ranks", "3 ranks"])
def shards(request):
    results = play_ranks(shard, request.param)
    for result in results:
        assert isinstance(result, bytes), result
    return [unpacked(result) for result in results]


def alone():
    """The same with plain AdamW on one process: the model, its optimizer, its state halfway."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    three_steps(model, optimizer)
    return model, optimizer, deepcopy(optimizer.state_dict())


def equal(parameters, others) -> bool:
    return all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))


def test_a_sharded_optimizer_gives_the_same_parameters_bit_by_bit(shards):
    model, optimizer, _ = alone()
    assert all(equal(result["halfway"], model.parameters()) for result in shards)
    three_steps(model, optimizer, start=3)
    assert all(equal(result["parameters"], model.parameters()) for result in shards)


def test_each_rank_holds_its_share_of_the_moments(shards):
    total = sum(p.numel() for p in small_model().parameters())
    assert sum(result["moments"] for result in shards) == total
    for result in shards:
        assert result["moments"] == pytest.approx(total / len(shards), rel=0.1)


def test_the_whole_state_is_on_rank_0_and_is_that_of_one_process(shards):
    _, _, expected = alone()
    state = shards[0]["state"]
    assert [result["state"] for result in shards[1:]] == [None] * (len(shards) - 1)
    assert state["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        assert all(torch.equal(state["state"][index][name], values[name]) for name in values)


def test_a_sharded_state_goes_on_sharded_and_on_one_process(shards):
    for result in shards:
        assert equal(result["resumed"], result["parameters"])
    model = small_model()
    with torch.no_grad():
        for own, other in zip(model.parameters(), shards[0]["halfway"], strict=True):
            own.copy_(other)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    optimizer.load_state_dict(shards[0]["state"])
    three_steps(model, optimizer, start=3)
    assert equal(model.parameters(), shards[0]["parameters"])


def go_on(packed_start):
    Accelerator()
    halfway, state = unpacked(packed_start)
    model = small_model()
    with torch.no_grad():
        for own, other in zip(model.parameters(), halfway, strict=True):
            own.copy_(other)
    optimizer = sharded_adamw(model.parameters(), **SETTINGS)
    optimizer.load_state_dict(state)
    three_steps(model, optimizer, start=3)
    return hash_of(model)


def test_the_state_of_one_process_goes_on_sharded():
    model, optimizer, state = alone()
    halfway = [p.detach().clone() for p in model.parameters()]
    three_steps(model, optimizer, start=3)
    assert play_ranks(go_on, 2, packed((halfway, state))) == [hash_of(model)] * 2


def test_without_a_process_group_the_optimizer_is_plain_adamw():
    optimizer = sharded_adamw(small_model().parameters(), **SETTINGS)
    assert type(optimizer) is torch.optim.AdamW
    assert consolidated_state_dict(optimizer, 0) == optimizer.state_dict()
