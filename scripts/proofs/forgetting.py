"""Measure what learning one domain does to the others, and remedies against forgetting.

    python scripts/proofs/forgetting.py --seeds 1 2 3
    python scripts/proofs/forgetting.py --model FOLDER --num-gpus 2 --seeds 1 2 3

The first command trains the tiny model on airline, retail and telecom; the second trains a real
model (FOLDER: SmolLM2-135M-Instruct) on three desks whose rules it must remember, or, with
`--reading`, on desks whose rules stand in the prompt. Runs are sequential training in two orders,
mixed training, and the remedies. They have equally many episodes, and the runs of a seed share one
warm start. Evaluations use held-out tasks.

Each number is a mean over seeds in points (hundredths of the success rate), with a 95 % interval
from a bootstrap over tasks, which is paired if two runs are compared. The brackets hold the number
of each seed. Bold numbers exclude 0 in a bootstrap over tasks and seeds, three at least. After a
run, its stage checkpoints are measured (KL divergences) and removed. Finished runs are not
repeated, so rows and seeds can be added later. `--quick` uses few steps and tasks, only to test
the script. Flags after `--` are passed to every run.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.commands import sweep
from pipeline.common.errors import UserError
from pipeline.config.cli import flags_of, parse
from pipeline.config.settings import Config
from pipeline.data.curriculum import make_stages
from pipeline.evaluation.transfer import Number, differences, summary
from pipeline.report.run_files import read_metrics
from scripts.bench.common import machine, parser_of, results_of, write_json
from scripts.proofs import forgetting_figure
from scripts.proofs.forgetting_measures import (
    Point,
    Reader,
    answers_by_desk,
    by_answer,
    correlations,
    dots_of,
    drift,
    read_json,
    steps_until,
)

Runs = list[dict[str, Any]]
SEQUENCE = "sequence"
MIXED = "mixed"
RFT = "rft"
REPLAY = "replay"
RELEARN = "relearn"
RFT_ROUNDS = 4  # of each stage
REVERSED = "reversed"  # stands for the domains in reversed order
ROWS: dict[str, dict[str, Any]] = {
    SEQUENCE: {},
    "reverse": {"order": REVERSED},
    MIXED: sweep.MIXED,
    REPLAY: {"replay": 0.3},
    "kl_new": {"beta": 0.05, "reference_per_stage": "true"},
    "kl_old": {"learned_beta": 3.0},
    "movement": {"movement_coef": 0.1},
    "task_arithmetic": {"curriculum": "separate", "merge_method": "task_arithmetic"},
    "ties": {"curriculum": "separate", "merge_method": "ties"},
    "distillation": {"curriculum": "separate", "merge_method": "distillation"},
    RFT: {"max_steps": 0, "rft_rounds": RFT_ROUNDS},
    RELEARN: {},
}
WORDS = {
    SEQUENCE: "in sequence, no remedy",
    "reverse": "in sequence, reversed order",
    MIXED: "mixed",
    REPLAY: "replay 0.3",
    "kl_new": "KL on the new prompts (beta 0.05)",
    "kl_old": "KL on old prompts (learned_beta 3)",
    "movement": "penalty on movement (movement_coef 0.1)",
    "task_arithmetic": "experts, merged by task arithmetic",
    "ties": "experts, merged by TIES",
    "distillation": "experts, distilled on-policy",
    RFT: "supervised on own successes (RFT)",
    RELEARN: "the first domain once more",
}
# Settings by kind of model. `kl_episodes` is for each domain and later stage.
TINY = "--tasks-per-step 12 --max-steps 84 --learning-rate 8e-4"
TINY += " --eval-tasks-per-domain 100 --eval-trials 2"
RECIPES = {"remembering": "smollm2_three_hidden", "reading": "smollm2_three"}
KL_EPISODES = {"tiny": 100, "remembering": 18, "reading": 18}
# Without checkpoints inside stages; evaluations of equal policies are made once.
ALWAYS = "--save-steps 0 --validation-steps 0 --kl-probe-tasks 0"
ALWAYS += " --no-eval-greedy --no-eval-on-start --report-to none"
QUICK = "--max-steps 9 --tasks-per-step 4 --num-generations 2 --warm-start-steps 3"
QUICK += " --eval-tasks-per-domain 6 --eval-trials 2"
COLUMNS = {
    "average_accuracy": "success at the end",
    "stage_gain": "gain of a stage's own domain",
    "backward_transfer": "backward transfer",
    "forward_transfer": "forward transfer",
    "forgetting": "forgetting",
}
KLS = {
    "spearman_old": "KL on old domains (ranks)",
    "spearman_new": "KL on the new domain (ranks)",
    "spearman_old_minus_new": "difference of the two",
    "pearson_old": "logarithm of KL on old domains",
    "pearson_new": "logarithm of KL on the new domain",
}
LEARNED = {
    "learn": "steps to learn the first domain",
    "relearn": "steps to learn it again, after the others",
}
LEAST_SEEDS = 3  # of a bold number
TESTED = ("backward_transfer", "forward_transfer")  # metrics that are tested against zero


def main(argv: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="tiny", help="tiny, or a folder of a real model")
    parser.add_argument("--reading", action="store_true", help="rules stand in the prompt")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--num-gpus", type=int, default=1, help="ranks of each run")
    parser.add_argument("--output-dir", type=Path, help="missing: runs/forgetting-<kind of model>")
    parser.add_argument("--raw", type=Path, help="add the results of all runs to this JSON file")
    parser.add_argument("--figure", type=Path, help="draw what is in the file --raw")
    parser.add_argument("--page", type=Path, help="put the tables into this Markdown page")
    parser.add_argument("--only-report", action="store_true", help="of the finished runs; run none")
    parser.add_argument("--quick", action="store_true", help="a few steps: does it work?")
    parser.add_argument("passed_on", nargs="*", help="after --: flags of every run")
    options = parser.parse_args(argv)
    if options.figure and not options.raw:
        parser.error("--figure: give --raw as well, the file of what is drawn")
    if options.reading and options.model == "tiny":
        parser.error("--reading: give the folder of a real model as --model")
    kind = "tiny"
    flags = ["--config", "forgetting", *TINY.split()]
    if options.model != "tiny":
        kind = "reading" if options.reading else "remembering"
        flags = ["--config", RECIPES[kind], "--model", options.model]
    flags += [*ALWAYS.split(), *(QUICK.split() if options.quick else []), *options.passed_on]
    name = f"runs/forgetting-{kind}{'-quick' if options.quick else ''}"
    study = Study(options.output_dir or Path(name), flags, options.num_gpus, KL_EPISODES[kind])
    try:
        if not options.only_report and not study.make(options.rows, options.seeds):
            return 1
        found = study.found(options.rows, options.seeds)
        text = report(found)
        if options.page:
            put_in(options.page, kind, text)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    figures = {
        f"{name}: {metric}": value[0] or 0.0
        for name, of in found.items()
        for metric, value in summary([run["results"] for run in of])["metrics"].items()
    }
    where = machine()
    write_json(options.json, figures, where, {"seeds": options.seeds, "flags": flags})
    if options.raw:
        shared = ["FOLDER" if flag == options.model else flag for flag in flags]
        add_raw(options.raw, kind, found, {"machine": where, "flags": shared})
    if options.figure:
        forgetting_figure.draw(read_json(options.raw), options.figure, WORDS)
    return 0


class Study:
    """The runs of one model: `<row>-seed-<n>` in a folder, each with its files beside it.

    `<name>.done.json` has the flags of a finished run, `<name>.cost.json` its CPU seconds, and
    `<name>.measured.json` what was measured with its checkpoints.
    """

    def __init__(
        self, folder: Path, flags: Sequence[str], num_ranks: int, num_episodes: int
    ) -> None:
        self.folder = folder.resolve()
        self.flags = list(flags)
        self.num_ranks = num_ranks
        self.num_episodes = num_episodes
        self.config: Config = parse(self.flags)
        self.domains = list(self.config.data.domains)

    def settings(self, row: str) -> dict[str, Any]:
        """Return the settings of a row, of which some need the recipe."""
        settings = dict(ROWS[row])
        if settings.get("order") == REVERSED:
            settings["order"] = self.domains[::-1]
        if row == RELEARN:
            steps = self.num_steps()
            first = self.domains[0]
            settings["order"] = [*self.domains, first]
            settings["max_steps"] = sum(steps.values()) + steps[first]
            settings["stage_steps"] = {**steps, f"{first}-2": steps[first]}
        return settings

    def num_steps(self) -> dict[str, int]:
        """Return the number of steps of each domain's stage in the sequence."""
        stages = make_stages(self.config, dict.fromkeys(self.domains, 10**6))
        return {stage.own[0]: stage.num_steps for stage in stages}

    def make(self, rows: Sequence[str], seeds: Sequence[int]) -> bool:
        """Make and measure all runs that are missing; return False if one failed."""
        for row in rows:
            parse([*self.flags, *flags_of(self.settings(row))])  # refuses before the first run
        is_good = True
        for seed in seeds:
            common = [*self.flags, "--seed", str(seed)]
            start = f"{sweep.WARM_STARTS}/seed-{seed}"
            if not self.run(start, [*common, *flags_of(sweep.WARM_START)]):
                return False
            model = self.folder / start / "checkpoints" / "warm-start"
            for row in rows:
                of_row = [*common, "--warm-start-steps", "0"]
                is_good &= self.make_row(row, f"{row}-seed-{seed}", model, of_row)
        return is_good

    def make_row(self, row: str, name: str, model: Path, common: Sequence[str]) -> bool:
        """Make and measure a run. RFT is a run for each domain, from the policy of the last."""
        if row != RFT:
            further = ["--model", str(model), *flags_of(self.settings(row))]
            return self.run(name, [*common, *further]) and self.measure(row, name)
        for domain, steps in self.num_steps().items():
            tasks = steps * self.config.rollout.tasks_per_step // RFT_ROUNDS
            own = {**self.settings(row), "order": [domain], "rft_tasks": tasks}
            own |= {"stage_weights": {}, "stage_steps": {}}
            if not self.run(f"{name}/{domain}", [*common, "--model", str(model), *flags_of(own)]):
                return False
            model = self.folder / name / domain / "checkpoints" / "rft"
        return self.measure(row, name)

    def run(self, name: str, flags: Sequence[str]) -> bool:
        """Make a run unless it is done, and add its CPU seconds to its file of cost."""
        cost = self.folder / f"{name}.cost.json"
        begun = cpu_s()
        try:
            return sweep.run_one(self.folder, name, self.num_ranks, flags)
        finally:
            if (spent := cpu_s() - begun) > 0:
                before = read_json(cost)["cpu_s"] if cost.is_file() else 0.0
                cost.write_text(json.dumps({"cpu_s": before + spent}), encoding="utf-8")

    def points(self, row: str, name: str) -> list[Point]:
        """Return the policies of a run at the ends of its stages."""
        folder = self.folder / name
        if row == RFT:
            runs = [(domain, folder / domain) for domain in self.num_steps()]
            return [
                Point(d, [d], of / "checkpoints" / "rft", of / "trajectories" / "evaluation-rft")
                for d, of in runs
            ]
        return [
            Point(
                stage["name"],
                stage["own"],
                folder / "checkpoints" / f"stage-{number}-{stage['name']}",
                folder / "trajectories" / f"evaluation-{stage['name']}",
            )
            for number, stage in enumerate(read_json(folder / "curriculum.json")["stages"], 1)
        ]

    def measure(self, row: str, name: str) -> bool:
        """Write what needs the checkpoints of a run, then remove them."""
        target = self.folder / f"{name}.measured.json"
        if target.is_file():
            return True
        points = self.points(row, name)
        parents = [point.checkpoint.parent for point in points]
        reader = Reader(parents[0].parent, points[0].checkpoint)
        drifts = []
        if self.is_chain(row):
            for before, after in pairwise(points):
                known = {d for point in points[: points.index(after) + 1] for d in point.own}
                drifts.append(drift(reader, before, after, sorted(known), self.num_episodes))
        measured: dict[str, Any] = {"kl": drifts}
        if "three_desks" in reader.domains[self.domains[0]].module:
            last = points[-1].transcripts
            measured["answers"] = answers_by_desk(reader.config, reader.domains, last)
        target.write_text(json.dumps(measured), encoding="utf-8")
        for parent in dict.fromkeys(parents):
            shutil.rmtree(parent)
        return True

    def is_chain(self, row: str) -> bool:
        """Return whether each stage of a row begins with the policy of the stage before."""
        return self.settings(row).get("curriculum", "sequential") == "sequential"

    def results(self, row: str, seed: int) -> dict[str, Any]:
        """Return the results of a run; its first evaluation is that of the warm start."""
        start = results_of(self.folder / sweep.WARM_STARTS / f"seed-{seed}")
        before = [e for e in start["evaluations"] if e["after"] == "warm_start"]
        folder = self.folder / f"{row}-seed-{seed}"
        if row != RFT:
            found = results_of(folder)
            return {**found, "evaluations": [*before, *found["evaluations"]]}
        return chained({d: results_of(folder / d) for d in self.num_steps()}, before)

    def found(self, rows: Sequence[str], seeds: Sequence[int]) -> dict[str, Runs]:
        """Return all that is known of the finished runs, by row. Raises UserError without any."""
        found = dict[str, Runs]()
        for row in rows:
            runs = [self.run_of(row, seed) for seed in seeds if self.is_measured(row, seed)]
            if missing := len(seeds) - len(runs):
                print(f"note: {row}: {missing} of {len(seeds)} seeds have not been run")
            found |= {row: runs} if runs else {}
        if not found:
            raise UserError(f"--only-report: {self.folder} holds no finished run; leave it out")
        return found

    def is_measured(self, row: str, seed: int) -> bool:
        return (self.folder / f"{row}-seed-{seed}.measured.json").is_file()

    def run_of(self, row: str, seed: int) -> dict[str, Any]:
        name = f"{row}-seed-{seed}"
        measured = read_json(self.folder / f"{name}.measured.json")
        results = self.results(row, seed)
        run = {"seed": seed, "results": results, "cpu_s": self.cost(name)}
        run |= {"answers": measured.get("answers", {})}
        if self.is_chain(row) and row != RELEARN:  # whose stages but the last are the sequence's
            owns = [stage["own"] for stage in results["curriculum"]["stages"]]
            run["dots"] = dots_of(owns, measured["kl"], matrix_of(results))
        if row == RELEARN:
            run["relearn"] = self.relearned(name)
        return run

    def cost(self, name: str) -> float:
        parts = [self.folder / f"{name}.cost.json", *(self.folder / name).glob("*.cost.json")]
        return sum(read_json(path)["cpu_s"] for path in parts if path.is_file())

    def relearned(self, name: str) -> dict[str, int | None]:
        """Return the steps of the first and of the last stage to the level of the first one's end.

        The level is the mean training reward of the last ten steps of the first stage.
        """
        metrics, _ = read_metrics(self.folder / name)
        first = self.domains[0]
        steps = [m for m in metrics if m["kind"] == "train"]
        rewards = [
            [m[f"reward/{first}"] for m in steps if m["stage"] == stage]
            for stage in (first, f"{first}-2")
        ]
        level = sum(rewards[0][-10:]) / len(rewards[0][-10:])
        return dict(
            zip(("learn", "relearn"), (steps_until(r, level) for r in rewards), strict=True)
        )


def cpu_s() -> float:
    """Return the CPU seconds of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def chained(parts: Mapping[str, dict[str, Any]], before: Sequence[Any]) -> dict[str, Any]:
    """Return the results of runs of one domain after the other as those of one run with stages."""
    evaluations = [
        {**next(e for e in of["evaluations"] if e["after"] == "rft"), "after": domain}
        for domain, of in parts.items()
    ]
    return {
        **next(iter(parts.values())),
        "evaluations": [*before, *evaluations],
        "curriculum": {"stages": [{"name": domain, "own": [domain]} for domain in parts]},
        "training": {
            domain: {"episodes": sum(of_round["episodes"] for of_round in of["rft"])}
            for domain, of in parts.items()
        },
    }


def matrix_of(results: Mapping[str, Any]) -> list[list[float]]:
    """Return success by evaluation and domain, domains in the order of their first stages."""
    stages = results["curriculum"]["stages"]
    domains = list(dict.fromkeys(domain for stage in stages for domain in stage["own"]))
    return [[e["success"][d]["mean"] for d in domains] for e in results["evaluations"]]


# The report


def report(found: Mapping[str, Runs]) -> str:
    """Return tables of all rows: transfer, differences, cost, movement, answers, correlations."""
    parts = [table(found)]
    if SEQUENCE in found:
        parts.append(remedies({name: of for name, of in found.items() if name != RELEARN}))
    parts.append(costs(found))
    if any(run["answers"] for of in found.values() for run in of):
        parts.append(answers(found))
    columns = {}
    for without in ((), (REPLAY,)):
        dots = [
            r["dots"] for n, of in found.items() for r in of if "dots" in r and n not in without
        ]
        if len(dots) > 2:
            what = f"{'without replay' if without else 'all'}: {sum(map(len, dots))} stages"
            columns[f"{what} of {len(dots)} runs"] = correlations(dots)
    if columns:
        rows = [
            [
                KLS[key],
                *("{:+.2f} ({:+.2f} to {:+.2f})".format(*of[key]) for of in columns.values()),
            ]
            for key in KLS
        ]
        parts.append(markdown(["correlation of points forgotten with", *columns], rows))
    if RELEARN in found:
        rows = [
            [str(run["seed"]), *(str(run["relearn"][key] or "never") for key in LEARNED)]
            for run in found[RELEARN]
        ]
        parts.append(markdown(["seed", *LEARNED.values()], rows))
    return "\n\n".join(parts)


def put_in(page: Path, kind: str, text: str) -> None:
    """Replace what stands in a page between the two comments of a model. Raises UserError."""
    begin, end = f"<!-- forgetting.py: {kind} -->\n", f"<!-- end of {kind} -->"
    content = page.read_text(encoding="utf-8")
    if begin not in content or end not in content:
        raise UserError(f"--page: {page} lacks the line {begin.strip()} or {end}; write both")
    before, rest = content.split(begin, 1)
    page.write_text(f"{before}{begin}\n{text}\n\n{end}{rest.split(end, 1)[1]}", encoding="utf-8")


def table(found_runs: Mapping[str, Runs]) -> str:
    """Format a row of metrics for each curriculum, over its seeds."""
    rows = []
    runs = {name: [run["results"] for run in of] for name, of in found_runs.items()}
    for name, of in runs.items():
        found = summary(of, over_seeds=False)
        wider = summary(of)["metrics"]
        each = [summary([run])["metrics"] for run in of]
        ends = " / ".join(f"{100 * (n[0] or 0):.0f}" for n in found["domains"]["matrix"][-1])
        cells = [
            # The interval of forgetting is no test of zero: see `transfer_metrics`.
            points(m, found["metrics"], each, wider if m in TESTED else None)
            for m in COLUMNS
        ]
        rows.append([WORDS[name], ends, *cells])
    names = " / ".join(summary(next(iter(runs.values())))["domains"]["names"])
    return markdown(["curriculum", f"{names} at the end", *COLUMNS.values()], rows)


def remedies(found_runs: Mapping[str, Runs]) -> str:
    """Format the paired differences between each row and the sequence without a remedy."""
    shown = ("backward_transfer", "forgetting", "stage_gain", "average_accuracy")
    rows = []
    plain = {run["seed"]: run["results"] for run in found_runs[SEQUENCE]}
    for name, runs in found_runs.items():
        pairs = [(run["results"], plain[run["seed"]]) for run in runs if run["seed"] in plain]
        if name != SEQUENCE and pairs:
            of, other = zip(*pairs, strict=True)
            found = differences(of, other, over_seeds=False)
            wider = differences(of, other)
            each = [differences([a], [b]) for a, b in pairs]
            cells = (points(metric, found, each, wider) for metric in shown)
            rows.append([WORDS[name], *cells])
    return markdown(["against no remedy", *(COLUMNS[metric] for metric in shown)], rows)


def costs(found: Mapping[str, Runs]) -> str:
    """Format episodes and CPU seconds of each row, and the movement of the policy."""
    rows = []
    for name, of in found.items():
        episodes = sum(t["episodes"] for run in of for t in run["results"]["training"].values())
        cpu = sum(run["cpu_s"] for run in of)
        dots = [dot for run in of for dot in run.get("dots", ())]
        means = [
            f"{sum(dot[key] for dot in dots) / len(dots):.4f}" if dots else "-"
            for key in ("kl_old", "kl_new")
        ]
        rows.append([WORDS[name], f"{episodes / len(of):,.0f}", f"{cpu / len(of):.0f}", *means])
    header = ["curriculum", "episodes", "CPU seconds", "KL on old domains", "KL on the new domain"]
    return markdown(header, rows)


def answers(found: Mapping[str, Runs]) -> str:
    """Format whose rules the answers on learned domains follow after the last stage."""
    rows = []
    for name, of in found.items():
        last = of[0]["results"]["curriculum"]["stages"][-1]["own"]
        counts = [
            {kind_of(key, last): n for key, n in count.items()}
            for run in of
            for domain, count in run["answers"].items()
            if len(last) > 1 or domain not in last
        ]
        shares = by_answer(counts)
        kinds = ("right", "last", "other", "none")
        rows.append([WORDS[name], *(f"{100 * shares.get(kind, 0):.0f}" for kind in kinds)])
    header = ["answers on domains before the last stage's, %", "right", "rules of the last domain"]
    return markdown([*header, "of the other domain", "none"], rows)


def kind_of(answer: str, last: Sequence[str]) -> str:
    if answer in ("right", "none"):
        return answer
    return "last" if answer in last and len(last) == 1 else "other"


Numbers = Mapping[str, Number]


def points(metric: str, found: Numbers, seeds: Sequence[Numbers], tested: Numbers | None) -> str:
    """Format a metric in points: `-5.1 (-8.0 to -2.2) [-6, -4]`; bold if `tested` excludes 0."""
    if metric not in found:
        return "-"
    sign = "" if metric == "average_accuracy" and tested is None else "+"
    value, low, high = (f"{100 * (x or 0):{sign}.1f}" for x in found[metric])
    each = ", ".join(f"{round(100 * (of[metric][0] or 0)):{sign}d}" for of in seeds)
    text = f"{value} ({low} to {high}) [{each}]"
    tested = tested if len(seeds) >= LEAST_SEEDS else None
    _, least, most = tested[metric] if tested else (0, 0, 0)
    return f"**{text}**" if (least or 0) > 0 or (most or 0) < 0 else text


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    aligned = ["---", *("--:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, aligned, *rows])


def add_raw(path: Path, kind: str, found: Mapping[str, Runs], about: Mapping[str, Any]) -> None:
    """Write the numbers of all runs into a JSON file, beside those of other models."""
    content = read_json(path) if path.is_file() else {}
    rows = {
        name: [
            {
                "seed": run["seed"],
                "stages": [stage["name"] for stage in run["results"]["curriculum"]["stages"]],
                "matrix": matrix_of(run["results"]),
                "metrics": summary([run["results"]])["metrics"],
                **{key: run[key] for key in ("dots", "answers", "relearn", "cpu_s") if key in run},
            }
            for run in of
        ]
        for name, of in found.items()
    }
    content[kind] = {**about, "rows": rows}
    path.write_text(json.dumps(content, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
