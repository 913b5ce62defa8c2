"""Search settings with Optuna. Each trial is a run, and bad trials end early.

    python scripts/optuna_study.py --recipe mixed --trials 20 \\
        --search learning_rate=1e-4..1e-3:log replay=0..0.5 loss_type=dapo,grpo

The search maximizes success on validation tasks, the mean over domains in the last validation of a
run. Held-out tasks of the test split are not used. A trial gets SIGTERM if its success at a step is
below the median of earlier trials at the step; the run then saves and ends. After Ctrl-C or
SIGTERM, the same command continues the study, and resumes the interrupted trial from its last
checkpoint. Flags after `--` are passed to every run. Needs `pip install optuna` (the extra
`search`).
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.commands.sweep import split_values
from pipeline.common.errors import INTERRUPTED, UserError, nearest
from pipeline.config.cli import Parser, flags_of, parse
from pipeline.config.recipe import SETTINGS, full_name
from pipeline.report.run_files import read_metrics
from pipeline.run import exit_code_of

RUN = (sys.executable, str(Path(__file__).resolve().parents[1] / "pipeline" / "run.py"))
POLL_S = 0.5  # seconds between reads of a run's metrics
Suggest = Callable[[Any], Any]  # lets a trial choose the value of a setting


def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mixed", help="a recipe file, or a shipped one")
    parser.add_argument("--search", nargs="+", required=True, metavar="SETTING=LOW..HIGH[:log]")
    parser.add_argument("--trials", type=int, default=20, help="completed or pruned, in total")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/study"))
    parser.add_argument("passed_on", nargs="*", help="after --: flags of every run")
    options = parser.parse_args(argv)
    if find_spec("optuna") is None:
        raise UserError("optuna: not installed; pip install optuna")
    flags = ["--config", options.recipe, "--report-to", "none", *options.passed_on]
    searches = searches_of(options.search, flags)
    config = parse(flags)
    every = config.evaluation.validation_steps
    if not 0 < every <= config.grpo.max_steps:
        raise UserError(
            f"validation_steps: got {every} of {config.grpo.max_steps} steps, but trials are "
            "judged by validations; give 1 to max_steps"
        )
    study = open_study(options.output_dir)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        objective = partial(play, searches, options.output_dir, [*RUN, *flags])
        run_trials(study, options.trials, objective)
    except KeyboardInterrupt:  # of Ctrl-C or SIGTERM; the trial's line has told it
        return INTERRUPTED
    if not any(trial.state.name == "COMPLETE" for trial in study.trials):
        print("no trial was completed", file=sys.stderr)
        return 1
    best = study.best_trial
    words = " ".join(flags_of(best.params))
    print(f"best: {best.user_attrs['folder']}, success {best.value:.3f}: {words}")
    return 0


def searches_of(words: Sequence[str], flags: Sequence[str]) -> dict[str, Suggest]:
    """Return how each setting is suggested, from words such as `replay=0..0.5`.

    Raises UserError for a value that a run with these flags would refuse, and for a wrong range.
    """
    from optuna import Trial

    types = {full_name(*setting): str(field.annotation) for setting, field in SETTINGS.items()}
    searches: dict[str, Suggest] = {}
    for word in words:
        name, _, values = word.partition("=")
        if not values:
            raise UserError(f"--search: got {word!r}; write {name}=LOW..HIGH[:log] or A,B")
        ends = values.removesuffix(":log").split("..")
        is_range = len(ends) == 2
        choices = ends if is_range else split_values(values)
        for value in choices:
            parse([*flags, *flags_of({name: value})])
        if name not in types:
            near = nearest(name, types)
            meant = f"; did you mean {near}?" if near else ""
            raise UserError(f"--search: got {word!r}, no full name of a setting{meant}")
        if is_range and "int" not in types[name] and "float" not in types[name]:
            raise UserError(f"--search: got {word!r}, and {name} is no number; write {name}=A,B")
        number = float if "float" in types[name] else int
        suggest: Any = Trial.suggest_float if number is float else Trial.suggest_int
        searches[name] = partial(Trial.suggest_categorical, name=name, choices=choices)
        if is_range:
            low, high = map(number, ends)
            is_log = values.endswith(":log")
            if low >= high or (is_log and low <= 0):
                why = "give LOW below HIGH, and above 0 with :log"
                raise UserError(f"--search: got {word!r}; {why}")
            searches[name] = partial(suggest, name=name, low=low, high=high, log=is_log)
    return searches


def open_study(folder: Path, num_startup_trials: int = 5) -> Any:
    """Load or create the study in a folder; the first trials are not pruned."""
    import optuna

    folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        storage=f"sqlite:///{(folder / 'study.db').resolve()}",
        study_name="search",
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=num_startup_trials),
    )
    # The seed differs from the seeds of existing trials.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    return study


def run_trials(study: Any, num_trials: int, objective: Callable[[Any], float]) -> None:
    """Run trials until `num_trials` trials of the study are finished, or have failed now."""
    finished = sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in study.trials)
    study.optimize(objective, num_trials - finished, catch=ChildProcessError)


def play(
    searches: Mapping[str, Suggest], parent: Path, command: Sequence[str], trial: Any
) -> float:
    """Make a run and report its validations; return the success in the last validation."""
    from optuna import TrialPruned

    name = trial.user_attrs.get("folder", f"trial-{trial.number:04d}")
    trial.set_user_attr("folder", name)
    flags = flags_of({setting: suggest(trial) for setting, suggest in searches.items()})
    folder = parent / name
    words = [*command, *flags, "--output-dir", str(folder), "--resume-from-checkpoint", "auto"]
    with folder.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    outcome = f"failed, see {folder}.log"
    successes: dict[int, float] = {}
    try:
        is_running = True
        while is_running:
            time.sleep(POLL_S)
            is_running = process.poll() is None
            for line in read_metrics(folder)[0]:
                if line["kind"] == "validation" and line["step"] not in successes:
                    rates = [line[key] for key in line if key.endswith("/success")]
                    if not rates:  # no trial of this validation could be scored
                        continue
                    successes[line["step"]] = fmean(rates)
                    trial.report(fmean(rates), line["step"])
                    if is_running and trial.should_prune():
                        outcome = "pruned"
                        raise TrialPruned
        if process.returncode or not successes:
            raise ChildProcessError(outcome)
        outcome = f"success {successes[max(successes)]:.3f}"
        return successes[max(successes)]
    except KeyboardInterrupt:
        outcome = "interrupted; the same command goes on"
        trial.study.enqueue_trial(trial.params, {"folder": name})
        raise
    finally:
        if process.poll() is None:  # A run saves a checkpoint on SIGTERM.
            process.terminate()
            process.wait()
        print(f"{name}: {outcome}  {' '.join(flags)}", flush=True)


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:]), sys.argv[1:]))
