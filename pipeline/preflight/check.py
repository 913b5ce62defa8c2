"""`--check`, and what every rank checks before it computes.

These are the settings, tasks, tokenizer, template and memory.
"""

from __future__ import annotations

import os
import shutil

from pipeline.checkpoints.run_folder import check_folder, folder_of
from pipeline.config.settings import Config
from pipeline.data.tasks import Task, count_by
from pipeline.environments.domains import Domain
from pipeline.environments.timeouts import EnvironmentFault
from pipeline.environments.tools import tool_schemas
from pipeline.errors import UserError
from pipeline.files.untrusted import one_line, printable
from pipeline.models import lora
from pipeline.models.capabilities import why_generate
from pipeline.models.layers import refuse_unlayered
from pipeline.models.loading import load_folder, refuse_other_vocabulary
from pipeline.models.shapes import SHAPES, empty_model
from pipeline.preflight.memory import GIB, _num_trained, memory_of_a_rank, memory_per_rank
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
        parts_of = " + ".join(f"{name} {size / GIB:.1f}" for name, size in memory.items())
        raise UserError(
            f"memory: each rank needs {need / GIB:.1f} GiB ({parts_of}) and has "
            f"{have / GIB:.1f}; lower max_live_episodes or max_tokens_per_microbatch, set "
            "use_peft or shard_optimizer, or take a smaller model or larger GPUs"
        )
    return parts


def main(config: Config) -> int:
    """Check a recipe and print what it would do; nothing is written and no weights are loaded."""
    check_folder(config)
    unreachable = ""
    try:
        parts = prepare(config)
    except UserError as error:
        if config.model.model not in SHAPES:
            raise
        unreachable = str(error)
        parts = prepare(config, with_tiny_tokenizer=True)
    why, notes = check_model(config, parts)
    print(f"recipe {config.recipe}: model {config.model.model}")
    if unreachable:
        print(
            f"  not checked: tokenizer and template ({unreachable}); the embedded tokenizer "
            "counts below"
        )
    if why is None:
        print("sampling: one key-value cache over all turns")
    else:
        print(f"sampling: through generate, every message from the start again (slower): {why}")
    for note in notes:
        print(f"model: {note}")
    _print_tasks(config, parts)
    _print_stages(config, parts)
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
        refuse_full_disk(config, max(size, 12.0 * _num_trained(config, model)))
    is_tried = name != "tiny" and os.environ.get("LOCAL_RANK", "0") == "0"  # once a machine
    return why, try_architecture(config, model) if is_tried else []


def refuse_full_disk(config: Config, size: float) -> None:
    """UserError where the file system of the run's folder cannot take two files of so many bytes.

    One without a size of its own is taken to have no limit.
    """
    folder = folder_of(config)
    found = shutil.disk_usage(next(part for part in (folder, *folder.parents) if part.exists()))
    if found.total > 0 and found.free < 2 * size:
        raise UserError(
            f"output_dir: two checkpoints take {2 * size / GIB:.1f} GiB, and there are "
            f"{found.free / GIB:.1f} free for {str(folder)!r}; make room, or name another folder"
        )


def _print_tasks(config: Config, parts: Prepared) -> None:
    print("tasks")
    for domain in config.data.domains:
        families = ", ".join(
            f"{printable(name)} {count}"
            for name, count in count_by(parts.train[domain], "family").items()
        )
        held_out = len(parts.held_out[domain])
        print(
            f"  {domain}: {len(parts.train[domain])} to train ({families}), {held_out} "
            f"{config.data.eval_split}"
        )


def _print_stages(config: Config, parts: Prepared) -> None:
    size = config.rollout.num_generations
    print(f"stages ({config.curriculum.curriculum}; groups of {size} episodes)")
    if not config.grpo.use_grpo:
        print("  none: evaluation only")
        return
    for stage in parts.stages:
        joined = " or " if stage.turns else " + "
        groups = joined.join(f"{count} {domain}" for domain, count in stage.groups.items())
        print(f"  {stage.name}: {stage.num_steps} steps of {groups} groups")


def _print_prompts(config: Config, parts: Prepared) -> None:
    limits = config.rollout
    print(
        f"prompts (limits: {limits.max_tokens} tokens an episode, {limits.max_tokens_per_turn} "
        "a turn)"
    )
    for domain, longest in parts.longest_prompts().items():
        print(f"  {domain}: longest prompt {longest} tokens")
    for domain in config.data.domains:
        task, known = parts.train[domain][0], parts.domains[domain]
        ids = parts.chat.prompt_ids(task.prompt, tool_schemas(known.environment))
        text = f"--- a prompt of {domain} ({task.id}) ---\n{parts.tokenizer.decode(ids)}"
        print(f"\n{printable(text)}")
        if known.can_demonstrate(task):
            _print_expert(known, task, limits.call_timeout)


def _print_expert(domain: Domain, task: Task, seconds: float) -> None:
    try:
        messages, reward = domain.demonstrate(task, seconds)
    except EnvironmentFault as fault:
        print(f"--- its expert fails: {printable(one_line(str(fault)))} ---")
        return
    print(f"--- its expert, reward {reward:g} ---")
    for message in messages[len(task.prompt) :]:
        calls = [call["function"] for call in message.get("tool_calls", [])]
        said = message["content"] or "; ".join(f"{c['name']}({c['arguments']})" for c in calls)
        print(f"  {message['role']}: {printable(said)}")


def _print_memory(config: Config, parts: Prepared) -> None:
    need = memory_per_rank(config, parts.tokenizer)
    total, have = sum(need.values()), memory_of_a_rank(config)
    print("\nmemory per rank, estimated")
    for name, size in need.items():
        print(f"  {name:<34}{size / GIB:8.2f} GiB")
    verdict = "fits" if total <= have else "does not fit: a run would be refused here"
    print(
        f"  {'sum':<34}{total / GIB:8.2f} GiB, of {have / GIB:.1f} GiB that a rank has here: "
        f"{verdict}"
    )
