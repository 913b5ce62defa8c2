"""Search settings with Optuna. Each trial is a run, and bad trials end early.

    python scripts/optuna_study.py --recipe mixed --trials 20 \\
        --search learning_rate=1e-4..1e-3:log replay=0..0.5 loss_type=dapo,grpo

The search maximizes success on validation tasks, the mean over domains in the last validation of a
run. Held-out tasks of the test split are not used. A trial gets SIGTERM if its success at a step is
below the median of earlier trials at the step; the run then saves and ends. The same command
continues an interrupted study, and resumes the interrupted trial from its last checkpoint. Several
processes may share a `--storage`; each process runs one trial at a time. Flags after `--` are
passed to every run. Needs `pip install optuna` (the extra `search`).

Exit codes: 0 done, 1 no trial was completed, 2 a mistake in the command, 75 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import psutil

from pipeline.commands.sweep import flags_of, split_values
from pipeline.config.cli import flag, parse
from pipeline.config.recipe import SETTINGS
from pipeline.errors import INTERRUPTED, UserError, nearest

RUN = (sys.executable, str(Path(__file__).resolve().parents[1] / "pipeline" / "run.py"))
NUMBER = r"[+-]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?"
POLL_S = 0.5  # seconds between reads of a run's metrics


class RunFailed(Exception):
    """A run that ended without a result and without a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A setting with a range or a list of choices."""

    name: str
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False
    choices: tuple[str, ...] = ()

    def suggest(self, trial: Any) -> str:
        if self.choices:
            return str(trial.suggest_categorical(self.name, self.choices))
        if self.is_whole:
            low, high = int(self.low), int(self.high)
            return str(trial.suggest_int(self.name, low, high, log=self.is_log))
        return repr(trial.suggest_float(self.name, self.low, self.high, log=self.is_log))

    def ends(self) -> tuple[str, ...]:
        """The two ends of a range, or all choices."""
        ends = (self.low, self.high)
        return self.choices or tuple(str(int(end) if self.is_whole else end) for end in ends)


def parse_search(words: Sequence[str]) -> list[Search]:
    """Parse `learning_rate=1e-4..1e-3:log`, `tasks_per_step=8..32` or `loss_type=dapo,grpo`.

    UserError for an unknown setting or a wrong range.
    """
    known = {flag(*key)[2:].replace("-", "_"): field.annotation for key, field in SETTINGS.items()}
    found = []
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
            found.append(Search(name=name, choices=tuple(split_values(values))))
            continue
        low, high, is_log = float(ends[1]), float(ends[2]), bool(ends[3])
        if low >= high or (is_log and low <= 0):
            raise UserError(f"--search: got {word!r}; give LOW below HIGH, and above 0 with :log")
        is_whole = "float" not in str(known[name])
        found.append(Search(name=name, low=low, high=high, is_log=is_log, is_whole=is_whole))
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

    def __init__(
        self, study: Any, folder: Path, searches: Sequence[Search], flags: Sequence[str]
    ) -> None:
        self.study, self.folder, self.searches, self.flags = study, folder, searches, flags
        self.command: Sequence[str] = RUN

    def run(self, num_trials: int) -> None:
        """Run trials until `--trials` trials of the study are finished."""
        from optuna.trial import TrialState

        self._take_back()
        finished = (TrialState.COMPLETE, TrialState.PRUNED)
        left = num_trials - len(self.study.get_trials(states=finished))
        if left > 0:
            self.study.optimize(self._play, n_trials=left, catch=(RunFailed,))

    def _take_back(self) -> None:
        """Queue trials again whose process on this machine was killed."""
        from optuna.trial import TrialState

        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            host, _, pid = trial.user_attrs.get("process", "").rpartition(":")
            if host == socket.gethostname() and not psutil.pid_exists(int(pid)):
                self.study.tell(trial.number, state=TrialState.FAIL)
                self._again(trial)

    def _again(self, trial: Any) -> None:
        self.study.enqueue_trial(trial.params, {"folder": trial.user_attrs["folder"]})

    def _play(self, trial: Any) -> float:
        """Run one trial and return its success; raises TrialPruned or RunFailed."""
        from optuna import TrialPruned

        name = trial.user_attrs.get("folder", f"trial-{trial.number:04d}")
        trial.set_user_attr("folder", name)
        trial.set_user_attr("process", f"{socket.gethostname()}:{os.getpid()}")
        flags = flags_of({search.name: search.suggest(trial) for search in self.searches})
        shown, value = " ".join(flags), None
        try:
            value = self._watch(trial, self.folder / name, flags)
        except TrialPruned:
            print(f"{name}: pruned  {shown}", flush=True)
            raise
        except RunFailed as error:
            print(f"{name}: {error}  {shown}", flush=True)
            raise
        except KeyboardInterrupt:
            self._again(trial)
            raise
        print(f"{name}: success {value:.3f}  {shown}", flush=True)
        return value

    def _watch(self, trial: Any, folder: Path, flags: Sequence[str]) -> float:
        """Run a trial, report each validation to Optuna, and return the last success."""
        from optuna import TrialPruned

        words = [*self.command, *self.flags, *flags, "--output-dir", str(folder)]
        log, seen = folder.with_suffix(".log"), dict[int, float]()
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*words, "--resume-from-checkpoint", "auto"], stdout=file, stderr=subprocess.STDOUT
            )
        try:
            ended = False
            while not ended:
                ended = _has_ended(process)
                for step, success in validations(folder):
                    if step not in seen:
                        seen[step] = success
                        trial.report(success, step)
                        if trial.should_prune() and not ended:
                            raise TrialPruned
        finally:  # A run saves a checkpoint on SIGTERM.
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode or not seen:
            raise RunFailed(f"failed with exit code {process.returncode}, see {log}")
        return seen[max(seen)]


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended, or ends within a moment."""
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def main(argv: list[str]) -> int:
    place = argv.index("--") if "--" in argv else len(argv)
    options = parser().parse_args(argv[:place])
    flags = ["--config", options.recipe, "--report-to", "none", *argv[place + 1 :]]
    try:
        searches = parse_search(options.search)
        _check(searches, flags)
        study = _open(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        Study(study, options.output_dir, searches, flags).run(options.trials)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    return _tell_best(study, searches)


def _check(searches: Sequence[Search], flags: Sequence[str]) -> None:
    """Check the flags of all runs before the first run."""
    for search in searches:
        for value in search.ends():
            parse([*flags, *flags_of({search.name: value})])
    config = parse(list(flags))
    every = config.evaluation.validation_steps
    if not 0 < every <= config.grpo.max_steps:
        raise UserError(
            f"validation_steps: got {every} of {config.grpo.max_steps} steps, but trials are "
            "judged by validations; give 1 to max_steps"
        )


def _open(options: argparse.Namespace) -> Any:
    """Load or create the study in its storage; UserError if Optuna is not installed."""
    try:
        import optuna
    except ImportError:
        raise UserError("optuna: not installed; pip install optuna") from None
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


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _tell_best(study: Any, searches: Sequence[Search]) -> int:
    from optuna.trial import TrialState

    if not study.get_trials(states=(TrialState.COMPLETE,)):
        print("no trial was completed", file=sys.stderr)
        return 1
    best = study.best_trial
    flags = flags_of({search.name: str(best.params[search.name]) for search in searches})
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
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
