"""`--check`, and what every rank checks before it computes: settings, tasks, model, memory."""

from __future__ import annotations

import os
import shutil

from pipeline.checkpoints.run_folder import check_folder, folder_of
from pipeline.config.settings import Config
from pipeline.data.tasks import count_by
from pipeline.errors import UserError
from pipeline.files.untrusted import printable
from pipeline.models import lora
from pipeline.models.capabilities import why_generate
from pipeline.models.layers import refuse_unlayered
from pipeline.models.loading import load_folder, refuse_other_vocabulary
from pipeline.models.shapes import SHAPES, empty_model
from pipeline.preflight.memory import GIB, memory_of_a_rank, memory_per_rank, num_trained
from pipeline.preflight.prepare import Prepared, prepare
from pipeline.preflight.stand_in import try_architecture


def validate(config: Config) -> Prepared:
    """Check everything but the run's folder that can be refused before a rank computes.

    Raises UserError.
    """
    parts = prepare(config)
    _, notes = check_model(config, parts)
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(f"warning: {note}", flush=True)
    memory, have = memory_per_rank(config, parts.tokenizer), memory_of_a_rank(config)
    need = sum(memory.values())
    if need > have:
        terms = " + ".join(f"{name} {size / GIB:.1f}" for name, size in memory.items())
        raise UserError(
            f"memory: each rank needs {need / GIB:.1f} GiB ({terms}) and has "
            f"{have / GIB:.1f}; lower max_concurrent_episodes or max_tokens_per_microbatch, set "
            "use_peft or shard_optimizer, or take a smaller model or larger GPUs"
        )
    return parts


def main(config: Config) -> int:
    """Check a recipe and print what it would do; nothing is written and no weights are loaded."""
    check_folder(config)
    lines = [f"recipe {config.recipe}: model {config.model.model}"]
    try:
        parts = prepare(config)
    except UserError as error:
        if config.model.model not in SHAPES:
            raise
        missing = f"tokenizer and template ({error})"
        lines.append(f"  not checked: {missing}; the embedded tokenizer counts below")
        parts = prepare(config, with_tiny_tokenizer=True)
    why, notes = check_model(config, parts)
    slow = f"through generate, every message from the start again (slower): {why}"
    lines.append(f"sampling: {'one key-value cache over all turns' if why is None else slow}")
    print("\n".join([*lines, *(f"model: {note}" for note in notes)]))
    _print_tasks_and_stages(config, parts)
    _print_prompts(config, parts)
    _print_memory(config, parts)
    return 0


def check_model(config: Config, parts: Prepared) -> tuple[str | None, list[str]]:
    """Why its conversations must be sampled through `generate`, and lines to print about it.

    Its weights are not loaded. Raises UserError where the files of its folder do not fit each
    other, where a small model of its kind is not trained on what it samples, and where the run's
    folder has no room for two checkpoints of it, the one that is written and the one before.
    """
    name = config.model.model
    if lora.is_adapter(name):
        lora.read_adapters(name)
        name = lora.base_of(name)
    model = empty_model(config, parts.tokenizer)
    if config.grpo.gradient_checkpointing:
        refuse_unlayered(model)
    refuse_other_vocabulary(parts.tokenizer, model)
    if os.path.isdir(name):
        load_folder(name, config.model, device="meta")
    why = why_generate(model)
    if config.grpo.use_grpo:
        size = 4.0 * model.num_parameters() * bool(config.warm_start.steps)
        refuse_full_disk(config, max(size, 12.0 * num_trained(config, model)))
    is_tried = name != "tiny" and os.environ.get("LOCAL_RANK", "0") == "0"  # once a machine
    return why, try_architecture(config, model) if is_tried else []


def refuse_full_disk(config: Config, size: float) -> None:
    """UserError where the run's file system has no room for two files of `size` bytes.

    A file system that reports no size is taken to have no limit.
    """
    folder = folder_of(config)
    disk = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    if disk.total > 0 and disk.free < 2 * size:
        raise UserError(
            f"output_dir: two checkpoints take {2 * size / GIB:.1f} GiB, and there are "
            f"{disk.free / GIB:.1f} free for {str(folder)!r}; make room, or name another folder"
        )


def _print_tasks_and_stages(config: Config, parts: Prepared) -> None:
    print("tasks")
    for domain, tasks in parts.train.items():
        counts = count_by(tasks, "family").items()
        families = ", ".join(f"{printable(name)} {count}" for name, count in counts)
        held_out = f"{len(parts.held_out[domain])} {config.data.eval_split}"
        print(f"  {domain}: {len(tasks)} to train ({families}), {held_out}")
    size = config.rollout.num_generations
    print(f"stages ({config.curriculum.curriculum}; groups of {size} episodes)")
    if not config.grpo.use_grpo:
        print("  none: evaluation only")
    for stage in parts.stages if config.grpo.use_grpo else ():
        joined = " or " if stage.turns else " + "
        groups = joined.join(f"{count} {domain}" for domain, count in stage.groups.items())
        print(f"  {stage.name}: {stage.num_steps} steps of {groups} groups")


def _print_prompts(config: Config, parts: Prepared) -> None:
    limits = config.rollout
    in_turn = f"{limits.max_tokens_per_turn} a turn"
    print(f"prompts (limits: {limits.max_tokens} tokens an episode, {in_turn})")
    for name, longest in parts.longest_prompts().items():
        print(f"  {name}: longest prompt {longest} tokens")
    for name, tasks in parts.train.items():
        task = tasks[0]
        text = parts.tokenizer.decode(parts.prompt_ids(name, task))
        print(printable(f"\n--- a prompt of {name} ({task.id}) ---\n{text}"))


def _print_memory(config: Config, parts: Prepared) -> None:
    need = memory_per_rank(config, parts.tokenizer)
    total, have = sum(need.values()), memory_of_a_rank(config)
    verdict = "fits" if total <= have else "does not fit: a run would be refused here"
    print("\nmemory per rank, estimated")
    for name, size in {**need, "sum": total}.items():
        end = f", of {have / GIB:.1f} GiB that a rank has here: {verdict}" if name == "sum" else ""
        print(f"  {name:<34}{size / GIB:8.2f} GiB{end}")
