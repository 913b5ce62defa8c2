"""The run: what comes before GRPO (`before_grpo.py`), then GRPO stage by stage.

A stage consists of steps (rollouts and an update) and an evaluation. `train` is the loop; the
functions that it calls follow in the order of its calls. `run_state.py` has the run as data.
"""

import gc
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from copy import deepcopy
from functools import partial

from pipeline.before_grpo import attach_adapters, before_training, report_start
from pipeline.checkpoints.checkpoint import full_disk
from pipeline.checkpoints.moments import load_optimizer
from pipeline.checkpoints.resume import (
    START,
    experts_of,
    folder_of_reference,
    refuse_other_origin,
    set_merged,
    set_weights,
    share_folder,
    start_of_grpo,
    weights_of,
)
from pipeline.checkpoints.run_folder import folder_of
from pipeline.checkpoints.transcripts import read_transcripts
from pipeline.common.console import command, kept_warnings, may_fail
from pipeline.common.errors import INTERRUPTED, RunError, UserError
from pipeline.common.layout import WARNINGS
from pipeline.config.settings import DISTILL, MERGE, Config
from pipeline.data.curriculum import (
    GAIN,
    Stage,
    learning_rate_at,
    num_drawn,
    tasks_of_source,
)
from pipeline.data.task_memory import TaskMemory
from pipeline.data.tasks import Task
from pipeline.distributed.connect import connect
from pipeline.distributed.ranks import Interrupted
from pipeline.distributed.watchdog import Watchdog
from pipeline.evaluation.advice import (
    ActionCollapse,
    count_dead_steps,
    dead_domains,
    fallen_domains,
    lost_domains,
)
from pipeline.evaluation.evaluate import (
    error_counts,
    evaluate,
    mean_success,
    plateau,
    scored,
    stop_on_errors,
    training_summary,
    validation_metrics,
)
from pipeline.models.fitting import fitted
from pipeline.models.sampling_copy import has_adapters
from pipeline.preflight.check import check_and_prepare
from pipeline.report.export import push_after_training
from pipeline.report.progress import StageProgress
from pipeline.report.watch import page_beside
from pipeline.report.write import final_table, write_report
from pipeline.rollout.samplers.choice import refuse_missing
from pipeline.run_state import Run, evaluate_held_out, open_run
from pipeline.training import step_metrics
from pipeline.training.collect import RolloutBatch, collect_rollouts, give_advantages
from pipeline.training.distillation import teach
from pipeline.training.step_metrics import Meter, over_iterations, rollout_metrics
from pipeline.training.updater import Reference, Updater

# Mean differences of log-probabilities between sampler and training, in nats, above which a run
# warns: 3 times those of healthy runs of SmolLM2-135M in bf16, whose maxima over a step of 3,500
# tokens reach 0.5, and 10 times those in fp32 (docs/results/real_models.md).
GAP_BF16 = 0.1
GAP_FP32 = 1e-4
GAP_CORRECTED = 0.3  # with the correction of the sampler, in every precision
# Mean ratio of trainer to sampler below which, or above whose inverse, a corrected run warns.
LEAST_RATIO = 0.1
UNSCORED_STEPS = 3  # steps in a row without any reward that end a run


def carry_out(run: Run, end: Callable[[Run], None]) -> int:
    """Run to the end or until a signal interrupts the run, and return the exit code."""
    try:
        before_training(run)
        if run.config.grpo.use_grpo:
            train(run)
        end(run)
    except Interrupted:
        return stop(run)
    return 0


def train(run: Run) -> None:
    """Do GRPO: for each stage and each step, collect rollouts and update the policy."""
    meter = begin_grpo(run)
    for index in range(len(run.parts.stages)):
        stage = run.stages[index]  # after an early end of a stage, later stages begin earlier
        if run.state.evaluated(stage.name):
            continue
        first = begin_stage(run, stage)
        with StageProgress(
            stage.name,
            stage.num_steps,
            is_main=run.ranks.is_main,
            done=first - stage.first_step,
            num_later=run.stages[-1].last_step - stage.last_step,
        ) as progress:
            for step in range(first, stage.last_step):
                if ends_early(run, stage):
                    break
                with profiled(run, step + 1), meter.step():
                    batch = collect(run, stage, step)
                    give_advantages(batch, run.ranks, run.config)
                    statistics = update(run, stage, batch)
                metrics = record(run, stage, batch, statistics, meter)
                progress.step(metrics)
                end_step(run, stage, batch)
        end_stage(run, stage)


# The stages


def updater_of(run: Run) -> Updater:
    """Return what trains the model, from `begin_grpo` on."""
    assert run.learner.updater is not None, "GRPO has not begun"
    return run.learner.updater


def begin_grpo(run: Run) -> Meter:
    """Make the Updater, and return a Meter that measures the training steps."""
    learner = run.learner
    updater = learner.updater = make_updater(run)
    learner.sync_weights()
    if run.config.curriculum.is_separate and not (run.config.is_supervised or run.state.step):
        run.save(START)
    run.save_if_needed()
    for probe in (run.kl_probe, run.learned):
        probe.load([s for s in run.stages[:-1] if run.state.evaluated(s.name)])
    step_metrics.tell_missed(run.config.run.profile, run.state.step, run.folder, run.say)
    meter = Meter(run.ranks, learner.rollout, updater)
    gc.freeze()  # exempts long-lived objects from garbage collection
    return meter


def make_updater(run: Run) -> Updater:
    """Make the Updater of the current model, or of the checkpoint from which the run goes on."""
    config = run.config
    learner = run.learner
    # Until the first step, the model has what GRPO starts from.
    resumed = run.checkpointer.resumed if run.saved_state.get("step") else None
    if config.model.use_peft and not has_adapters(learner.model):
        attach_adapters(run)
    tokenizer = run.parts.tokenizer
    load = partial(set_weights, learner.model, config, tokenizer)
    module = learner.module_to_train()

    def earlier(*, per_stage: bool) -> Reference:
        """Return the policy before GRPO, or at the start of the stage."""
        if resumed is not None:
            folder = folder_of_reference(run.checkpointer, run.stages, per_stage)
            load(folder)
            if folder is None and not config.model.use_peft:
                weights = weights_of(learner.model, run.ranks)
                refuse_other_origin(run.saved_state, weights, resumed.name, config.run.override)
        return Reference(module)

    per_stage = config.grpo.reference_per_stage
    reference = earlier(per_stage=per_stage) if config.grpo.beta > 0 else None
    start = reference if per_stage else None
    if config.grpo.movement_coef == 0:
        start = None
    elif start is None:
        start = earlier(per_stage=True)
    if resumed is not None and (reference or start or config.model.use_peft):
        load(resumed)
    updater = Updater(
        run.accelerator,
        module,
        run.ranks,
        config,
        reference=reference,
        start=start,
        pad_id=tokenizer.pad_token_id or 0,
    )
    updater.faults_folder = run.folder / "faults"
    if resumed is not None:
        load_optimizer(resumed, updater.optimizer)
        updater.load_state_dict(run.saved_state)
    return updater


def begin_stage(run: Run, stage: Stage) -> int:
    """Prepare a stage; return the index of the stage's next step among all steps of the run."""
    is_inside = run.state.step > stage.first_step
    if stage.anew and not is_inside:
        begin_anew(run, stage)
    updater = updater_of(run)
    per_stage = run.config.grpo.reference_per_stage
    for earlier, is_of_stage in ((updater.reference, per_stage), (updater.start, True)):
        if earlier is not None:
            if is_of_stage and not is_inside:
                earlier.refresh()
            when = f"of the reference policy in stage {stage.name}"
            run.ranks.check_same_parameters(earlier.parameters.items(), when)
    run.records = []
    if is_inside:
        folder = run.folder / "trajectories" / stage.name
        run.records = read_transcripts(folder, run.ranks.rank, run.ranks.num_ranks)
        resume_open_groups(run, stage)
    else:
        run.state.error_counts = {}
        run.state.dead_steps = {}
        run.state.decisions = {}
        if run.config.curriculum.difficulties:  # which may have equal ids
            run.state.task_memory = {}
        stages = run.stages[: stage.index + 1]
        if not stage.anew:
            for line in lost_domains(run.state.evaluations, stages, run.config.evaluation):
                run.say(f"warning: {line}")
    if stage.name == DISTILL:
        begin_teaching(run)
    run.sources = run.parts.sources(stage)
    validate_when_due(run, stage)  # a resumed run may have stopped before this validation
    if has_unsaved_best(run):
        run.save()
    return max(stage.first_step, run.state.step)


def resume_open_groups(run: Run, stage: Stage) -> None:
    """Go on with the groups that had not ended when the checkpoint was written."""
    if not run.saved_state.get("open_groups"):
        return
    if run.state.step >= stage.last_step:  # another max_steps than before
        run.say(f"warning: stage {stage.name} has no further step, so open episodes are left out")
    elif anew := run.open_groups.load_state_dict(run.saved_state, stage.name):
        run.say(
            f"warning: episodes of {', '.join(anew)} that had not ended begin anew, because "
            "what they wait for cannot be called again, or settings have changed"
        )


def begin_anew(run: Run, stage: Stage) -> None:
    """Set the weights from before the first stage, or those merged of all experts; reset AdamW."""
    config = run.config
    start = start_of_grpo(run.checkpointer)
    if start is None:
        raise UserError(
            f"curriculum: checkpoint {START}, with which stage {stage.name} begins, is gone; "
            "restore it, or start anew"
        )
    model = run.learner.model
    tokenizer = run.parts.tokenizer
    with run.ranks.phase("load weights", stage.name, run.state.step):
        if stage.name == MERGE:
            experts = experts_of(run.checkpointer, run.stages)
            how = f"{config.curriculum.merge_method} of {', '.join(experts)}"
            run.say(f"stage {MERGE}: {how}, from {start.name}")
            set_merged(model, config, tokenizer, [start, *experts.values()], run.ranks)
            run.state.stage = MERGE
        else:
            set_weights(model, config, tokenizer, start)
        updater_of(run).optimizer.state.clear()
        run.learner.sync_weights()


def begin_teaching(run: Run) -> None:
    """Make the expert of each domain its teacher; the policy's weights stay as they are."""
    experts = experts_of(run.checkpointer, run.stages)
    run.say(f"stage {DISTILL}: the experts of {', '.join(experts)} teach a student")
    updater = updater_of(run)
    # A student's entropy shall be that of its teachers.
    updater.settings = updater.settings.model_copy(update={"entropy_coef": 0.0})
    for domain, folder in experts.items():
        teacher = run.teachers[domain] = Reference(updater.module, aside=True)
        with teacher.in_place():
            set_weights(run.learner.model, run.config, run.parts.tokenizer, folder)


def end_stage(run: Run, stage: Stage) -> None:
    """Summarise and evaluate a stage, keep episodes for KL estimates, and save a checkpoint."""
    gathered = run.ranks.all_gather_objects(run.records, f"records of stage {stage.name}")
    run.records = []
    if any(gathered):
        run.state.training[stage.name] = training_summary(gathered)
    if stage.index + 1 < len(run.stages):
        keep_episodes(run, stage)
    run.save_if_needed()  # an evaluation may take longer than the stage
    evaluate_held_out(run, stage.name)
    run.save(f"stage-{stage.index + 1}-{stage.name}")


def keep_episodes(run: Run, stage: Stage) -> None:
    """Keep episodes of the stage's domains, as the policy now plays them."""
    config = run.config
    for probe, count in (
        (run.kl_probe, config.evaluation.kl_probe_tasks),
        (run.learned, config.grpo.learned_beta_tasks),
    ):
        tasks = list[Task]()
        for domain in stage.own if probe.is_wanted else ():
            if probe is run.kl_probe:
                tasks += run.parts.validation[domain][:count]
            else:
                source = run.sources[domain]
                most = min(count, num_drawn(source))
                tasks += tasks_of_source(source, most, 0, config.run.seed, "learned", domain)
        if tasks:
            with run.ranks.phase("validate", stage.name, run.state.step):
                probe.keep(stage, tasks, run.learner.rollout)


# The steps of a stage


def profiled(run: Run, step: int) -> AbstractContextManager[None]:
    """Return a context manager that profiles the step if the setting `profile` lists it."""
    return step_metrics.step_profile(
        step, run.config.run.profile, run.folder, run.ranks, run.accelerator.device
    )


def collect(run: Run, stage: Stage, step: int) -> RolloutBatch:
    """Collect this rank's rollouts for a step."""
    by_signal = run.config.curriculum.task_sampling == "signal"
    memory = TaskMemory(**deepcopy(run.state.task_memory)) if by_signal else None
    config = run.config
    if run.teachers:  # groups with equal rewards teach, too
        config = config.changed("grpo", dynamic_sampling=False)
    run.open_groups.begin_step(
        step,
        drains=step + 1 in (1, stage.last_step)
        or is_due(config.evaluation.validation_steps, step + 1),
        saves=is_due(config.run.save_steps, step + 1),
    )
    batch = collect_rollouts(run.open_groups, run.ranks, config, stage, run.sources, memory=memory)
    run.check_language_models()
    return batch


def is_due(every: int, step: int) -> bool:
    """Return whether something happens after `step` steps that happens after each `every` steps."""
    return every > 0 and step % every == 0


def update(run: Run, stage: Stage, batch: RolloutBatch) -> dict[str, float]:
    """Train on the batch, load the weights into the sampler, return all ranks' statistics."""
    step = run.state.step
    settings = run.config.grpo
    learned = [t for d, of in run.learned.episodes.items() if d not in stage.own for t in of]
    learning_rate = learning_rate_at(
        step - stage.first_step, stage.num_steps, run.config.peak_learning_rate, settings
    )
    with run.ranks.phase("update", stage.name, step + 1):
        run.learner.sampling.rest()
        updater = updater_of(run)
        teachers = run.teachers
        taught = teach(batch, teachers, updater, run.ranks, run.config) if teachers else {}
        of_iterations = [
            updater.update_policy(
                batch.trajectories,
                [sample.advantage for sample in batch.samples],
                learning_rate,
                [sample.kept for sample in batch.samples],
                learned=learned,
                is_last=iteration == settings.num_iterations,
            )
            for iteration in range(1, settings.num_iterations + 1)
        ]
        run.learner.sync_weights()
    statistics = over_iterations(of_iterations) | taught
    warn_of_disagreement(run, f"warning: step {step + 1}:", statistics)
    return statistics


def warn_of_disagreement(run: Run, where: str, statistics: Mapping[str, float]) -> None:
    """Warn once if sampler and training disagree, and once if the correction spoils the update."""
    settings = run.config.grpo
    default = GAP_BF16 if run.accelerator.mixed_precision == "bf16" else GAP_FP32
    if run.config.corrects_sampling or run.config.rollout.is_partial:
        default = GAP_CORRECTED
    limit = settings.max_sampling_logp_difference or default
    gap = statistics.get("train/sampling_logp_difference_mean", 0.0)
    ratio = statistics.get("train/importance_sampling_ratio_mean", 1.0)
    above = f"and above max_sampling_logp_difference {limit:g}"
    useless = (
        "and about 1 is right: the correction of the sampler leaves nothing useful of this update; "
        "set mixed_precision no, or sampler own"
    )
    for name, value, is_right, why in (
        ("sampling_logp_difference_mean", gap, gap <= limit, above),
        ("importance_sampling_ratio_mean", ratio, LEAST_RATIO <= ratio <= 1 / LEAST_RATIO, useless),
    ):
        if not is_right and name not in run.warned_of:
            run.say(f"{where} train/{name} is {value:.2g} {why}")
            run.warned_of.add(name)


def record(
    run: Run, stage: Stage, batch: RolloutBatch, statistics: dict[str, float], meter: Meter
) -> dict[str, float]:
    """Count a finished step, write its transcripts, metrics and timings; return the metrics."""
    run.state.step = run.state.step + 1
    run.state.stage = stage.name
    advantages = [sample.advantage for sample in batch.samples]
    run.save_transcripts(stage.name, batch.trajectories, advantages)
    run.records += [trajectory.record() for trajectory in batch.trajectories]
    rewards = run.learner.rollout.rewards
    names = [] if rewards is None else rewards.names(run.parts.domains.values())
    metrics, counts = rollout_metrics(batch, run.ranks, run.config, names, run.state.num_tokens)
    run.state.num_tokens = int(metrics["train/num_tokens"])
    for domain, (episodes, errors) in counts.items():
        before = run.state.error_counts.get(domain, [0, 0])
        run.state.error_counts[domain] = [before[0] + episodes, before[1] + errors]
    _refuse_unscored(run, stage, metrics)
    if not batch.tasks and "no group" not in run.warned_of:
        run.warned_of.add("no group")
        run.say(
            f"note: step {run.state.step} trains no group, because none has ended after "
            f"{run.config.rollout.partial_rollout_tokens} tokens of each episode "
            "(partial_rollout_tokens); later steps train them"
        )
    keys = {"kind": "train", "stage": stage.name, "step": run.state.step}
    if batch.memory is not None:
        run.state.task_memory = vars(batch.memory)
        metrics |= batch.memory.metrics(batch.tasks[: batch.rounds[0]])
    own = {**keys, **statistics, **metrics}
    run.log.metrics(own if rewards is None else run.with_logged("train/", own))
    run.log.timings({**keys, **meter.timings(batch.trajectories)})
    if not run.teachers:
        count_dead_steps(run.state.dead_steps, stage, metrics)
    warn_of_stagnation(run, stage, batch, {**statistics, **metrics})
    return {**statistics, **metrics}


def warn_of_stagnation(
    run: Run, stage: Stage, batch: RolloutBatch, metrics: Mapping[str, float]
) -> None:
    """Warn if the policy acts alike, or if neither the weights nor the reward move."""
    collapse = ActionCollapse(**run.state.decisions)
    collapse.add(
        stage,
        run.state.step,
        batch.first,
        run.parts.domains,
        run.config.evaluation.success_threshold,
        run.ranks,
    )
    standstill = run.standstill.message(metrics, run.config.peak_learning_rate)
    lines = [*collapse.messages(metrics, run.config), standstill]
    run.state.decisions = vars(collapse)
    for line in filter(None, lines):
        run.say(f"warning: step {run.state.step}: {line}")


def _refuse_unscored(run: Run, stage: Stage, metrics: Mapping[str, float]) -> None:
    """Raise UserError if no episode of the last steps has a reward, though none failed."""
    left = sum(metrics.get(f"rollout/left_out/reward/{domain}", 0.0) for domain in stage.groups)
    if not metrics["rollout/episodes"]:
        return
    is_unscored = (
        left == metrics["rollout/episodes"] and not metrics["rollout/stop/environment_error"]
    )
    run.num_unscored_steps = run.num_unscored_steps + 1 if is_unscored else 0
    if run.num_unscored_steps == UNSCORED_STEPS:
        raise UserError(
            f"reward_funcs: every function returned None for all {left:.0f} episodes of step "
            f"{run.state.step} and of the {UNSCORED_STEPS - 1} before it, so nothing can be "
            "learned; let a function return a number for each completion"
        )


def end_step(run: Run, stage: Stage, batch: RolloutBatch) -> None:
    """Report the start, look for faults and dead domains, validate."""
    if run.state.step == 1:
        report_start(run, batch)
    stop_on_errors(run.ranks, run.state.error_counts, run.config.rollout, run.records)
    validate_when_due(run, stage)
    lines = dead_domains(run.state.dead_steps, stage, run.records, run.ranks, run.config)
    is_stopped = bool(lines) and run.config.run.stop_on_dead_domain
    most = run.config.data.max_reward_calls
    called = run.state.num_reward_calls
    is_spent = most is not None and called >= most
    if run.checkpointer.is_due or is_stopped or is_spent or has_unsaved_best(run):
        run.save()
    if is_stopped:
        raise RunError(f"stop_on_dead_domain: step {run.state.step}: {lines[0]}")
    if is_spent:
        raise UserError(
            f"max_reward_calls: got {most}, and reward functions were called {called} times; "
            "resume with more and --override"
        )
    for line in lines:
        run.say(f"warning: step {run.state.step}: {line}")


def validate_when_due(run: Run, stage: Stage) -> None:
    """Validate the policy if `validation_steps` divides the step, but only once per step."""
    step = run.state.step
    if not is_due(run.config.evaluation.validation_steps, step) or run.state.validated(step):
        return
    begun = time.perf_counter()
    tasks = [task for tasks in run.parts.validation.values() for task in tasks]
    with run.ranks.phase("validate", stage.name, step):
        records, trajectories = evaluate(
            run.learner.rollout, tasks, 1, run.config.run.seed, run.ranks
        )
        run.check_language_models()
        kl = run.kl_probe.divergences(updater_of(run))
    rewards = scored(records)
    keys = {"stage": stage.name, "step": step}
    run.state.validations.append({**keys, "success": rewards, "kl": kl})
    threshold = run.config.evaluation.success_threshold
    metrics = validation_metrics(rewards, kl, threshold)
    keys = {"kind": "validation", **keys}
    run.log.metrics(run.with_logged("validation/", {**keys, **metrics}))
    run.log.timings({**keys, "perf/validation_s": time.perf_counter() - begun})
    mean = mean_success(rewards, run.config.data.domains, threshold)
    best = run.state.best.get("success", -1.0)
    if run.config.run.keep_best and mean is not None and mean > best:
        run.state.best = {"checkpoint": f"step-{step:06d}", "step": step, "success": mean}
    for line in fallen_domains(run.state.validations, stage, run.config):
        run.say(f"warning: step {step}: {line}")
    stop_on_errors(
        run.ranks, error_counts(records), run.config.rollout, trajectories, "in a validation"
    )


def has_unsaved_best(run: Run) -> bool:
    """Whether the present policy is the best so far and has no checkpoint yet."""
    return run.state.best.get("step") == run.state.step and not run.checkpointer.is_current


def ends_early(run: Run, stage: Stage) -> bool:
    """Return True and store the stage's length if validation success no longer rises."""
    best = plateau(run.state.validations, stage, run.config)
    if best is None:
        return False
    done = run.state.step - stage.first_step
    run.state.ended_early[stage.name] = done
    run.say(
        f"stage {stage.name} ends after {done} of {stage.num_steps} steps: "
        f"{run.config.curriculum.plateau_patience} validations without {GAIN:g} more success "
        f"(best {best:.2f})"
    )
    return True


# The end


def finish(run: Run) -> None:
    """Write the results and the report on rank 0, and print the table of results."""
    if run.ranks.is_main:
        run.write_results()
        contents = "checkpoints, without a report"
        again = f"{command('report')} {run.folder}"
        with may_fail("report", f"{again} makes it again"):
            write_report(run.folder)
            contents = "report, plots and checkpoints"
        run.log.results = run.folder
        with may_fail("table", f"{again} has it"):
            results = json.loads((run.folder / "results.json").read_text(encoding="utf-8"))
            print(final_table(results))
        if best := run.state.best:
            print(
                f"best checkpoint: {best['checkpoint']}, mean validation success "
                f"{best['success']:.3f}; export and chat take it by --checkpoint best"
            )
        print(f"{contents}: {run.folder}")
    run.ranks.barrier("end")


def stop(run: Run) -> int:
    """Save a checkpoint unless the latest checkpoint is current, and return the exit code."""
    if run.state.stage != "start":
        run.save_if_needed()
    if not run.watchdog.can_resume:
        run.say("interrupted before the first checkpoint; start again")
        return 1
    run.say(
        f"interrupted after {run.state.step} steps; go on with --output-dir {run.folder} "
        "--resume-from-checkpoint latest"
    )
    return INTERRUPTED


def main(
    config: Config,
    *,
    open_run: Callable[..., Run] = open_run,
    end: Callable[[Run], None] = finish,
) -> int:
    """Run the training on this rank and return the exit code; all ranks must call this function.

    `open_run` has the signature of `pipeline.run_state.open_run`; `end` is called after training.
    """
    config, lines = fitted(config)
    accelerator, ranks = connect(config)
    with Watchdog(ranks, config.run.timeout) as watchdog:
        refuse_missing(config.rollout.sampler_facts)
        try:
            folder = share_folder(config, ranks)
            parts = check_and_prepare(config, ranks)
            run = open_run(config, folder, parts, accelerator, ranks, watchdog)
        except OSError as error:
            fault = full_disk(folder_of(config), error, "start again in another folder")
            raise fault or error from None
        for line in lines:
            run.say(line)
        page = page_beside(run.folder) if config.run.watch and ranks.is_main else nullcontext()
        with kept_warnings(run.folder / WARNINGS), run.log, closing(run.learner), page:
            try:
                code = carry_out(run, end)
            except Exception as error:
                if (fault := run.checkpointer.machine_fault(error)) is None:
                    raise
                raise fault from None
        if code == 0:
            accelerator.end_training()
    # An upload may take longer than other ranks would wait.
    if code == 0 and ranks.is_main and config.run.push_to_hub and config.grpo.use_grpo:
        push_after_training(run.folder, config)
    return code
