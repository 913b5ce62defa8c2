"""KL estimates between the current policy and the policies at the end of earlier stages.

At the end of a stage, the policy runs episodes of a few validation tasks of the stage's domains.
Later validations estimate KL(policy at the end of the stage || current policy), per token, on the
tokens that were sampled at the end of the stage.
"""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage
from pipeline.data.tasks import Task
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation.evaluate import evaluate, grouped
from pipeline.files.durable import write_text
from pipeline.grpo.micro_batches import make_micro_batches
from pipeline.grpo.updater import Updater
from pipeline.rollout.rollout import Rollout
from pipeline.rollout.trajectory import Trajectory

FIELDS = ("domain", "task_id", "trial", "prompt_ids", "completion_ids", "loss_mask", "logprobs")


class KLProbe:
    """Keeps episodes from the end of each stage in `kl_probe/`; estimates KL on the episodes."""

    def __init__(self, folder: Path, config: Config, ranks: Ranks) -> None:
        self._folder = folder / "kl_probe"
        self._config = config
        self._ranks = ranks
        self.episodes: dict[str, list[Trajectory]] = {}  # by domain
        settings = config.evaluation
        self.is_wanted = settings.kl_probe_tasks > 0 and settings.validation_steps > 0

    def keep(self, stage: Stage, tasks: Sequence[Task], rollout: Rollout) -> None:
        """Run one episode of each task at the stage's end; every rank keeps all episodes."""
        _, mine = evaluate(rollout, tasks, 1, self._config.run.seed, self._ranks)
        episodes = [{name: getattr(t, name) for name in FIELDS} for t in mine if any(t.loss_mask)]
        gathered = chain(*self._ranks.all_gather_objects(episodes, "KL probe"))
        by_task = {(episode["domain"], episode["task_id"]): episode for episode in gathered}
        ordered = [by_task[task.key] for task in tasks if task.key in by_task]
        if self._ranks.is_main:
            self._folder.mkdir(exist_ok=True)
            write_text(self._folder / f"{stage.name}.json", json.dumps(ordered))
        self._ranks.barrier("KL probe")
        self._add(ordered)

    def load(self, stages: Sequence[Stage]) -> None:
        for stage in stages if self.is_wanted else ():
            path = self._folder / f"{stage.name}.json"
            if path.is_file():
                self._add(json.loads(path.read_text(encoding="utf-8")))
            elif self._ranks.is_main:
                print(f"warning: {path} is gone, so there is no KL of {stage.name}")

    def _add(self, episodes: Sequence[dict[str, Any]]) -> None:
        self.episodes |= grouped((Trajectory(**episode) for episode in episodes), "domain")

    def divergences(self, updater: Updater) -> dict[str, float]:
        """Return the KL estimate (nats per token) of each domain that has kept episodes.

        The estimator is k3 of Schulman (2020), as in the loss. The order of summation does not
        depend on the number of ranks.
        """
        episodes = [*chain(*self.episodes.values())]
        if not episodes:
            return {}
        mine = [episodes[i] for i in self._ranks.shard(len(episodes))]
        shards = self._ranks.all_gather_numbers(self._sums(mine, updater))
        sums = [0.0] * len(episodes)
        for rank, shard in enumerate(shards):
            sums[rank :: len(shards)] = shard
        left = iter(sums)
        return {
            domain: sum(next(left) for _ in of) / sum(t.num_sampled_tokens for t in of)
            for domain, of in self.episodes.items()
        }

    @torch.no_grad()
    def _sums(self, trajectories: Sequence[Trajectory], updater: Updater) -> list[float]:
        order = sorted(range(len(trajectories)), key=lambda i: -trajectories[i].num_tokens)
        # With one episode per pass, the shapes of tensors do not depend on the number of ranks.
        budget = 1 if self._config.run.deterministic else updater.max_tokens_per_microbatch
        items = [(trajectories[i], 0.0, 0.0) for i in order]
        sums = list[float]()
        for batch in make_micro_batches(items, budget, updater.pad_id):
            batch = batch.to(updater.accelerator.device)
            with updater.accelerator.autocast():
                logprobs, _ = updater.module(batch)
            ratio = (logprobs - batch.old_logprobs).double()
            terms = (torch.expm1(ratio) - ratio).cpu()  # on a GPU, index_add adds in no fixed order
            zeros = terms.new_zeros(len(batch.lengths))
            sums += zeros.index_add(0, batch.sequences.cpu(), terms).tolist()
        return [value for _, value in sorted(zip(order, sums, strict=True))]
