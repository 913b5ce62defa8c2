"""A run folder -> `report.md`, two pictures, and the table for the terminal.

Made from the files alone: `python -m pipeline.report FOLDER` makes it again. Success sampled at the
training temperature and success of greedy decoding are two measurements; they are never compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pipeline.config import UserError
from pipeline.plots import learning_curves, stage_performance
from pipeline.run_files import (
    Evaluation,
    Run,
    after_name,
    before_and_after,
    domains_of,
    load_run,
    number,
    rate,
    wilson,
)
from pipeline.tracking import METRICS, TIMINGS

CURVES, BARS = "learning_curves.png", "stage_performance.png"
FLOORS = {
    "nothing": "doing nothing",
    "transfer": "always transferring (best single reason)",
    "every_tool": "every tool in turn",
}
FILES = {
    "config.yaml": "every setting of the run",
    "curriculum.json": "stages, their steps and groups",
    METRICS: "one line per training step and evaluation; only what the seed determines",
    TIMINGS: "times, under the same steps",
    "results.json": "every evaluation, the floors",
    "trajectories": "transcripts, one file per stage, step and rank",
    "checkpoints": "models for `from_pretrained`; `latest` names the last",
}


def write_report(folder: Path) -> None:
    """Write `report.md` and its pictures into a run folder; UserError if it holds no run."""
    run = load_run(folder)
    learning_curves(run).savefig(folder / CURVES, dpi=150)
    stage_performance(run).savefig(folder / BARS, dpi=150)
    sections = [
        f"# {folder.resolve().name}",
        _what_ran(run),
        _before_and_after(run),
        f"![Training reward and held-out success over the steps]({CURVES})",
        _evaluations(run),
        f"![Held-out success of each domain after each stage]({BARS})",
        _families(run),
        _floors(run),
        _curriculum(run),
        _stop_reasons(run),
        _faults(run),
        _files(run),
    ]
    text = "\n\n".join(section for section in sections if section) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")


def final_table(results: Mapping[str, Any]) -> str:
    """The table at the end of a run, for the terminal: before and after GRPO, or what there is."""
    header, rows = _change(results["evaluations"])
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [header, *rows]
    ]
    return "\n".join(lines)


def _change(evaluations: Sequence[Evaluation]) -> tuple[list[str], list[list[str]]]:
    domains = [*domains_of(evaluations), "mean"]
    before, after = before_and_after(evaluations)
    if before is None or after is None:
        only = before or after
        rows = [[d, *(number(rate(only, d, kind)) for kind in ("mean", "greedy"))] for d in domains]
        return ["success", "sampled", "greedy"], rows
    header = [
        "success",
        "sampled before",
        "sampled after",
        "change",
        "greedy before",
        "greedy after",
    ]
    rows = []
    for domain in domains:
        old, new = rate(before, domain, "mean"), rate(after, domain, "mean")
        change = None if old is None or new is None else new - old
        greedy = [number(rate(e, domain, "greedy")) for e in (before, after)]
        rows.append([domain, number(old), number(new), number(change, "+"), *greedy])
    return header, rows


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]], num_left: int = 1) -> str:
    """A table whose first `num_left` columns hold words."""
    aligned = [":--" if i < num_left else "--:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, aligned, *rows])


def _what_ran(run: Run) -> str:
    config, results = run.config, run.results
    data, grpo, rollout = config["data"], config["grpo"], config["rollout"]
    lines = [
        f"Recipe `{config['recipe']}`, seed {config['run']['seed']}, "
        f"{results.get('num_ranks', 'unknown number of')} rank(s).",
        f"Model `{config['model']['model']}`; domains {', '.join(run.domains)}; "
        f"{data['tasks_per_domain']} training tasks of each ({data['difficulty']}).",
        f"Warm start: {config['warm_start']['steps'] or 'no'} supervised steps.",
        f"GRPO: {len(run.train)} of {grpo['max_steps']} steps, each {rollout['tasks_per_step']} "
        f"groups of {rollout['num_generations']} episodes, learning rate "
        f"{grpo['learning_rate']:g}, beta {grpo['beta']:g}."
        if grpo["use_grpo"]
        else "GRPO: not used; this run evaluates only.",
    ]
    if grpo["permute_rewards"]:
        lines.append("**A control: rewards were permuted among the episodes of each step.**")
    if "wall_s" in results:
        lines.append(f"Wall time {_duration(results['wall_s'])}.")
    if run.step_s:
        lines[-1] += f" A training step took {median(run.step_s):.2f} s (median)."
    if not results["evaluations"]:
        lines.append("**There is no evaluation in this folder: the run was interrupted.**")
    return "\n".join(f"- {line}" for line in lines)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _before_and_after(run: Run) -> str:
    if not run.evaluations:
        return ""
    before, after = before_and_after(run.evaluations)
    title = "## Before and after GRPO" if before and after else "## Success"
    named = [after_name(e) for e in (before, after) if e]
    named = [f"before: {named[0]}", f"after: {named[1]}"] if len(named) == 2 else named
    of = next(iter(run.evaluations[-1]["success"].values()))
    how = (
        f"On {of['num_tasks']} tasks of each domain ({run.results.get('split', 'test')} split); "
        f"{', '.join(named)}. *Sampled*: the mean of {of['num_trials']} trial(s) of each task at "
        f"the training temperature ({run.config['rollout']['temperature']:g}). *Greedy*: one trial "
        "of each, always the likeliest token. Compare sampled with sampled and greedy with greedy."
    )
    return "\n\n".join([title, _markdown(*_change(run.evaluations)), how])


def _evaluations(run: Run) -> str:
    if not run.evaluations:
        return ""
    domains = [*run.domains, "mean"]
    parts = ["## Every evaluation"]
    for kind, name in (("mean", "sampled"), ("greedy", "greedy")):
        rows = [
            [after_name(e), str(e["step"]), *(_cell(e, domain, kind) for domain in domains)]
            for e in run.evaluations
        ]
        parts.append(_markdown([name, "step", *domains], rows))
    parts.append(
        "In brackets: 95 % Wilson intervals that count each task once, because trials of one task "
        "are not independent. They are wide on purpose."
    )
    return "\n\n".join(parts)


def _cell(evaluation: Evaluation, domain: str, kind: str) -> str:
    value = rate(evaluation, domain, kind)
    if value is None or domain == "mean":
        return number(value)
    low, high = wilson(value, evaluation["success"][domain]["num_tasks"])
    return f"{value:.3f} [{low:.2f}, {high:.2f}]"


def _families(run: Run) -> str:
    evaluations = [e for e in before_and_after(run.evaluations) if e]
    rows = []
    for domain, success in evaluations[-1]["success"].items() if evaluations else []:
        for family in success.get("families", {}):
            names = [domain, family, "all"]
            rows.append([*names, *_rates(evaluations, domain, "families", family)])
            for branch in success.get("branches", {}):
                if branch.startswith(f"{family}/"):
                    names = ["", "", branch.removeprefix(f"{family}/")]
                    rows.append([*names, *_rates(evaluations, domain, "branches", branch)])
    if not rows:
        return ""
    when = [" before", " after"] if len(evaluations) == 2 else [""]
    rates = [f"{kind}{word}" for kind in ("sampled", "greedy") for word in when]
    table = _markdown(["domain", "family", "branch", "tasks", *rates], rows, num_left=3)
    return f"## By family and branch\n\n{table}"


def _rates(evaluations: list[Evaluation], domain: str, level: str, name: str) -> list[str]:
    groups = [e["success"].get(domain, {}).get(level, {}).get(name, {}) for e in evaluations]
    rates = [number(group.get(kind)) for kind in ("mean", "greedy") for group in groups]
    return [str(groups[-1]["num_tasks"]), *rates]


def _floors(run: Run) -> str:
    floors = run.results["floors"]
    if not floors:
        return ""
    rows = [[d, *(number(of.get(key)) for key in FLOORS)] for d, of in floors.items()]
    table = _markdown(["domain", *FLOORS.values()], rows)
    return f"## Floors\n\nWhat policies earn that never look at the request.\n\n{table}"


def _curriculum(run: Run) -> str:
    if not run.stages:
        return ""
    rows = []
    for stage in run.stages:
        first, last = stage["first_step"] + 1, stage["first_step"] + stage["num_steps"]
        groups = ", ".join(f"{count} {domain}" for domain, count in stage["domains"].items())
        rows.append([stage["name"], f"{first} to {last}", groups])
    table = _markdown(["stage", "steps", "groups in each step"], rows, num_left=3)
    replay = (
        f"Replay: after the first stage {run.replay:.0%} of a step's groups, in whole groups, come "
        "from the domains of earlier stages."
        if run.replay
        else "No replay: a stage draws from its own domains only."
    )
    return f"## Curriculum\n\n{table}\n\n{replay}"


def _stop_reasons(run: Run) -> str:
    prefix = "rollout/stop/"
    reasons = sorted({key for record in run.train for key in record if key.startswith(prefix)})
    if not reasons:
        return ""
    rows = []
    for reason in reasons:
        shares = [fmean(r.get(reason) or 0.0 for r in run.of_stage(s)) for s in run.stages]
        if any(shares):
            rows.append([reason.removeprefix(prefix), *(f"{share:.1%}" for share in shares)])
    table = _markdown(["reason", *(stage["name"] for stage in run.stages)], rows)
    return f"## How training episodes ended\n\nShare of a stage's episodes.\n\n{table}"


def _faults(run: Run) -> str:
    """What went wrong and was dealt with; nothing where nothing did."""
    faults = run.results.get("faults", {})
    texts = []
    if count := faults.get("skipped_steps"):
        steps = "1 step was" if count == 1 else f"{count} steps were"
        texts.append(f"{steps} skipped for a loss or gradient that was not finite (`faults/`).")
    if budget := faults.get("max_tokens_per_microbatch"):
        texts.append(f"Memory ran out; `max_tokens_per_microbatch` was lowered to {budget}.")
    return "\n\n".join(["## Faults", *texts]) if texts else ""


def _files(run: Run) -> str:
    lines = [f"- `{name}`: {what}" for name, what in FILES.items() if (run.folder / name).exists()]
    return "## Files\n\n" + "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("error: give one run folder: python -m pipeline.report FOLDER", file=sys.stderr)
        return 2
    try:
        write_report(Path(arguments[0]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(Path(arguments[0]) / "report.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
