"""What W&B gets at the end of a run: final numbers, the report with its pictures, episodes.

None of it is a row of W&B's history, which has one for each line of `metrics.jsonl`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

from pipeline.files.afterwards import may_fail
from pipeline.files.durable import whole_lines
from pipeline.tracking.run_files import transcripts_in

HAS_THEM = "the run folder has them"
MAX_STEPS, MAX_EPISODES = 50, 200  # in the table
FIELDS = ("domain", "family", "task_id", "trial", "reward", "stop_reason", "advantage")
COLUMNS = ["stage", "step", *(name.removesuffix("_id") for name in FIELDS), "conversation"]
FILES = ("report.html", "report.md", "results.json", "curriculum.json", "config.yaml")


def send_results(run: Any, folder: Path) -> None:
    """Send all results that the run folder has; if one kind fails, the others are sent."""
    import wandb

    pictures = sorted(folder.glob("*.png"))
    files = [path for name in FILES if (path := folder / name).is_file()]
    with may_fail("W&B did not get the final numbers", HAS_THEM):
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        run.summary.update(final_numbers(results))
    with may_fail("W&B did not get the report and the pictures", HAS_THEM):
        artifact = wandb.Artifact(f"report-{run.id}", type="report")
        for path in [*pictures, *files]:
            artifact.add_file(str(path.resolve()), policy="immutable")  # without a copy
        run.log_artifact(artifact)
        run.summary.update({f"plots/{path.stem}": wandb.Image(str(path)) for path in pictures})
    with may_fail("W&B did not get the table of episodes", HAS_THEM):
        if rows := episode_rows(folder):
            run.summary["trajectories"] = wandb.Table(columns=[*COLUMNS], data=rows)


def final_numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of the last evaluation as `final/<domain>/<name>`, and those of `transfer`."""
    evaluations = results.get("evaluations") or [{"success": {}}]
    final = dict(_flat("transfer", results.get("transfer")))
    for domain, rates in evaluations[-1]["success"].items():
        names = {"success": "mean", "greedy": "greedy", "reward": "reward"}
        final |= {f"final/{domain}/{n}": rates[key] for n, key in names.items() if key in rates}
    return final


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers in a tree of mappings whose leaves are numbers or [number, low, high]."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}/{key}", item)
    elif isinstance(value, list) and len(value) == 3:
        names = (name, f"{name}/low", f"{name}/high")
        yield from ((n, x) for n, x in zip(names, value, strict=True) if isinstance(x, int | float))
    elif isinstance(value, int | float):
        yield name, value


def episode_rows(folder: Path) -> list[list[Any]]:
    """At most MAX_EPISODES rows of the table, evenly from all steps, stages and evaluations."""
    files = transcripts_in(folder)
    steps = list(files)[:: ceil(len(files) / MAX_STEPS) or 1]
    rows = []
    for stage, step in steps:
        lines = [line for path in files[stage, step] for line in whole_lines(path)]
        every = ceil(len(lines) * len(steps) / MAX_EPISODES) or 1
        for episode in map(json.loads, lines[::every]):
            conversation = "\n\n".join(map(_text, episode["messages"]))
            rows.append([stage, step, *map(episode.get, FIELDS), conversation])
    return rows


def _text(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    lines = [f"{call['name']}({json.dumps(call['arguments'])})" for call in calls]
    return f"{message['role']}: " + "\n".join(filter(None, [message.get("content"), *lines]))
