"""`trl.GRPOTrainer` for `vs_trl.py`: TRL's own loop, which waits after each step.

Both trainers get their settings from the same flags. Features that only cost time are off: logging,
saving, reporting, progress bars, the search for unused parameters, gradient checkpointing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from common import ready
from datasets import Dataset
from sums_task import correct
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_adapter import factories, outcome_reward
from turns import Gate, Work, script_of, siblings, without_users

from pipeline.config.cli import parse
from pipeline.config.settings import Config
from pipeline.data.curriculum import tasks_of_step
from pipeline.models.loading import load_model
from pipeline.preflight.parts import Parts, prepare

SAME = {  # settings with equal names in TRL and here
    *("temperature", "num_generations", "learning_rate"),
    *("adam_beta1", "adam_beta2", "weight_decay", "max_grad_norm", "beta", "epsilon"),
    *("epsilon_high", "delta", "loss_type", "importance_sampling_level", "scale_rewards"),
    *("num_iterations", "entropy_coef", "gradient_checkpointing"),
}


class Forced(LogitsProcessor):
    """Replaces the tokens of each batch row in `generate` by its episode's next given message.

    One call of `generate` is one turn.
    """

    def __init__(self, model: Any) -> None:
        self._generate = model.generate
        self._turn = 0
        self._column = 0
        self._turns: list[torch.Tensor] = []
        model.generate = self.generate

    def begin(self, scripts: Sequence[list[list[int]]], device: Any) -> None:
        """Set the given messages of new episodes, in the order of their batch rows."""
        self._turn = 0
        self._turns = []
        for turn in zip(*scripts, strict=True):
            rows = [torch.tensor(ids) for ids in turn]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            self._turns.append(padded.to(device))

    def generate(self, *arguments: Any, **options: Any) -> Any:
        self._column = 0
        found = self._generate(*arguments, logits_processor=LogitsProcessorList([self]), **options)
        self._turn += 1
        return found

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = self._turns[self._turn][:, self._column, None]
        assert len(tokens) == len(scores), "an episode ended early"
        self._column += 1
        return scores.scatter(1, tokens, 1e9)


class Trainer(GRPOTrainer):
    """TRL's trainer, which counts sampled tokens and the seconds of sampling."""

    forced: Forced | None = None
    scripts: dict[tuple[tuple[str, str], int], list[list[int]]]
    device_type = "cpu"

    def reset_counts(self) -> None:
        self.counts = {"episodes": 0.0, "tokens": 0.0, "reward": 0.0}
        self.counts |= {"sample_s": 0.0, "padded_tokens": 0.0}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        begun = time.perf_counter()
        if self.forced is not None:
            names = [(row["domain"], row["id"]) for row in inputs]
            scripts = [self.scripts[pair] for pair in zip(names, siblings(names), strict=True)]
            self.forced.begin(scripts, self.accelerator.device)
        outputs: dict[str, Any] = super()._generate_and_score_completions(inputs)
        ready(self.device_type)
        self.counts["sample_s"] += time.perf_counter() - begun
        mask = outputs["completion_mask"] * outputs.get("tool_mask", 1)
        self.counts["episodes"] += len(inputs)
        self.counts["tokens"] += int(mask.sum())
        width = outputs["prompt_ids"].shape[1] + outputs["completion_ids"].shape[1]
        padded = self.args.per_device_train_batch_size * width
        self.counts["padded_tokens"] = max(padded, self.counts["padded_tokens"])
        return outputs

    def _calculate_rewards(self, *arguments: Any) -> torch.Tensor:
        found: torch.Tensor = super()._calculate_rewards(*arguments)  # rewards of all ranks
        self.counts["reward"] += float(found.sum()) / self.accelerator.num_processes
        return found


class AtEachStep(TrainerCallback):
    """Waits at the gate after each optimizer step."""

    def __init__(self, trainer: Trainer, gate: Gate) -> None:
        self._trainer = trainer
        self._gate = gate

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self._gate(self._trainer.counts)
        self._trainer.reset_counts()


def main(work: Work, gate: Gate) -> None:
    config = parse(work.flags)
    parts = prepare(config)
    if not config.data.reward_funcs:
        parts = without_users(parts)
    tasks = [
        task
        for step in range(work.num_units)
        for task in tasks_of_step(parts.stages[0], step, parts.train, config.run.seed)
    ]
    rows = [{**task.row(), "environment": task.domain} for task in tasks]
    if config.data.reward_funcs:
        rows = [{name: row[name] for name in ("prompt", "answer")} for row in rows]
    trainer = make_trainer(config, parts, work, rows)
    trainer.reset_counts()
    if work.forced and work.kind != "update":
        trainer.scripts = {
            (task.key, sibling): script_of(task, parts, sibling)
            for task in tasks
            for sibling in range(config.rollout.num_generations)
        }
        trainer.forced = Forced(trainer.model)
    if work.kind == "sampling":
        size = config.rollout.tasks_per_step
        sample(trainer, work, [rows[i : i + size] for i in range(0, len(rows), size)], gate)
    else:
        trainer.add_callback(AtEachStep(trainer, gate))
        trainer.train()


def make_trainer(config: Config, parts: Parts, work: Work, rows: list[dict[str, Any]]) -> Trainer:
    if work.kind == "update":
        sources = replayed(Path(work.exchange), len(rows))
    elif config.data.reward_funcs:
        sources = {"train_dataset": Dataset.from_list(rows), "reward_funcs": correct}
    else:
        sources = {
            "train_dataset": Dataset.from_list(rows),
            "environment_factory": factories(
                {name: domain.environment for name, domain in parts.domains.items()}
            ),
            "reward_funcs": outcome_reward(parts.chat.end_of_turn_id),
        }
    longest_prompt = max(parts.prompts.longest.values())
    return Trainer(
        model=load_model(config.model, parts.tokenizer, config.run.seed),
        args=GRPOConfig(**settings_of(config, work, longest_prompt)),
        processing_class=parts.tokenizer,
        **sources,
    )


def settings_of(config: Config, work: Work, longest_prompt: int) -> dict[str, Any]:
    """The arguments of GRPOConfig that correspond to our settings."""
    limits = config.rollout
    ours = {**limits.model_dump(include=SAME), **config.grpo.model_dump(include=SAME)}
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    episodes = limits.tasks_per_step * limits.num_generations // num_ranks
    assert episodes % work.batch == 0, f"{episodes} episodes a rank in batches of {work.batch}"
    on_cpu = work.device == "cpu"
    return {
        **ours,
        "output_dir": str(config.run.output_dir),
        "seed": config.run.seed,
        "lr_scheduler_type": config.grpo.stage_lr_decay,
        "warmup_steps": config.grpo.stage_warmup_steps,
        "max_steps": work.num_units,
        "per_device_train_batch_size": work.batch,
        "gradient_accumulation_steps": episodes // work.batch,
        "steps_per_generation": work.steps_per_generation,
        "max_completion_length": limits.max_tokens_per_turn
        if config.data.reward_funcs
        else limits.max_tokens - longest_prompt,
        "generation_kwargs": {"max_new_tokens": limits.max_tokens_per_turn},
        "max_tool_calling_iterations": limits.max_turns - 1,
        "shuffle_dataset": False,  # The dataset has the order of our steps.
        "bf16": not on_cpu,
        "use_cpu": on_cpu,
        "ddp_backend": "gloo" if on_cpu and num_ranks > 1 else None,
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
        "dataloader_pin_memory": not on_cpu,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def replayed(folder: Path, num_rows: int) -> dict[str, Any]:
    """A dataset, rollouts and rewards from the trajectories that our side wrote for this rank."""
    path = folder / f"{os.environ.get('RANK', '0')}.json"
    rows = cycle(json.loads(path.read_text(encoding="utf-8")))
    current: list[dict[str, Any]] = []

    def rollout(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        current[:] = islice(rows, len(prompts))
        return {
            "prompt_ids": [row["prompt_ids"] for row in current],
            "completion_ids": [row["completion_ids"] for row in current],
            "env_mask": [[int(sampled) for sampled in row["loss_mask"]] for row in current],
            "logprobs": None,
        }

    def outcome(completions: Sequence[Any], **_: Any) -> list[float]:
        return [row["reward"] for row in current]

    dataset = Dataset.from_list([{"prompt": "a"}] * num_rows)
    return {"train_dataset": dataset, "rollout_func": rollout, "reward_funcs": outcome}


def sample(trainer: Any, work: Work, groups: Sequence[list[dict[str, Any]]], gate: Gate) -> None:
    """Sample the episodes of each step, always from the same weights."""
    ranks = trainer.accelerator
    at_once = work.batch * work.steps_per_generation
    trainer.model.train()  # TRL samples in training mode.
    for rows in groups:
        mine = rows[ranks.process_index :: ranks.num_processes]
        inputs = [deepcopy(row) for row in mine for _ in range(trainer.num_generations)]
        for first in range(0, len(inputs), at_once):
            trainer._generate_and_score_completions(inputs[first : first + at_once])
        gate(trainer.counts)
        trainer.reset_counts()


if __name__ == "__main__":
    asked = Work(**json.loads(sys.argv[1]))
    main(asked, Gate(asked.device))
