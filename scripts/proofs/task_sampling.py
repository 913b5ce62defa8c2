"""Measure `task_sampling: signal` against `uniform` where many tasks are too easy or too hard.

    python scripts/proofs/task_sampling.py --seeds 1 2 3

The case `levels` needs `pip install reasoning-gym`: words to spell backward and sums, at six
levels from often to never solved, each a task family; the reward is 1 for the whole answer. `sums`
has the dataset `reasoning_gym:chain_sum` alone. `mixed` is the recipe. `tau2` is the recipe
`tau2_telecom_tiny` and needs `--tau2 CHECKOUT`.

For each seed, one warm start is the start of both runs, which then draw equally many tasks. The
table has the share of groups with signal, and the sampled success on held-out tasks of all levels
with the difference of the two runs and its standard error over tasks.

Then 15 steps of the first seed's `signal` are made on 1, 2 and 3 ranks, and on 2 ranks that are
interrupted and go on from an earlier checkpoint; all must draw the same tasks and get the same
rewards. The exit code is 1 if they do not, if the mean share of `levels` is below RATIO times that
of `uniform`, or if success is worse by more than two standard errors. Finished runs are not
repeated, and interrupted ones go on. Flags after `--` are passed to every run.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from itertools import count, islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.data.tasks import SPLITS, Task
from pipeline.environments import Agent
from pipeline.report.run_files import episodes_in, read_metrics, transcripts_in
from scripts.bench.common import finish_run, machine, parser_of, results_of, start_run, write_json

RATIO = 1.3
SPELL = "Spell this word backward (example: sun -> nus): "
SUM = "State the final answer to the following arithmetic problem: "
WORDS = [SPELL, SUM]
LEVELS: dict[str, tuple[str, dict[str, int]]] = {
    **{
        f"{n} letters": ("spell_backward", {"min_word_len": n, "max_word_len": n})
        for n in (3, 5, 7)
    },
    **{
        f"{n} digits": ("chain_sum", {"max_terms": 2, "min_digits": n, "max_digits": n})
        for n in (2, 3, 4)
    },
}
CASES = {
    "levels": [
        *("--domains", "levels", "--environments"),
        "{levels: scripts.proofs.task_sampling:LevelsEnvironment}",
        *("--warm-start-steps", "150", "--warm-start-batch-size", "64", "--max-steps", "40"),
        *("--tasks-per-domain", "1200", "--eval-tasks-per-domain", "120"),
        *("--max-tokens-per-turn", "12", "--max-tokens", "64"),
    ],
    "sums": [
        *("--domains", "sums", "--environments"),
        "{sums: {factory: reasoning_gym:chain_sum, arguments: {min_terms: 2, max_terms: 2,"
        " min_digits: 1, max_digits: 4, family: num_digits}}}",
        *("--warm-start-steps", "250", "--warm-start-batch-size", "64", "--max-steps", "40"),
        *("--warm-start-rule-share", "1"),
        *("--tasks-per-domain", "1000", "--eval-tasks-per-domain", "200"),
        *("--max-tokens-per-turn", "8", "--max-tokens", "128"),
    ],
    "mixed": ["--config", "mixed", "--max-steps", "60"],
    "tau2": ["--config", "tau2_telecom_tiny", "--max-steps", "30"],
}
ALWAYS = ["--eval-trials", "4", "--no-eval-greedy", "--no-eval-on-start"]
ALWAYS += ["--validation-steps", "0", "--report-to", "none", "--save-steps", "5"]


# The domain


class LevelsEnvironment:
    """A question with one answer."""

    def reset(self, payload: str, **row: Any) -> None:
        self.answer: str = json.loads(payload)["goal"]["answer"]
        self.final_message = ""

    def get_reward(self) -> float:
        return float(self.final_message.strip() == self.answer)


def expert(agent: Agent, goal: dict[str, str]) -> str:
    return goal["answer"]


def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    """Return tasks of all levels in turn; the splits have no question in common."""
    import reasoning_gym

    questions = {}
    for level, (name, arguments) in LEVELS.items():
        entries = reasoning_gym.create_dataset(name, seed=seed, size=10**6, **arguments)
        of_split = (e for e in map(entries.__getitem__, count()) if split_of(e) == split)
        questions[level] = list(islice(of_split, -(-n // len(LEVELS))))
    tasks = list[Task]()
    for number in range(n):
        level = list(LEVELS)[number % len(LEVELS)]
        entry = questions[level][number // len(LEVELS)]
        payload = json.dumps({"goal": {"answer": entry["answer"]}})
        prompt = ({"role": "user", "content": entry["question"]},)
        name = f"{split}-{number}"
        tasks.append(Task(domain="levels", id=name, prompt=prompt, payload=payload, family=level))
    return tasks


def split_of(entry: dict[str, Any]) -> str:
    return SPLITS[zlib.crc32(entry["question"].encode()) % len(SPLITS)]


# The measurement


def main(argv: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", default=["levels"], choices=CASES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tau2", help="a checkout of tau2-bench")
    parser.add_argument("--no-ranks", action="store_true", help="leave out the repeated runs")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/task-sampling"))
    parser.add_argument("passed_on", nargs="*", help="after --: flags of every run")
    options = parser.parse_args(argv)
    folder = options.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    faults = list[str]()
    for case in options.cases:
        flags = [*CASES[case], *ALWAYS, *(["--tau2", options.tau2] if options.tau2 else [])]
        flags += options.passed_on
        print("| case | seed | signal | times uniform | success | difference |")
        print("|---|--:|--:|--:|--:|--:|")
        rows = [measured(folder, case, seed, flags) for seed in options.seeds]
        found[case] = rows
        if case == "levels":
            ratio = fmean(row["signal"] for row in rows) / fmean(row["uniform"] for row in rows)
            low = fmean(row["difference"] for row in rows) + 2 * error_of(rows)
            faults += [f"signal is {ratio:.2f} times uniform"] * (ratio < RATIO)
            faults += [f"success is worse, {low:.3f}"] * (low < 0)
        if not options.no_ranks:
            faults += differing(folder, case, options.seeds[0], flags)
    for fault in faults:
        print(f"fault: {fault}")
    write_json(options.json, found, machine(), {"seeds": options.seeds, "cases": options.cases})
    return bool(faults)


def measured(folder: Path, case: str, seed: int, flags: list[str]) -> dict[str, Any]:
    """Make the runs of a seed that are not there yet; print and return their figures."""
    start = made(folder / f"{case}-{seed}-start", [*flags, "--seed", str(seed), "--max-steps", "0"])
    begun = [*flags, "--seed", str(seed), "--model", str(start / "checkpoints" / "warm-start")]
    begun += ["--warm-start-steps", "0"]
    runs = {
        kind: made(folder / f"{case}-{seed}-{kind}", [*begun, "--task-sampling", kind])
        for kind in ("uniform", "signal")
    }
    shares = {kind: share_with_signal(run) for kind, run in runs.items()}
    success = {kind: of_tasks(run) for kind, run in runs.items()}
    differences = [success["signal"][t] - mean for t, mean in success["uniform"].items()]
    row = {
        **shares,
        "success": {kind: fmean(of.values()) for kind, of in success.items()},
        "difference": fmean(differences),
        "error": stdev(differences) / len(differences) ** 0.5,
    }
    print(
        f"| {case} | {seed} | {shares['uniform']:.3f} -> {shares['signal']:.3f} "
        f"| {shares['signal'] / shares['uniform']:.2f} "
        f"| {row['success']['uniform']:.3f} -> {row['success']['signal']:.3f} "
        f"| {row['difference']:+.3f} +- {row['error']:.3f} |",
        flush=True,
    )
    return row


def made(folder: Path, flags: list[str], num_ranks: int = 1) -> Path:
    if not (folder / "report.html").is_file():
        place = ["--num-gpus", str(num_ranks), "--output-dir", str(folder)]
        if (folder / "checkpoints" / "latest").is_file():  # an interrupted run
            place += ["--resume-from-checkpoint", "latest"]
        finish_run([*flags, *place], folder.with_name(f"{folder.name}.log"))
    return folder


def share_with_signal(run: Path) -> float:
    lines, _ = read_metrics(run)
    return 1 - fmean(
        line["rollout/frac_reward_zero_std"] for line in lines if line["kind"] == "train"
    )


def of_tasks(run: Path) -> dict[tuple[str, str], float]:
    """Return the mean success of each held-out task at the end."""
    last = results_of(run)["evaluations"][-1]["success"]
    return {(domain, t): fmean(of) for domain, s in last.items() for t, of in s["tasks"].items()}


def error_of(rows: list[dict[str, Any]]) -> float:
    """Return the standard error of the mean difference over seeds, from those over tasks."""
    return float(sum(row["error"] ** 2 for row in rows) ** 0.5 / len(rows))


# The same on any ranks, and after a kill


def differing(folder: Path, case: str, seed: int, flags: list[str]) -> list[str]:
    """Repeat a `signal` run on other ranks, and killed; return the names of runs that differ."""
    model = folder / f"{case}-{seed}-start" / "checkpoints" / "warm-start"
    flags = [*flags, "--seed", str(seed), "--model", str(model), "--warm-start-steps", "0"]
    # Without it, rounding would change a few tokens where two were nearly as likely.
    flags += ["--task-sampling", "signal", "--max-steps", "15", "--deterministic"]
    one = drawn(made(folder / f"{case}-{seed}-1-rank", flags))
    runs = {f"{n} ranks": made(folder / f"{case}-{seed}-{n}-ranks", flags, n) for n in (2, 3)}
    runs["2 ranks, resumed"] = killed(folder / f"{case}-{seed}-killed", flags)
    same = {name: drawn(run) == one for name, run in runs.items()}
    print(f"draws of {len(one)} episodes, equal to those on 1 rank: {same}", flush=True)
    return [f"{name}: other draws" for name, is_same in same.items() if not is_same]


def killed(folder: Path, flags: list[str]) -> Path:
    if (folder / "report.html").is_file():
        return folder
    log = folder.with_name(f"{folder.name}.log")
    flags = [*flags, "--num-gpus", "2", "--output-dir", str(folder)]
    process = start_run(flags, log)
    metrics = folder / "metrics.jsonl"
    while '"step": 7,' not in (metrics.read_text() if metrics.is_file() else ""):
        assert process.poll() is None, f"it has ended, see {log}"
        time.sleep(0.05)
    process.terminate()
    process.wait()
    finish_run([*flags, "--resume-from-checkpoint", "step-000005"], log)
    return folder


def drawn(run: Path) -> list[tuple[Any, ...]]:
    """Return what each training episode of a run was, and its reward."""
    return sorted(
        (stage, step, e["domain"], e["task_id"], e["trial"], e["reward"])
        for (stage, step), paths in transcripts_in(run).items()
        if not stage.startswith("evaluation-")
        for path in paths
        for e in episodes_in(path)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
