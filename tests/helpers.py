"""What several test modules share: small real models, an environment, a scripted policy, real
ranks.
"""

import asyncio
import json
import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from random import Random
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline.chat.template import Chat
from pipeline.data.rng import uniforms
from pipeline.data.tasks import Message, Task
from pipeline.grpo.micro_batches import micro_batch
from pipeline.models.loading import TokenLogprobs
from pipeline.models.tiny import tiny_tokenizer
from pipeline.rollout.row_sampler import Sampler
from pipeline.rollout.sequences import Sampled
from pipeline.rollout.token_sampling import cumulative
from pipeline.rollout.trajectory import StopReason, Trajectory


@cache
def tokenizer() -> Any:
    return tiny_tokenizer()


@cache
def chat() -> Chat:
    return Chat(tokenizer())


def small_model(seed: int = 0, dtype: torch.dtype = torch.float32, vocab_size: int = 16) -> Any:
    """A Qwen3 of 2 layers and few tokens, with weights so large that no distribution is flat."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).to(dtype)


def in_float64(model: Any) -> Any:
    """The model in float64 throughout: transformers' norms compute in float32 whatever they get."""
    model = model.double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_rms_norm, module.weight, module.variance_epsilon)
    return model


def _rms_norm(weight: torch.Tensor, epsilon: float, hidden: torch.Tensor) -> torch.Tensor:
    return weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)


def make_task(name: str = "t1", request: str = "hello", **fields: Any) -> Task:
    prompt = ({"role": "system", "content": "desk"}, {"role": "user", "content": request})
    return Task(**{"domain": "desk", "id": name, "prompt": prompt, "payload": "{}", **fields})


def make_trajectory(
    prompt: Sequence[int] = (1, 2, 3),
    completion: Sequence[int] = (4, 5),
    mask: Sequence[int] | None = None,
    **fields: Any,
) -> Trajectory:
    """An episode in plain ids; `mask` says which of the completion were sampled, all if missing."""
    loss_mask = [True] * len(completion) if mask is None else [bool(m) for m in mask]
    values: dict[str, Any] = {
        "domain": "desk",
        "task_id": "t1",
        "family": "",
        "branch": "",
        "trial": 0,
        "prompt_ids": list(prompt),
        "completion_ids": list(completion),
        "loss_mask": loss_mask,
        "logprobs": [-1.0 if m else 0.0 for m in loss_mask],
        "stop_reason": StopReason.COMPLETED,
        "reward": 0.0,
        "num_turns": 1,
    }
    return Trajectory(**{**values, **fields})


def make_episodes(count: int) -> tuple[list[Trajectory], list[float]]:
    """Random conversations with log-probabilities near the small model's, and advantages."""
    random = Random(count)
    rows = []
    for _ in range(count):
        length = random.randint(1, 40)
        completion = [random.randrange(16) for _ in range(length)]
        mask = [1] + [random.randrange(2) for _ in range(length - 1)]
        rows.append(make_trajectory([1, random.randrange(16)], completion, mask))
    batch = micro_batch([(row, 0.0, 1.0) for row in rows], 0)
    with torch.no_grad():
        logprobs = TokenLogprobs(small_model(), 1.0)(batch)[0]
    noise = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1)) * 0.1
    kept = (logprobs + noise).split([row.num_sampled_tokens for row in rows])
    for i, values in enumerate(kept):
        numbers = iter(values.tolist())
        rows[i] = make_trajectory(
            rows[i].prompt_ids,
            rows[i].completion_ids,
            rows[i].loss_mask,
            logprobs=[next(numbers) if mask else 0.0 for mask in rows[i].loss_mask],
        )
    return rows, [random.choice([-1.0, -0.3, 0.5, 2.0]) for _ in range(count)]


def call(name: str, **arguments: Any) -> Message:
    """An assistant message that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Desk:
    """An environment in TRL's style: tools, `reset`, `get_reward`, and nothing else.

    Its payload may name what fails. The reward is the share of the final message's words that are
    "done".
    """

    def reset(self, **row: Any) -> str | None:
        self.row = row
        self._payload = json.loads(row["payload"])
        self.final_message = ""
        if self._payload.get("fails") == "reset":
            raise RuntimeError("no desk")
        addition: str | None = self._payload.get("addition")
        return addition

    def look(self, item: str, times: int = 1) -> dict[str, str]:
        """Look an item up.

        Args:
            item: Name of the item.
            times: How often.
        """
        return {item: "seen " * times}

    async def wait(self, minutes: int) -> str:
        """Wait for a while.

        Args:
            minutes: How long.
        """
        await asyncio.sleep(0)
        return f"{minutes} minutes later"

    def jam(self) -> str:
        """Jam the printer."""
        raise RuntimeError("paper jam")

    def get_reward(self) -> float:
        if self._payload.get("fails") == "get_reward":
            raise KeyError("ledger")
        words = self.final_message.lower().rstrip(".").split()
        return words.count("done") / max(1, len(words))


class ScriptedSampler:
    """A policy that says given messages: the Sampler's five calls without a model.

    `scripts` holds, for each key, the messages of its turns. `contexts` keeps, for each key, every
    token that the conversation held, and `most_open` how many conversations were open at once.
    """

    def __init__(self, scripts: Mapping[int, Sequence[Message]]) -> None:
        self.scripts = {key: list(messages) for key, messages in scripts.items()}
        self.contexts: dict[int, list[int]] = {}
        self.limits: list[int] = []
        self.num_open = self.most_open = 0

    def load_weights(self, model: Any) -> None:
        pass

    def open(self, prompts: Sequence[list[int]], keys: Sequence[int]) -> list[int]:
        self.num_open += len(keys)
        self.most_open = max(self.most_open, self.num_open)
        self.contexts |= {key: list(ids) for key, ids in zip(keys, prompts, strict=True)}
        return list(keys)

    def extend(self, episode: int, ids: list[int]) -> None:
        self.contexts[episode] += ids

    def close(self, episode: int) -> None:
        self.num_open -= 1

    def sample(
        self,
        episodes: Sequence[int],
        max_tokens: Sequence[int],
        greedy: bool = False,
        until: int | None = None,
    ) -> list[Sampled | None]:
        """The first `until` conversations, in their order, complete their messages."""
        self.limits += max_tokens
        said = [self._say(*pair) for pair in list(zip(episodes, max_tokens, strict=True))[:until]]
        return said + [None] * (len(episodes) - len(said))

    def _say(self, key: int, room: int) -> Sampled:
        ids = chat().message_ids(self.scripts[key].pop(0))
        self.contexts[key] += ids[:room]
        logprobs = [-0.5 - position / 100 for position in range(len(ids))]
        return Sampled(ids=ids[:room], logprobs=logprobs[:room], finished=len(ids) <= room)


class ForcedSampler(Sampler):
    """The real sampler, made to say given tokens instead of those that it draws.

    `forced` holds, for each key, the tokens of its stream in order; other keys are drawn as ever.
    `misses` says, for each forced token by key and position, how far its draw lies from that
    token's share of the cumulative distribution; None where the token would have been drawn.
    """

    forced: Mapping[int, Sequence[int]] = {}

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.misses: dict[tuple[int, int], float | None] = {}

    def pick(self, logprobs_BV: Any, keys: Any, positions: Any, greedy: bool) -> Any:
        picked = super().pick(logprobs_BV, keys, positions, greedy)
        for row, (key, position) in enumerate(zip(keys.tolist(), positions.tolist(), strict=True)):
            tokens = self.forced.get(key, ())
            if position >= len(tokens):  # a free stream, or one that is at its end
                continue
            # A row that has finished its message is asked again with the next one.
            self.misses[key, position] = None
            if picked[row] != tokens[position]:
                picked[row] = tokens[position]
                line = [0.0, *cumulative(logprobs_BV[row : row + 1])[0].tolist()]
                draw = float(uniforms(keys[row], positions[row])) * line[-1]
                low, high = line[tokens[position]], line[tokens[position] + 1]
                self.misses[key, position] = max(low - draw, draw - high)
        return picked


# Real ranks


def start_unwatched(config: Any) -> Any:
    """A run on this rank as `pipeline.train.main` starts it, without its watchdog's thread."""
    from pipeline import session
    from pipeline.distributed.watchdog import Watchdog

    accelerator, ranks = session.connect(config)
    return session.start(config, accelerator, ranks, Watchdog(ranks, config.run.timeout))


_context = get_context("forkserver")  # a clean server process imports once, and ranks fork from it
_context.set_forkserver_preload(["pipeline.session"])


def play_ranks(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout_s: float = 120
) -> list[Any]:
    """Run `function(*arguments)` on so many real processes; what each returns, by rank.

    They are ended when none says anything for `timeout_s`. Each finds the variables that
    `accelerate launch` would set. What a rank raises comes back as the text of its traceback, in
    place of a result.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    scratch = tempfile.TemporaryDirectory(prefix="ranks-")  # what a rank leaves goes with it
    for rank in range(num_ranks):
        receiver, sender = _context.Pipe(duplex=False)
        place = (rank, num_ranks, port, scratch.name)
        process = _context.Process(target=_rank, args=(sender, function, place, arguments))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results: list[Any] = [f"rank {rank} said nothing" for rank in range(num_ranks)]
    open_pipes = list(pipes)
    while open_pipes:
        ready = wait(open_pipes, timeout=timeout_s)
        if not ready:
            break
        for pipe in ready:
            try:
                results[pipes.index(pipe)] = pipe.recv()  # type: ignore[arg-type, union-attr]
            except EOFError:
                open_pipes.remove(pipe)
    for process in processes:
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()
    scratch.cleanup()
    return results


def _rank(
    sender: Any, function: Callable[..., Any], place: tuple[int, int, int, str], arguments: Any
) -> None:
    rank, size, port, tempfile.tempdir = place
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    try:
        result = function(*arguments)
    except Exception:
        result = traceback.format_exc()
    sender.send(result)
    os._exit(0)  # a live gloo group may abort the process on its way out
