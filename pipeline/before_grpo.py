"""What a run does before GRPO: evaluations, warm start, rejection fine-tuning, start report."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain

from pipeline.data.curriculum import tasks_of_source
from pipeline.data.shares import num_drawn
from pipeline.data.tasks import Task
from pipeline.endpoints.language_model import LanguageModel
from pipeline.evaluation.agents import agent_rollout, evaluate_agent
from pipeline.evaluation.error_rates import ErrorRates, stop_on_errors
from pipeline.evaluation.evaluate import in_words as rates_in_words
from pipeline.evaluation.start_report import start_report
from pipeline.files.console import may_fail
from pipeline.grpo.collect import RolloutBatch, play_groups
from pipeline.report.tables import start_block
from pipeline.rft import examples_of, in_words, kept_of, metrics_of, settings_of_round, summary_of
from pipeline.rollout.trajectory import Trajectory
from pipeline.run_state import RunState
from pipeline.sft import fine_tune, sft_examples
from pipeline.tracking.progress import StageProgress, episodes_of


class BeforeGRPO(RunState):
    """A RunState that prepares the policy for GRPO."""

    def before_training(self) -> None:
        """Evaluate the given model; do the warm start and RFT, and evaluate after each."""
        config = self.config
        state = self.state
        if config.evaluation.agent_url is not None:
            self.evaluate_agent(str(config.evaluation.agent_model))
        if not state.evaluated("start"):
            self.evaluate("start")
        if not config.grpo.use_grpo:
            return
        if config.model.use_peft and config.is_supervised:
            self.policy.attach(self.checkpointer, self.checkpointer.resumed)
        if config.warm_start.steps:
            if state.stage == "start":
                self.give_warm_start()
            if not state.evaluated("warm_start"):
                self.evaluate("warm_start")
        if config.rft.rft_rounds and state.step == 0:
            self.give_rft()
        if config.evaluation.start_report_tasks and config.grpo.max_steps and state.step == 0:
            self.play_for_report()

    def evaluate_agent(self, name: str) -> None:
        """Let the endpoint at `agent_url` play the held-out tasks, unless it has done so.

        Its failure does not end the run; a resumed run tries again, and pays no call twice.
        """
        config = self.config
        ranks = self.ranks
        if "success" in self.state.agents.get(name, {}):
            return
        if ranks.is_main:  # an agent that failed may have had other ranks
            shutil.rmtree(self.folder / "trajectories" / "agent", ignore_errors=True)
        with closing(LanguageModel("agent", config, self.folder, ranks, as_written=True)) as model:
            given = config.evaluation.agent_temperature
            temperature = config.rollout.temperature if given is None else given
            agent = agent_rollout(self.policy.rollout, model, temperature)
            tasks = [task for tasks in self.parts.held_out.values() for task in tasks]
            count = len(ranks.shard(len(tasks))) * (config.evaluation.eval_trials + 1)
            shown = episodes_of(f"agent {name}", count, ranks)
            with ranks.phase("evaluate", self.state.stage, self.state.step), shown as progress:
                entry, played = evaluate_agent(agent, tasks, config, ranks, progress)
        self.check_language_models()
        self._logged("")  # forgets the metrics of reward functions
        self._save_transcripts("agent", played)
        self.state.agents[name] = entry
        if why := entry.get("failed"):
            self.say(f"warning: agent {name} failed: {why}")
        else:
            self.say(f"agent {name}: success sampled  {rates_in_words(entry['success'])}")

    def give_warm_start(self) -> None:
        """Train on demonstrations, and save the first checkpoint."""
        begun = time.perf_counter()
        config = self.config
        parts = self.parts
        ranks = self.ranks
        with self._supervised("warm start", config.warm_start.steps) as on_step:
            examples = sft_examples(config, parts.chat, parts.domains, ranks.alive)
            loss = fine_tune(config, self.accelerator, ranks, self.policy.model, examples, on_step)
        keys = {"kind": "warm_start", "stage": "warm_start", "step": 0}
        self.log.timings({**keys, "perf/warm_start_s": time.perf_counter() - begun})
        self.log.metrics({**keys, "warm_start/loss": loss})
        self.state.stage = "warm_start"
        self._save_and_give("warm-start")

    def give_rft(self) -> None:
        """Do the rounds of RFT that are missing, with a checkpoint after each, and evaluate.

        A checkpoint before the first round keeps what came before, so that a killed run repeats at
        most one round.
        """
        for number in range(len(self.state.rft) + 1, self.config.rft.rft_rounds + 1):
            self.state.stage = "rft"
            if not self.checkpointer.is_current:
                self.save("rft")
            self._rft_round(number)
            self._save_and_give("rft")
        if not self.state.evaluated("rft"):
            self.evaluate("rft")

    def _rft_round(self, number: int) -> None:
        begun = time.perf_counter()
        name = f"rft-{number}"
        config = self.config
        ranks = self.ranks
        limits = config.rollout
        threshold = config.evaluation.success_threshold
        if ranks.is_main:  # an interrupted round may have had other ranks
            shutil.rmtree(self.folder / "trajectories" / name, ignore_errors=True)
        tasks = self.training_tasks(config.rft.rft_tasks, number - 1, "rft")
        played = self._play(tasks, f"rft round {number}", "rft", number)
        self._save_transcripts(name, played)
        mine = [t.record() for t in played], kept_of(played, limits.num_generations, threshold)
        gathered = ranks.all_gather_objects(mine, name)
        records, kept = ([*chain(*of)] for of in zip(*gathered, strict=True))
        stop_on_errors(ranks, ErrorRates(records), limits, played, f"in rft round {number}")
        entry = summary_of(number, records, kept, threshold)
        if kept:
            examples = examples_of(kept, config.warm_start.batch_size, config.run.seed, name)
            config = settings_of_round(config, len(examples))
            entry["steps"] = config.warm_start.steps
            with self._supervised(f"rft round {number}", entry["steps"]) as on_step:
                entry["loss"] = fine_tune(
                    config, self.accelerator, ranks, self.policy.model, examples, on_step
                )
        self.say(in_words(entry))
        self.state.rft.append(entry)
        keys = {"kind": "rft", "stage": "rft", "step": 0}
        self.log.timings({**keys, "perf/rft_s": time.perf_counter() - begun})
        self.log.metrics(self._with_logged("rft/", {**keys, **metrics_of(entry)}))

    @contextmanager
    def _supervised(self, name: str, num_steps: int) -> Iterator[Callable[[float], None]]:
        """Show the progress of supervised training; yields a function to call after each step."""
        progress = StageProgress(name, num_steps, is_main=self.ranks.is_main)
        with progress, self.ranks.phase(name):
            yield lambda loss: progress.step({"loss": loss})

    def _save_and_give(self, name: str) -> None:
        self.save(name)
        self.policy.give_weights()

    def training_tasks(self, count: int, part: int, *key: int | str) -> list[Task]:
        """Return at most `count` training tasks of each domain that a stage trains.

        Every rank returns the same tasks. Parts 0, 1, ... of the same `key` have other tasks until
        all tasks have been returned. The difficulty is that of the domain's first stage.
        """
        seed = self.config.run.seed
        tasks = list[Task]()
        first = {domain: stage for stage in reversed(self.parts.stages) for domain in stage.own}
        for domain in [domain for domain in self.config.data.domains if domain in first]:
            source = self.parts.sources(first[domain])[domain]
            most = min(count, num_drawn(source))
            tasks += tasks_of_source(source, most, part, seed, *key, domain)
        return tasks

    def _play(self, tasks: Sequence[Task], name: str, *key: int | str) -> list[Trajectory]:
        """Return this rank's groups of episodes of `tasks`; `key` names the random numbers."""
        ranks = self.ranks
        rollout = self.policy.rollout
        size = self.config.rollout.num_generations
        mine = [tasks[index] for index in ranks.shard(len(tasks))]
        shown = episodes_of(name, len(mine) * size, ranks)
        seed = self.config.run.seed
        with ranks.phase("sample", name), shown as progress:
            return play_groups(rollout, ranks, mine, size, seed, *key, progress=progress)

    def play_for_report(self) -> None:
        """Play `start_report_tasks` groups of each domain for the start report."""
        key = "start report"
        tasks = self.training_tasks(self.config.evaluation.start_report_tasks, 0, key)
        self.start.add(self._play(tasks, key, key), self.config.rollout.num_generations)
        self._logged("")  # forgets the metrics of reward functions

    def report_start(self, batch: RolloutBatch) -> None:
        """Make and print the start report. Every rank must call this after the first step."""
        self.start.add(batch.first, self.config.rollout.num_generations)
        groups = self.start.gathered(self.ranks)
        if self.ranks.is_main:
            with may_fail("start report", "the run goes on without it"):
                evaluation = self.state.evaluations[-1]
                baselines = self._baselines
                self.start.content = start_report(groups, evaluation, self.config, baselines)
                print(start_block(self.start.content), flush=True)
