"""The RunState: the state of a run on one rank, with its evaluations and checkpoints."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.checkpoints import run_folder
from pipeline.checkpoints.checkpoint import Checkpointer, TrainState
from pipeline.checkpoints.resume import (
    load_start,
    open_together,
    origin_of_model,
    refuse_other_origin,
    refuse_other_stages,
    refuse_other_weights,
    share_folder,
    weights_of,
)
from pipeline.checkpoints.transcripts import save_transcripts
from pipeline.config.settings import Config
from pipeline.customers import customers_of, end_of_run, judge_of
from pipeline.data.curriculum import Stage, describe, one_after_another
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.watchdog import Watchdog
from pipeline.environments.tools import tool_schemas
from pipeline.errors import UserError
from pipeline.evaluation.advice import DeadDomains, Decisions, StartReport
from pipeline.evaluation.baselines import baselines as play_baselines
from pipeline.evaluation.evaluate import (
    ErrorRates,
    KLProbe,
    evaluate,
    evaluation_metrics,
    failed_trials,
    in_words,
    refuse_failed_trials,
    stop_on_errors,
    success,
    unscored_trials,
    write_results,
)
from pipeline.files.console import may_fail
from pipeline.files.durable import write_text
from pipeline.grpo.learner import Learner
from pipeline.preflight.check import validate
from pipeline.rollout.rewards import load_reward_functions
from pipeline.rollout.sampler import make_sampler
from pipeline.rollout.trajectory import RunRecord, Trajectory
from pipeline.tracking.log import RunLog
from pipeline.tracking.progress import episodes_of, say_start
from pipeline.tracking.step_metrics import logged_by_reward_functions, machine

Hook = Callable[["RunState", str, Sequence[Trajectory]], None]


class RunState:
    """The state of a run on one rank. Every rank of the process group makes a RunState.

    `make_sampler` has the signature of `pipeline.rollout.sampler.make_sampler`. `on_batch` is
    called after each step and each evaluation with this object, the name of the stage or
    evaluation, and this rank's episodes. Raises UserError for mistakes of the user.
    """

    def __init__(
        self,
        config: Config,
        accelerator: Any,
        ranks: Ranks,
        watchdog: Watchdog,
        *,
        make_sampler: Callable[..., Any] = make_sampler,
        on_batch: Hook = lambda *_: None,
    ) -> None:
        self.accelerator = accelerator
        self.ranks = ranks
        self.watchdog = watchdog

        # All ranks agree on the folder and on what the run is made of, before anything is written.
        config = share_folder(config, ranks)
        assert config.run.output_dir is not None, "share_folder names the run folder"
        self.config = config
        self.folder = config.run.output_dir
        self.parts = validate(config)
        tokenizer = self.parts.tokenizer
        about = self.parts.about
        made_of = dict(self.parts.made_of)
        opened, resumed = open_together(config, ranks, tokenizer, about, made_of)
        watchdog.can_resume = resumed is not None
        watchdog.not_for_children += [opened.lock] if opened else []

        # The weights, and the state of a checkpoint, which must be of the same run.
        self._saved_state, model = load_start(config, tokenizer, resumed, accelerator.device)
        refuse_other_weights(model, ranks)
        if config.model.use_peft or (resumed is None and config.grpo.beta > 0):
            made_of |= weights_of(model, ranks)  # read again when the run is resumed
        origin = self._saved_state or origin_of_model(config)
        name = (resumed or Path(config.model.model)).name
        override = config.run.override
        for line in refuse_other_origin(origin, made_of, name, override, about):
            self.say(line)
        self.state = TrainState()
        self.errors = ErrorRates()
        self.dead = DeadDomains()
        self.start = StartReport()
        self.decisions = Decisions()
        for owner in (self.state, self.errors, self.dead, self.start, self.decisions):
            owner.load_state_dict(self._saved_state)
        refuse_other_stages(self.state.evaluations, self.stages, self.folder)
        self.state.config = config.model_dump(mode="json")
        self.state.about = about
        self.state.made_of = {**self.state.made_of, **made_of}

        # The policy, with what scores and answers its messages.
        domains = self.parts.domains
        rewards = load_reward_functions(config, ranks.progress)
        customers = customers_of(config, self.folder, domains, self.parts.held_out, ranks)
        self._judge = judge_of(config, self.folder, domains, ranks, rewards)
        self.learner = Learner(
            model,
            self.parts.chat,
            self.parts.environments,
            config,
            accelerator,
            ranks,
            make_sampler=make_sampler,
            rewards=rewards,
            welcomes=customers.welcomes if customers else {},
            judge=self._judge.ask if self._judge else None,
        )
        if self.learner.note:
            self.say(f"warning: {self.learner.note}")
        first = config.data.domains[0]
        prompt = self.parts.prompt_ids(first, self.parts.longest[first][0])
        self.learner.check_agreement(prompt)
        self.learner.sampling.max_episodes = self.parts.episodes_at_once
        self.logged("")  # tells reward functions the number of steps
        self._taken = set[str]()  # names of `log_metric` that have been warned of
        self.language_models = [customers.model] if customers else []
        self.language_models += [self._judge] if self._judge else []

        # The files of the run; only rank 0 has opened the folder.
        if opened is not None:
            evaluated = {evaluation["after"] for evaluation in self.state.evaluations}
            run_folder.begin(opened, config, self.state.step, evaluated)
        log_state = None if resumed is None else self._saved_state
        self.log = RunLog(self.folder, config, is_main=ranks.is_main, state=log_state)
        keys = {"kind": "machine", "stage": self.state.stage, "step": self.state.step}
        self.log.timings({**keys, **machine(ranks.num_ranks)})
        self.checkpointer = Checkpointer(
            self.folder, ranks, config.run, self.state, tokenizer, resumed=resumed
        )
        self.checkpointer.owners += [self.log, self.errors, self.dead, self.start, self.decisions]
        if opened is not None:
            described = json.dumps(describe(self.stages, config), indent=1)
            write_text(self.folder / "curriculum.json", described)
            say_start(opened, self.state.step, config, self.parts.stages)
        self.kl_probe = KLProbe(self.folder, config, ranks)
        self.records: list[RunRecord] = []  # this rank's training episodes in the current stage
        self._rewards: dict[str, float] = {}  # the latest mean reward of each domain
        self._on_batch = on_batch
        self._warned_of_gap = False

    @property
    def stages(self) -> list[Stage]:
        """The stages of the run. If a stage ends early, the next stages begin at earlier steps."""
        return one_after_another(self.parts.stages, self.state.ended_early)

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.ranks.is_main:
            print(text, flush=True)

    def logged(self, prefix: str) -> dict[str, float]:
        """Return the metrics that reward functions have logged since the last call."""
        rewards = self.learner.rollout.rewards
        return logged_by_reward_functions(rewards, self.ranks, self.state, prefix)

    def with_logged(self, prefix: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a line of metrics with those that reward functions have logged beside `own`.

        A value under a name of `own` is left out, with a warning at the first time.
        """
        logged = self.logged(prefix)
        for name in sorted((logged.keys() & own.keys()) - self._taken):
            self._taken.add(name)
            why = "which is the pipeline's, so what a reward function logs there is left out"
            self.say(f"warning: log_metric: got {name}, {why}; choose another name")
        return {**logged, **own}

    def evaluate(self, after: str) -> None:
        """Evaluate on the held-out tasks, with sampling and greedily, and write `results.json`."""
        begun = time.perf_counter()
        settings = self.config.evaluation
        trials = settings.eval_trials
        seed = self.config.run.seed
        rollout = self.learner.rollout
        tasks = [task for tasks in self.parts.held_out.values() for task in tasks]
        name = f"evaluation after {after}"
        share = len(self.ranks.shard(len(tasks)))
        shown = episodes_of(name, share * (trials + 1), self.ranks)
        with self.ranks.phase("evaluate", self.state.stage, self.state.step), shown as progress:
            sampled, trajectories = evaluate(
                rollout, tasks, trials, seed, self.ranks, progress=progress
            )
            greedy, _ = evaluate(
                rollout, tasks, 1, seed, self.ranks, greedy=True, progress=progress
            )
        is_trained = self.learner.updater is not None
        ends = failed_trials([*sampled, *greedy]) or unscored_trials([*sampled, *greedy])
        if ends and is_trained and not self.checkpointer.is_current:
            self.save(f"step-{self.state.step:06d}")  # a check below may end the run
        self.check_language_models()
        rates = ErrorRates(sampled)
        when = f"in the evaluation after {after}"
        stop_on_errors(self.ranks, rates, self.config.rollout, trajectories, when)
        refuse_failed_trials([*sampled, *greedy], when)
        found = success(sampled, greedy, trials, settings.success_threshold)
        entry = {"after": after, "step": self.state.step, "success": found}
        self.state.evaluations.append(entry)
        keys = {"kind": "eval", "after": after, "stage": self.state.stage, "step": self.state.step}
        self.log.metrics(self.with_logged("eval/", {**keys, **evaluation_metrics(found)}))
        self.log.timings({**keys, "perf/evaluation_s": time.perf_counter() - begun})
        self.save_transcripts(f"evaluation-{after}", trajectories)
        self.say(f"evaluation after {after}: success sampled  {in_words(found)}")
        if self.ranks.is_main:
            self.write_results(is_final=False)

    def check_language_models(self) -> None:
        """End the run on all ranks, after a checkpoint, if customers or judge cannot go on."""
        if not (models := self.language_models) or not (why := end_of_run(models, self.ranks)):
            return
        if self.learner.updater is not None and not self.checkpointer.is_current:
            self.save(f"step-{self.state.step:06d}")
        raise UserError(why)

    def save(self, name: str) -> None:
        """Write a checkpoint."""
        updater = self.learner.updater
        optimizer = None if updater is None else updater.optimizer
        with self.ranks.phase("checkpoint", self.state.stage, self.state.step):
            seconds = self.checkpointer.save(name, self.learner.model, optimizer)
        self.watchdog.can_resume = True
        keys = {"kind": "checkpoint", "stage": self.state.stage, "step": self.state.step}
        self.log.timings({**keys, "perf/checkpoint_s": seconds})

    def save_transcripts(
        self, name: str, episodes: Sequence[Trajectory], advantages: Sequence[float] | None = None
    ) -> None:
        self._on_batch(self, name, episodes)
        self.checkpointer.check_folder()
        folder = self.folder / "trajectories" / name
        step = self.state.step
        path = save_transcripts(folder, step, self.ranks.rank, episodes, advantages)
        self.checkpointer.unsynced.append(path)

    @cached_property
    def baselines(self) -> dict[str, dict[str, float]]:
        """The results of the baselines, which do not depend on the model.

        Reward functions score a model's answers, so with reward functions there are no baselines.
        """
        if self.config.data.reward_funcs:
            return {}
        parts = self.parts
        timeout = self.config.rollout.call_timeout
        judge = self._judge.ask if self._judge else None
        return play_baselines(parts.domains, parts.held_out, timeout, judge)

    def write_results(self, is_final: bool = True) -> None:
        """Write `results.json`; only the final file has the transfer metrics."""
        updater = {} if self.learner.updater is None else self.learner.updater.state_dict()
        faults = {"skipped_steps": updater.get("num_skipped_steps")}
        faults["max_tokens_per_microbatch"] = updater.get("max_tokens_per_microbatch")
        again = f"--output-dir {self.folder} --resume-from-checkpoint latest writes them again"
        with may_fail("results.json", again):
            environments = self.parts.environments
            facts = {
                "baselines": self.baselines,
                "num_ranks": self.ranks.num_ranks,
                "faults": {name: count for name, count in faults.items() if count},
                "wall_s": self.checkpointer.wall_s,
            }
            further: dict[str, Any] = {"best": self.state.best, "about": self.parts.about}
            further |= {"rft": self.state.rft, "start": self.start.content}
            further |= {"agents": self.state.agents, "made_of": self.state.made_of}
            facts |= {name: of for name, of in further.items() if of}
            facts["reward_parts"] = {n: d.reward_parts for n, d in self.parts.domains.items()}
            facts["num_train_tasks"] = {n: len(tasks) for n, tasks in self.parts.train.items()}
            facts["tools"] = {n: tool_schemas(e) for n, e in environments.items()}
            stages = self.stages
            held_out = self.parts.held_out
            write_results(self.folder, self.config, self.state, stages, held_out, facts, is_final)
