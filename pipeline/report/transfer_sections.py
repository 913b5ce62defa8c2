"""The transfer numbers of a run as tables, each number with its 95 % interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.report.sections import Block, Picture, Table, bullets
from pipeline.tracking.run_files import RunData

# Names and meanings for the reader.
METRICS = {
    "average_accuracy": ("average accuracy", "mean success of all domains at the end"),
    "total_gain": ("total gain", "the same minus before GRPO"),
    "stage_gain": ("new-domain gain", "of a stage's own domains, over that stage; mean of stages"),
    "backward_transfer": (
        "backward transfer",
        "effect of later stages on domains trained before: + helped, - lost",
    ),
    "forward_transfer": (
        "forward transfer",
        "effect of earlier stages on domains not yet trained: + helped, - lost",
    ),
    "forgetting": (
        "forgetting",
        "best success before the last stage minus that at the end: + lost, - gained; the best of "
        "noisy numbers is too high, so a part of it is chance",
    ),
    "learning_efficiency": ("learning efficiency", "total gain per 1,000 training episodes"),
    "area_under_curve": (
        "area under the learning curve",
        "mean validation success over the steps, all domains",
    ),
}
UNSIGNED = ("average_accuracy", "area_under_curve")
AT_THE_END = ("stage_gain", "backward_transfer", "forward_transfer", "forgetting")
BY_COLUMN = ("backward_transfer", "forward_transfer", "forgetting", "area_under_curve")
NO_INTERVAL = "-"
HUGE = 1e6  # rewards beyond it are written with an exponent
HOW = (
    "In brackets: 95 % intervals, percentile bootstrap over tasks, paired: a resample takes a task "
    "with all its trials at all points. They do not cover other seeds; "
    "`python -m pipeline.report RUN RUN ...` compares runs with several seeds."
)


def shown(number: Sequence[Any] | None, sign: str = "", digits: int = 2) -> str:
    """`+0.55 [+0.47, +0.63]`; a dash for a number without an interval."""
    if number is None or None in number:
        return NO_INTERVAL
    rounded = [round(x, digits) + 0.0 for x in number]  # adding zero turns -0.00 into 0.00
    value, low, high = (f"{x:{sign}.{digits}{'g' if abs(x) > HUGE else 'f'}}" for x in rounded)
    return f"{value} [{low}, {high}]"


def of_name(number: Sequence[Any] | None, name: str, sign: str = "") -> str:
    """A number as text, with the sign and the digits of its name in METRICS."""
    is_change = name in METRICS and name not in UNSIGNED
    return shown(number, sign or "+" * is_change, 3 if name == "learning_efficiency" else 2)


def number_table(
    head: str, numbers: Mapping[str, Mapping[str, Any]], names: Iterable[str], sign: str = ""
) -> Table:
    """A row for each key of `numbers`, and a column for each of the names that has a number."""
    used = [name for name in names if any(of.get(name) for of in numbers.values())]
    rows = [[key, *(of_name(of.get(n), n, sign) for n in used)] for key, of in numbers.items()]
    header = [METRICS[name][0] if name in METRICS else name for name in used]
    return Table([head, *header], [row for row in rows if {*row[1:]} - {NO_INTERVAL}])


def terminal_lines(transfer: Mapping[str, Any]) -> str:
    """The block at the end of a run; empty for fewer than two stages."""
    if len(transfer.get("points", [])) < 3:
        return ""
    rows = _metric_rows(transfer, AT_THE_END)
    width = max((len(row[0]) for row in rows), default=0)
    return "\n".join(f"{name.ljust(width)}  {number}" for name, number, _ in rows)


def reward_lines(transfer: Mapping[str, Any]) -> str:
    """For the terminal: the mean reward before and after of domains with graded rewards."""
    ends = {domain: [*of[:1], *of[1:][-1:]] for domain, of in transfer.get("rewards", {}).items()}
    return "\n".join(f"mean reward {d}  {' -> '.join(map(shown, of))}" for d, of in ends.items())


def _metric_rows(transfer: Mapping[str, Any], names: Iterable[str] = METRICS) -> list[list[str]]:
    """A row for each number that is defined: name, number, meaning."""
    numbers = transfer["metrics"]
    return [
        [METRICS[name][0], of_name(numbers[name], name), METRICS[name][1]]
        for name in names
        if numbers.get(name)
    ]


def transfer_and_forgetting(run: RunData) -> list[Block]:
    if not (transfer := run.transfer):
        return []
    domains, numbers = transfer["domains"], _metric_rows(transfer)
    rows = zip(run.points, domains["matrix"], strict=True)
    stages = [
        [
            stage["name"],
            ", ".join(stage["own"]),
            f"{stage['episodes']:,.0f}",
            shown(stage["gain"], "+"),
            shown(stage["efficiency"], "+", 3),
        ]
        for stage in transfer["stages"]
    ]
    of_stages = ["stage", "its own domains", "episodes", "gain", "gain per 1,000 episodes"]
    return [
        Picture("accuracy_matrix", "Accuracy matrix: success after each stage"),
        Table(["sampled success", *domains["names"]], [[p, *map(shown, row)] for p, row in rows]),
        Picture("transfer", "Effect of each stage on each domain"),
        Table(["success as a share of 1", "value [95 % interval]"], [row[:2] for row in numbers]),
        bullets(f"*{name}*: {meaning}." for name, _, meaning in numbers),
        HOW,
        Table(of_stages, stages, num_left=2),
        _by_column("domain", {**domains, "area_under_curve": transfer["area_under_curve"]}),
        _by_column("family", transfer["families"]),
    ]


def _by_column(kind: str, of: Mapping[str, Any]) -> Table:
    """Transfer of each domain or family."""
    numbers = {column: {n: of.get(n, {}).get(column) for n in BY_COLUMN} for column in of["names"]}
    return number_table(kind, numbers, BY_COLUMN)


def tools(run: RunData) -> list[Block]:
    """How often calls were answered without an error, held out and in training."""
    if not run.transfer:
        return []
    tools = run.transfer["tools"]
    calls, errors = Counter[str](), Counter[str]()
    for stage in run.results.get("training", {}).values():
        for domain, of_domain in stage.get("tools", {}).items():
            for tool, counts in of_domain.items():
                calls[f"{domain}/{tool}"] += counts[0]
                errors[f"{domain}/{tool}"] += counts[1]
    ends = [0, -1] if len(run.points) > 1 else [0]
    rows = []
    for c, name in enumerate(tools["names"]):
        cells = [shown(tools["matrix"][p][c]) for p in ends]
        backward = shown(tools["backward_transfer"].get(name), "+")
        share = f"{1 - errors[name] / calls[name]:.1%}" if calls[name] else "-"
        rows.append([name, *cells, backward, f"{calls[name]:,}", share])
    header = ["tool", *(run.points[p] for p in ends), "backward transfer", "training calls"]
    return [
        "Share of calls in held-out episodes that were answered without an error; `unknown` stands "
        "for tools that do not exist. A dash: not called, or too rarely for an interval.",
        Picture("tools", "Success of tool calls after each stage"),
        Table([*header, "of them without error"], rows),
    ]


def trials(run: RunData) -> list[Block]:
    """pass@k and pass^k: solved in at least one, or in all, of k trials."""
    rows = [
        [domain, name, *map(shown, numbers)]
        for domain, of_domain in run.transfer.get("passes", {}).items()
        for name, numbers in of_domain.items()
    ]
    return [
        Table(["domain", "", *run.points], rows, num_left=2),
        "*pass@k*: a task is solved in at least one of k trials; *pass^k*: in all of k. Both are "
        "unbiased estimates from the trials of each task; a trial solves with a reward of "
        f"{run.success_threshold:g} or more.",
    ]


def mean_rewards(run: RunData) -> list[Block]:
    """The mean reward of domains whose rewards are not all 0 or 1."""
    rewards = run.transfer.get("rewards", {})
    return [
        Table(["reward", *run.points], [[d, *map(shown, of)] for d, of in rewards.items()]),
        "Sampled, over all trials. A trial is a success with a reward of "
        f"{run.success_threshold:g} or more (`success_threshold`). {HOW}",
    ]
