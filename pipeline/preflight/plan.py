"""What `--check --plan` adds: memory, exchange and time of a step on other numbers of ranks.

A step takes the sampling and the update of a rank's episodes, and then the bytes that a rank sends,
over the bandwidth. The compute is measured where a run could start; else it is counted in FLOPs.
"""

import time
from collections.abc import Iterator
from statistics import median

from pipeline.config.settings import Config
from pipeline.data.curriculum import tasks_of_step
from pipeline.models.capabilities import idle_weights
from pipeline.models.layers import outer_layers
from pipeline.models.memory import GIB, Memory
from pipeline.preflight.measure import alone, asks_endpoints, new_updater, why_not
from pipeline.preflight.parts import Parts
from pipeline.training.collect import play_groups

SHARDS = ("none", "optimizer", "full")
TIMES = 3  # that a part of a step is measured
TFLOPS = 200.0  # of a GPU in training, if nothing is measured: a fifth of an H100's peak in bf16


def plan(memory: Memory, parts: Parts) -> Iterator[str]:
    """Yield a line for each number of ranks and way of sharding, and then what they assume.

    One rank has nothing to spread, so it has one line.
    """
    config = memory.config
    run = config.run
    counts = sorted({*run.plan})
    if why := _why_counted(memory):
        speed = run.plan_tflops or TFLOPS
        seconds = {n: flops(memory, n) / speed / 1e12 for n in counts}
        how = (
            f"{why}: plan_tflops {speed:g} of a rank, also in sampling, for episodes of "
            f"{memory.longest(config):,} tokens, the limits'"
        )
    else:
        seconds = measured_seconds(config, parts, counts)
        how = "measured here: a rank's groups of the first step, as the model plays them now, alone"
    shards = SHARDS if outer_layers(memory.model) else SHARDS[:2]
    size = config.rollout.num_generations
    rate = run.plan_bandwidth * 1e9
    yield f"\nplan of a step of {config.rollout.tasks_per_step} groups of {size} episodes"
    yield f"  ranks  {'shard':<9}  GiB of a rank  {'bytes a rank sends':>20}  seconds  speed-up"
    for count in counts:
        for shard in shards if count > 1 else ("none",):
            there = memory.on(count, shard)
            need = there.need()
            sent = bytes_sent(there)
            total = seconds[count] + sent / rate
            first = seconds[counts[0]] + bytes_sent(memory.on(counts[0], shard)) / rate
            fits = "" if need <= memory.have else "  does not fit"
            yield (
                f"  {count:>5}  {shard:<9}  {need / GIB:>13.2f}  {sent:>20,.0f}  {total:>7.4g}  "
                f"{first / total:>8.2f}{fits}"
            )
    yield (
        f"  assumes {how}; plan_bandwidth {run.plan_bandwidth:g} GB/s between ranks, while none "
        f"computes; no waits; all groups train; {memory.have / GIB:.1f} GiB of a rank; speed-up "
        f"against {counts[0]:,} ranks"
    )


def _why_counted(memory: Memory) -> str:
    """Return why the compute is counted in FLOPs, or an empty text if it can be measured."""
    config = memory.config
    if config.run.plan_tflops is not None:
        return "counted"
    if asks_endpoints(config):
        return "not measured, for answers of endpoints cost money"
    why = why_not(memory)
    return f"not measured ({why})" if why else ""


def measured_seconds(config: Config, parts: Parts, counts: list[int]) -> dict[int, float]:
    """Return the seconds in which this process does a rank's part of a step, by number of ranks.

    The median of TIMES counts: the first takes longer.
    """
    learner, ranks = alone(config, parts)
    updater = new_updater(learner, ranks, config)
    seed = config.run.seed
    size = config.rollout.num_generations
    stage = next(stage for stage in parts.stages if stage.num_steps)
    tasks = tasks_of_step(stage, stage.first_step, parts.sources(stage), seed)
    seconds = {count: list[float]() for count in counts}
    for count in counts * TIMES:
        begun = time.monotonic()
        own = tasks[::count]
        episodes = play_groups(learner.rollout, ranks, own, size, seed, "plan", "", 0)
        advantages = [1.0 if number % 2 else -1.0 for number in range(len(episodes))]
        for _ in range(config.grpo.num_iterations):
            updater.update_policy(episodes, advantages, learning_rate=0.0)
        learner.sync_weights()
        seconds[count].append(time.monotonic() - begun)
    learner.close()
    return {count: median(values) for count, values in seconds.items()}


def episodes_per_rank(config: Config, num_ranks: int) -> int:
    """Return the episodes of the busiest rank in a step."""
    limits = config.rollout
    return -(-limits.tasks_per_step // num_ranks) * limits.num_generations


def flops(memory: Memory, num_ranks: int) -> float:
    """Return the FLOPs of a rank in a step, for episodes as long as the limits allow.

    For a token, a forward pass takes 2 per parameter, and a backward pass 2 per parameter and 2
    per trained one; attention is left out, and so are the experts that a router does not choose.
    A group's prompt is sampled from once, and an update computes all tokens of an episode.
    """
    config = memory.config
    grpo = config.grpo
    episodes = episodes_per_rank(config, num_ranks)
    longest = memory.longest(config)
    prompt = min(longest, max(memory.prompts.values(), default=0))
    sampled = episodes * (longest - prompt) + episodes / config.rollout.num_generations * prompt
    forwards = 1 + grpo.gradient_checkpointing + (grpo.beta > 0)
    active = memory.num_weights - idle_weights(memory.model)
    trained = memory.num_trained if config.model.use_peft else active
    update = (2.0 * (forwards + 1) * active + 2.0 * trained) * grpo.num_iterations
    return 2.0 * active * sampled + update * episodes * longest


def passes(memory: Memory) -> int:
    """Return the micro-batches of the busiest rank in an update, of episodes at their longest."""
    config = memory.config
    together = max(1, memory.budget(config) // memory.longest(config))
    return -(-episodes_per_rank(config, memory.num_ranks) // together)


def bytes_sent(memory: Memory) -> float:
    """Return the bytes that a rank sends in a step. Rings send (N - 1) / N of a tensor.

    An all-reduce goes round the ring twice. With `full`, each pass gathers the weights in the
    computing type, those of layers again for the backward pass, and adds up gradients in float32;
    the reference policy, and a probe of the sampler's new weights, gather them once. If layers do
    not reshard, an update gathers the weights and adds up the gradients once.
    """
    config = memory.config
    grpo = config.grpo
    whole = 4.0 * memory.num_trained
    weights = float(memory.dtype.itemsize * memory.num_weights)
    once = 0.0
    if grpo.shard == "full":
        inside = sum(p.numel() for x in outer_layers(memory.model) for p in x.parameters())
        again = float(memory.dtype.itemsize * inside)
        has_reference = grpo.beta > 0
        update = weights * (1 + has_reference) + whole
        if grpo.reshard_after_forward:
            update = passes(memory) * (update + again)
        once = whole + weights  # the sampler's new weights, and the probe
    else:
        update = whole * (2 if grpo.shard == "none" else 3)
    ranks = memory.num_ranks
    return (ranks - 1) / ranks * (grpo.num_iterations * update + once)
