"""The sections of a run's report, from the run folder's files alone.

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
from pipeline.report.sections import Block, Picture, Section, Table, with_content
from pipeline.report.transfer_sections import HOW, shown, tools, transfer_and_forgetting, trials
from pipeline.tracking.run_files import (
    Evaluation,
    RunData,
    after_name,
    before_and_after,
    domains_of,
    number,
    rate,
)

BASELINES = {
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
    "results.json": "every evaluation, the baselines, the transfer numbers",
    "trajectories": "transcripts, one file per stage, step and rank",
    "checkpoints": "models for `from_pretrained`; `latest` names the last",
}


def sections_of(run: RunData) -> list[Section]:
    caption = "Training reward and held-out success over the steps"
    sections = [
        Section("", [_what_ran(run)]),
        _before_and_after(run),
        Section("", [Picture("learning_curves", caption)]),
        transfer_and_forgetting(run),
        _evaluations(run),
        _mean_rewards(run),
        _families(run),
        tools(run),
        trials(run),
        _baselines(run),
        _curriculum(run),
        _stop_reasons(run),
        _zero_std_groups(run),
        _time(run),
        _faults(run),
        _files(run),
    ]
    return with_content(sections)


def change(evaluations: Sequence[Evaluation], transfer: Mapping[str, Any]) -> Table:
    """Success before and after GRPO and the change with its interval, or the only success."""
    domains = [*domains_of(evaluations), "mean"]
    before, after = before_and_after(evaluations)
    if before is None or after is None:
        only = before or after
        rows = [[d, *(number(rate(only, d, kind)) for kind in ("mean", "greedy"))] for d in domains]
        return Table(["success", "sampled", "greedy"], rows)
    gains = dict(transfer.get("domains", {}).get("gain", {}))
    gains["mean"] = transfer.get("metrics", {}).get("total_gain")
    rows = []
    for domain in domains:
        rates = [rate(e, domain, kind) for kind in ("mean", "greedy") for e in (before, after)]
        old, new, *greedy = map(number, rates)
        rows.append([domain, old, new, shown(gains.get(domain), "+"), *greedy])
    kinds = ["sampled before", "sampled after", "change [95 %]", "greedy before", "greedy after"]
    return Table(["success", *kinds], rows)


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
    return _list(lines)


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _before_and_after(run: RunData) -> Section:
    if not run.evaluations:
        return Section("", [])
    before, after = before_and_after(run.evaluations)
    title = "Before and after GRPO" if before and after else "Success"
    names = [after_name(e["after"]) for e in (before, after) if e]
    names = [f"before: {names[0]}", f"after: {names[1]}"] if len(names) == 2 else names
    of = next(iter(run.evaluations[-1]["success"].values()))
    how = (
        f"On {of['num_tasks']} tasks of each domain ({run.results.get('split', 'test')} split); "
        f"{', '.join(names)}. *Sampled*: the mean of {of['num_trials']} trial(s) of each task at "
        f"the training temperature ({run.config['rollout']['temperature']:g}). *Greedy*: one trial "
        "of each, always the likeliest token. Compare sampled with sampled and greedy with greedy."
    )
    return Section(title, [change(run.evaluations, run.transfer), how])


def _evaluations(run: RunData) -> Section:
    domains = [*run.domains, "mean"]
    tables = [
        Table([name, "step", *domains], [_row(e, domains, kind) for e in run.evaluations])
        for kind, name in (("mean", "sampled"), ("greedy", "greedy"))
    ]
    text = (
        "In brackets: 95 % Wilson intervals that count each task once, because trials of one task "
        "are not independent. They are wide on purpose."
    )
    picture = Picture("stage_performance", "Held-out success of each domain after each stage")
    return Section("Every evaluation", [*tables, text, picture])


def _row(evaluation: Evaluation, domains: Sequence[str], kind: str) -> list[str]:
    cells = [_cell(evaluation, domain, kind) for domain in domains]
    return [after_name(evaluation["after"]), str(evaluation["step"]), *cells]


def _cell(evaluation: Evaluation, domain: str, kind: str) -> str:
    value = rate(evaluation, domain, kind)
    # Older runs have mean rewards, which need not be shares.
    if value is None or domain == "mean" or not 0 <= value <= 1:
        return number(value)
    low, high = wilson(value, evaluation["success"][domain]["num_tasks"])
    return f"{value:.3f} [{low:.2f}, {high:.2f}]"


def _mean_rewards(run: RunData) -> Section:
    """The mean reward of domains whose rewards are not all 0 or 1."""
    rewards = run.transfer.get("rewards", {})
    rows = [[domain, *(shown(value) for value in values)] for domain, values in rewards.items()]
    text = (
        "Sampled, over all trials. A trial is a success with a reward of "
        f"{run.success_threshold:g} or more (`success_threshold`). {HOW}"
    )
    return Section("Mean reward", [Table(["reward", *run.points], rows), text])


def _families(run: RunData) -> Section:
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
    when = [" before", " after"] if len(evaluations) == 2 else [""]
    rates = [f"{kind}{word}" for kind in ("sampled", "greedy") for word in when]
    table = Table(["domain", "family", "branch", "tasks", *rates], rows, num_left=3)
    return Section("By family and branch", [table])


def _rates(evaluations: list[Evaluation], domain: str, level: str, name: str) -> list[str]:
    groups = [e["success"].get(domain, {}).get(level, {}).get(name, {}) for e in evaluations]
    rates = [number(group.get(kind)) for kind in ("mean", "greedy") for group in groups]
    return [str(groups[-1]["num_tasks"]), *rates]


def _baselines(run: RunData) -> Section:
    baselines = run.results["baselines"]
    rows = [[d, *(number(of.get(key)) for key in BASELINES)] for d, of in baselines.items()]
    text = (
        "What policies earn that never read the record of a request. The last two are the best of "
        "all such policies: one for every request, and one for each family of requests. They may "
        "use what the customer answers, and are chosen on these tasks, so others earn less."
    )
    return Section("Baselines", [text, Table(["domain", *BASELINES.values()], rows)])


def _curriculum(run: RunData) -> Section:
    rows = []
    for stage in run.stages:
        first, last = stage["first_step"] + 1, stage["first_step"] + stage["num_steps"]
        groups = ", ".join(f"{count} {domain}" for domain, count in stage["domains"].items())
        rows.append([stage["name"], f"{first} to {last}", groups])
    table = Table(["stage", "steps", "groups in each step"], rows, num_left=3)
    replay = (
        f"Replay: after the first stage {run.replay:.0%} of a step's groups, in whole groups, come "
        "from the domains of earlier stages."
        if run.replay
        else "No replay: a stage draws from its own domains only."
    )
    return Section("Curriculum", [table, replay])


def _shares(run: RunData, prefix: str) -> dict[str, list[float]]:
    """Means over each stage's steps of the metrics with a prefix, by the rest of their names."""
    keys = sorted({key for record in run.train for key in record if key.startswith(prefix)})
    return {
        key.removeprefix(prefix): [
            fmean(record.get(key) or 0.0 for record in run.of_stage(stage)) for stage in run.stages
        ]
        for key in keys
    }


def _table_of_shares(run: RunData, head: str, shares: Mapping[str, Sequence[float]]) -> Table:
    rows = [[name, *(f"{share:.1%}" for share in of)] for name, of in shares.items()]
    return Table([head, *(stage["name"] for stage in run.stages)], rows)


def _stop_reasons(run: RunData) -> Section:
    shares = {name: of for name, of in _shares(run, "rollout/stop/").items() if any(of)}
    picture = Picture("stop_reasons", "Why training episodes ended, over the steps")
    table = _table_of_shares(run, "reason", shares)
    blocks = ["Share of a stage's episodes.", picture, table, *_left_out(run)]
    return Section("How training episodes ended", blocks)


def _left_out(run: RunData) -> list[Block]:
    """How many episodes training left out, by domain and kind, if there were any."""
    prefix, counts = "rollout/left_out/", Counter[str]()
    for record in run.train:
        for key, count in record.items():
            if key.startswith(prefix):
                counts[key.removeprefix(prefix)] += round(count)
    rows = [[*reversed(key.split("/", 1)), str(counts[key])] for key in sorted(counts)]
    text = (
        "Left out of training, because an environment failed at what the policy is not answerable "
        "for: its `reset`, its user's `reply`, or a service that it said is down (`outage`)."
    )
    return [text, Table(["domain", "what failed", "episodes"], rows, num_left=2)] if rows else []


def _zero_std_groups(run: RunData) -> Section:
    kinds = {"all_failed": "all failed", "all_solved": "all solved"}
    if any(record.get("rollout/too_few_left") for record in run.train):
        kinds["too_few_left"] = "fewer than two left"
    kinds["frac_reward_zero_std"] = "in all"
    shares = {name: _shares(run, f"rollout/{kind}").get("", []) for kind, name in kinds.items()}
    text = (
        "Share of a stage's groups whose episodes all earned the same (or fewer than two were not "
        "left out): they have no advantage and teach nothing."
    )
    picture = Picture("zero_std_groups", "Groups without a signal, over the steps")
    table = _table_of_shares(run, "groups", {name: of for name, of in shares.items() if of})
    return Section("Zero-std groups", [text, picture, table])


def _time(run: RunData) -> Section:
    if not any("perf/sample_s" in record for record in run.timings):
        return Section("", [])
    rows = []
    for key, name in PHASES.items():
        values = [record.get(f"perf/{key}") for record in run.timings]
        if seconds := [value for value in values if value is not None]:
            most, total = f"{max(seconds):.2f} s", _duration(sum(seconds))
            rows.append([name, f"{median(seconds):.2f} s", most, total])
    if memory := [r["perf/peak_memory_mb"] for r in run.timings if "perf/peak_memory_mb" in r]:
        most = f"{max(memory):,.0f} MB"
        rows.append(["peak memory of a rank", f"{median(memory):,.0f} MB", most, "-"])
    text = "Seconds are means over ranks; memory is that of the rank that takes most."
    picture = Picture("time_and_memory", "Time and memory of each training step")
    table = Table(["of a training step", "median", "most", "in all"], rows)
    return Section("Time and memory", [text, picture, table])


def _faults(run: RunData) -> Section:
    """Faults that the run recovered from."""
    faults: dict[str, Any] = run.results.get("faults", {})
    texts = []
    if count := faults.get("skipped_steps"):
        steps = "1 step was" if count == 1 else f"{count} steps were"
        texts.append(f"{steps} skipped for a loss or gradient that was not finite (`faults/`).")
    if budget := faults.get("max_tokens_per_microbatch"):
        texts.append(f"Memory ran out; `max_tokens_per_microbatch` was lowered to {budget}.")
    return Section("Faults", texts)


def _files(run: RunData) -> Section:
    names = [name for name in FILES if name == "report.html" or (run.folder / name).exists()]
    return Section("Files", [_list([f"`{name}`: {FILES[name]}" for name in names])])
