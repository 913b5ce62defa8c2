"""What a run does before GRPO: evaluations, the warm start, and what the start report needs."""

import gc
import time

import torch

from pipeline.data.shares import num_drawn, tasks_of_source
from pipeline.data.tasks import Task
from pipeline.distributed.ranks import Interrupted
from pipeline.evaluation.start_report import start_report
from pipeline.files.console import may_fail
from pipeline.grpo.collect import RolloutBatch, play_groups
from pipeline.models.loading import load_folder
from pipeline.report.tables import start_block
from pipeline.run_state import RunState
from pipeline.sft import warm_start
from pipeline.tracking.progress import StageProgress, episodes_shown


class BeforeGRPO(RunState):
    """A RunState that prepares the policy for GRPO."""

    def before_training(self) -> None:
        """Evaluate the given model, do the warm start, and evaluate again."""
        config, state = self.config, self.state
        if not state.evaluated("start"):
            self.evaluate("start")
        if not config.grpo.use_grpo:
            return
        if config.warm_start.steps:
            if state.stage == "start":
                self.give_warm_start()
            if not state.evaluated("warm_start"):
                self.evaluate("warm_start")
        if config.evaluation.start_report_tasks and config.grpo.max_steps and state.step == 0:
            self.play_for_report()

    def give_warm_start(self) -> None:
        """Train on demonstrations, save the first checkpoint, and load the saved model."""
        begun, parts, ranks = time.perf_counter(), self.parts, self.ranks
        num_steps = self.config.warm_start.steps
        progress = StageProgress("warm start", num_steps, is_main=ranks.is_main)

        def on_step(loss: float | None) -> None:
            progress.step({"loss": loss})
            ranks.alive()
            if ranks.stop_wanted:  # an interrupted warm start saves no checkpoint
                raise Interrupted

        with progress, ranks.phase("warm start"):
            arguments = self.config, self.policy.model, parts.chat, parts.domains
            loss = warm_start(*arguments, ranks.num_ranks, on_step, ranks.alive)
        keys = {"kind": "warm_start", "stage": "warm_start", "step": 0}
        self.log.timings({**keys, "perf/warm_start_s": time.perf_counter() - begun})
        self.log.metrics({**keys, "warm_start/loss": loss})
        self.state.stage = "warm_start"
        self.save("warm-start")
        folder = self.checkpointer.folder / "warm-start"
        self.policy.replace(load_folder(folder, self.config.model))
        gc.collect()  # frees SFTTrainer's optimizer, which reference cycles keep alive
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()

    def training_tasks(self, count: int, part: int, *key: int | str) -> list[Task]:
        """Return at most `count` training tasks of each domain that a stage trains.

        Every rank returns the same tasks. Parts 0, 1, ... of the same `key` have other tasks until
        all tasks have been returned. The difficulty is that of the domain's first stage.
        """
        seed, tasks = self.config.run.seed, list[Task]()
        first = {domain: stage for stage in reversed(self.parts.stages) for domain in stage.own}
        for domain in [domain for domain in self.config.data.domains if domain in first]:
            source = self.parts.sources(first[domain])[domain]
            most = min(count, num_drawn(source))
            tasks += tasks_of_source(source, most, part, seed, *key, domain)
        return tasks

    def play_for_report(self) -> None:
        """Play `start_report_tasks` groups of each domain for the start report."""
        key, ranks, rollout = "start report", self.ranks, self.policy.rollout
        tasks = self.training_tasks(self.config.evaluation.start_report_tasks, 0, key)
        size, mine = self.config.rollout.num_generations, ranks.shard(len(tasks))
        with ranks.phase("sample", key), episodes_shown(rollout, key, len(mine) * size, ranks):
            own = [tasks[index] for index in mine]
            played = play_groups(rollout, ranks, own, size, self.config.run.seed, key)
        self._logged("")  # forgets the metrics of reward functions
        self.start.add(played, size)

    def report_start(self, batch: RolloutBatch) -> None:
        """Make and print the start report. Every rank must call this after the first step."""
        self.start.add(batch.first, self.config.rollout.num_generations)
        groups = self.start.gathered(self.ranks)
        if self.ranks.is_main:
            with may_fail("start report", "the run goes on without it"):
                evaluation, baselines = self.state.evaluations[-1], self._baselines
                self.start.content = start_report(groups, evaluation, self.config, baselines)
                print(start_block(self.start.content), flush=True)
