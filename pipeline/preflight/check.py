"""`--check`, and what every run checks before it starts ranks.

These are the settings, tasks, tokenizer, template and memory.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from pipeline.checkpoints.run_folder import check_folder, folder_of
from pipeline.config.settings import EMBEDDED_DOMAINS, STARTED_BY_US, Config, UserError
from pipeline.data.tasks import count_by
from pipeline.embedded.experts import play_expert
from pipeline.environments.tools import tool_schemas
from pipeline.files.untrusted import printable
from pipeline.grpo.micro_batches import KEYS_PER_TOKEN
from pipeline.grpo.prefix_tree import unserved
from pipeline.models import lora
from pipeline.models.files import refuse_misfits, refuse_other_vocabulary, weights_in
from pipeline.models.layers import refuse_unlayered, widest
from pipeline.models.loading import from_files, hub_reachable, on_gpu, uses_bf16
from pipeline.models.tiny import tiny_model, tiny_tokenizer
from pipeline.preflight.prepare import Prepared, prepare
from pipeline.preflight.stand_in import try_architecture

GIB = 1 << 30
# Settings of models that change logits after the output layer, which training applies by itself.
SCALED_LOGITS = (
    *("final_logit_softcapping", "logits_soft_cap"),
    *("logits_scaling", "logit_scale", "lm_head_multiplier"),
)
# Shapes of hub models in shipped recipes, so that their memory can be added up where the hub
# cannot be reached. Source: the config.json of each model on the Hugging Face hub.
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    }
}


def validate(config: Config) -> Prepared:
    """Check everything but the run's folder that can be refused before a rank computes.

    Raises UserError.
    """
    parts = prepare(config)
    _, notes = check_model(config, parts)
    if os.environ.get("RANK", "0") == "0" and STARTED_BY_US not in os.environ:
        for note in notes:
            print(f"warning: {note}", flush=True)
    memory, have = memory_per_rank(config), memory_of_a_rank(config)
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
        parts = prepare(config, tokenizer=tiny_tokenizer(config.data.domains))
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
    _print_memory(config)
    return 0


def check_model(config: Config, parts: Prepared) -> tuple[str | None, list[str]]:
    """Why its conversations must be sampled through `generate`, and lines to print about it.

    Its weights are not loaded. Raises UserError where the files of its folder do not fit each
    other, where a small model of its kind is not trained on what it samples, and where the run's
    folder has no room for two checkpoints of it, the one that is written and the one before.
    """
    name = config.model.model
    while lora.is_adapter(name):
        lora.check_files(name)
        name = lora.base_of(name)
    model = empty_model(config)
    if config.grpo.gradient_checkpointing:
        refuse_unlayered(model)
    refuse_other_vocabulary(parts.tokenizer, model)
    if os.path.isdir(name):
        refuse_misfits(name, weights_in(name), model)
    why = why_generate(model)
    if config.grpo.use_grpo:
        size = 4.0 * model.num_parameters() * bool(config.warm_start.steps)
        refuse_full_disk(config, max(size, 12.0 * _num_trained(config, model)))
    is_known = name == "tiny" or STARTED_BY_US in os.environ  # the parent has tried it
    return why, [] if is_known else try_architecture(config, model)


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


def why_generate(model: Any) -> str | None:
    """Why conversations must be sampled through `generate`; None where one cache can serve them.

    The model's weights are not looked at. Raises UserError where neither can.
    """
    config = model.config.get_text_config()
    scaled = [name for name in SCALED_LOGITS if getattr(config, name, None) not in (None, 1.0)]
    if scaled:
        raise UserError(f"model: its config sets {scaled[0]}, which is not supported; use another")
    why = unserved(config)
    if why is None and getattr(model, "_is_stateful", False):
        raise UserError(
            f"model: got {type(model).__name__}, which is recurrent and names no kinds of layers; "
            "use another"
        )
    return why


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
        task, environment = parts.train[domain][0], parts.environments[domain]
        ids = parts.chat.prompt_ids(task.prompt, tool_schemas(environment))
        text = f"--- a prompt of {domain} ({task.id}) ---\n{parts.tokenizer.decode(ids)}"
        print(f"\n{printable(text)}")
        if domain not in EMBEDDED_DOMAINS or not json.loads(task.payload).get("goal"):
            continue
        expert = import_module(f"pipeline.embedded.{domain}").expert
        messages, reward = play_expert(environment(), expert, task)
        print(f"--- its expert, reward {reward:g} ---")
        for message in messages[len(task.prompt) :]:
            calls = [call["function"] for call in message.get("tool_calls", [])]
            said = message["content"] or "; ".join(f"{c['name']}({c['arguments']})" for c in calls)
            print(f"  {message['role']}: {printable(said)}")


def _print_memory(config: Config) -> None:
    need = memory_per_rank(config)
    total, have = sum(need.values()), memory_of_a_rank(config)
    print("\nmemory per rank, estimated")
    for name, size in need.items():
        print(f"  {name:<34}{size / GIB:8.2f} GiB")
    verdict = "fits" if total <= have else "does not fit: a run would be refused here"
    print(
        f"  {'sum':<34}{total / GIB:8.2f} GiB, of {have / GIB:.1f} GiB that a rank has here: "
        f"{verdict}"
    )


def memory_per_rank(config: Config) -> dict[str, float]:
    """Bytes that a rank needs, by purpose, estimated from the model's shape and the limits."""
    model = empty_model(config)
    shape, num_parameters = model.config.get_text_config(), model.num_parameters()
    size = 2 if uses_bf16(config.model) else 4
    layers, intermediate_size = shape.num_hidden_layers, _intermediate_size(shape)
    limits, grpo = config.rollout, config.grpo
    data, num_ranks = config.data, config.run.num_gpus or 1
    groups = -(-limits.tasks_per_step // num_ranks)
    trials = len(data.domains) * data.eval_tasks_per_domain * config.evaluation.eval_trials
    side_by_side = max(groups * limits.num_generations, -(-trials // num_ranks))
    episodes = min(limits.max_live_episodes, side_by_side)
    cache = layers * _size_of_cache(shape) * size * limits.max_tokens * episodes
    memory = {
        "weights (fp32)": 4.0 * num_parameters,
        # In fp32 it shares those that are trained; LoRA's are merged into others.
        "weights of the sampler": size * num_parameters * (size == 2 or config.model.use_peft),
        "key-value cache": cache,
    }
    if grpo.use_grpo:
        trained = _tokens_of_a_step(config, num_ranks)
        tokens = max(limits.max_tokens, min(grpo.max_tokens_per_microbatch, trained))
        # Per token and layer: about 16 hidden-size and 3 intermediate-size tensors kept for the
        # backward pass, and three float32 copies of the logits of one chunk.
        kept = tokens * layers * (16 * shape.hidden_size + 3 * intermediate_size) * size
        if grpo.share_prefixes and not grpo.padding_free:  # keys and values that attention gathers
            gathered = min(tokens * KEYS_PER_TOKEN, trained)
            kept += gathered * layers * 2 * _size_of_keys(shape) * size
        if grpo.gradient_checkpointing:  # one layer's, and every layer's input
            kept = kept // layers + tokens * layers * shape.hidden_size * size
        logits = 3 * 4 * min(1 << 24, tokens * shape.vocab_size)
        memory |= _memory_of_training(config, model, num_parameters)
        memory["activations of a micro-batch"] = float(kept + logits)
    return memory


def _size_of_cache(shape: Any) -> int:
    """Numbers that a token takes in a layer's cache; latent attention keeps what both come from."""
    if latent := getattr(shape, "kv_lora_rank", None):
        return int(latent + shape.qk_rope_head_dim)
    return 2 * _size_of_keys(shape)


def _tokens_of_a_step(config: Config, num_ranks: int) -> int:
    """Tokens of the episodes that a rank trains on in a step, all of full length.

    With dynamic sampling the groups that live may all lie on one rank; balancing evens them out
    to within a group. The warm start's demonstrations count where they are more.
    """
    limits, grpo = config.rollout, config.grpo
    groups = -(-limits.tasks_per_step // num_ranks)
    if grpo.dynamic_sampling:
        balances = grpo.balance_ranks and not config.run.deterministic
        groups = min(groups + 1, limits.tasks_per_step) if balances else limits.tasks_per_step
    episodes = groups * limits.num_generations
    if config.warm_start.steps:
        episodes = max(episodes, -(-config.warm_start.batch_size // num_ranks))
    return episodes * limits.max_tokens


def _size_of_keys(shape: Any) -> int:
    """Numbers that the keys of a token take in a layer; linear attention keeps none."""
    heads = widest(shape, "num_attention_heads")
    head_dim = widest(shape, "head_dim") or shape.hidden_size // max(1, heads)
    return (widest(shape, "num_key_value_heads") or heads) * head_dim


def _intermediate_size(shape: Any) -> int:
    """Of the feed-forward layers; where it is not told, the customary one."""
    return widest(shape, "intermediate_size") or 4 * int(shape.hidden_size)


def _memory_of_training(config: Config, model: Any, num_parameters: int) -> dict[str, float]:
    """Bytes that come with trained weights, in GRPO or the warm start, whichever needs more."""
    grpo, num_trained = config.grpo, _num_trained(config, model)
    num_ranks = config.run.num_gpus or 1
    memory = {}
    if config.model.use_peft:
        memory["LoRA adapters (fp32)"] = 4.0 * num_trained
    memory["gradients (fp32)"] = 4.0 * num_trained
    memory["AdamW (fp32, two moments)"] = 8.0 * num_trained
    if grpo.shard_optimizer:
        memory["AdamW (fp32, two moments)"] /= num_ranks
    if grpo.beta > 0:
        memory["reference policy (fp32)"] = 4.0 * num_trained
    warm_start = {  # trains every weight, and shards nothing
        "gradients of the warm start": 4.0 * num_parameters,
        "AdamW of the warm start": 8.0 * num_parameters,
    }
    needs_more = sum(warm_start.values()) > sum(memory.values())
    return warm_start if config.warm_start.steps and needs_more else memory


def _num_trained(config: Config, model: Any) -> int:
    """Weights that GRPO trains; with LoRA, the model without weights gets its adapters here."""
    if not config.model.use_peft:
        return int(model.num_parameters())
    with torch.device("meta"):
        attached = lora.attach(model, config.model, config.model.model, config.run.seed)
    return sum(p.numel() for p in attached.parameters() if p.requires_grad)


def empty_model(config: Config) -> Any:
    """The recipe's model without its weights."""
    name = config.model.model
    if name == "tiny":
        with torch.device("meta"):
            return tiny_model(tiny_tokenizer(config.data.domains), 0)
    base, settings = name, config.model
    while lora.is_adapter(base):
        base = lora.base_of(base)

    def shape_of() -> Any:
        return AutoConfig.from_pretrained(
            base,
            trust_remote_code=settings.trust_remote_code,
            local_files_only=not hub_reachable(),
        )

    def make() -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                shape,
                trust_remote_code=settings.trust_remote_code,
                attn_implementation=settings.attn_implementation,
            )

    try:
        shape = from_files(base, "configuration", shape_of)
    except UserError:
        if name not in SHAPES:
            raise
        shape = Qwen3Config(**SHAPES[name])
    return from_files(base, "model", make)


def memory_of_a_rank(config: Config) -> float:
    """Bytes that one rank can use here.

    They are its GPU's, or its share of the machine's (or container's) memory.
    """
    if on_gpu():
        return float(
            min(
                torch.cuda.get_device_properties(i).total_memory
                for i in range(torch.cuda.device_count())
            )
        )
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()))
    return total / int(os.environ.get("LOCAL_WORLD_SIZE", config.run.num_gpus or 1))
