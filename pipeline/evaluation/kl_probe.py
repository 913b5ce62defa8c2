"""The KL probe: the divergence of the policy from its own state at the end of earlier stages.

At the end of each stage the policy plays a few validation tasks of the stage's domains. Later
validations estimate KL(policy at that stage's end || policy now), per token, on the tokens of these
kept episodes, without new samples.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage
from pipeline.data.tasks import Task
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.evaluate import evaluate
from pipeline.files.durable import write_text
from pipeline.grpo.micro_batches import cuts, micro_batch
from pipeline.grpo.updater import Updater
from pipeline.rollout.rollout import Rollout
from pipeline.rollout.trajectory import Trajectory

KEPT = ("domain", "task_id", "trial", "prompt_ids", "completion_ids", "loss_mask", "logprobs")


class KLProbe:
    """Kept episodes of stages that are over (`kl_probe/` of the run folder), and the KL on them."""

    def __init__(self, folder: Path, config: Config, ranks: Ranks) -> None:
        self._folder, self._config, self._ranks = folder / "kl_probe", config, ranks
        self.episodes: dict[str, list[Trajectory]] = {}  # by domain
        settings = config.evaluation
        self.is_wanted = settings.kl_probe_tasks > 0 and settings.eval_steps > 0

    def keep(self, stage: Stage, tasks: Sequence[Task], rollout: Rollout) -> None:
        """Play the tasks at the stage's end; every rank keeps all episodes."""
        _, mine = evaluate(rollout, tasks, 1, self._config.run.seed, self._ranks)
        rows = [{name: getattr(t, name) for name in KEPT} for t in mine if t.num_sampled_tokens]
        gathered = self._ranks.all_gather_objects(rows, "KL probe")
        by_task = {(row["domain"], row["task_id"]): row for rows in gathered for row in rows}
        ordered = [by_task[task.key] for task in tasks if task.key in by_task]
        if self._ranks.is_main:
            self._folder.mkdir(exist_ok=True)
            write_text(self._folder / f"{stage.name}.json", json.dumps(ordered))
        self._ranks.barrier("KL probe")
        self._add(ordered)

    def load(self, stages: Sequence[Stage]) -> None:
        """After a resume, read the episodes of these stages, which are over."""
        for stage in stages if self.is_wanted else ():
            path = self._folder / f"{stage.name}.json"
            before = path.parent.with_name("anchors") / path.name  # of earlier versions
            path = before if before.is_file() else path
            if path.is_file():
                self._add(json.loads(path.read_text(encoding="utf-8")))
            elif self._ranks.is_main:
                print(f"warning: {path} is gone, so there is no KL of {stage.name}")

    def _add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Keep these episodes, in place of earlier ones of their domains."""
        self.episodes |= {row["domain"]: [] for row in rows}
        for row in rows:
            self.episodes[row["domain"]].append(Trajectory(**row))

    def divergences(self, updater: Updater) -> dict[str, float]:
        """KL per token of each domain that has episodes; k3 of Schulman 2020, as in the loss.

        Each rank computes every num_ranks-th episode; sums are in the order of episodes.
        """
        episodes = [t for trajectories in self.episodes.values() for t in trajectories]
        if not episodes:
            return {}
        mine = [episodes[i] for i in self._ranks.shard(len(episodes))]
        shards = self._ranks.all_gather_numbers(self._sums(mine, updater))
        sums = [0.0] * len(episodes)
        for rank, shard in enumerate(shards):
            sums[rank :: len(shards)] = shard
        kl, left = {}, iter(sums)
        for domain, of in self.episodes.items():
            kl[domain] = sum(next(left) for _ in of) / sum(t.num_sampled_tokens for t in of)
        return kl

    @torch.no_grad()
    def _sums(self, trajectories: Sequence[Trajectory], updater: Updater) -> list[float]:
        """The divergence of each episode, summed over its sampled tokens."""
        order = sorted(range(len(trajectories)), key=lambda i: -trajectories[i].num_tokens)
        lengths = [trajectories[i].num_tokens for i in order]
        # One episode a forward pass: its shapes do not depend on the number of ranks.
        budget = 1 if self._config.run.deterministic else updater.max_tokens_per_microbatch
        ends, divergences = cuts(lengths, budget, padding_free=False), [0.0] * len(order)
        for first, last in zip([0, *ends], ends, strict=False):
            indices = order[first:last]
            batch = micro_batch([(trajectories[i], 0.0, 0.0) for i in indices], updater.pad_id)
            batch = batch.to(updater.accelerator.device)
            with updater.accelerator.autocast():
                logprobs, _ = updater.module(batch)
            ratio = (logprobs - batch.old_logprobs).double()
            terms = (torch.expm1(ratio) - ratio).cpu()  # index_add on a GPU has no fixed order
            sums = terms.new_zeros(len(indices)).index_add(0, batch.sequences.cpu(), terms)
            for i, value in zip(indices, sums.tolist(), strict=True):
                divergences[i] = value
        return divergences
