"""What `--check` sees where weights and device are at hand: agents' episodes, the longest group."""

import os
import random
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import try_to_load_from_cache
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from pipeline.checkpoints.resume import load_start
from pipeline.common.console import in_words
from pipeline.common.errors import UserError
from pipeline.common.untrusted import one_line, reason_of
from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage
from pipeline.data.rng import stream_key
from pipeline.distributed.devices import dtype_of, uses_bf16
from pipeline.distributed.ranks import Ranks
from pipeline.models import lora
from pipeline.models.memory import GIB, Memory
from pipeline.models.rank_memory import cost_of_a_pair
from pipeline.preflight.parts import Parts
from pipeline.rollout.episode import RolloutRequest
from pipeline.rollout.samplers.choice import make_sampler
from pipeline.rollout.trajectory import Trajectory
from pipeline.training.learner import Learner
from pipeline.training.updater import Reference, Updater

LAST = 16  # tokens that are sampled at the end of each episode; those before are given
SHORT = 512  # tokens of an episode, after the prompt, that says how long the longest group takes
MOST_S = 600.0  # seconds of a group that is still played
PLAYED = 64  # held-out tasks that are played to say how long evaluations take
PLAYED_S = 60.0  # seconds after which this ends


def measured(memory: Memory, parts: Parts) -> Iterator[str]:
    """Play the longest group that the settings allow, do one update, and yield what both need.

    Before that, sampler and trainer are compared, as in a run, and each loop of the user's plays an
    episode. On a GPU, a peak is what torch has
    allocated there; on a CPU, it is the largest resident size of this process. Raises UserError if
    the group does not fit, if the model is none that a run would train, or if a loop fails.
    """
    config = memory.config
    if why := why_not(memory):
        yield f"not measured: {why}"
        return
    learner, ranks = alone(config, parts)
    device = learner.accelerator.device
    prompt = parts.longest_prompt
    learner.check_agreement(prompt)
    yield "sampler and trainer compute the same log-probabilities"
    size = config.rollout.num_generations
    longest = memory.longest(config)
    unplayed = why_not_played(config, parts)
    group_of = f"a group of {size:,} episodes of {longest:,} tokens"
    try:
        for name in (name for name, domain in parts.domains.items() if domain.loop is not None):
            seen = f"no episode is played: {unplayed}, which may cost money"
            yield f"{name}: {seen if unplayed else episode_of_loop(name, learner, parts, config)}"
        short = min(longest, len(prompt) + SHORT)
        begun = time.monotonic()
        play_longest(learner, prompt, short, 1)
        seconds = time.monotonic() - begun
        seconds *= size * tokens_of(learner.model, longest) / tokens_of(learner.model, short)
        if seconds > MOST_S:
            yield f"not measured: the rollout of {group_of} would take about {in_words(seconds)}"
            return
        on_one = "" if config.grpo.shard == "none" else ", on one rank, which shards nothing"
        yield f"\nmemory measured, in GiB, for {group_of}{on_one}"
        begun = time.monotonic()
        group = play_longest(learner, prompt, longest, size)
        yield _row("its rollout", device, begun)
        if config.grpo.use_grpo:
            begun = time.monotonic()
            advantages = [1.0 if number % 2 else -1.0 for number in range(size)]
            updater = new_updater(learner, ranks, config)
            updater.update_policy(group, advantages, learning_rate=0.0)
            yield _row("its update", device, begun)
        if not unplayed:
            yield from time_of_evaluations(learner, parts, config, memory.num_ranks)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        raise UserError(
            f"memory: {group_of} does not fit ({reason_of(error)}); lower max_tokens or "
            "num_generations, set gradient_checkpointing or use_peft, or take a smaller model"
        ) from None
    finally:
        learner.close()


def tokens_of(model: Any, longest: int) -> float:
    """Return the tokens of an episode, with their attention as further tokens."""
    return longest * (1 + cost_of_a_pair(model) * longest / 2)


def asks_endpoints(config: Config) -> bool:
    """Return whether episodes ask a customer or a judge, whose answers cost money."""
    return config.customer.url is not None or config.judge.url is not None


def why_not_played(config: Config, parts: Parts) -> str:
    """Return why no episodes are played, or an empty text."""
    if asks_endpoints(config):
        return "they ask a customer or a judge"
    functions = parts.rewards.functions if parts.rewards else ()
    has_loop = any(domain.loop is not None for domain in parts.domains.values())
    asking = [f.name for f in functions if f.is_async and has_loop]
    return f"the reward function {asking[0]} is async" if asking else ""


def episode_of_loop(name: str, learner: Learner, parts: Parts, config: Config) -> str:
    """Let a domain's loop play an episode, and return what was seen.

    Raises UserError if the loop fails before its first message.
    """
    loop: Any = parts.domains[name].loop
    task = parts.held_out[name][0]
    key = stream_key(config.run.seed, "check", *task.key)
    begun = time.monotonic()
    (episode,) = learner.rollout([RolloutRequest(task=task, trial=0, key=key)])
    seconds = time.monotonic() - begun
    if episode.error and not episode.num_turns:
        raise UserError(f"{name}: its agent fails before its first message: {episode.error}")
    causes = ", ".join(f"{count} {cause}" for cause, count in episode.new_sequences.items())
    num_tokens = sum(sequence.num_tokens for sequence in episode.sequences)
    errors = one_line(getattr(loop, "errors", ""))
    parts_of_line = [
        f"an episode of {getattr(loop, '__name__', 'its loop')}",
        f"{episode.num_turns} messages in {len(episode.sequences)} sequence(s)",
        f"new ones by {causes}" * bool(causes),
        f"{episode.num_sampled_in_all} of {num_tokens} tokens sampled",
        f"{episode.stop_reason}, reward {episode.reward:g}",
        f"{seconds:.1f} s",
        one_line(episode.error),
        f"standard error: {errors}" * bool(errors),
    ]
    return "; ".join(filter(None, parts_of_line))


def num_evaluations(config: Config, stages: Sequence[Stage]) -> tuple[int, int]:
    """Return how many evaluations on all held-out tasks, and how many validations a run has."""
    if not config.grpo.use_grpo:
        return 1, 0
    every = config.evaluation.validation_steps
    last = max((stage.last_step for stage in stages), default=0)
    supervised = (config.warm_start.steps > 0) + (config.rft.rft_rounds > 0)
    before = config.evaluation.eval_on_start + supervised
    return before + len(stages), last // every if every else 0


def time_of_evaluations(
    learner: Learner, parts: Parts, config: Config, num_ranks: int
) -> Iterator[str]:
    """Play held-out tasks for PLAYED_S seconds at most; yield how long the evaluations take."""
    tasks = [task for held_out in parts.held_out.values() for task in held_out]
    played = tasks[:: -(-len(tasks) // PLAYED)]
    requests = [
        RolloutRequest(task=task, trial=0, key=stream_key(config.run.seed, "check", *task.key))
        for task in played
    ]
    ended = list[int]()
    begun = time.monotonic()

    def stop_late(key: str) -> None:
        if not key and time.monotonic() - begun > PLAYED_S:
            raise TimeoutError

    learner.rollout.on_progress = stop_late
    with suppress(TimeoutError):
        learner.rollout(requests, progress=ended.append)
    each = (time.monotonic() - begun) / max(1, sum(ended)) / num_ranks
    number, validations = num_evaluations(config, parts.stages)
    size = len(tasks) * (config.evaluation.eval_trials + config.evaluation.eval_greedy)
    of_validation = sum(map(len, parts.validation.values()))
    times = f"{number} x {size:,} episodes in about {in_words(number * size * each)}"
    if validations:
        seconds = validations * of_validation * each
        times += f", validations {validations} x {of_validation:,} in {in_words(seconds)}"
    if config.grpo.use_grpo:
        groups = sum(sum(s.groups.values()) * s.num_steps for s in parts.stages if not s.schedule)
        groups += sum(
            config.rollout.tasks_per_step * s.num_steps for s in parts.stages if s.schedule
        )
        episodes = groups * config.rollout.num_generations
        times += f", the steps' rollouts {episodes:,} in {in_words(episodes * each)}"
    faster = "after the warm start and " if config.warm_start.steps and config.grpo.use_grpo else ""
    yield (
        f"\ntime, if the model stayed as it is: evaluations {times}; at the speed of {sum(ended)} "
        f"held-out tasks: {faster}with many at once, episodes take less time"
    )


def why_not(memory: Memory) -> str:
    """Return why the group cannot be played here, or an empty text."""
    if "RANK" in os.environ:
        return "a launcher has started this process; give --check without one"
    if not memory.is_here:
        return "the recipe is for another machine"
    name = memory.config.model.model
    base = lora.base_named_in(name) if lora.is_adapter(name) else name
    is_cached = (
        isinstance(try_to_load_from_cache(base, file), str)
        for file in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    )
    if base == "tiny" or os.path.isdir(base) or any(is_cached):
        return ""
    return f"the weights of {base} are not on this machine"


def alone(config: Config, parts: Parts) -> tuple[Learner, Ranks]:
    """Return the learner of a run of one rank before its training, and that rank.

    A run with LoRA gets new adapters.
    """
    accelerator = Accelerator(mixed_precision="bf16" if uses_bf16(config.model) else "no")
    ranks = Ranks(0, 1, config.run.timeout)
    settings = config.model
    _, model = load_start(config, parts.tokenizer, None, accelerator.device)
    if settings.use_peft:
        model = lora.attach(model, settings, settings.model, config.run.seed, dtype_of(settings))
    learner = Learner(
        model,
        parts.chat,
        parts.domains,
        config,
        accelerator,
        ranks,
        make_sampler=make_sampler,
        rewards=None if why_not_played(config, parts) else parts.rewards,
    )
    return learner, ranks


def new_updater(learner: Learner, ranks: Ranks, config: Config) -> Updater:
    module = learner.module_to_train()
    reference = Reference(module) if config.grpo.beta > 0 else None
    start = Reference(module) if config.grpo.movement_coef > 0 else None
    return Updater(learner.accelerator, module, ranks, config, reference=reference, start=start)


def play_longest(learner: Learner, prompt: list[int], longest: int, size: int) -> list[Trajectory]:
    """Return `size` episodes of `longest` tokens, of which no two are alike after the prompt."""
    draws = random.Random(0)
    sampler = learner.sampling.sampler
    count = max(1, min(LAST, longest - len(prompt)))
    beginnings = [draws.choices(prompt, k=longest - len(prompt) - count) for _ in range(size)]
    conversations = sampler.open([prompt + ids for ids in beginnings], range(size))
    messages = sampler.sample(conversations, [count] * size)
    group = list[Trajectory]()
    for conversation, ids, message in zip(conversations, beginnings, messages, strict=True):
        assert message is not None, "a call without `until` completes all messages"
        trajectory = Trajectory(domain="", task_id="", prompt_ids=prompt)
        trajectory.append(ids, [0.0] * len(ids))
        trajectory.append(message.ids, message.logprobs)
        group.append(trajectory)
        sampler.close(conversation)
    return group


def _row(name: str, device: torch.device, begun: float) -> str:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    return f"  {f'peak of {name}':<34}{peak / GIB:>12.2f}   in {time.monotonic() - begun:.1f} s"
