"""Decoding in blocks of steps that a GPU replays as CUDA graphs.

A step computes one token of each row, from the embedding to the position of the next token, on
buffers that keep their addresses: what a step samples is what the next one reads. A graph replays
the operations of a step without Python. The host's numbers are frozen in it, so there is one graph
for each number of rows and each length of the cache (`bucket`). The host looks at a block of STEPS
tokens while the GPU computes the next block.

Letters in shapes: B rows, K steps, V entries of the vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.common.console import say
from pipeline.data.rng import uniforms
from pipeline.models.rank_memory import bucket, is_out_of_memory, num_cache_rows
from pipeline.rollout.samplers.drawing import Keys, Positions

# Tokens between two looks at the ends of messages. A message that has ended costs up to
# 2 * STEPS - 1 tokens that nobody reads; a look takes the host less time than a step the GPU.
STEPS = 4
SHORTEST = 256  # length of the smallest bucket
EQUAL = 1e-5  # nats between the first two steps and their replays
Function = Callable[[], None]


class Graphs:
    """Captures CUDA graphs, which share memory: no graph reads what another has left there."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self.forget()

    def forget(self) -> None:
        """Let later graphs share other memory; call this when all graphs are gone."""
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Function) -> None:
        """Call a function in the stream of captures; libraries then have their memory there."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, function: Function) -> Function:
        """Return what does the GPU's part of `function` again, on the same tensors.

        Raises RuntimeError if the host would wait for the GPU.
        """
        # A capture that fails may leave the allocator unusable, so waits are found before. The mode
        # holds for all threads, so another thread that waits for the GPU now fails, too.
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.warm_up(function)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog, environments) may use the GPU at the same time.
        options: Any = {"stream": self._stream, "capture_error_mode": "thread_local"}
        before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, self._pool, **options):
                function()
        except RuntimeError as error:  # the first one says why
            torch.cuda.set_stream(before)
            raise (error.__context__ or error) from None
        return graph.replay


class Buffers:
    """What the steps of B rows read and write, and two copies on the host for a block's results."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.state = torch.zeros(3, num_rows, 1, dtype=torch.int64, device=device)
        self.tokens, self.positions, self.last = self.state
        self.rows = torch.arange(num_rows, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        shape = STEPS, num_rows
        self.numbers = torch.zeros(shape, dtype=torch.float64, device=device)
        self.ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        of_blocks = self.numbers, self.ids, self.logprobs
        pins = device.type == "cuda"
        # The host reads one copy while the GPU writes the other.
        self._copies = [
            [torch.zeros(x.shape, dtype=x.dtype, pin_memory=pins) for x in of_blocks]
            for _ in range(2)
        ]

    def next_copies(self) -> list[torch.Tensor]:
        """Return the host's numbers, ids and log-probabilities that are free, each [K, B]."""
        self._copies.reverse()
        return self._copies[0]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of the cache 0, 1, ..., of which the first n are to sample, the others wait."""

    tokens: Sequence[int]  # [n], the last token of each row, not yet in the cache
    held: NDArray[np.int64]  # [B], number of tokens in the cache
    left: NDArray[np.int64]  # [n], maximum number of tokens to sample
    keys: Keys  # [n], streams of random numbers ...
    used: Positions  # [n], ... and how many of these are used

    @property
    def last(self) -> int:
        """The last position that any row may have."""
        return int(max(self.held.max(), (self.held[: len(self.left)] + self.left).max()))


class Decoded(NamedTuple):
    """The tokens that n rows have sampled in T steps."""

    ids: NDArray[np.int64]  # [n, T]
    logprobs: NDArray[np.float32]  # [n, T], in nats
    lengths: NDArray[np.int64]  # [n], number of tokens of each message; the others do not count


class Launched(NamedTuple):
    """A block that the GPU computes, and where the host will find its results."""

    event: torch.cuda.Event | None
    num_steps: int
    copies: list[torch.Tensor]


class Policy(Protocol):
    """What a step computes with; nothing in it may wait for the GPU."""

    def next_logprobs(
        self, rows_B: torch.Tensor, tokens_B1: torch.Tensor, positions_B1: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Return the next tokens' log-probabilities [B, V]; attention reads `length` positions."""

    def draw(self, logprobs_BV: torch.Tensor, numbers_B: torch.Tensor) -> torch.Tensor:
        """Return the token of each row at its random number, [B] int64."""

    def fixed(self) -> list[torch.Tensor]:
        """Return all tensors of the model and of its cache, whose addresses a graph knows."""


class BlockDecoder:
    """Samples the tokens of a batch block by block; `graphs` are CUDA's or a stand-in's.

    The first two replays of a graph are compared with the steps themselves: a graph that differs is
    not used. If a step cannot be captured, all steps are started from Python.
    """

    def __init__(self, policy: Policy, graphs: Any, device: torch.device) -> None:
        self._policy = policy
        self._graphs = graphs
        self._device = device
        self._buffers = dict[int, Buffers]()  # by number of rows
        self._replays = dict[tuple[int, int, bool], Function]()  # by rows, length and greedy
        self._addresses = list[Any]()
        self.num_graphs = 0  # that were proven right

    def decode(
        self, batch: Batch, wanted: int, stops: NDArray[np.int64], capacity: int, greedy: bool
    ) -> Decoded:
        """Sample until `wanted` messages are complete, or half of the rows.

        A message is complete at one of the ids `stops` or at its maximum length. `capacity` is the
        cache's number of positions.
        """
        self._forget_if_moved()
        count = len(batch.left)
        buffers = self._begun(batch)
        most = int(batch.left.max())
        ids = list[NDArray[np.int64]]()
        logprobs = list[NDArray[np.float32]]()
        lengths = np.zeros(count, dtype=np.int64)  # 0 while the message is incomplete
        num_launched = num_read = 0
        is_over = False
        running = deque[Launched]()
        while True:
            if len(running) < 2 and num_launched < most and not is_over:
                num_steps = min(STEPS, most - num_launched)
                steps = np.arange(num_launched, num_launched + num_steps)
                numbers = uniforms(batch.keys, batch.used + steps[:, None])
                end = min(int(batch.held.max()) + num_launched + num_steps, batch.last + 1)
                length = min(bucket(end, SHORTEST), capacity)
                running.append(self._launch(buffers, numbers, length, greedy))
                num_launched += num_steps
                continue
            if not running:
                break
            block = running.popleft()
            if block.event is not None:
                block.event.synchronize()
            for known, new in zip((ids, logprobs), block.copies[1:], strict=True):
                known.append(new[: block.num_steps, :count].numpy().copy())
            number = np.arange(num_read + 1, num_read + block.num_steps + 1)[:, None]
            ends = np.isin(ids[-1], stops) | (number >= batch.left)
            first = np.where(ends.any(0), num_read + 1 + ends.argmax(0), 0)
            lengths = np.where(lengths == 0, first, lengths)
            num_read += block.num_steps
            going = int((lengths == 0).sum())
            is_over = count - going >= wanted or num_cache_rows(going) <= len(batch.held) // 2
        lengths[lengths == 0] = num_launched
        return Decoded(np.concatenate(ids).T, np.concatenate(logprobs).T, lengths)

    def _begun(self, batch: Batch) -> Buffers:
        """Return the buffers of a batch, with its tokens and positions."""
        num_rows = len(batch.held)
        if num_rows not in self._buffers:
            self._buffers[num_rows] = Buffers(num_rows, self._device)
        buffers = self._buffers[num_rows]
        state = torch.zeros(buffers.state.shape, dtype=torch.int64)
        state[0, : len(batch.tokens), 0] = torch.tensor(batch.tokens)
        state[1, :, 0] = torch.from_numpy(batch.held)
        state[2] = batch.last
        if self._device.type == "cuda":  # a copy from pinned memory does not wait
            state = state.pin_memory()
        buffers.state.copy_(state, non_blocking=True)
        return buffers

    def _launch(
        self, buffers: Buffers, numbers_KB: NDArray[np.float64], length: int, greedy: bool
    ) -> Launched:
        num_steps, count = numbers_KB.shape
        copies = buffers.next_copies()
        copies[0][:num_steps, :count] = torch.from_numpy(numbers_KB)
        buffers.numbers.copy_(copies[0], non_blocking=True)
        buffers.step.zero_()
        replay = self._replay(buffers, length, greedy)
        for _ in range(num_steps):
            replay()
        for copied, own in zip(copies[1:], (buffers.ids, buffers.logprobs), strict=True):
            copied.copy_(own, non_blocking=True)
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return Launched(event, num_steps, copies)

    def _replay(self, buffers: Buffers, length: int, greedy: bool) -> Function:
        key = len(buffers.rows), length, greedy
        if key not in self._replays:
            self._replays[key] = self._captured(buffers, length, greedy)
        return self._replays[key]

    def _captured(self, buffers: Buffers, length: int, greedy: bool) -> Function:
        """Return a graph that is proven right; else the step itself, and say why."""

        def step() -> None:
            self._step(buffers, length, greedy)

        def two_steps(function: Function) -> tuple[torch.Tensor, torch.Tensor]:
            """Return tokens and log-probabilities; the second step has other inputs."""
            function()
            function()
            results = buffers.ids[:2].clone(), buffers.logprobs[:2].clone()
            start_over()
            return results

        def start_over() -> None:
            buffers.state.copy_(begun)
            buffers.step.zero_()

        if self._graphs is None:
            return step
        begun = buffers.state.clone()
        try:
            plain = two_steps(lambda: self._graphs.warm_up(step))
            replay: Function = self._graphs.capture(step)
            start_over()
            replayed = two_steps(replay)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._graphs = None
            why = str(error).splitlines()[0]
            say(f"warning: sampling without CUDA graphs, which takes longer: {why}")
            start_over()
            return step
        gap = (plain[1] - replayed[1]).abs().max()
        if not (torch.equal(plain[0], replayed[0]) and float(gap) <= EQUAL):
            what = f"{len(buffers.rows)} rows of {length} tokens"
            say(f"warning: the CUDA graph of {what} samples other tokens than the model; not used")
            return step
        self.num_graphs += 1
        return replay

    def _step(self, buffers: Buffers, length: int, greedy: bool) -> None:
        """Sample one token of each row."""
        logprobs_BV = self._policy.next_logprobs(
            buffers.rows, buffers.tokens, buffers.positions, length
        )
        if greedy:
            sampled_B = logprobs_BV.argmax(-1)
        else:
            numbers_1B = buffers.numbers.index_select(0, buffers.step)
            sampled_B = self._policy.draw(logprobs_BV, numbers_1B[0])
        chosen_B1 = logprobs_BV.gather(-1, sampled_B[:, None])
        buffers.ids.index_copy_(0, buffers.step, sampled_B[None])
        buffers.logprobs.index_copy_(0, buffers.step, chosen_B1.T)
        buffers.tokens.copy_(sampled_B[:, None])
        # Rows with complete messages write at positions up to `last`.
        torch.minimum(buffers.positions + 1, buffers.last, out=buffers.positions)
        buffers.step.add_(1)

    def _forget_if_moved(self) -> None:
        """Forget all graphs if the cache or a weight has moved since their captures."""
        addresses = [(tensor.data_ptr(), tensor.stride()) for tensor in self._policy.fixed()]
        if addresses != self._addresses:
            self.forget()
            self._addresses = addresses

    def forget(self) -> None:
        """Free the graphs and their memory."""
        self._replays.clear()
        self._buffers.clear()
        if self._graphs is not None:
            self._graphs.forget()
