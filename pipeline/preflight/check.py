"""Checks of settings, tasks, model and memory before a run, and the plan that `--check` prints."""

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

from pipeline.checkpoints.run_folder import check_folder, folder_of
from pipeline.common.console import say
from pipeline.common.errors import UserError
from pipeline.common.untrusted import printable
from pipeline.config.rules import without_effect
from pipeline.config.settings import SAMPLERS, Config
from pipeline.distributed.main_memory import main_memory, refuse_too_many
from pipeline.distributed.ranks import Ranks
from pipeline.models.chat.fitting import held_clock
from pipeline.models.fitting import fitted
from pipeline.models.loading import SHAPES
from pipeline.models.memory import GIB, Memory
from pipeline.models.model_checks import check_model
from pipeline.preflight.parts import Parts, prepare
from pipeline.rollout.samplers.choice import chosen_sampler


def check_and_prepare(config: Config, ranks: Ranks) -> Parts:
    """Check the settings, tasks, model and memory of a run, on every rank. Raises UserError.

    Of the parts that it returns, fewer episodes play at once if no more fit into memory. The chat
    template of a new run reads rank 0's clock.
    """
    parts = prepare(config, clock=ranks.all_gather_objects(held_clock(), "clock")[0])
    model, _, notes = check_model(config, parts.tokenizer)
    lines = [f"note: {note}" for note in parts.notes]
    lines += [
        f"warning: {warning}" for warning in (*without_effect(config), *parts.warnings, *notes)
    ]
    memory = Memory(config, prompts=parts.prompts.longest, model=model)
    lines += memory.lower_episodes()
    for line in lines if ranks.is_main else ():
        say(line, sys.stdout)
    refuse_full_disk(memory)
    memory.refuse_lack()
    return replace(parts, episodes_at_once=memory.config.rollout.max_concurrent_episodes)


def main(config: Config, *, measures: bool = False) -> int:
    """Check a recipe and print its plan. Writes no files.

    Raises UserError for what a run would refuse. A recipe for more GPUs than this machine has is
    a recipe for another machine: its GPUs' memory counts, and the disk here does not. If
    `measures`, the longest group is played where that is possible, which loads the weights.
    """
    check_folder(config)
    config, chosen = fitted(config)
    lines = [f"recipe {config.recipe}: model {config.model.model}", *chosen]
    try:
        parts = prepare(config)
    except UserError as error:
        if config.model.model not in SHAPES:
            raise
        lines.append(
            f"  not checked: tokenizer and template ({error}); the embedded tokenizer counts below"
        )
        parts = prepare(config, with_tiny_tokenizer=True)
    model, why, notes = check_model(config, parts.tokenizer)
    lines.append(f"sampling: {_sampling(config, why)}")
    lines += [f"model: {note}" for note in notes]
    lines += [f"warning: {warning}" for warning in (*without_effect(config), *parts.warnings)]
    memory = Memory(config, prompts=parts.prompts.longest, model=model)
    if memory.is_here:
        lines += memory.lower_episodes()
    print("\n".join([*lines, *_plan(config, parts), "", *memory.table()]), flush=True)
    if memory.is_here:
        refuse_full_disk(memory)
    memory.refuse_lack()
    if not memory.has_gpu:
        refuse_too_many(memory.num_ranks, main_memory()[1])
    if measures:
        from pipeline.preflight.measure import measured  # whose imports take a second

        for line in measured(memory, parts):
            print(line, flush=True)
    if config.run.plan:
        from pipeline.preflight.plan import plan

        for line in plan(memory, parts):
            print(line, flush=True)
    return 0


def _sampling(config: Config, why: str | None) -> str:
    name, why_slow = chosen_sampler(config.rollout.sampler, why)
    facts = SAMPLERS[name]
    is_missing = bool(facts.package) and find_spec(facts.package) is None
    return facts.in_words + f": {why_slow}" * bool(why_slow) + ", not installed here" * is_missing


def refuse_full_disk(memory: Memory) -> None:
    """Raise UserError if the run's disk has no room for two checkpoints."""
    config = memory.config
    if not config.grpo.use_grpo:
        return
    size = 12.0 * memory.num_trained
    folder = folder_of(config)
    disk = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    if disk.total > 0 and disk.free < 2 * size:  # Some file systems report a size of 0.
        raise UserError(
            f"output_dir: two checkpoints take {2 * size / GIB:.1f} GiB, and there are "
            f"{disk.free / GIB:.1f} free for {str(folder)!r}; make room, or name another folder"
        )


def _plan(config: Config, parts: Parts) -> Iterator[str]:
    if parts.chat.is_append_only:
        yield "chat template: append-only, so a conversation is one sequence of tokens"
    yield from (f"note: {note}" for note in parts.notes)
    yield "tasks"
    for domain, tasks in parts.train.items():
        counts = sorted(Counter(task.family for task in tasks).items())
        families = ", ".join(f"{printable(name)} {count}" for name, count in counts if name)
        shares = next(
            (s.family_shares[domain] for s in parts.stages if domain in s.family_shares),
            dict[str, float](),
        )
        for name, share in shares.items():
            families += f"; share of {printable(name)} {share:.2f}"
        families = f" ({families})" * bool(families)
        held_out = f"{len(parts.held_out[domain])} {config.data.eval_split}"
        yield f"  {domain}: {len(tasks)} to train{families}, {held_out}"
    functions = config.data.reward_funcs
    limits = config.rollout
    weights = config.data.reward_weights or [1.0] * len(functions)
    for target, weight in zip(functions, weights, strict=True):
        yield f"  reward function {target}, weight {weight:g}"
    yield f"stages ({config.curriculum.curriculum}; groups of {limits.num_generations} episodes)"
    if not config.grpo.use_grpo:
        yield "  none: evaluation only"
    elif rounds := config.rft.rft_rounds:
        yield f"  before: rejection fine-tuning in {rounds} round(s), tasks: {config.rft.rft_tasks}"
    for stage in parts.stages if config.grpo.use_grpo else ():
        joined = " or " if stage.schedule else " + "
        groups = joined.join(f"{count} {domain}" for domain, count in stage.groups.items())
        yield f"  {stage.name}: {stage.num_steps} steps" + f" of {groups} groups" * bool(groups)
    if config.run.push_to_hub and config.grpo.use_grpo:
        yield f"after training: upload to {config.run.hub_model_id} on the Hugging Face hub"
    yield (
        f"prompts (limits: {limits.max_tokens} tokens an episode, {limits.max_tokens_per_turn} a "
        "turn)"
    )
    for domain, longest in parts.prompts.longest.items():
        yield f"  {domain}: longest prompt {longest} tokens"
    for domain, tasks in parts.train.items():
        text = parts.tokenizer.decode(parts.prompt_ids(domain, tasks[0]))
        yield printable(f"\n--- a prompt of {domain} ({tasks[0].id}) ---\n{text}")
