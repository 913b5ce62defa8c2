"""What `--check` measures where the weights and the device are at hand: the longest group."""

import os
import random
import resource
import time
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from huggingface_hub import try_to_load_from_cache
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from pipeline.checkpoints.resume import load_start
from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.errors import UserError
from pipeline.files.untrusted import reason_of
from pipeline.grpo.learner import Learner
from pipeline.grpo.updater import Reference, Updater
from pipeline.models import lora
from pipeline.models.loading import dtype_of, uses_bf16
from pipeline.preflight.memory import GIB, Memory
from pipeline.preflight.prepare import Prepared
from pipeline.rollout.sampler import make_sampler
from pipeline.rollout.trajectory import Trajectory

LAST = 16  # tokens that are sampled at the end of each episode; those before are given


def measured(memory: Memory, parts: Prepared) -> Iterator[str]:
    """Play the longest group that the settings allow, do one update, and yield what both need.

    Before that, sampler and trainer are compared, as in a run. On a GPU, a peak is what torch has
    allocated there; on a CPU, it is the largest resident size of this process. Raises UserError if
    the group does not fit, or if the model is none that a run would train.
    """
    config = memory.config
    if why := why_not(memory):
        yield f"not measured: {why}"
        return
    learner, ranks = alone(config, parts)
    device = learner.accelerator.device
    first = config.data.domains[0]
    prompt = parts.prompt_ids(first, parts.longest[first][0])
    learner.check_agreement(prompt)
    yield "sampler and trainer compute the same log-probabilities"
    size = config.rollout.num_generations
    longest = memory.longest(config)
    on_one = "" if config.grpo.shard == "none" else ", on one rank, which shards nothing"
    yield f"\nmemory measured, in GiB, for a group of {size} episodes of {longest:,} tokens{on_one}"
    try:
        begun = time.monotonic()
        group = play_longest(learner, prompt, longest, size)
        yield _row("its rollout", device, begun)
        if config.grpo.use_grpo:
            begun = time.monotonic()
            advantages = [1.0 if number % 2 else -1.0 for number in range(size)]
            updater = updater_of(learner, ranks, config)
            updater.update_policy(group, advantages, learning_rate=0.0)
            yield _row("its update", device, begun)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        raise UserError(
            f"memory: a group of {size} episodes of {longest:,} tokens does not fit "
            f"({reason_of(error)}); lower max_tokens or num_generations, set "
            "gradient_checkpointing or use_peft, or take a smaller model"
        ) from None
    finally:
        learner.close()


def why_not(memory: Memory) -> str:
    """Return why the group cannot be played here, or an empty text."""
    if "RANK" in os.environ:
        return "a launcher has started this process; give --check without one"
    if not memory.is_here:
        return "the recipe is for another machine"
    name = memory.config.model.model
    base = lora.base_of(name) if lora.is_adapter(name) else name
    files = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    is_cached = (isinstance(try_to_load_from_cache(base, file), str) for file in files)
    if base == "tiny" or os.path.isdir(base) or any(is_cached):
        return ""
    return f"the weights of {base} are not on this machine"


def alone(config: Config, parts: Prepared) -> tuple[Learner, Ranks]:
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
        parts.environments,
        config,
        accelerator,
        ranks,
        make_sampler=make_sampler,
    )
    return learner, ranks


def updater_of(learner: Learner, ranks: Ranks, config: Config) -> Updater:
    module = learner.module_to_train()
    reference = Reference(module) if config.grpo.beta > 0 else None
    return Updater(learner.accelerator, module, ranks, config, 0, reference)


def play_longest(learner: Learner, prompt: list[int], longest: int, size: int) -> list[Trajectory]:
    """Return `size` episodes of `longest` tokens, of which no two are alike after the prompt."""
    draws = random.Random(0)
    sampler = learner.sampling.sampler
    count = max(1, min(LAST, longest - len(prompt)))
    given = [draws.choices(prompt, k=longest - len(prompt) - count) for _ in range(size)]
    conversations = sampler.open([prompt + ids for ids in given], range(size))
    messages = sampler.sample(conversations, [count] * size)
    group = list[Trajectory]()
    for conversation, ids, message in zip(conversations, given, messages, strict=True):
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
