"""The sections of a run's report, from the run folder's files alone.

Success sampled at the training temperature and success of greedy decoding are two measurements;
they are never compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from statistics import fmean, median
from typing import Any

from pipeline.evaluation.transfer_metrics import wilson
from pipeline.files.layout import METRICS, TIMINGS
from pipeline.report import transfer_sections as of_transfer
from pipeline.report.sections import Block, Picture, Section, Table, bullets
from pipeline.tracking.run_files import (
    Evaluation,
    RunData,
    after_name,
    before_and_after,
    domains_of,
    number,
    rate,
)

KINDS = {"mean": "sampled", "greedy": "greedy"}  # of success rates
BASELINES = {
    "nothing": "doing nothing",
    "transfer": "always transferring (best single reason)",
    "every_tool": "every tool in turn",
}
ZERO_STD = {
    "rollout/all_failed": "all failed",
    "rollout/all_solved": "all solved",
    "rollout/too_few_left": "fewer than two left",
    "rollout/frac_reward_zero_std": "in all",
}
TIMES = {
    "perf/sample_s": ("sampling", "{:.2f} s"),
    "perf/environment_s": ("environment (within sampling)", "{:.2f} s"),
    "perf/update_s": ("update", "{:.2f} s"),
    "perf/wait_s": ("waiting for ranks", "{:.2f} s"),
    "perf/step_s": ("whole step", "{:.2f} s"),
    "perf/peak_memory_mb": ("peak memory of a rank", "{:,.0f} MB"),
}
FILES = {
    "report.html": "all of this in one page, and a reader of the episodes",
    "config.yaml": "every setting of the run",
    "curriculum.json": "stages, their steps and groups",
    METRICS: "one line per training step and evaluation; only what the seed determines",
    TIMINGS: "times, under the same steps",
    "results.json": "every evaluation, the baselines, the transfer numbers",
    "trajectories": "transcripts, one file per stage, step and rank",
    "checkpoints": "models for `from_pretrained`; `latest` names the last",
}
STOP, LEFT_OUT = "rollout/stop/", "rollout/left_out/"


def sections_of(run: RunData) -> list[Section]:
    """All sections in order; those of a run that lacks their data are empty."""
    curves = Picture("learning_curves", "Training reward and held-out success over the steps")
    return [
        Section("", [_what_ran(run)]),
        Section("Success", _success(run)),
        Section("", [curves]),
        Section("Transfer and forgetting", of_transfer.transfer_and_forgetting(run)),
        Section("Every evaluation", _evaluations(run)),
        Section("Mean reward", of_transfer.mean_rewards(run)),
        Section("By family and branch", [_families(run)]),
        Section("Tools", of_transfer.tools(run)),
        Section("pass@k and pass^k", of_transfer.trials(run)),
        Section("Baselines", _baselines(run)),
        Section("Curriculum", _curriculum(run)),
        Section("How training episodes ended", _stop_reasons(run)),
        Section("", _left_out(run)),
        Section("Zero-std groups", _zero_std_groups(run)),
        Section("Time and memory", _time(run)),
        Section("Faults", _faults(run)),
        Section("Files", [_files(run)]),
    ]


def change(evaluations: Sequence[Evaluation], transfer: Mapping[str, Any]) -> Table:
    """Success before and after GRPO and the change with its interval, or the only success."""
    before, after = before_and_after(evaluations)
    found = [before, after] if before and after else [before or after]
    rates = {
        domain: [number(rate(e, domain, kind)) for kind in KINDS for e in found]
        for domain in [*domains_of(evaluations), "mean"]
    }
    if len(found) < 2:
        return Table(["success", "sampled", "greedy"], [[d, *of] for d, of in rates.items()])
    mean = transfer.get("metrics", {}).get("total_gain")
    gains = {**transfer.get("domains", {}).get("gain", {}), "mean": mean}
    rows = [[d, *of[:2], of_transfer.shown(gains.get(d), "+"), *of[2:]] for d, of in rates.items()]
    kinds = ["sampled before", "sampled after", "change [95 %]", "greedy before", "greedy after"]
    return Table(["success", *kinds], rows)


def _what_ran(run: RunData) -> str:
    config, results = run.config, run.results
    data, grpo, rollout = config["data"], config["grpo"], config["rollout"]
    steps = (
        f"GRPO: {len(run.train)} of {grpo['max_steps']} steps, each {rollout['tasks_per_step']} "
        f"groups of {rollout['num_generations']} episodes, learning rate "
        f"{grpo['learning_rate']:g}, beta {grpo['beta']:g}."
    )
    interrupted = "**There is no evaluation in this folder: the run was interrupted.**"
    control = "**A control: rewards were permuted among the episodes of each step.**"
    lines = [
        f"Recipe `{config['recipe']}`, seed {config['run']['seed']}, "
        f"{results.get('num_ranks', 'unknown number of')} rank(s).",
        f"Model `{config['model']['model']}`; domains {', '.join(run.domains)}; "
        f"{data['tasks_per_domain']} training tasks of each ({data['difficulty']}).",
        f"Warm start: {config['warm_start']['steps'] or 'no'} supervised steps.",
        steps if grpo["use_grpo"] else "GRPO: not used; this run evaluates only.",
        control if grpo["permute_rewards"] else "",
        f"Wall time {_duration(results['wall_s'])}." if "wall_s" in results else "",
        f"A training step took {median(run.step_s):.2f} s (median)." if run.step_s else "",
        "" if run.evaluations else interrupted,
    ]
    return bullets(filter(None, lines))


def _duration(seconds: float) -> str:
    return f"{timedelta(seconds=round(seconds))} h"


def _success(run: RunData) -> list[Block]:
    if not run.evaluations:
        return []
    points = [after_name(e["after"]) for e in before_and_after(run.evaluations) if e]
    names = [f"before: {points[0]}", f"after: {points[1]}"] if len(points) == 2 else points
    of = next(iter(run.evaluations[-1]["success"].values()))
    return [
        change(run.evaluations, run.transfer),
        f"On {of['num_tasks']} tasks of each domain ({run.results.get('split', 'test')} split); "
        f"{', '.join(names)}. *Sampled*: the mean of {of['num_trials']} trial(s) of each task at "
        f"the training temperature ({run.config['rollout']['temperature']:g}). *Greedy*: one trial "
        "of each, always the likeliest token. Compare sampled with sampled and greedy with greedy.",
    ]


def _evaluations(run: RunData) -> list[Block]:
    domains = [*run.domains, "mean"]
    rows = {
        kind: [
            [after_name(e["after"]), str(e["step"]), *(_with_interval(e, d, kind) for d in domains)]
            for e in run.evaluations
        ]
        for kind in KINDS
    }
    return [
        *(Table([KINDS[kind], "step", *domains], of) for kind, of in rows.items()),
        "In brackets: 95 % Wilson intervals that count each task once, because trials of one task "
        "are not independent. They are wide on purpose.",
        Picture("stage_performance", "Held-out success of each domain after each stage"),
    ]


def _with_interval(evaluation: Evaluation, domain: str, kind: str) -> str:
    value = rate(evaluation, domain, kind)
    # Older runs have mean rewards, which need not be shares.
    if value is None or domain == "mean" or not 0 <= value <= 1:
        return number(value)
    low, high = wilson(value, evaluation["success"][domain]["num_tasks"])
    return f"{value:.3f} [{low:.2f}, {high:.2f}]"


def _families(run: RunData) -> Table:
    """Rates of each family, and of its branches below it, before and after GRPO."""
    found = [e for e in before_and_after(run.evaluations) if e]
    rows = []
    for domain, success in found[-1]["success"].items() if found else ():
        for family in success.get("families", {}):
            levels = [("families", family, [domain, family, "all"])]
            for branch in success.get("branches", {}):
                if branch.startswith(f"{family}/"):
                    words = ["", "", branch.removeprefix(f"{family}/")]
                    levels.append(("branches", branch, words))
            for level, name, words in levels:
                of = [e["success"].get(domain, {}).get(level, {}).get(name, {}) for e in found]
                rates = [number(group.get(kind)) for kind in KINDS for group in of]
                rows.append([*words, str(of[-1]["num_tasks"]), *rates])
    when = [" before", " after"] if len(found) == 2 else [""]
    rates = [f"{kind}{word}" for kind in KINDS.values() for word in when]
    return Table(["domain", "family", "branch", "tasks", *rates], rows, num_left=3)


def _baselines(run: RunData) -> list[Block]:
    baselines = run.results["baselines"]
    rows = [[d, *(number(of.get(key)) for key in BASELINES)] for d, of in baselines.items()]
    return [
        "Mean reward of policies that ignore what the record of a request says.",
        Table(["domain", *BASELINES.values()], rows),
    ]


def _curriculum(run: RunData) -> list[Block]:
    rows = [
        [
            stage["name"],
            f"{stage['first_step'] + 1} to {stage['first_step'] + stage['num_steps']}",
            ", ".join(f"{count} {domain}" for domain, count in stage["domains"].items()),
        ]
        for stage in run.stages
    ]
    replay = (
        f"Replay: after the first stage {run.replay:.0%} of a step's groups, in whole groups, come "
        "from the domains of earlier stages."
        if run.replay
        else "No replay: a stage draws from its own domains only."
    )
    return [Table(["stage", "steps", "groups in each step"], rows, num_left=3), replay]


def _shares(run: RunData, head: str, names: Mapping[str, str]) -> Table:
    """Means of metrics over each stage's steps, as shares; `names` maps metrics to rows."""
    stages = {stage["name"]: run.of_stage(stage) for stage in run.stages}
    rows = [
        [name, *(f"{fmean(r.get(key) or 0.0 for r in of):.1%}" for of in stages.values())]
        for key, name in names.items()
    ]
    return Table([head, *stages], rows)


def _stop_reasons(run: RunData) -> list[Block]:
    found = {key for record in run.train for key, share in record.items() if share}
    names = {key: key.removeprefix(STOP) for key in sorted(found) if key.startswith(STOP)}
    return [
        "Share of a stage's episodes.",
        Picture("stop_reasons", "Why training episodes ended, over the steps"),
        _shares(run, "reason", names),
    ]


def _left_out(run: RunData) -> list[Block]:
    """How many episodes training left out, by domain and kind of failure."""
    counts = Counter[str]()
    for record in run.train:
        counts.update({k: round(n) for k, n in record.items() if k.startswith(LEFT_OUT)})
    rows = [
        [*reversed(key.removeprefix(LEFT_OUT).split("/", 1)), str(counts[key])]
        for key in sorted(counts)
    ]
    return [
        "Left out of training, because an environment failed and not the policy: its `reset`, its "
        "user's `reply`, or a service that it reported as down (`outage`).",
        Table(["domain", "failure", "episodes"], rows, num_left=2),
    ]


def _zero_std_groups(run: RunData) -> list[Block]:
    found = {key for record in run.train for key in record}
    return [
        "Share of a stage's groups whose episodes all earned the same (or fewer than two were not "
        "left out): they have no advantage and teach nothing.",
        Picture("zero_std_groups", "Groups without a signal, over the steps"),
        _shares(run, "groups", {key: name for key, name in ZERO_STD.items() if key in found}),
    ]


def _time(run: RunData) -> list[Block]:
    rows = []
    for key, (name, form) in TIMES.items():
        if values := [record[key] for record in run.timings if record.get(key) is not None]:
            total = _duration(sum(values)) if key.endswith("_s") else "-"
            rows.append([name, form.format(median(values)), form.format(max(values)), total])
    return [
        "Seconds are means over ranks; memory is that of the rank with the highest peak.",
        Picture("time_and_memory", "Time and memory of each training step"),
        Table(["of a training step", "median", "most", "in all"], rows),
    ]


def _faults(run: RunData) -> list[Block]:
    """Faults that the run recovered from."""
    faults = run.results.get("faults", {})
    texts: list[Block] = []
    if count := faults.get("skipped_steps"):
        texts.append(
            f"Steps skipped for a loss or gradient that was not finite: {count} (`faults/`)."
        )
    if budget := faults.get("max_tokens_per_microbatch"):
        texts.append(f"Memory ran out; `max_tokens_per_microbatch` was lowered to {budget}.")
    return texts


def _files(run: RunData) -> str:
    names = [name for name in FILES if name == "report.html" or (run.folder / name).exists()]
    return bullets(f"`{name}`: {FILES[name]}" for name in names)
