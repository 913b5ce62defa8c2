"""Search settings with Optuna. Each trial is a run, and bad trials end early.

    python scripts/optuna_study.py --recipe mixed --trials 20 \\
        --search learning_rate=1e-4..1e-3:log replay=0..0.5 loss_type=dapo,grpo

The search maximizes success on validation tasks, the mean over domains in the last validation of a
run. Held-out tasks of the test split are not used. A trial gets SIGTERM if its success at a step is
below the median of earlier trials at the step; the run then saves and ends. After Ctrl-C or
SIGTERM, the same command continues the study, and resumes the interrupted trial from its last
checkpoint. Several processes may share a `--storage`; each process runs one trial at a time. Flags
after `--` are passed to every run. Needs `pip install optuna` (the extra `search`).

Exit codes: 0 done, 1 no trial was completed, 2 a mistake in the command, 75 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.commands.sweep import flags_of, split_values
from pipeline.common.errors import INTERRUPTED, UserError, nearest
from pipeline.config.cli import flag, parse
from pipeline.config.recipe import SETTINGS

RUN = (sys.executable, str(Path(__file__).resolve().parents[1] / "pipeline" / "run.py"))
NUMBER = r"[+-]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?"
POLL_S = 0.5  # seconds between reads of a run's metrics

Searches = Mapping[str, Any]  # {setting: Optuna's distribution of its values}


def parse_search(words: Sequence[str]) -> dict[str, Any]:
    """Parse `learning_rate=1e-4..1e-3:log`, `tasks_per_step=8..32` or `loss_type=dapo,grpo`.

    UserError for an unknown setting or a wrong range.
    """
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    known = {flag(*key)[2:].replace("-", "_"): field.annotation for key, field in SETTINGS.items()}
    found: dict[str, Any] = {}
    for word in words:
        name, _, values = word.partition("=")
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else "name settings of the recipe"
            raise UserError(f"--search: got {name!r}; {hint}")
        ends = re.fullmatch(rf"({NUMBER})\.\.({NUMBER})(:log)?", values)
        if ends is None:
            if not values or ".." in values:
                raise UserError(f"--search: got {word!r}; write {name}=LOW..HIGH[:log] or A,B")
            found[name] = CategoricalDistribution(split_values(values))
            continue
        low = float(ends[1])
        high = float(ends[2])
        is_log = bool(ends[3])
        if low >= high or (is_log and low <= 0):
            raise UserError(f"--search: got {word!r}; give LOW below HIGH, and above 0 with :log")
        if "float" in str(known[name]):
            found[name] = FloatDistribution(low, high, log=is_log)
        else:
            found[name] = IntDistribution(int(low), int(high), log=is_log)
    return found


def validations(folder: Path) -> Iterator[tuple[int, float]]:
    """Step and mean success over domains of each validation of a run."""
    path = folder / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines(True) if path.is_file() else ():
        record = json.loads(line) if line.endswith("\n") else {}
        if record.get("kind") == "validation":
            found = [v for key, v in record.items() if re.fullmatch("validation/.*/success", key)]
            if found:
                yield record["step"], fmean(found)


class Study:
    """Runs the trials of an Optuna study in one folder."""

    def __init__(self, study: Any, folder: Path, searches: Searches, flags: Sequence[str]) -> None:
        self.study = study
        self.folder = folder
        self.searches = searches
        self.flags = flags
        self.command: Sequence[str] = RUN

    def run(self, num_trials: int) -> None:
        """Run trials until `num_trials` trials of the study are finished, or have failed now."""
        from optuna.trial import TrialState

        finished = self.study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
        for _ in range(num_trials - len(finished)):
            trial = self.study.ask(dict(self.searches))
            name = trial.user_attrs.get("folder", f"trial-{trial.number:04d}")
            trial.set_user_attr("folder", name)
            flags = flags_of({key: str(value) for key, value in trial.params.items()})
            try:
                said = self._play(trial, self.folder / name, flags)
            except KeyboardInterrupt:
                self.study.tell(trial, state=TrialState.FAIL)
                self.study.enqueue_trial(trial.params, {"folder": name})
                raise
            print(f"{name}: {said}  {' '.join(flags)}", flush=True)

    def _play(self, trial: Any, folder: Path, flags: Sequence[str]) -> str:
        """Make a run, report its validations to Optuna, and return what became of the trial."""
        from optuna.trial import TrialState

        words = [*self.command, *self.flags, *flags, "--output-dir", str(folder)]
        log = folder.with_suffix(".log")
        seen: dict[int, float] = {}
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*words, "--resume-from-checkpoint", "auto"], stdout=file, stderr=subprocess.STDOUT
            )
        try:
            ended = False
            while not ended:
                ended = _has_ended(process)
                for step, success in validations(folder):
                    if step in seen:
                        continue
                    seen[step] = success
                    trial.report(success, step)
                    if trial.should_prune() and not ended:
                        self.study.tell(trial, state=TrialState.PRUNED)
                        return "pruned"
        finally:  # A run saves a checkpoint on SIGTERM.
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode or not seen:
            self.study.tell(trial, state=TrialState.FAIL)
            return f"failed with exit code {process.returncode}, see {log}"
        value = seen[max(seen)]
        self.study.tell(trial, value)
        return f"success {value:.3f}"


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended, or ends within a moment."""
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    flags = ["--config", options.recipe, "--report-to", "none", *options.passed_on]
    try:
        if importlib.util.find_spec("optuna") is None:
            raise UserError("optuna: not installed; pip install optuna")
        searches = parse_search(options.search)
        _check(searches, flags)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    study = _open(options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Study(study, options.output_dir, searches, flags).run(options.trials)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    return _tell_best(study)


def _check(searches: Searches, flags: Sequence[str]) -> None:
    """Check the flags of all runs, with the ends of each range and all choices."""
    for name, values in searches.items():
        for value in getattr(values, "choices", None) or (values.low, values.high):
            parse([*flags, *flags_of({name: str(value)})])
    config = parse(list(flags))
    every = config.evaluation.validation_steps
    if not 0 < every <= config.grpo.max_steps:
        raise UserError(
            f"validation_steps: got {every} of {config.grpo.max_steps} steps, but trials are "
            "judged by validations; give 1 to max_steps"
        )


def _open(options: argparse.Namespace) -> Any:
    """Load or create the study in its storage."""
    import optuna

    options.output_dir.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path = (options.output_dir / "study.db").resolve()
    study = optuna.create_study(
        storage=options.storage or f"sqlite:///{path}",
        study_name=options.study_name,
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=options.startup_trials),
    )
    # The seed differs from the seeds of existing trials.
    study.sampler = optuna.samplers.TPESampler(seed=options.seed + len(study.trials))
    return study


def _tell_best(study: Any) -> int:
    from optuna.trial import TrialState

    if not study.get_trials(states=(TrialState.COMPLETE,)):
        print("no trial was completed", file=sys.stderr)
        return 1
    best = study.best_trial
    flags = flags_of({name: str(value) for name, value in best.params.items()})
    print(f"best: {best.user_attrs['folder']}, success {best.value:.3f}: {' '.join(flags)}")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--recipe", default="mixed", help="a recipe file, or a shipped one")
    made.add_argument("--search", nargs="+", required=True, metavar="SETTING=LOW..HIGH[:log]")
    made.add_argument("--trials", type=int, default=20, help="completed or pruned, in total")
    made.add_argument("--startup-trials", type=int, default=5, help="before any is pruned")
    made.add_argument("--seed", type=int, default=0, help="of what is suggested")
    made.add_argument("--output-dir", type=Path, default=Path("runs/study"))
    made.add_argument("--storage", help="missing: sqlite, study.db in the output folder")
    made.add_argument("--study-name", default="search")
    made.add_argument("passed_on", nargs="*", help="after --: flags of every run")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
