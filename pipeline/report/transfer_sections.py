"""The transfer numbers of a run as tables: none without its 95 % interval."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.report.sections import Block, Picture, Section, Table
from pipeline.tracking.run_files import RunData

Number = Sequence[float | None]  # value, low, high

# Names and meanings for the reader.
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
    texts = []
    for x in number:
        kind = "g" if abs(x or 0.0) > HUGE else "f"
        # Adding zero turns -0.00 into 0.00.
        texts.append(f"{round(x or 0.0, digits) + 0.0:{sign}.{digits}{kind}}")
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"


def of_name(number: Number | None, name: str) -> str:
    """A number of METRICS as text, with its own sign and digits."""
    sign = "" if name in UNSIGNED else "+"
    return shown(number, sign, 3 if name == "learning_efficiency" else 2)


def metric_rows(transfer: Mapping[str, Any], names: Iterable[str] = METRICS) -> list[list[str]]:
    """A row for each number that is defined: name, number, meaning."""
    numbers = transfer.get("metrics", {})
    return [
        [METRICS[name][0], of_name(numbers[name], name), METRICS[name][1]]
        for name in names
        if numbers.get(name)
    ]


def terminal_lines(transfer: Mapping[str, Any]) -> str:
    """The block at the end of a run; empty for fewer than two stages."""
    if len(transfer.get("points", [])) < 3:
        return ""
    rows = metric_rows(transfer, SHOWN_AT_THE_END)
    width = max((len(row[0]) for row in rows), default=0)
    return "\n".join(f"{name.ljust(width)}  {number}" for name, number, _ in rows)


def reward_lines(transfer: Mapping[str, Any]) -> str:
    """For the terminal: the mean reward before and after of domains with graded rewards."""
    ends = {domain: [*of[:1], *of[1:][-1:]] for domain, of in transfer.get("rewards", {}).items()}
    return "\n".join(f"mean reward {d}  {' -> '.join(map(shown, of))}" for d, of in ends.items())


def transfer_and_forgetting(run: RunData) -> Section:
    transfer = run.transfer
    if not transfer:
        return Section("", [])
    domains, stages, numbers = transfer["domains"], transfer["stages"], metric_rows(transfer)
    rows = [
        [point, *map(shown, row)] for point, row in zip(run.points, domains["matrix"], strict=True)
    ]
    blocks: list[Block] = [
        Picture("accuracy_matrix", "Accuracy matrix: success after each stage"),
        Table(["sampled success", *domains["names"]], rows),
    ]
    if len(rows) > 1:
        blocks.append(Picture("transfer", "What each stage did to each domain"))
    header = ["success as a share of 1", "value [95 % interval]"]
    blocks.append(Table(header, [[name, value] for name, value, _ in numbers]))
    blocks.append("\n".join(f"- *{name}*: {text}." for name, _, text in numbers))
    blocks.append(HOW)
    if stages:
        rows = [
            [
                stage["name"],
                ", ".join(stage["own"]),
                f"{stage['episodes']:,.0f}",
                shown(stage["gain"], "+"),
                shown(stage["efficiency"], "+", 3),
            ]
            for stage in stages
        ]
        header = ["stage", "its own domains", "episodes", "gain", "gain per 1,000 episodes"]
        blocks.append(Table(header, rows, num_left=2))
    blocks += _by_column(transfer, "domains", "By domain.", "domain")
    blocks += _by_column(transfer, "families", "By task family.", "family")
    return Section("Transfer and forgetting", blocks)


def _by_column(transfer: Mapping[str, Any], kind: str, text: str, head: str) -> list[Block]:
    """Transfer of each domain or family, and the area under the curve of each domain."""
    numbers = dict(transfer[kind])
    if kind == "domains":
        numbers["area_under_curve"] = transfer["area_under_curve"]
    names = ("backward_transfer", "forward_transfer", "forgetting", "area_under_curve")
    shown_names = [name for name in names if numbers.get(name)]
    rows = []
    for column in numbers["names"]:
        cells = [of_name(numbers[name].get(column), name) for name in shown_names]
        if any(cell != NO_INTERVAL for cell in cells):
            rows.append([column, *cells])
    header = [head, *(METRICS[name][0] for name in shown_names)]
    return [text, Table(header, rows)] if rows else []


def tools(run: RunData) -> Section:
    """How often calls were answered without an error, held out and in training."""
    if not run.transfer:
        return Section("", [])
    tools, training = run.transfer["tools"], _training_calls(run)
    ends = [0, -1] if len(run.points) > 1 else [0]
    rows = []
    for c, name in enumerate(tools["names"]):
        cells = [shown(tools["matrix"][p][c]) for p in ends]
        backward = shown(tools["backward_transfer"].get(name), "+")
        calls, errors = training[name]
        share = f"{1 - errors / calls:.1%}" if calls else "-"
        rows.append([name, *cells, backward, f"{calls:,}", share])
    header = ["tool", *(run.points[p] for p in ends), "backward transfer"]
    text = (
        "Share of calls in held-out episodes that were answered without an error; `unknown` stands "
        "for tools that do not exist. A dash: not called, or too rarely for an interval."
    )
    picture = Picture("tools", "Success of tool calls after each stage")
    table = Table([*header, "training calls", "of them without error"], rows)
    return Section("Tools", [text, picture, table])


def _training_calls(run: RunData) -> dict[str, tuple[int, int]]:
    """Calls and errors of `domain/tool` over all stages."""
    counts: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for stage in run.results.get("training", {}).values():
        for domain, tools in stage.get("tools", {}).items():
            for tool, (calls, errors) in tools.items():
                before = counts[f"{domain}/{tool}"]
                counts[f"{domain}/{tool}"] = (before[0] + calls, before[1] + errors)
    return counts


def trials(run: RunData) -> Section:
    """pass@k and pass^k: solved in at least one, or in all, of k trials."""
    passes = run.transfer.get("passes", {})
    rows = [
        [domain, name, *map(shown, numbers)]
        for domain, of_domain in passes.items()
        for name, numbers in of_domain.items()
    ]
    text = (
        "*pass@k*: a task is solved in at least one of k trials; *pass^k*: in all of k. Both are "
        "unbiased estimates from the trials of each task; a trial solves with a reward of "
        f"{run.success_threshold:g} or more."
    )
    return Section("pass@k and pass^k", [Table(["domain", "", *run.points], rows, 2), text])
