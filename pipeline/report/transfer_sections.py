"""The transfer numbers of a run as tables: none without its 95 % interval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.report.sections import Block, Picture, Section, Table
from pipeline.tracking.run_files import RunData, after_name

Number = Sequence[float | None]  # value, low, high

# Names for people, and which direction is good.
METRICS = {
    "average_accuracy": ("average accuracy", "mean success of all domains at the end"),
    "total_gain": ("total gain", "the same minus before GRPO"),
    "stage_gain": ("new-domain gain", "of a stage's own domains, over that stage; mean of stages"),
    "backward_transfer": (
        "backward transfer",
        "what later stages did to domains trained before: + helped, - lost",
    ),
    "forward_transfer": (
        "forward transfer",
        "what earlier stages did to domains not yet trained: + helped, - lost",
    ),
    "forgetting": (
        "forgetting",
        "best success before the last stage minus that at the end: + lost, - gained; the best of "
        "noisy numbers is too high, so some is there by chance",
    ),
    "learning_efficiency": ("learning efficiency", "total gain per 1,000 training episodes"),
    "area_under_curve": (
        "area under the learning curve",
        "mean validation success over the steps, all domains",
    ),
}
UNSIGNED = ("average_accuracy", "area_under_curve")
SHOWN_AT_THE_END = ("stage_gain", "backward_transfer", "forward_transfer", "forgetting")
NO_INTERVAL = "-"
HUGE = 1e6  # rewards beyond it are written with an exponent
HOW = (
    "In brackets: 95 % intervals, percentile bootstrap over tasks, paired: a resample takes a task "
    "with all its trials at all points. They say nothing of other seeds; runs with several seeds "
    "are compared by `python -m pipeline.report RUN RUN ...`."
)


def shown(number: Number | None, sign: str = "", digits: int = 2) -> str:
    """`+0.55 [+0.47, +0.63]`; a dash for a number without an interval."""
    if number is None or None in number:
        return NO_INTERVAL
    # Adding zero turns what rounds to -0.00 into 0.00.
    kinds = ["g" if abs(x or 0.0) > HUGE else "f" for x in number]
    value, low, high = (
        f"{round(x or 0.0, digits) + 0.0:{sign}.{digits}{kind}}"
        for x, kind in zip(number, kinds, strict=True)
    )
    return f"{value} [{low}, {high}]"


def metric_rows(transfer: Mapping[str, Any], names: Iterable[str] = METRICS) -> list[list[str]]:
    """A row for each number that is defined: name, number, meaning."""
    rows = []
    for name in names:
        if number := transfer.get("metrics", {}).get(name):
            digits = 3 if name == "learning_efficiency" else 2
            sign = "" if name in UNSIGNED else "+"
            rows.append([METRICS[name][0], shown(number, sign, digits), METRICS[name][1]])
    return rows


def terminal_lines(transfer: Mapping[str, Any]) -> str:
    """The block at the end of a run; empty for fewer than two stages."""
    if len(transfer.get("points", [])) < 3:
        return ""
    rows = metric_rows(transfer, SHOWN_AT_THE_END)
    width = max((len(row[0]) for row in rows), default=0)
    return "\n".join(f"{name.ljust(width)}  {number}" for name, number, _ in rows)


def reward_lines(transfer: Mapping[str, Any]) -> str:
    """The mean reward before and after, for the terminal, of domains where it says something."""
    lines = []
    for domain, values in transfer.get("rewards", {}).items():
        ends = [shown(value) for value in (values[0], values[-1])[: len(values)]]
        lines.append(f"mean reward {domain}  {' -> '.join(ends)}")
    return "\n".join(lines)


def transfer_sections(run: RunData) -> list[Section]:
    transfer = run.transfer
    if not transfer:
        return []
    return [
        Section(title="Transfer and forgetting", blocks=_whole(transfer)),
        *_of_tools(run),
        _passes(transfer, run.success_threshold),
    ]


def _whole(transfer: Mapping[str, Any]) -> list[Block]:
    domains = transfer["domains"]
    points = [after_name({"after": point}) for point in transfer["points"]]
    rows = [
        [name, *(shown(number) for number in row)]
        for name, row in zip(points, domains["matrix"], strict=True)
    ]
    blocks: list[Block] = [
        Picture(name="accuracy_matrix", caption="Accuracy matrix: success after each stage"),
        Table(header=["sampled success", *domains["names"]], rows=rows),
    ]
    if len(points) > 1:
        blocks.append(Picture(name="transfer", caption="What each stage did to each domain"))
    blocks += [
        Table(
            header=["success as a share of 1", "value [95 % interval]"],
            rows=[[name, value] for name, value, _ in metric_rows(transfer)],
        ),
        "\n".join(f"- *{name}*: {text}." for name, _, text in metric_rows(transfer)),
        HOW,
    ]
    if transfer["stages"]:
        rows = [
            [
                stage["name"],
                ", ".join(stage["own"]),
                f"{stage['episodes']:,.0f}",
                shown(stage["gain"], "+"),
                shown(stage["efficiency"], "+", 3),
            ]
            for stage in transfer["stages"]
        ]
        header = ["stage", "its own domains", "episodes", "gain", "gain per 1,000 episodes"]
        blocks.append(Table(header=header, rows=rows, num_left=2))
    blocks += [
        *_by_column(transfer, "domains", "By domain.", "domain"),
        *_by_column(transfer, "families", "By task family.", "family"),
    ]
    return blocks


def _by_column(transfer: Mapping[str, Any], kind: str, text: str, head: str) -> list[Block]:
    """Transfer of each column, and the area under its curve where it has one."""
    of = transfer[kind]
    kinds = [k for k in ("backward_transfer", "forward_transfer", "forgetting") if of[k]]
    columns = [(METRICS[k][0], of[k], "+") for k in kinds]
    if kind == "domains" and transfer["area_under_curve"]:
        columns.append((METRICS["area_under_curve"][0], transfer["area_under_curve"], ""))
    rows = []
    for name in of["names"]:
        cells = [shown(found.get(name), sign) for _, found, sign in columns]
        if any(cell != NO_INTERVAL for cell in cells):
            rows.append([name, *cells])
    if not rows:
        return []
    return [text, Table(header=[head, *(title for title, *_ in columns)], rows=rows)]


def _of_tools(run: RunData) -> list[Section]:
    """How often calls were answered without an error, held out and in training."""
    tools, training = run.transfer["tools"], _training_calls(run)
    if not tools["names"]:
        return []
    points = [after_name({"after": point}) for point in run.transfer["points"]]
    ends = [0, len(points) - 1] if len(points) > 1 else [0]
    rows = []
    for c, name in enumerate(tools["names"]):
        cells = [shown(tools["matrix"][p][c]) for p in ends]
        backward = shown(tools["backward_transfer"].get(name), "+")
        calls, errors = training.get(name, (0, 0))
        share = f"{1 - errors / calls:.1%}" if calls else "-"
        rows.append([name, *cells, backward, f"{calls:,}", share])
    header = ["tool", *(points[p] for p in ends), "backward transfer"]
    table = Table(header=[*header, "training calls", "of them without error"], rows=rows)
    text = (
        "Share of calls in held-out episodes that were answered without an error; `unknown` stands "
        "for tools that do not exist. A dash: not called, or too rarely for an interval."
    )
    return [
        Section(
            title="Tools",
            blocks=[
                text,
                Picture(name="tools", caption="Success of tool calls after each stage"),
                table,
            ],
        )
    ]


def _training_calls(run: RunData) -> dict[str, tuple[int, int]]:
    """Calls and errors of `domain/tool` over all stages."""
    found: dict[str, tuple[int, int]] = {}
    for stage in run.results.get("training", {}).values():
        for domain, tools in stage.get("tools", {}).items():
            for tool, (calls, errors) in tools.items():
                before = found.get(f"{domain}/{tool}", (0, 0))
                found[f"{domain}/{tool}"] = (before[0] + calls, before[1] + errors)
    return found


def _passes(transfer: Mapping[str, Any], threshold: float) -> Section:
    """pass@k and pass^k: solved in at least one, or in all, of k trials."""
    points = [after_name({"after": point}) for point in transfer["points"]]
    rows = [
        [domain, name, *(shown(number) for number in numbers)]
        for domain, of in transfer["passes"].items()
        for name, numbers in of.items()
    ]
    text = (
        "*pass@k*: a task is solved in at least one of k trials; *pass^k*: in all of k. Both are "
        "unbiased estimates from the trials of each task; a trial solves with a reward of "
        f"{threshold:g} or more."
    )
    table = Table(header=["domain", "", *points], rows=rows, num_left=2)
    return Section(title="pass@k and pass^k", blocks=[table, text])
