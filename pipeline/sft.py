"""The warm start: a short supervised stage on demonstrations.

It runs through TRL's SFTTrainer, on the same ranks. Its rows are `input_ids` and `labels` made by
the same code as rollouts (`chat/template.py`), so the policy learns to continue exactly what it
will be given. It shall leave a policy that is able but far from good: the domains' experts follow
the policy's rules only in part (`warm_start.rule_share`), so that every branch of every decision
stays likely and GRPO has something to sharpen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.chat.template import Chat
from pipeline.config.settings import Config
from pipeline.data.demonstrations import read_demonstrations
from pipeline.data.rng import permutation
from pipeline.data.tasks import Message
from pipeline.distributed.gradients import kept_apart
from pipeline.environments.domains import Domain, generated, try_expert
from pipeline.environments.timeouts import EnvironmentFault
from pipeline.environments.tools import tool_schemas
from pipeline.errors import UserError
from pipeline.files.untrusted import one_line, shown
from pipeline.models.loading import on_gpu, uses_bf16

Row = dict[str, list[int]]
NUM_TRIED = 100  # demonstrations of a file that are tried before a run
NUM_TRIED_BY_EXPERT = 8  # tasks of each domain that its expert must solve before a run
IGNORED = -100  # the label of tokens that are not trained, as in transformers


def warm_start(
    config: Config,
    model: Any,
    tokenizer: Any,
    chat: Chat,
    domains: Mapping[str, Domain],
    num_ranks: int,
    on_step: Callable[[], None],
    alive: Callable[[], None] = lambda: None,
) -> float:
    """Train `model` in place; every rank calls it after the Accelerator was made.

    `on_step` is called after each optimizer step, `alive` after each demonstration. Returns the
    mean loss of the steps' last eighth.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTTrainer

    rows, size = demonstration_rows(config, chat, domains, alive), config.warm_start.batch_size
    if config.run.deterministic:  # sums of shares would depend on the ranks: each does all the work
        rows, share = repeat_steps(rows, size, num_ranks), size
    else:
        rows, share = pad_steps(rows, size, num_ranks), -(-size // num_ranks)
    trainer = SFTTrainer(
        model=model,
        args=_arguments(config, share),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)  # the run's own log tells what it did

    class Hooks(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if config.run.deterministic:
                kept_apart(trainer.model_wrapped)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            on_step()

    trainer.add_callback(Hooks())
    hook = model.register_forward_pre_hook(_without_dropout)
    trainer.train()
    hook.remove()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return float(losses[-1])


def _without_dropout(model: Any, _: Any) -> None:
    """Each rank would draw masks for its own rows, so the answer would depend on their number."""
    model.eval()


def _arguments(config: Config, share: int) -> Any:
    """The trainer's settings, for so many of a step's rows on each rank."""
    from trl import SFTConfig

    settings = config.warm_start
    arguments = SFTConfig(
        output_dir=str(config.run.output_dir),
        max_steps=settings.steps,
        per_device_train_batch_size=share,
        average_tokens_across_devices=not config.run.deterministic,
        train_sampling_strategy="sequential",  # the rows come in the order of their own draws
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        adam_beta1=0.9,
        adam_beta2=0.98,
        weight_decay=0.01,
        max_grad_norm=1.0,
        bf16=uses_bf16(config.model),
        use_cpu=not on_gpu(),
        activation_checkpointing=False,
        save_strategy="no",
        logging_steps=max(1, settings.steps // 8),
        disable_tqdm=True,
        report_to=[],
        seed=config.run.seed,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        dataloader_pin_memory=on_gpu(),
        ddp_find_unused_parameters=False,
        accelerator_config={"use_configured_state": True},
    )
    arguments._n_gpu = 1  # one rank is one GPU; on several, transformers would turn to DataParallel
    return arguments


def repeat_steps(rows: Sequence[Row], batch_size: int, num_ranks: int) -> list[Row]:
    """Each step's rows once for every rank, where ranks take blocks of `batch_size` in turn."""
    steps = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    return [row for step in steps for _ in range(num_ranks) for row in step]


def pad_steps(rows: Sequence[Row], batch_size: int, num_ranks: int) -> list[Row]:
    """Add rows without labels behind each step's own.

    With them any number of ranks gets equal shares of a step.
    """
    missing = -batch_size % num_ranks
    padding = [{"input_ids": [0], "labels": [IGNORED]}] * missing
    return [
        row
        for i in range(0, len(rows), batch_size)
        for row in [*rows[i : i + batch_size], *padding]
    ]


def check_demonstrations(config: Config, domains: Mapping[str, Domain]) -> None:
    """Raises UserError where the warm start would find faulty demonstrations, or none."""
    if not config.grpo.use_grpo or config.warm_start.steps == 0:
        return
    if config.warm_start.data is not None:
        read_demonstrations(config.warm_start.data)
        return
    experts = _experts(domains)
    if not experts:
        raise UserError(
            "warm_start.data: missing, and the module of no domain has an expert(agent, goal); "
            "give demonstrations, add an expert, or set warm_start.steps 0"
        )
    for domain in experts:
        _check_expert(config, domain, _count_of_each(config, experts))


def _experts(domains: Mapping[str, Domain]) -> list[Domain]:
    return [domain for domain in domains.values() if domain.expert is not None]


def _count_of_each(config: Config, experts: Sequence[Domain]) -> int:
    """How many demonstrations of each expert the warm start takes."""
    return -(-config.warm_start.steps * config.warm_start.batch_size // len(experts))


def _check_expert(config: Config, domain: Domain, count: int) -> None:
    """UserError where a domain makes too few tasks, or its expert does not solve some of them.

    They are all made here only where the domain does not say how many it makes.
    """
    limit, settings = domain.max_tasks, config.warm_start
    if limit is not None and count > limit:
        raise UserError(
            f"warm_start: got {settings.steps} steps of {settings.batch_size} demonstrations, but "
            f"the experts give at most {limit} a domain; give fewer"
        )
    num_made = count if limit is None else min(count, NUM_TRIED_BY_EXPERT)
    tasks = generated(config.data, domain, num_made, "train")
    for task in tasks[:: -(-len(tasks) // NUM_TRIED_BY_EXPERT)]:
        try_expert(domain, task, config.rollout.call_timeout, config.evaluation.success_threshold)


def try_demonstrations(config: Config, chat: Chat) -> None:
    """UserError where one of NUM_TRIED demonstrations, evenly spread, cannot become tokens."""
    path = config.warm_start.data
    if not config.grpo.use_grpo or config.warm_start.steps == 0 or path is None:
        return
    found = read_demonstrations(path)
    for messages, tools in found[:: -(-len(found) // NUM_TRIED)]:
        try:
            encode(chat, messages, tools)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def demonstration_rows(
    config: Config,
    chat: Chat,
    domains: Mapping[str, Domain],
    alive: Callable[[], None] = lambda: None,
) -> list[Row]:
    """As many rows as the warm start will see, in its order.

    No row is used twice if enough can be made.
    """
    count = config.warm_start.steps * config.warm_start.batch_size
    if config.warm_start.data is not None:
        rows = [
            encode(chat, messages, tools)
            for messages, tools in read_demonstrations(config.warm_start.data)
        ]
        order = [
            index
            for epoch in range(count // len(rows) + 1)
            for index in _order(config, len(rows), epoch)
        ]
        return [rows[index] for index in order[:count]]
    experts = _experts(domains)
    assert experts, "check_demonstrations comes first"
    of_each = _count_of_each(config, experts)
    rows = []
    for domain in experts:
        for row in _expert_rows(config, chat, domain, of_each):
            rows.append(row)
            alive()
    return [rows[index] for index in _order(config, len(rows), 0)][:count]


def _order(config: Config, count: int, epoch: int) -> list[int]:
    return permutation(count, config.run.seed, "warm start", epoch)


def _expert_rows(config: Config, chat: Chat, domain: Domain, count: int) -> Iterator[Row]:
    tools, limit = tool_schemas(domain.environment), config.rollout.call_timeout
    share, seed = config.warm_start.rule_share, config.run.seed
    for task in generated(config.data, domain, count, "train"):
        try:
            messages, _ = domain.demonstrate(task, limit, share, seed)
        except EnvironmentFault as fault:
            raise UserError(
                f"tasks of {domain.name}: the expert fails on task {shown(task.id)} "
                f"({one_line(str(fault))}); mend the expert or the task"
            ) from None
        yield encode(chat, messages, tools)


def encode(chat: Chat, messages: Sequence[Message], tools: list[dict[str, Any]]) -> Row:
    """Tokens of a conversation, and labels on what the assistant says."""
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    ids = chat.prompt_ids(messages[:first], tools)
    labels = [IGNORED] * len(ids)
    replies: list[Message] = []
    for message in messages[first:]:
        if message["role"] != "assistant":
            replies.append(message)
            continue
        if replies:
            delta = chat.reply_ids(replies)
            ids, labels, replies = ids + delta, labels + [IGNORED] * len(delta), []
        said = chat.message_ids(message)
        ids, labels = ids + said, labels + said
    return {"input_ids": ids, "labels": labels}
