"""The warm start: a short supervised stage on demonstrations, through TRL's SFTTrainer.

It runs on the same ranks. The code of rollouts (`chat/template.py`) makes its rows (`input_ids` and
`labels`), so the policy learns to continue the same tokens that rollouts will give it. The domains'
experts follow the rules of their domain only in part (`warm_start.rule_share`): the policy solves
some tasks, every branch of every decision stays likely, and GRPO can improve the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from pipeline.chat.template import Chat
from pipeline.config.settings import Config
from pipeline.data.rng import permutation
from pipeline.data.tasks import Message, read_demonstrations
from pipeline.distributed.gradients import skip_gradient_sync
from pipeline.environments.domains import Domain, generated, try_expert
from pipeline.environments.faults import EnvironmentFault
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

    size, deterministic = config.warm_start.batch_size, config.run.deterministic
    rows = demonstration_rows(config, chat, domains, alive)
    trainer = SFTTrainer(
        model=model,
        args=_arguments(config, size if deterministic else -(-size // num_ranks)),
        train_dataset=Dataset.from_list(share_steps(rows, size, num_ranks, deterministic)),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)  # the run has its own log

    class Hooks(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if deterministic:
                skip_gradient_sync(trainer.model_wrapped)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            on_step()

    trainer.add_callback(Hooks())
    # Without dropout: masks that each rank draws for its own rows depend on the number of ranks.
    hook = model.register_forward_pre_hook(lambda module, _: module.eval() and None)
    trainer.train()
    hook.remove()
    return float([entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1])


def _arguments(config: Config, share: int) -> Any:
    """The trainer's settings; `share` rows of a step are on each rank."""
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
        adam_beta2=0.98,
        weight_decay=0.01,
        bf16=uses_bf16(config.model),
        use_cpu=not on_gpu(),
        activation_checkpointing=False,
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
    arguments._n_gpu = 1  # one rank is one GPU; on several, transformers would turn to DataParallel
    return arguments


def share_steps(
    rows: Sequence[Row], batch_size: int, num_ranks: int, deterministic: bool
) -> list[Row]:
    """Reorder rows so that each step is cut into equal blocks: rank 0 first, then rank 1, ...

    Rows without labels fill up a step that the ranks cannot share equally. If `deterministic`, each
    rank gets all rows of a step, because sums of shares depend on the number of ranks.
    """
    steps = [list(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
    padding = [{"input_ids": [0], "labels": [IGNORED]}] * (-batch_size % num_ranks)
    return [row for s in steps for row in (s * num_ranks if deterministic else s + padding)]


def check_demonstrations(config: Config, domains: Mapping[str, Domain], chat: Chat) -> None:
    """UserError if the warm start will have too few demonstrations, or faulty ones.

    NUM_TRIED demonstrations of a file, evenly spread, are turned into tokens; of the tasks of each
    domain, its expert must solve NUM_TRIED_BY_EXPERT.
    """
    settings, path = config.warm_start, config.warm_start.data
    if not config.grpo.use_grpo or settings.steps == 0:
        return
    if path is not None:
        demonstrations = read_demonstrations(path)
        for messages, tools in demonstrations[:: -(-len(demonstrations) // NUM_TRIED)]:
            try:
                encode(chat, messages, tools)
            except UserError as error:
                raise UserError(f"{path}: {error}") from None
        return
    experts, count = _experts(config, domains)
    if not experts:
        raise UserError(
            "warm_start.data: missing, and the module of no domain has an expert(agent, goal); "
            "give demonstrations, add an expert, or set warm_start.steps 0"
        )
    timeout, threshold = config.rollout.call_timeout, config.evaluation.success_threshold
    for domain in experts:
        limit = domain.max_tasks
        if limit is not None and count > limit:
            raise UserError(
                f"warm_start: got {settings.steps} steps of {settings.batch_size} demonstrations, "
                f"but the experts give at most {limit} a domain; give fewer"
            )
        # All tasks are made if the domain does not state how many it can make.
        num_made = count if limit is None else min(count, NUM_TRIED_BY_EXPERT)
        tasks = generated(config.data, domain, num_made, "train")
        for task in tasks[:: -(-len(tasks) // NUM_TRIED_BY_EXPERT)]:
            try_expert(domain, task, timeout, threshold)


def _experts(config: Config, domains: Mapping[str, Domain]) -> tuple[list[Domain], int]:
    """The domains that have an expert, and the number of demonstrations that each gives."""
    experts = [domain for domain in domains.values() if domain.expert is not None]
    count = config.warm_start.steps * config.warm_start.batch_size
    return experts, -(-count // max(1, len(experts)))


def demonstration_rows(
    config: Config,
    chat: Chat,
    domains: Mapping[str, Domain],
    alive: Callable[[], None] = lambda: None,
) -> list[Row]:
    """All rows that the warm start trains on, in order; `alive` is called after each is made.

    Rows repeat only if there are too few.
    """
    path, rows = config.warm_start.data, list[Row]()
    count = config.warm_start.steps * config.warm_start.batch_size
    made = _expert_demonstrations(config, domains) if path is None else read_demonstrations(path)
    for messages, tools in made:
        rows.append(encode(chat, messages, tools))
        alive()
    epochs = range(count // len(rows) + 1)
    order = [i for e in epochs for i in permutation(len(rows), config.run.seed, "warm start", e)]
    return [rows[i] for i in order[:count]]


def _expert_demonstrations(
    config: Config, domains: Mapping[str, Domain]
) -> Iterator[tuple[list[Message], list[dict[str, Any]]]]:
    """Conversations of the experts, and the tools of each."""
    timeout, share = config.rollout.call_timeout, config.warm_start.rule_share
    experts, count = _experts(config, domains)
    for domain in experts:
        tools = tool_schemas(domain.environment)
        for task in generated(config.data, domain, count, "train"):
            try:
                messages, _ = domain.demonstrate(task, timeout, share, config.run.seed)
            except EnvironmentFault as fault:
                raise UserError(
                    f"tasks of {domain.name}: the expert fails on task {shown(task.id)} "
                    f"({one_line(str(fault))}); mend the expert or the task"
                ) from None
            yield messages, tools


def encode(chat: Chat, messages: Sequence[Message], tools: list[dict[str, Any]]) -> Row:
    """Tokens of a conversation; tokens of the assistant's messages are their own labels."""
    is_assistant = [message["role"] == "assistant" for message in messages]
    first, end = is_assistant.index(True), len(messages) - is_assistant[::-1].index(True)
    parts = [(False, chat.prompt_ids(messages[:first], tools))]
    for is_sampled, group in groupby(messages[first:end], lambda m: m["role"] == "assistant"):
        run = list(group)
        pieces = map(chat.message_ids, run) if is_sampled else [chat.reply_ids(run)]
        parts += [(is_sampled, ids) for ids in pieces]
    return {
        "input_ids": [i for _, ids in parts for i in ids],
        "labels": [i if is_sampled else IGNORED for is_sampled, ids in parts for i in ids],
    }
