"""Faults of an update: micro-batches that do not fit, and a loss or gradient that is not finite."""

import contextlib
import io
import math
import weakref

import pytest
import torch
from accelerate import Accelerator

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.models.rank_memory import is_out_of_memory
from pipeline.training.micro_batches import micro_batch
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Reference, Updater
from scripts.proofs.grid import make_episodes, make_trajectory, small_model
from scripts.proofs.ranks import play_ranks
from tests.support.messages import says

BUDGET = 160  # tokens that the micro-batches of these tests may have
EPISODES = 24  # of each rank


def find_no_memory():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    raise error  # whose traceback now holds this frame, which holds the error


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(context, hidden):
        return hidden.clone()

    @staticmethod
    def backward(context, gradient):
        find_no_memory()


class Tight(TokenLogprobs):
    """Finds no memory in its given forward passes, or in their backward passes half-way.

    Passes are counted from 1. With `room` it has none either for more tokens than that.
    """

    def __init__(self, model, fails=(), backward=False, room=10**9):
        super().__init__(model, 1.0)
        self.fails, self.backward_fails, self.room = set(fails), backward, room
        self.calls, self.failing, self.made = 0, False, []
        model.get_decoder().layers[0].register_forward_hook(self._after_the_first_layer)

    def _after_the_first_layer(self, _, __, hidden):
        return _Raises.apply(hidden) if self.failing and self.backward_fails else hidden

    def forward(self, batch):
        self.calls += 1
        self.failing = self.calls in self.fails or batch.input_ids.numel() > self.room
        found = super().forward(batch)
        self.made.append(weakref.ref(found[0]))
        if self.failing and not self.backward_fails:
            find_no_memory()
        return found


def updater_of(module, budget=BUDGET, run=None, **grpo) -> Updater:
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 60)
    settings = {"entropy_coef": 0.0, "max_tokens_per_microbatch": budget, **grpo}
    config = Config.model_validate(
        {"grpo": settings, "rollout": {"num_generations": 4}, "run": run or {}}
    )
    updater = Updater(accelerator, module, ranks, config)
    return updater


def mine(ranks):
    """This rank's share of the episodes and their advantages."""
    rows, advantages = make_episodes(EPISODES * ranks.num_ranks)
    groups = range(ranks.rank, len(rows) // 4, ranks.num_ranks)
    chosen = [4 * group + i for group in groups for i in range(4)]
    return [rows[i] for i in chosen], [advantages[i] for i in chosen]


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.model.parameters()]).tolist()


# Memory


def two_updates(module, budget=BUDGET, starts_with=None, **settings):
    """Statistics and parameters after each update, what was printed, and the updater."""
    updater, said = updater_of(module, budget, **settings), io.StringIO()
    if starts_with is not None:
        updater.max_tokens_per_microbatch = starts_with
    found = []
    with contextlib.redirect_stderr(said):
        for _ in range(2):
            statistics = updater.update_policy(*mine(updater.ranks), 1e-3)
            found.append((statistics, flat(module)))
    return found, said.getvalue(), updater


def test_where_memory_ends_the_update_is_that_of_half_the_budget():
    found, said, updater = two_updates(Tight(small_model(), {2}, backward=True))
    expected, nothing, half = two_updates(TokenLogprobs(small_model(), 1.0), BUDGET // 2)
    assert nothing == ""
    for (statistics, parameters), (others, other_parameters) in zip(found, expected, strict=True):
        assert parameters == other_parameters
        assert statistics.pop("train/max_tokens_per_microbatch") == 80
        assert statistics == others
    assert "going on with max_tokens_per_microbatch 80\n" in said and said.count("warning") == 1
    assert updater.max_tokens_per_microbatch == 80
    assert (updater.num_tokens, updater.num_padded_tokens) == (
        half.num_tokens,
        half.num_padded_tokens,
    )


def test_an_episode_that_does_not_fit_alone_stops_the_run_and_says_what_to_do():
    rows = [make_trajectory([1, 2], [3] * 30), make_trajectory([1, 2], [4, 5])]
    updater = updater_of(Tight(small_model(), room=20), 16)
    message = (
        r"^out of memory in one episode of 32 tokens on rank 0 \(max_tokens_per_microbatch is 16\);"
        r" set gradient_checkpointing, or lower max_tokens$"
    )
    with pytest.raises(RuntimeError, match=message):
        updater.update_policy(rows, [1.0, -1.0], 1e-3)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_what_the_failed_pass_held_is_free_before_the_next(backward):
    module, free = Tight(small_model(), {2}, backward), []
    module.register_forward_pre_hook(lambda *_: free.append([m() is None for m in module.made]))
    updater = updater_of(module)
    with contextlib.redirect_stderr(io.StringIO()):
        updater.update_policy(*mine(updater.ranks), 1e-3)
    assert free[2] == [True, True], "the exception, or a cycle, still holds the activations"


def test_out_of_memory_is_known_by_its_type_or_its_text():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    for ask in (lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: bytearray(1 << 62)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            ask()
        assert is_out_of_memory(caught.value)
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_out_of_memory(KeyError("can't allocate memory"))


PLACES = [(1, False), ("last", True)]  # which micro-batch fails; in its backward pass


def one_rank_fails():
    """On rank 1 alone memory ends, at each of the places; and the same with its budget at hand."""
    plain = updater_of(TokenLogprobs(small_model(), 1.0), balance_ranks=False)
    count = len(plain._cut([(row, 0.0, 1.0) for row in mine(plain.ranks)[0]]))
    found = {}
    for which, backward in PLACES:
        fails = {count if which == "last" else which} if plain.ranks.rank == 1 else set()
        module = Tight(small_model(), fails, backward)
        results, said, updater = two_updates(module, balance_ranks=False)
        found[which, backward] = results, said, updater.max_tokens_per_microbatch
    own = None if plain.ranks.rank == 0 else BUDGET // 2
    module = TokenLogprobs(small_model(), 1.0)
    found["expected"] = two_updates(module, starts_with=own, balance_ranks=False)[0]
    return count, found


def test_where_memory_ends_on_one_rank_the_others_wait_and_then_take_its_budget():
    (_, first), (count, second) = play_ranks(one_rank_fails, 2)
    assert count >= 4
    for place in PLACES:
        assert first[place][0] == second[place][0] == first["expected"] == second["expected"], place
        assert first[place][1] == "", "only the rank that it happened to says so"
        assert "micro-batch of" in second[place][1] and "on rank 1; going on" in second[place][1]
        assert first[place][2] == second[place][2] == 80
    (statistics, _), (later, _) = first["expected"]
    assert statistics["train/max_tokens_per_microbatch"] == 80
    assert later["train/max_tokens_per_microbatch"] == 80


# What is not finite


class _Poisons(torch.autograd.Function):
    @staticmethod
    def forward(context, hidden):
        return hidden.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * math.nan


class Poisoned(TokenLogprobs):
    """Its gradient is NaN while `poisons`; its loss is not."""

    poisons = False

    def forward(self, batch):
        logprobs, entropy = super().forward(batch)
        return (_Poisons.apply(logprobs) if self.poisons else logprobs), entropy


def state_of(updater):
    """Parameters, moments and gradients, to be compared bit by bit."""
    states = updater.optimizer.state_dict()["state"]
    return (
        flat(updater.module),
        [[value.tolist() for value in state.values()] for state in states.values()],
        [p.grad for p in updater.parameters],
    )


@pytest.mark.parametrize(("bad", "deterministic"), [(math.nan, False), (math.inf, True)])
def test_a_step_that_is_not_finite_is_skipped_as_if_it_had_not_been(bad, deterministic, capsys):
    modules = [TokenLogprobs(small_model(), 1.0) for _ in range(2)]
    disturbed, other = (
        updater_of(module, beta=0.1, run={"deterministic": deterministic}) for module in modules
    )
    for updater in (disturbed, other):
        updater.reference = Reference(updater.module)
        updater.update_policy(*mine(updater.ranks), 1e-3)
    rows, advantages = mine(disturbed.ranks)
    batch = micro_batch([(row, 0.0, 1.0) for row in rows], 0)
    before, reference = state_of(disturbed), disturbed.reference.logprobs(batch)
    statistics = disturbed.update_policy(rows, [*advantages[:-1], bad], 1e-3)
    assert state_of(disturbed) == before and set(before[2]) == {None}
    assert torch.equal(disturbed.reference.logprobs(batch), reference)
    assert statistics["train/skipped"] == 1
    assert not math.isfinite(statistics["train/loss"])
    assert (disturbed.num_skipped, disturbed.num_skipped_in_a_row) == (1, 1)
    says(capsys.readouterr().err, "not finite", "skipped", "rank 0, tasks desk/t1")
    again, expected = (u.update_policy(*mine(u.ranks), 1e-3) for u in (disturbed, other))
    assert again == expected and again["train/skipped"] == 0
    assert state_of(disturbed) == state_of(other)
    assert (disturbed.num_skipped, disturbed.num_skipped_in_a_row) == (1, 0)


def test_several_updates_on_the_episodes_of_a_step_count_as_one_skipped_step(capsys):
    updater = updater_of(TokenLogprobs(small_model(), 1.0), max_skipped_steps=1)
    rows, _ = mine(updater.ranks)
    with updater.ranks.phase("update", "desk", 7):
        for _ in range(3):
            updater.update_policy(rows, [math.nan] * len(rows), 1e-3)
    assert (updater.num_skipped, updater.num_skipped_in_a_row) == (1, 1)
    assert capsys.readouterr().err.count("warning: step 7: the loss") == 3
    with updater.ranks.phase("update", "desk", 8), pytest.raises(RuntimeError, match="2 steps"):
        updater.update_policy(rows, [math.nan] * len(rows), 1e-3)


def skip_on_two_ranks(folder):
    """Updates of which rank 1's data, then its gradient, is at fault; then too many of them."""
    module = Poisoned(small_model(), 1.0)
    updater, said, errors = updater_of(module, BUDGET, max_skipped_steps=2), io.StringIO(), []
    updater.faults_folder = folder
    rank = updater.ranks.rank
    rows, advantages = make_episodes(2 * EPISODES)
    # Rank 1 has most, so that some of its groups move to rank 0 before the update.
    chosen = slice(0, 8) if rank == 0 else slice(8, None)
    rows = [
        make_trajectory(
            row.prompt_ids,
            row.completion_ids,
            row.loss_mask,
            logprobs=row.logprobs,
            domain="retail",
            task_id=f"t{number // 4}",
        )
        for number, row in enumerate(rows)
    ][chosen]
    advantages = advantages[chosen]
    bad = [math.nan if row.task_id == "t11" else a for row, a in zip(rows, advantages, strict=True)]
    found = []
    with contextlib.redirect_stderr(said):
        for step, values in ((12, bad), (13, advantages), (14, bad)):
            module.poisons = step == 13 and rank == 1
            with updater.ranks.phase("update", "retail", step):
                try:
                    found.append(updater.update_policy(rows, values, 1e-3)["train/skipped"])
                except RuntimeError as error:
                    errors.append(str(error))
    same = updater.ranks.check_same_parameters(module.model.named_parameters(), "at the end")
    return found, errors, said.getvalue(), flat(module), updater.num_skipped, same


@pytest.fixture(scope="module")
def skipped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "faults"
    return folder, play_ranks(skip_on_two_ranks, 2, folder)


def saved(folder, step):
    """What each rank has saved of a step, by rank."""
    paths = sorted(folder.glob(f"step-{step:06d}.rank-*.pt"))
    return {int(p.stem.rpartition("-")[2]): torch.load(p, weights_only=True) for p in paths}


def test_ranks_skip_and_stop_together(skipped):
    folder, (one, two) = skipped
    assert one[0] == two[0] == [1, 1]
    assert one[4] == two[4] == 3
    assert one[3] == two[3] == flat(TokenLogprobs(small_model(), 1.0))
    assert one[5] == two[5]
    assert one[1] == two[1] and len(one[1]) == 1
    start = "the loss or gradient was not finite in 3 steps in a row (rank "
    assert one[1][0].startswith(start) and "retail/t11" in one[1][0]
    assert one[1][0].endswith(
        f"; the batches are in {folder}; lower the learning rate or look at them"
    )
    assert two[2] == "", "rank 0 speaks for all"
    first, second = one[2].splitlines()
    assert first.startswith(
        "warning: step 12: the loss or gradient was not finite, so the update was skipped (rank "
    )
    assert second.startswith("warning: step 13: ")
    assert "rank 0, tasks retail/" in second and "; rank 1, tasks retail/" in second
    assert "more" in second, "no more tasks are named than a line holds"


def test_what_is_at_fault_is_kept_with_its_tasks_wherever_it_was_computed(skipped):
    folder, _ = skipped
    for step in (12, 14):
        found = saved(folder, step)
        batches = [batch for content in found.values() for batch in content["micro_batches"]]
        assert all(math.isnan(batch["loss"]) for batch in batches)
        assert all("retail/t11" in batch["tasks"] for batch in batches)
        assert [content["step"] for content in found.values()] == [step] * len(found)
        tasks = [task for batch in batches for task in batch["tasks"]]
        assert tasks.count("retail/t11") == 4
        poisoned = [batch["advantages"].isnan().any() for batch in batches]
        assert all(poisoned) and len(poisoned) <= 4
