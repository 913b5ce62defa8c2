"""The warm start: a short supervised stage on demonstrations, with TRL's SFTTrainer.

With LoRA, it trains the adapters. As in the update of GRPO, a backward pass has a micro-batch,
and logits come in chunks (`grpo/token_logprobs.py`).

All ranks of the run take part in the warm start. `chat/template.py` makes the tokens of both
demonstrations and rollouts. The expert of a domain follows the domain's rules in only a share of
the demonstrations (`warm_start.rule_share`), so that GRPO can improve the policy. `fine_tune` also
trains on examples that are no demonstrations.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import count, groupby, islice, pairwise
from typing import Any

import torch

from pipeline.chat.template import Chat
from pipeline.config.settings import Config
from pipeline.data.rng import permutation
from pipeline.data.tasks import Message
from pipeline.environments.demonstrations import demonstrations_of, has_demonstrations
from pipeline.environments.domains import Domain
from pipeline.errors import UserError
from pipeline.grpo.micro_batches import MicroBatch, cuts
from pipeline.grpo.token_logprobs import TokenLogprobs
from pipeline.models.budget import memory_of, token_budget
from pipeline.models.capabilities import recompute_layers
from pipeline.models.loading import on_gpu, uses_bf16
from pipeline.models.lora import base_model

SFTExample = dict[str, list[int]]  # has the keys `input_ids` and `labels`
IGNORED = -100  # label of tokens without a loss, as in transformers


def fine_tune(
    config: Config,
    model: Any,
    chat: Chat,
    examples: Sequence[SFTExample],
    num_ranks: int,
    on_step: Callable[[float | None], None],
) -> float:
    """Train `model` in place on examples in their order, with the settings of the warm start.

    Every rank must call this function after creating the Accelerator. `examples` are the examples
    of all steps, `warm_start.batch_size` for each step. `on_step` is called after each optimizer
    step with the last logged loss, a mean over an eighth of the steps, or with None. Returns the
    mean loss of the last eighth of the steps. Afterwards, `model` returns losses instead of logits.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTTrainer

    size, deterministic = config.warm_start.batch_size, config.run.deterministic
    budget = token_budget(config, base_model(model), memory_of(next(model.parameters()).device))
    if config.grpo.gradient_checkpointing:
        recompute_layers(model)

    class Trainer(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.eval()  # without dropout, whose masks would depend on the number of ranks
            *others, last = _micro_batches(self._prepare_inputs(inputs), budget)
            # DDP averages over the ranks, whose labels `num_items_in_batch` counts.
            is_mean = self.args.average_tokens_across_devices
            scale = (self.accelerator.num_processes if is_mean else 1) / num_items_in_batch
            losses = torch.zeros((), device=self.accelerator.device)
            for batch in (*others, last):
                # If `deterministic`, each rank has all examples, so DDP sums nothing.
                is_synced = batch is last and not deterministic
                with nullcontext() if is_synced else self.accelerator.no_sync(model):
                    loss = model(batch) * scale
                    self.accelerator.backward(loss)
                losses += loss.detach()
            return losses

    trainer = Trainer(
        model=model,
        args=_arguments(config, size if deterministic else -(-size // num_ranks)),
        train_dataset=Dataset.from_list(share_steps(examples, size, num_ranks, deterministic)),
        processing_class=chat.tokenizer,
    )
    trainer.remove_callback(PrinterCallback)

    class Hooks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            on_step(next((e["loss"] for e in trainer.state.log_history[::-1] if "loss" in e), None))

    trainer.add_callback(Hooks())
    module = TokenLogprobs(model, temperature=1.0, trains_entropy=False)
    model.forward = lambda batch: -module(batch)[0].sum()
    trainer.train()
    return float([entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1])


def _micro_batches(inputs: Mapping[str, torch.Tensor], budget: int) -> Iterator[MicroBatch]:
    """Yield a step's padded examples in micro-batches of at most `budget` tokens."""
    lengths = inputs["attention_mask"].sum(1).tolist()
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for first, end in pairwise([0, *cuts([lengths[i] for i in order], budget, False)]):
        part = order[first:end], slice(lengths[order[first]])
        ids, labels = inputs["input_ids"][part], inputs["labels"][part]
        rows, columns = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
        unused = labels.new_zeros(0, dtype=torch.float32)
        yield MicroBatch(
            input_ids=ids,
            position_ids=None,
            lengths=torch.tensor([lengths[i] for i in order[first:end]]),
            rows=rows,
            columns=columns,
            sequences=rows,
            targets=labels[rows, columns + 1],
            old_logprobs=unused,
            advantages=unused,
            weights=unused,
        )


def _arguments(config: Config, num_examples: int) -> Any:
    """Return SFTTrainer's arguments; each rank trains on `num_examples` examples per step."""
    from trl import SFTConfig

    settings = config.warm_start
    new, old = "activation_checkpointing", "gradient_checkpointing"  # transformers 5.23 has both
    recomputing: Any = {new if new in SFTConfig.__dataclass_fields__ else old: False}
    arguments = SFTConfig(
        output_dir=str(config.run.output_dir),
        max_steps=settings.steps,
        per_device_train_batch_size=num_examples,
        average_tokens_across_devices=not config.run.deterministic,
        train_sampling_strategy="sequential",
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        adam_beta2=0.98,
        weight_decay=0.01,
        bf16=uses_bf16(config.model),
        use_cpu=not on_gpu(),
        **recomputing,
        save_strategy="no",
        logging_steps=max(1, settings.steps // 8),
        disable_tqdm=True,
        seed=config.run.seed,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        dataloader_pin_memory=on_gpu(),
        ddp_find_unused_parameters=False,
        accelerator_config={"use_configured_state": True},
    )
    arguments._n_gpu = 1  # prevents DataParallel if a rank sees several GPUs
    return arguments


def share_steps(
    examples: Sequence[SFTExample], batch_size: int, num_ranks: int, deterministic: bool
) -> list[SFTExample]:
    """Return the examples in the order in which SFTTrainer gives examples to the ranks.

    Padding examples fill up each step, so that all ranks get equal numbers of examples. If
    `deterministic`, each rank gets all examples, so that sums do not depend on the number of ranks.
    """
    steps = [list(examples[i : i + batch_size]) for i in range(0, len(examples), batch_size)]
    padding = [{"input_ids": [0], "labels": [IGNORED]}] * (-batch_size % num_ranks)
    return [e for s in steps for e in (s * num_ranks if deterministic else s + padding)]


def sources_of(config: Config, domains: Mapping[str, Domain]) -> tuple[list[Domain], int]:
    """Return the domains with demonstrations, and how many examples each domain must give."""
    sources = [domain for domain in domains.values() if has_demonstrations(config, domain)]
    count = config.warm_start.steps * config.warm_start.batch_size
    return sources, -(-count // max(1, len(sources)))


def sft_examples(
    config: Config,
    chat: Chat,
    domains: Mapping[str, Domain],
    alive: Callable[[], None] = lambda: None,
) -> list[SFTExample]:
    """Return the examples of all steps of the warm start, in the order of the steps.

    Each domain gives the same number of examples. A file with fewer demonstrations is read in
    passes, each in an order of its own. `alive` is called after each demonstration.
    """
    examples, repeated = dict[str, list[SFTExample]](), dict[str, Iterator[int]]()
    positions = list[tuple[str, int]]()
    total, seed = config.warm_start.steps * config.warm_start.batch_size, config.run.seed
    sources, per_domain = sources_of(config, domains)
    for domain in sources:
        own = examples[domain.name] = []
        for _, messages, tools in demonstrations_of(config, domain, per_domain):
            own.append(encode(chat, messages, tools or []))
            alive()
        size = len(own)
        if domain.name in config.data.demonstrations:
            repeated[domain.name] = passes(size, seed, "warm start", domain.name)
            size = per_domain
        positions += [(domain.name, index) for index in range(size)]
    if not positions:
        raise UserError("demonstrations: got none for the warm start; give --warm-start-steps 0")
    order = islice(passes(len(positions), seed, "warm start"), total)
    return [
        examples[name][next(repeated[name]) if name in repeated else index]
        for name, index in (positions[i] for i in order)
    ]


def passes(size: int, *key: int | str) -> Iterator[int]:
    """Yield the numbers below `size` again and again, each time in a random order of its own."""
    return (i for number in count() for i in permutation(size, *key, number))


def encode(chat: Chat, messages: Sequence[Message], tools: list[dict[str, Any]]) -> SFTExample:
    """Return tokens and labels of a conversation; only tokens of assistant messages have a loss."""
    parts = parts_of(chat, messages, tools)
    return {
        "input_ids": [i for _, ids in parts for i in ids],
        "labels": [i if is_sampled else IGNORED for is_sampled, ids in parts for i in ids],
    }


def parts_of(
    chat: Chat, messages: Sequence[Message], tools: list[dict[str, Any]]
) -> list[tuple[bool, list[int]]]:
    """Return (is sampled, token ids) of the prompt, each assistant message and each reply."""
    is_assistant = [message["role"] == "assistant" for message in messages]
    first, end = is_assistant.index(True), len(messages) - is_assistant[::-1].index(True)
    parts = [(False, chat.prompt_ids(messages[:first], tools))]
    for is_sampled, group in groupby(messages[first:end], lambda m: m["role"] == "assistant"):
        run = list(group)
        pieces = map(chat.message_ids, run) if is_sampled else [chat.reply_ids(run)]
        parts += [(is_sampled, ids) for ids in pieces]
    return parts
