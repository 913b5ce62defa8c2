"""The numbers of reports as text and as rows of tables, made only from the files of a run folder.

The success of sampled episodes and the success of greedy episodes are separate measurements;
reports never compare these measurements with each other.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from statistics import fmean
from typing import Any

from pipeline.config.recipe import recipe_in_words
from pipeline.evaluation.transfer import rate, threshold_of, tool_counts
from pipeline.report.plots.drawing import NO_INTERVAL, ci_text
from pipeline.report.plots.pictures import STOP
from pipeline.report.run_files import (
    Evaluation,
    RunData,
    after_name,
    before_and_after,
    domains_of,
    number,
)

METRIC_NAMES = {  # key in `results.json` -> name in reports
    "average_accuracy": "average accuracy",
    "total_gain": "total gain",
    "stage_gain": "new-domain gain",
    "backward_transfer": "backward transfer",
    "forward_transfer": "forward transfer",
    "forgetting": "forgetting",
    "learning_efficiency": "learning efficiency",
    "area_under_curve": "area under the learning curve",
}
UNSIGNED = ("average_accuracy", "area_under_curve")
RATE_KINDS = {"mean": "sampled", "greedy": "greedy"}  # key in `results.json` -> name in reports
ENDS = ("before GRPO", "after GRPO")

LEFT_OUT = "rollout/left_out/"
STALE = "rollout/staleness/"
BY_COLUMN = ("backward_transfer", "forward_transfer", "forgetting", "area_under_curve")

Rows = list[list[str]]  # cells of a table; the first row is the header


def metric(number: Sequence[Any] | None, name: str, sign: str = "") -> str:
    """Format (value, low, high) with the sign and the digits for the transfer metric `name`."""
    is_change = name in METRIC_NAMES and name not in UNSIGNED
    return ci_text(number, sign or "+" * is_change, 3 if name == "learning_efficiency" else 2)


def number_table(title: str, numbers: Mapping[str, Mapping[str, Any]], sign: str = "") -> Rows:
    """Return a table with a row per key of `numbers` and a column per name that has numbers."""
    names = dict.fromkeys(name for of in numbers.values() for name in of)
    used = [name for name in names if any(of.get(name) for of in numbers.values())]
    rows = [[key, *(metric(of.get(n), n, sign) for n in used)] for key, of in numbers.items()]
    header = [title, *(METRIC_NAMES.get(name, name) for name in used)]
    return [header, *(row for row in rows if {*row[1:]} - {NO_INTERVAL})]


def success_tables(results: Mapping[str, Any]) -> list[Rows]:
    """Return a table of sampled success, with its change, and a table of greedy success.

    Both show success before and after GRPO. If there are no evaluations before GRPO, or none after
    GRPO, there is one table with a column for sampled and a column for greedy success. Without
    evaluations there is no table. An agent behind an endpoint has further columns.
    """
    ends = [e for e in before_and_after(results["evaluations"]) if e]
    transfer = results["transfer"]
    names = [*domains_of(results["evaluations"]), "mean"]
    threshold = threshold_of([results])
    agents = agents_of(results)
    kinds = kinds_of([*ends, *agents.values()])
    if not ends:
        return []

    def cells(name: str, kind: str, of: Iterable[Evaluation]) -> list[str]:
        return [with_interval(rate(e, name, kind, threshold)) for e in of]

    if len(ends) < 2:
        further = [f"{kind}, {agent}" for agent in agents for kind in kinds.values()]
        columns = [([e], kind) for e in (*ends, *agents.values()) for kind in kinds]
        rows = ([n, *(c for e, kind in columns for c in cells(n, kind, e))] for n in names)
        return [[["success", *kinds.values(), *further], *rows]]
    gains = {
        **transfer.get("domains", {}).get("gain", {}),
        "mean": transfer.get("metrics", {}).get("total_gain"),
    }
    sampled = [
        [
            n,
            *cells(n, "mean", ends),
            ci_text(gains.get(n), "+"),
            *cells(n, "mean", agents.values()),
        ]
        for n in names
    ]
    greedy = [[name, *cells(name, "greedy", [*ends, *agents.values()])] for name in names]
    tables = [[["success, sampled", *ENDS, "change", *agents], *sampled]]
    if "greedy" in kinds:
        tables.append([["success, greedy", *ENDS, *agents], *greedy])
    return tables


def kinds_of(evaluations: Sequence[Evaluation]) -> dict[str, str]:
    """Return those of RATE_KINDS that were played."""
    played = [of for e in evaluations for of in e["success"].values()]
    return {key: name for key, name in RATE_KINDS.items() if any(key in of for of in played)}


def agents_of(results: Mapping[str, Any]) -> dict[str, Evaluation]:
    """Return the agents behind an endpoint that have played the held-out tasks, by name."""
    return {name: of for name, of in results.get("agents", {}).items() if "success" in of}


def ends_in_words(evaluations: Sequence[Evaluation]) -> str:
    """Return which evaluations `before GRPO` and `after GRPO` mean."""
    ends = zip(ENDS, before_and_after(evaluations), strict=True)
    return "; ".join(f"{name} = {after_name(of['after'])}" for name, of in ends if of)


def with_interval(values: Sequence[Any] | None) -> str:
    """Format (value, low, high); without bounds, as for one task, the value alone."""
    return number(values[0]) if values and None in values else ci_text(values)


def failures(evaluations: Sequence[Evaluation]) -> dict[str, str]:
    """Return a sentence for each domain without any success at the end of the run."""
    _, after = before_and_after(evaluations)
    return {
        domain: f"{domain} failed: no sampled episode succeeds at the end of the run"
        for domain, of in (after["success"] if after else {}).items()
        if of["mean"] == 0
    }


def aligned(rows: Rows) -> str:
    """Return a table as text; the first column is aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
        for name, *cells in rows
    )


def start_table(start: Mapping[str, Any]) -> Rows:
    """Return a row per domain of the start report; no rows without a report."""
    if not start:
        return []
    names = ["pass@1", f"pass@{start['num_generations']}"]
    rows = [["start of GRPO", "held-out pass@1", *names, "with signal", "best baseline"]]
    for domain, of in start["domains"].items():
        count = of["groups"]
        best = of["baseline"]
        signal = f"{of['groups_with_signal']} of {count}" if count else NO_INTERVAL
        baseline = f"{number(best[1])} {best[0].replace('_', ' ')}" if best else NO_INTERVAL
        rates = [with_interval(of[name]) for name in ("held_out", *names)]
        rows.append([domain, *rates, signal, baseline])
    return rows


def pass_hat_table(transfer: Mapping[str, Any]) -> Rows:
    """Return pass^1 to pass^4 at the end of a run; no rows if a task has fewer than 4 trials."""
    names = [f"pass^{k}" for k in range(1, 5)]
    rows = [
        [d, *(with_interval(of[name][-1]) for name in names)]
        for d, of in transfer.get("passes", {}).items()
        if names[-1] in of
    ]
    return [["in all of k trials", *names], *rows] if rows else []


def report_data(run: RunData, live: bool = False) -> dict[str, Any]:
    """Return the variables of the template `run.md.jinja`; `live` if the run goes on."""
    columns: dict[str, dict[str, Any]] = {}
    if transfer := run.transfer:
        area = {"area_under_curve": transfer["area_under_curve"]}
        columns = {"domain": {**transfer["domains"], **area}, "family": transfer["families"]}
    metrics = sorted({key for record in run.train for key, value in record.items() if value})
    return {
        "run": run,
        "title": run.folder.resolve().name,
        "live": live,
        "metrics": metrics,  # with a value other than 0 in any step
        "ends": [e for e in before_and_after(run.evaluations) if e],
        "kinds": kinds_of(run.evaluations),
        "success_tables": success_tables({**run.results, "transfer": run.transfer}),
        "ends_in_words": ends_in_words(run.evaluations),
        "failures": failures(run.evaluations),
        "baselines": baseline_table(run.results),
        "agents": agents_of(run.results),
        "start": start_table(run.results.get("start", {})),
        "about": about_table(run.results),
        "recipe": recipe_in_words(run.config),
        "train_tasks": train_tasks_in_words(run),
        "transfer_by": [_transfer_by(kind, of) for kind, of in columns.items()],
        "calls": _calls_in_training(run),
        "sequences": _sequences_in_training(run),
        "stop_reasons": {key: key.removeprefix(STOP) for key in metrics if key.startswith(STOP)},
        "left_out": [key for key in metrics if key.startswith(LEFT_OUT)],
        "rewards_by_name": _rewards_by_name(run),
        "rate_of": lambda e, d, kind: with_interval(rate(e, d, kind, run.success_threshold)),
        "by_family": _by_family(run),
    }


def train_tasks_in_words(run: RunData) -> str:
    """Say how many training tasks each domain had, and how difficult those of the embedded are."""
    data = run.config["data"]
    of_stages = run.config["curriculum"]["difficulties"]
    own = {*data["tasks"], *data["environments"], *run.results.get("about", ())}
    difficulty = f" ({', '.join(of_stages or [data['difficulty']])})"
    numbers: Mapping[str, int] = run.results.get("num_train_tasks", {})
    texts = {name: f"{n}{difficulty * (name not in own)}" for name, n in numbers.items()}
    if len({*texts.values()}) == 1:
        return f"training tasks{' of each' * (len(texts) > 1)}: {next(iter(texts.values()))}"
    return "training tasks: " + ", ".join(f"{name} {text}" for name, text in texts.items())


def baseline_table(results: Mapping[str, Any]) -> Rows:
    """Return a row for each baseline of each domain, with its mean reward."""
    rows = [
        [domain, name.replace("_", " "), number(reward)]
        for domain, of in results.get("baselines", {}).items()
        for name, reward in of.items()
    ]
    return [["domain", "baseline", "mean reward"], *rows] if rows else []


def about_table(results: Mapping[str, Any]) -> Rows:
    """Return a row per fact that the domains' modules tell, or no rows."""
    rows = [
        [domain, name.replace("_", " "), _fact(value)]
        for domain, facts in results.get("about", {}).items()
        for name, value in facts.items()
    ]
    return [["domain", "fact", "value"], *rows] if rows else []


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        between = "; " if any(isinstance(item, list) for item in value.values()) else ", "
        return between.join(f"{name}: {_fact(item)}" for name, item in value.items())
    return ", ".join(map(_fact, value)) if isinstance(value, list) else str(value)


def staleness_in_words(train: Iterable[Mapping[str, Any]]) -> str:
    """Return shares of the trained tokens by staleness, such as `0: 81 %, 1: 19 %`, or ""."""
    counts = Counter[int]()
    for line in train:
        counts.update({int(n[len(STALE) :]): c for n, c in line.items() if n.startswith(STALE)})
    oldest = max((staleness for staleness, count in counts.items() if count), default=-1)
    shares = {number: counts[number] / counts.total() for number in range(oldest + 1)}
    return ", ".join(f"{number}: {share:.1%}" for number, share in shares.items())


def share(records: Iterable[Mapping[str, Any]], key: str) -> str:
    """Return the mean of a metric over the training steps in which an episode ended, as text."""
    found = [record.get(key) or 0.0 for record in records if record.get("rollout/episodes", 1)]
    return f"{fmean(found or [0.0]):.3f}"


def _by_family(run: RunData) -> list[Rows]:
    """Return a table per domain: number of tasks and success rates of its families and branches."""
    ends = [e for e in before_and_after(run.evaluations) if e]
    columns = dict(zip(ENDS if ends[1:] else [""], ends, strict=False)) | agents_of(run.results)
    kinds = kinds_of([*columns.values()])
    names = [", ".join(filter(None, (kind, of))) for kind in kinds.values() for of in columns]
    tables = list[Rows]()
    for domain in run.domains if ends else ():
        success = [e["success"].get(domain, {}) for e in columns.values()]
        found = [{**of.get("families", {}), **of.get("branches", {})} for of in success]
        rows = [
            [name, str(last["num_tasks"])]
            + [number(of.get(name, {}).get(kind)) for kind in kinds for of in found]
            for name, last in sorted(found[len(ends) - 1].items())
        ]
        if rows:
            tables.append([[domain, "tasks", *names], *rows])
    return tables


def _calls_in_training(run: RunData) -> dict[str, list[int]]:
    """Return the numbers of calls and of failed calls of each tool, `domain/tool`."""
    return tool_counts(
        {f"{domain}/{tool}": counts for tool, counts in tools.items()}
        for stage in run.results.get("training", {}).values()
        for domain, tools in stage.get("tools", {}).items()
    )


def _sequences_in_training(run: RunData) -> Rows:
    """Return a row per domain whose episodes had several sequences, with why further ones began."""
    totals = defaultdict[str, Counter[str]](Counter)
    for stage in run.results.get("training", {}).values():
        for domain, counts in stage.get("sequences", {}).items():
            totals[domain] += Counter(counts)
    causes = dict.fromkeys(cause for of in totals.values() for cause in of if cause != "episodes")
    rows = [
        [domain, f"{of.total() / of['episodes']:.2f}", *(str(of[cause]) for cause in causes)]
        for domain, of in totals.items()
    ]
    return [["domain", "sequences of an episode", *causes], *rows] if causes else []


def _transfer_by(kind: str, of: Mapping[str, Any]) -> Rows:
    numbers = {column: {n: of.get(n, {}).get(column) for n in BY_COLUMN} for column in of["names"]}
    return number_table(kind, numbers)


def _rewards_by_name(run: RunData) -> Rows:
    """Return a row per stage and source of rewards: means of the first and last tenth of steps."""
    found = {key.rpartition("/")[0] for line in run.train for key in line}
    ends = [f"{of}, {tenth} tenth" for of in ("mean", "std") for tenth in ("first", "last")]
    rows = [["stage", "reward", *ends]]
    for stage in run.stages:
        lines = run.of_stage(stage)
        tenth = ceil(len(lines) / 10)
        for key in sorted(key for key in found if key.startswith("rewards/")):
            values = [
                [line[name] for line in part if (name := f"{key}/{of}") in line]
                for of in ("mean", "std")
                for part in (lines[:tenth], lines[-tenth:])
            ]
            cells = [f"{fmean(of):.4g}" if of else NO_INTERVAL for of in values]
            if {*cells} != {NO_INTERVAL}:
                rows.append([stage["name"], key.removeprefix("rewards/"), *cells])
    return rows
