"""What W&B gets at the end of a run beyond its rows: numbers, plots, report, episodes.

None of it may make a row of W&B's history, whose number is that of a line of `metrics.jsonl`: it
goes to the run's summary and into artifacts. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.settings import Config
from pipeline.files.durable import whole_lines

MAX_GROUP = 128  # characters, as of W&B's names
MAX_EPISODES = 200
MAX_TRANSCRIPTS = 50  # files that these are read from
COLUMNS = (
    *("stage", "step", "domain", "family", "task", "trial", "reward", "stop_reason"),
    *("advantage", "conversation"),
)
REPORT_FILES = ("report.html", "report.md", "results.json", "curriculum.json", "config.yaml")


def send_results(run: Any, folder: Path) -> dict[str, Exception]:
    """Hand all of it over, each kind whatever became of the others; returns what could not be."""
    kinds: dict[str, Callable[[Any, Path], None]] = {
        "the final numbers": _send_numbers,
        "plots and report": _send_report,
        "the table of episodes": _send_episodes,
    }
    faults: dict[str, Exception] = {}
    for name, send in kinds.items():
        try:
            send(run, folder)
        except Exception as error:
            faults[name] = error
    return faults


def group_of(config: Config) -> str:
    """The curriculum, by which W&B groups runs, such as `sequential airline-retail-telecom`."""
    domains = config.curriculum.order or config.data.domains
    return f"{config.curriculum.curriculum} {'-'.join(domains)}"[:MAX_GROUP]


def _send_numbers(run: Any, folder: Path) -> None:
    path = folder / "results.json"
    if path.is_file():
        run.summary.update(final_numbers(json.loads(path.read_text(encoding="utf-8"))))


def final_numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of `results.json` that are final, by the names that they get in the summary.

    `final/<domain>/success` (sampled) and `final/<domain>/greedy` of the last evaluation, with
    `final/<domain>/reward`, the mean, where rewards are not all 0 or 1; and what is under
    `transfer`, whose levels are joined by `/`. Its matrices stay in the file.
    """
    evaluations = results.get("evaluations") or [{"success": {}}]
    found = {}
    for domain, rates in evaluations[-1]["success"].items():
        found[f"final/{domain}/success"] = rates["mean"]
        found[f"final/{domain}/greedy"] = rates["greedy"]
        if "reward" in rates:
            found[f"final/{domain}/reward"] = rates["reward"]
    return dict(_flat("transfer", results.get("transfer"))) | found


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers in a tree of mappings; of lists those that are [number, low, high] alone."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}/{key}", item)
    elif isinstance(value, list) and len(value) == 3:
        for ending, item in zip(("", "/low", "/high"), value, strict=True):
            if isinstance(item, int | float):
                yield from _flat(f"{name}{ending}", item)
    elif isinstance(value, int | float) and math.isfinite(value):
        yield name, value


def _send_report(run: Any, folder: Path) -> None:
    import wandb

    pictures = sorted(folder.glob("*.png"))
    files = [path for path in (folder / name for name in REPORT_FILES) if path.is_file()]
    artifact = wandb.Artifact(f"report-{run.id}", type="report")
    for path in [*pictures, *files]:
        artifact.add_file(str(path.resolve()), policy="immutable")  # sent from the run folder
    if pictures or files:
        run.log_artifact(artifact)
    run.summary.update({f"plots/{path.stem}": wandb.Image(str(path)) for path in pictures})


def _send_episodes(run: Any, folder: Path) -> None:
    import wandb

    if rows := episode_rows(folder):
        run.summary["trajectories"] = wandb.Table(columns=list(COLUMNS), data=rows)


def episode_rows(folder: Path, limit: int = MAX_EPISODES) -> list[list[Any]]:
    """At most `limit` episodes of all steps, stages and evaluations, evenly spread; see COLUMNS."""
    files = sorted(
        folder.glob("trajectories/*/step-*.jsonl.gz"), key=lambda p: (p.name, p.parent.name)
    )
    files = _spread(files, min(limit, MAX_TRANSCRIPTS))
    rows: list[list[Any]] = []
    for place, path in enumerate(files):
        share = (limit - len(rows)) // (len(files) - place)
        rows += [_row(path, json.loads(line)) for line in _spread(list(whole_lines(path)), share)]
    return rows


def _row(path: Path, episode: Mapping[str, Any]) -> list[Any]:
    step = int(path.name.removeprefix("step-").split(".")[0])
    names = ("domain", "family", "task_id", "trial", "reward", "stop_reason", "advantage")
    known = [episode.get(name) for name in names]
    return [path.parent.name, step, *known, conversation(episode["messages"])]


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, evenly spread."""
    count = min(count, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages as text: each after its role, tool calls as `name({...})`."""
    parts = []
    for message in messages:
        said = [message.get("content") or ""]
        for call in message.get("tool_calls") or ():
            function = call["function"]
            said.append(f"{function['name']}({json.dumps(function['arguments'])})")
        parts.append(f"{message['role']}: " + "\n".join(text for text in said if text))
    return "\n\n".join(parts)
