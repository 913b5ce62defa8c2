"""What a run's report says: its sections, from the run folder's files alone.

Success sampled at the training temperature and success of greedy decoding are two measurements;
they are never compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from pipeline.evaluation.transfer_metrics import wilson
from pipeline.files.layout import METRICS, TIMINGS
from pipeline.report.sections import Block, Picture, Section, Table
from pipeline.report.transfer_sections import HOW, shown, transfer_sections
from pipeline.tracking.run_files import (
    Evaluation,
    RunData,
    after_name,
    before_and_after,
    domains_of,
    number,
    rate,
)

FLOORS = {
    "nothing": "doing nothing",
    "transfer": "always transferring (best single reason)",
    "every_tool": "every tool in turn",
    "unread": "best that never reads the record",
    "unread_by_family": "best of each family",
}
PHASES = {
    "sample_s": "sampling",
    "environment_s": "environment (within sampling)",
    "update_s": "update",
    "wait_s": "waiting for ranks",
    "step_s": "whole step",
}
FILES = {
    "report.html": "all of this in one page, and a reader of the episodes",
    "config.yaml": "every setting of the run",
    "curriculum.json": "stages, their steps and groups",
    METRICS: "one line per training step and evaluation; only what the seed determines",
    TIMINGS: "times, under the same steps",
    "results.json": "every evaluation, the floors, the transfer numbers",
    "trajectories": "transcripts, one file per stage, step and rank",
    "checkpoints": "models for `from_pretrained`; `latest` names the last",
}


def sections_of(run: RunData) -> list[Section]:
    found = [
        Section(title="", blocks=[_what_ran(run)]),
        *_before_and_after(run),
        Section(
            title="",
            blocks=[
                Picture(
                    name="learning_curves",
                    caption="Training reward and held-out success over the steps",
                )
            ],
        ),
        *transfer_sections(run)[:1],
        *_evaluations(run),
        *_mean_rewards(run),
        *_families(run),
        *transfer_sections(run)[1:],
        *_floors(run),
        *_curriculum(run),
        *_stop_reasons(run),
        *_dead_groups(run),
        *_time(run),
        *_faults(run),
        _files(run),
    ]
    return [section for section in found if section.blocks]


def change(evaluations: Sequence[Evaluation], transfer: Mapping[str, Any]) -> Table:
    """Success before and after GRPO, or of what there is; the change with its interval."""
    domains = [*domains_of(evaluations), "mean"]
    before, after = before_and_after(evaluations)
    if before is None or after is None:
        only = before or after
        rows = [[d, *(number(rate(only, d, kind)) for kind in ("mean", "greedy"))] for d in domains]
        return Table(header=["success", "sampled", "greedy"], rows=rows)
    gains = dict(transfer.get("domains", {}).get("gain", {}))
    gains["mean"] = transfer.get("metrics", {}).get("total_gain")
    rows = []
    for domain in domains:
        rates = [rate(e, domain, kind) for kind in ("mean", "greedy") for e in (before, after)]
        old, new, *greedy = map(number, rates)
        rows.append([domain, old, new, shown(gains.get(domain), "+"), *greedy])
    kinds = ["sampled before", "sampled after", "change [95 %]", "greedy before", "greedy after"]
    return Table(header=["success", *kinds], rows=rows)


def _what_ran(run: RunData) -> str:
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


def _before_and_after(run: RunData) -> list[Section]:
    if not run.evaluations:
        return []
    before, after = before_and_after(run.evaluations)
    title = "Before and after GRPO" if before and after else "Success"
    named = [after_name(e) for e in (before, after) if e]
    named = [f"before: {named[0]}", f"after: {named[1]}"] if len(named) == 2 else named
    of = next(iter(run.evaluations[-1]["success"].values()))
    how = (
        f"On {of['num_tasks']} tasks of each domain ({run.results.get('split', 'test')} split); "
        f"{', '.join(named)}. *Sampled*: the mean of {of['num_trials']} trial(s) of each task at "
        f"the training temperature ({run.config['rollout']['temperature']:g}). *Greedy*: one trial "
        "of each, always the likeliest token. Compare sampled with sampled and greedy with greedy."
    )
    return [Section(title=title, blocks=[change(run.evaluations, run.transfer), how])]


def _evaluations(run: RunData) -> list[Section]:
    if not run.evaluations:
        return []
    domains = [*run.domains, "mean"]
    blocks: list[Block] = []
    for kind, name in (("mean", "sampled"), ("greedy", "greedy")):
        rows = [
            [after_name(e), str(e["step"]), *(_cell(e, domain, kind) for domain in domains)]
            for e in run.evaluations
        ]
        blocks.append(Table(header=[name, "step", *domains], rows=rows))
    blocks.append(
        "In brackets: 95 % Wilson intervals that count each task once, because trials of one task "
        "are not independent. They are wide on purpose."
    )
    caption = "Held-out success of each domain after each stage"
    blocks.append(Picture(name="stage_performance", caption=caption))
    return [Section(title="Every evaluation", blocks=blocks)]


def _mean_rewards(run: RunData) -> list[Section]:
    """Of domains whose rewards are not all 0 or 1."""
    rewards = run.transfer.get("rewards", {})
    if not rewards:
        return []
    points = [after_name({"after": point}) for point in run.transfer["points"]]
    rows = [[domain, *(shown(value) for value in values)] for domain, values in rewards.items()]
    text = (
        "Sampled, over all trials. A trial is a success with a reward of "
        f"{run.success_threshold:g} or more (`success_threshold`). {HOW}"
    )
    return [
        Section(title="Mean reward", blocks=[Table(header=["reward", *points], rows=rows), text])
    ]


def _cell(evaluation: Evaluation, domain: str, kind: str) -> str:
    value = rate(evaluation, domain, kind)
    if value is None or domain == "mean":
        return number(value)
    if not 0 <= value <= 1:  # older runs have mean rewards there
        return number(value)
    low, high = wilson(value, evaluation["success"][domain]["num_tasks"])
    return f"{value:.3f} [{low:.2f}, {high:.2f}]"


def _families(run: RunData) -> list[Section]:
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
        return []
    when = [" before", " after"] if len(evaluations) == 2 else [""]
    rates = [f"{kind}{word}" for kind in ("sampled", "greedy") for word in when]
    table = Table(header=["domain", "family", "branch", "tasks", *rates], rows=rows, num_left=3)
    return [Section(title="By family and branch", blocks=[table])]


def _rates(evaluations: list[Evaluation], domain: str, level: str, name: str) -> list[str]:
    groups = [e["success"].get(domain, {}).get(level, {}).get(name, {}) for e in evaluations]
    rates = [number(group.get(kind)) for kind in ("mean", "greedy") for group in groups]
    return [str(groups[-1]["num_tasks"]), *rates]


def _floors(run: RunData) -> list[Section]:
    floors = run.results["floors"]
    if not floors:
        return []
    rows = [[d, *(number(of.get(key)) for key in FLOORS)] for d, of in floors.items()]
    table = Table(header=["domain", *FLOORS.values()], rows=rows)
    text = (
        "What policies earn that never read the record of a request. The last two are the best of "
        "all such policies: one for every request, and one for each family of requests. They may "
        "use what the customer answers, and are chosen on these tasks, so others earn less."
    )
    return [Section(title="Floors", blocks=[text, table])]


def _curriculum(run: RunData) -> list[Section]:
    if not run.stages:
        return []
    rows = []
    for stage in run.stages:
        first, last = stage["first_step"] + 1, stage["first_step"] + stage["num_steps"]
        groups = ", ".join(f"{count} {domain}" for domain, count in stage["domains"].items())
        rows.append([stage["name"], f"{first} to {last}", groups])
    table = Table(header=["stage", "steps", "groups in each step"], rows=rows, num_left=3)
    replay = (
        f"Replay: after the first stage {run.replay:.0%} of a step's groups, in whole groups, come "
        "from the domains of earlier stages."
        if run.replay
        else "No replay: a stage draws from its own domains only."
    )
    return [Section(title="Curriculum", blocks=[table, replay])]


def _stop_reasons(run: RunData) -> list[Section]:
    prefix = "rollout/stop/"
    rows = [
        [reason, *(f"{share:.1%}" for share in shares)]
        for reason, shares in _shares(run, prefix).items()
        if any(shares)
    ]
    if not rows:
        return []
    table = Table(header=["reason", *(stage["name"] for stage in run.stages)], rows=rows)
    picture = Picture(name="stop_reasons", caption="Why training episodes ended, over the steps")
    title, left_out = "How training episodes ended", _left_out(run)
    blocks = ["Share of a stage's episodes.", picture, table, *left_out]
    return [Section(title=title, blocks=blocks)]


def _left_out(run: RunData) -> list[Block]:
    """How many episodes training left out, by domain and kind; nothing where there were none."""
    prefix, counts = "rollout/left_out/", Counter[str]()
    for record in run.train:
        for key, count in record.items():
            if key.startswith(prefix):
                counts[key.removeprefix(prefix)] += round(count)
    if not counts:
        return []
    rows = [[*reversed(key.split("/", 1)), str(counts[key])] for key in sorted(counts)]
    text = (
        "Left out of training, because an environment failed at what the policy is not answerable "
        "for: its `reset`, its user's `reply`, or a service that it said is down (`outage`)."
    )
    return [text, Table(header=["domain", "what failed", "episodes"], rows=rows, num_left=2)]


def _shares(run: RunData, prefix: str) -> dict[str, list[float]]:
    """Means over each stage's steps of the metrics with a prefix, by what follows it."""
    keys = sorted({key for record in run.train for key in record if key.startswith(prefix)})
    return {
        key.removeprefix(prefix): [
            fmean(record.get(key) or 0.0 for record in run.of_stage(stage)) for stage in run.stages
        ]
        for key in keys
    }


def _dead_groups(run: RunData) -> list[Section]:
    kinds = {"all_failed": "all failed", "all_solved": "all solved"}
    if any(record.get("rollout/too_few_left") for record in run.train):
        kinds["too_few_left"] = "fewer than two left"
    kinds["dead_groups"] = "in all"
    found = {name: _shares(run, f"rollout/{kind}").get("") for kind, name in kinds.items()}
    rows = [[name, *(f"{s:.1%}" for s in shares)] for name, shares in found.items() if shares]
    if not rows:
        return []
    text = (
        "Share of a stage's groups whose episodes all earned the same (or fewer than two were not "
        "left out): they have no advantage and teach nothing."
    )
    table = Table(header=["groups", *(stage["name"] for stage in run.stages)], rows=rows)
    picture = Picture(name="dead_groups", caption="Groups without a signal, over the steps")
    return [Section(title="Dead groups", blocks=[text, picture, table])]


def _time(run: RunData) -> list[Section]:
    rows = []
    for key, name in PHASES.items():
        values = [record.get(f"perf/{key}") for record in run.timings]
        known = [value for value in values if value is not None]
        if known:
            seconds = [f"{median(known):.2f} s", f"{max(known):.2f} s", _duration(sum(known))]
            rows.append([name, *seconds])
    memory = [r["perf/peak_memory_mb"] for r in run.timings if "perf/peak_memory_mb" in r]
    if memory:
        most = f"{max(memory):,.0f} MB"
        rows.append(["peak memory of a rank", f"{median(memory):,.0f} MB", most, "-"])
    if not any("perf/sample_s" in record for record in run.timings):
        return []
    table = Table(header=["of a training step", "median", "most", "in all"], rows=rows)
    text = "Seconds are means over ranks; memory is that of the rank that takes most."
    picture = Picture(name="time_and_memory", caption="Time and memory of each training step")
    return [Section(title="Time and memory", blocks=[text, picture, table])]


def _faults(run: RunData) -> list[Section]:
    """What went wrong and was dealt with; nothing where nothing did."""
    faults: dict[str, Any] = run.results.get("faults", {})
    texts = []
    if count := faults.get("skipped_steps"):
        steps = "1 step was" if count == 1 else f"{count} steps were"
        texts.append(f"{steps} skipped for a loss or gradient that was not finite (`faults/`).")
    if budget := faults.get("max_tokens_per_microbatch"):
        texts.append(f"Memory ran out; `max_tokens_per_microbatch` was lowered to {budget}.")
    return [Section(title="Faults", blocks=texts)]


def _files(run: RunData) -> Section:
    there = [name for name in FILES if name == "report.html" or (run.folder / name).exists()]
    lines = [f"- `{name}`: {FILES[name]}" for name in there]
    return Section(title="Files", blocks=["\n".join(lines)])
