"""A run on one rank as data; how it is opened; its evaluations, checkpoints and results."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints import run_folder
from pipeline.checkpoints.checkpoint import Checkpointer, SavedState, TrainState
from pipeline.checkpoints.resume import (
    agree_on_model,
    load_start,
    open_together,
    origin_of_model,
    refuse_other_origin,
    refuse_other_stages,
)
from pipeline.checkpoints.run_folder import Opened
from pipeline.checkpoints.transcripts import save_transcripts
from pipeline.common.console import may_fail, say
from pipeline.common.durable import write_text
from pipeline.common.errors import UserError
from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage, describe_stages, one_after_another
from pipeline.data.tasks import MODULE, Source
from pipeline.distributed.ranks import Ranks
from pipeline.distributed.watchdog import Watchdog
from pipeline.environments.language_models.customers import customers_of, end_of_run, judge_of
from pipeline.environments.language_models.language_model import LanguageModel
from pipeline.evaluation.advice import Group, StandStill
from pipeline.evaluation.baselines import play_baselines
from pipeline.evaluation.evaluate import (
    KLProbe,
    error_counts,
    evaluate,
    evaluation_metrics,
    failed_trials,
    refuse_failed_trials,
    stop_on_errors,
    success,
    success_in_words,
    unscored_trials,
    write_results,
)
from pipeline.models.capabilities import enter_ends
from pipeline.preflight.made_of import hashes_of_modules, made_of
from pipeline.preflight.parts import Parts
from pipeline.report.log import RunLog
from pipeline.report.progress import episode_progress, say_start
from pipeline.rollout.samplers.choice import Sampler, make_sampler
from pipeline.rollout.trajectory import EpisodeRecord, Trajectory
from pipeline.training.learner import Learner
from pipeline.training.open_groups import OpenGroups
from pipeline.training.step_metrics import logged_by_reward_functions, machine
from pipeline.training.updater import Reference

Hook = Callable[["Run", str, Sequence[Trajectory]], None]


@dataclass(kw_only=True, eq=False)
class Run:
    """A run on one rank: its settings, facts, files and state. `open_run` makes it.

    The functions of `before_grpo.py` and `train.py` tell what happens to it.
    """

    config: Config
    parts: Parts  # domains, tasks, stages, tokenizer
    folder: Path

    accelerator: Any
    ranks: Ranks
    watchdog: Watchdog

    learner: Learner
    open_groups: OpenGroups
    language_models: list[LanguageModel]  # customers and judge

    log: RunLog
    checkpointer: Checkpointer
    saved_state: Mapping[str, Any]  # of the checkpoint from which the run goes on; empty: none
    kl_probe: KLProbe
    learned: KLProbe  # the episodes of `learned_beta`

    state: TrainState  # what checkpoints keep

    # What a resumed run counts anew, or reads from its files.
    sources: Mapping[str, Source] = field(default_factory=dict)  # tasks of the stage, by domain
    teachers: dict[str, Reference] = field(default_factory=dict)  # of the stage, by domain
    records: list[EpisodeRecord] = field(
        default_factory=list
    )  # episodes of the stage, of this rank
    start_groups: list[Group] = field(default_factory=list)  # of this rank, for the start report
    num_unscored_steps: int = 0  # in a row
    standstill: StandStill = field(default_factory=StandStill)
    warned_of: set[str] = field(default_factory=set)  # metrics, once each

    on_batch: Hook = lambda *_: None

    @property
    def stages(self) -> list[Stage]:
        """The stages of the run. If a stage ends early, the next stages begin at earlier steps."""
        return one_after_another(self.parts.stages, self.state.ended_early)

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.ranks.is_main:
            say(text, sys.stdout)

    def drain_logged(self, prefix: str) -> dict[str, float]:
        """Return the metrics that reward functions have logged since the last call."""
        rewards = self.learner.rollout.rewards
        return logged_by_reward_functions(rewards, self.ranks, self.state, prefix)

    def with_logged(self, prefix: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a line of metrics with those that reward functions have logged beside `own`.

        A value under a name of `own` is left out, with a warning at the first time.
        """
        logged = self.drain_logged(prefix)
        for name in sorted((logged.keys() & own.keys()) - self.warned_of):
            self.warned_of.add(name)
            self.say(
                f"warning: log_metric: got {name}, which is the pipeline's, so what a reward "
                "function logs there is left out; choose another name"
            )
        return {**logged, **own}

    def check_language_models(self) -> None:
        """End the run on all ranks, after a checkpoint, if customers or judge cannot go on."""
        if not (models := self.language_models) or not (why := end_of_run(models, self.ranks)):
            return
        if self.learner.updater is not None:
            self.save_if_needed()
        raise UserError(why)

    def note_modules(self) -> None:
        """Add the user's modules that were first imported in an episode to `made_of`.

        Raises UserError if they differ between the ranks.
        """
        known = self.state.made_of
        new = {k: v for k, v in hashes_of_modules(self.config).items() if k not in known}
        late = dict[str, str]()
        for rank, own in enumerate(self.ranks.all_gather_objects(new, "modules")):
            for name, value in own.items():
                if late.setdefault(name, value) != value:
                    raise UserError(
                        f"{name}: rank {rank} has imported another file than the ranks before it; "
                        "give all the same files"
                    )
        self.state.made_of = {**late, **known}

    def further_state(self) -> dict[str, Any]:
        """Return what checkpoints keep beside `state`: of log, open groups, and updater if any."""
        updater = self.learner.updater
        further = self.log.state_dict() | self.open_groups.state_dict(self.state.step)
        return further | ({} if updater is None else updater.state_dict())

    def save(self, name: str = "", optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write a checkpoint, by default with the name of the step and the updater's optimizer."""
        self.note_modules()
        name = name or f"step-{self.state.step:06d}"
        updater = self.learner.updater
        optimizer = optimizer if updater is None else updater.optimizer
        with self.ranks.phase("checkpoint", self.state.stage, self.state.step):
            seconds = self.checkpointer.save(
                name, self.learner.model, optimizer, self.further_state()
            )
        self.watchdog.can_resume = True
        self.log.timings(
            {
                "kind": "checkpoint",
                "stage": self.state.stage,
                "step": self.state.step,
                "perf/checkpoint_s": seconds,
            }
        )

    def save_if_needed(self, name: str = "") -> None:
        """Write a checkpoint unless the last one has all finished steps and evaluations."""
        if not self.checkpointer.is_current:
            self.save(name)

    def save_transcripts(
        self, name: str, episodes: Sequence[Trajectory], advantages: Sequence[float] | None = None
    ) -> None:
        self.on_batch(self, name, episodes)
        self.checkpointer.check_folder()
        folder = self.folder / "trajectories" / name
        path = save_transcripts(folder, self.state.step, self.ranks.rank, episodes, advantages)
        self.checkpointer.unsynced.append(path)

    @cached_property
    def baselines(self) -> dict[str, dict[str, float]]:
        """The results of the baselines, which do not depend on the model.

        Reward functions score a model's answers, so with reward functions there are no baselines.
        """
        if self.config.data.reward_funcs:
            return {}
        return play_baselines(
            self.parts.domains,
            self.parts.held_out,
            self.config.rollout.call_timeout,
            self.learner.rollout.judge,
        )

    def write_results(self, is_final: bool = True) -> None:
        """Write `results.json`; only the final file has the transfer metrics."""
        updater = {} if self.learner.updater is None else self.learner.updater.state_dict()
        faults = {
            "skipped_steps": updater.get("num_skipped_steps"),
            "max_tokens_per_microbatch": updater.get("max_tokens_per_microbatch"),
        }
        again = f"--output-dir {self.folder} --resume-from-checkpoint latest writes them again"
        with may_fail("results.json", again):
            further = {
                "best": self.state.best,
                "about": self.parts.about,
                "rft": self.state.rft,
                "start": self.state.start_report,
                "unseen": self.parts.prompts.unseen,
                "agents": self.state.agents,
                "made_of": self.state.made_of,
            }
            facts = {
                "baselines": self.baselines,
                "num_ranks": self.ranks.num_ranks,
                "faults": {name: count for name, count in faults.items() if count},
                "wall_s": self.checkpointer.wall_s,
                **{name: fact for name, fact in further.items() if fact},
                "reward_parts": {n: d.reward_parts for n, d in self.parts.domains.items()},
                "num_train_tasks": {n: len(tasks) for n, tasks in self.parts.train.items()},
                "tools": {n: d.tools for n, d in self.parts.domains.items()},
            }
            write_results(
                self.folder,
                self.config,
                self.state,
                self.stages,
                self.parts.held_out,
                facts,
                is_final=is_final,
            )


def open_run(
    config: Config,
    folder: Path,
    parts: Parts,
    accelerator: Any,
    ranks: Ranks,
    watchdog: Watchdog,
    *,
    make_sampler: Callable[..., Sampler] = make_sampler,
    on_batch: Hook = lambda *_: None,
) -> Run:
    """Open a run of `parts` in `folder`. Every rank of the process group must call this function.

    `make_sampler` has the signature of that in `pipeline.rollout.samplers.choice`. `on_batch` is
    called after each step and each evaluation with the run, the name of the stage or evaluation,
    and this rank's episodes. Raises UserError for mistakes of the user.
    """
    origin = agree_on_origin(config, folder, parts, accelerator, ranks, watchdog)
    learner, language_models = make_learner(origin, config, accelerator, ranks, make_sampler)
    log, checkpointer = open_files(origin, config, ranks, watchdog)
    run = Run(
        config=config,
        parts=parts,
        folder=folder,
        accelerator=accelerator,
        ranks=ranks,
        watchdog=watchdog,
        learner=learner,
        open_groups=OpenGroups(learner.rollout, ranks, config),
        language_models=language_models,
        log=log,
        checkpointer=checkpointer,
        saved_state=origin.saved_state,
        kl_probe=KLProbe(folder, config, ranks),
        learned=KLProbe(folder, config, ranks, trains=True),
        state=origin.state,
        on_batch=on_batch,
    )
    run.drain_logged("")  # tells reward functions the number of steps
    return run


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a run begins with on this rank; all ranks have agreed on it before rank 0 writes."""

    folder: Path
    files: Opened | None  # the open folder, on rank 0
    resumed: Path | None  # the checkpoint from which the run goes on
    parts: Parts
    model: Any
    saved_state: SavedState  # of the checkpoint, or empty
    state: TrainState


def agree_on_origin(
    config: Config,
    folder: Path,
    parts: Parts,
    accelerator: Any,
    ranks: Ranks,
    watchdog: Watchdog,
) -> Origin:
    """Open the run's folder, and load its weights and its state.

    Raises UserError if the ranks, or a run and its checkpoint, are made of different things.
    """
    about = parts.about
    hashes = made_of(config, parts.tasks, parts.tokenizer)
    files, resumed = open_together(config, folder, ranks, parts.tokenizer, about, hashes)
    watchdog.can_resume = resumed is not None
    watchdog.not_for_children += [files.lock] if files else []
    saved_state, model = load_start(config, parts.tokenizer, resumed, accelerator.device)
    state = TrainState()
    state.load_state_dict(saved_state)
    earlier = saved_state or origin_of_model(config)
    late = [n for n in earlier.get("made_of", {}) if n.startswith(MODULE) and n not in hashes]
    hashes |= agree_on_model(config, model, parts.chat, late, ranks, is_new=resumed is None)
    enter_ends(model, parts.chat)
    stages = one_after_another(parts.stages, state.ended_early)
    name = (resumed or Path(config.model.model)).name
    notes = refuse_other_origin(earlier, hashes, name, config.run.override, about)
    for line in notes if ranks.is_main else ():
        say(line)
    refuse_other_stages(state.evaluations, stages, folder)
    state.config = config.model_dump(mode="json")
    state.about = about
    state.made_of = {**state.made_of, **hashes}
    return Origin(
        folder=folder,
        files=files,
        resumed=resumed,
        parts=parts,
        model=model,
        saved_state=saved_state,
        state=state,
    )


def make_learner(
    origin: Origin,
    config: Config,
    accelerator: Any,
    ranks: Ranks,
    make_sampler: Callable[..., Sampler],
) -> tuple[Learner, list[LanguageModel]]:
    """Make the learner, with the language models that answer and judge its messages.

    Raises UserError if it samples other than it trains.
    """
    parts = origin.parts
    customers = customers_of(config, origin.folder, parts.served, ranks)
    judge = judge_of(config, origin.folder, ranks)
    learner = Learner(
        origin.model,
        parts.chat,
        parts.domains,
        config,
        accelerator,
        ranks,
        make_sampler=make_sampler,
        rewards=parts.rewards,
        opening_messages=customers.opening_messages if customers else {},
        judge=judge.ask if judge else None,
    )
    if learner.note and ranks.is_main:
        say(f"warning: {learner.note}")
    if config.grpo.shard != "none" and ranks.num_ranks == 1:
        say("note: shard has no effect on one rank")
    learner.check_agreement(parts.longest_prompt)
    learner.sampling.max_episodes = parts.episodes_at_once
    models = (customers.model if customers else None, judge)
    return learner, [model for model in models if model]


def open_files(
    origin: Origin, config: Config, ranks: Ranks, watchdog: Watchdog
) -> tuple[RunLog, Checkpointer]:
    """Write the first files of the run on rank 0; return what writes the others."""
    folder = origin.folder
    state = origin.state
    if origin.files is not None:
        watchdog.run_folder = folder
        evaluated = {evaluation["after"] for evaluation in state.evaluations}
        run_folder.begin_folder(origin.files, config, ranks.num_ranks, state.step, evaluated)
    log = RunLog(folder, config, is_main=ranks.is_main, state=origin.saved_state or None)
    keys = {"kind": "machine", "stage": state.stage, "step": state.step}
    log.timings({**keys, **machine(ranks.num_ranks)})
    checkpointer = Checkpointer(
        folder, ranks, config.run, state, origin.parts.tokenizer, resumed=origin.resumed
    )
    if origin.files is not None:
        stages = one_after_another(origin.parts.stages, state.ended_early)
        write_text(
            folder / "curriculum.json", json.dumps(describe_stages(stages, config), indent=1)
        )
        say_start(origin.files, state.step, config, origin.parts.stages)
    return log, checkpointer


def evaluate_held_out(run: Run, after: str) -> None:
    """Evaluate on the held-out tasks, with sampling and greedily, and write `results.json`."""
    begun = time.perf_counter()
    settings = run.config.evaluation
    trials = settings.eval_trials
    seed = run.config.run.seed
    rollout = run.learner.rollout
    tasks = [task for tasks in run.parts.held_out.values() for task in tasks]
    name = f"evaluation after {after}"
    count = len(run.ranks.shard(len(tasks))) * (trials + settings.eval_greedy)
    shown = episode_progress(name, count, run.ranks)
    with run.ranks.phase("evaluate", run.state.stage, run.state.step), shown as progress:
        sampled, trajectories = evaluate(rollout, tasks, trials, seed, run.ranks, progress=progress)
        greedy = list[EpisodeRecord]()
        if settings.eval_greedy:
            greedy, _ = evaluate(rollout, tasks, 1, seed, run.ranks, greedy=True, progress=progress)
    ends = failed_trials([*sampled, *greedy]) or unscored_trials([*sampled, *greedy])
    if ends and run.learner.updater is not None:
        run.save_if_needed()  # a check below may end the run
    run.check_language_models()
    when = f"in the evaluation after {after}"
    stop_on_errors(run.ranks, error_counts(sampled), run.config.rollout, trajectories, when)
    refuse_failed_trials([*sampled, *greedy], when)
    successes = success(sampled, greedy, trials, settings.success_threshold)
    run.state.evaluations.append({"after": after, "step": run.state.step, "success": successes})
    metrics = evaluation_metrics(successes)
    keys = {"kind": "eval", "after": after, "stage": run.state.stage, "step": run.state.step}
    run.log.metrics(run.with_logged("eval/", {**keys, **metrics}))
    run.log.timings({**keys, "perf/evaluation_s": time.perf_counter() - begun})
    run.save_transcripts(f"evaluation-{after}", trajectories)
    run.say(f"evaluation after {after}: success sampled  {success_in_words(successes)}")
    if after == "start" and run.config.grpo.use_grpo and not run.config.is_supervised:
        silent = [
            name
            for name, domain in run.parts.domains.items()
            if domain.tools and not successes[name]["tools"]
        ]
        if silent:
            run.say(
                f"warning: no held-out episode called a tool of {', '.join(silent)}, and GRPO "
                "learns only from calls that the policy tries; --warm-start-steps 40 first teaches "
                "them from demonstrations"
            )
    if run.ranks.is_main:
        run.write_results(is_final=False)
