"""Read the files of a run folder, for reports, plots and W&B. This module imports no torch."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from pipeline.common.console import fault_and_place
from pipeline.common.durable import read_records, whole_lines
from pipeline.common.errors import UserError
from pipeline.common.layout import METRICS, RUN_SETTINGS, TIMINGS
from pipeline.common.untrusted import reason_of
from pipeline.config.recipe import Loader, own_domains
from pipeline.data.curriculum import BEFORE_GRPO
from pipeline.evaluation.transfer import summary, threshold_of

Evaluation = Mapping[str, Any]
FOREIGN = "is not what a run writes; restore it"
MAX_STEPS = 50
MAX_EPISODES = 200  # maximum numbers of steps and episodes in `episode_rows`
MAX_OF_STEP = 32  # maximum number of episodes in `rows_of_step`
FIELDS = ("domain", "family", "task_id", "trial", "reward", "stop_reason", "advantage")
AFTER = {  # key in `results.json` -> name in reports; other keys are names of stages
    "start": "at the start",
    "warm_start": "after the warm start",
    "rft": "after rejection fine-tuning",
}
COLUMNS = ["stage", "step", *(n.removesuffix("_id") for n in FIELDS), "rewards", "conversation"]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The content of a run folder. After an interruption, some fields may be empty."""

    folder: Path
    config: dict[str, Any]
    results: dict[str, Any]
    stages: list[dict[str, Any]]  # the stages of `curriculum.json` that have training steps
    replay: float
    preview: float
    train: list[dict[str, Any]]  # lines of `metrics.jsonl`, in order of steps
    validation: list[dict[str, Any]]
    timings: list[dict[str, Any]]  # lines of `timings.jsonl` of training steps
    transfer: dict[str, Any]  # the result of `transfer.summary`

    @property
    def name(self) -> str:
        """The recipe of the run, or its domains if they are the user's own."""
        return ", ".join(own_domains(self.config)) or str(self.config["recipe"])

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return list(self.results["evaluations"])

    @property
    def domains(self) -> list[str]:
        return domains_of(self.evaluations) or list(self.config["data"]["domains"])

    @property
    def points(self) -> list[str]:
        return [after_name(after) for after in self.transfer.get("points", [])]

    @property
    def step_s(self) -> list[float]:
        return [line["perf/step_s"] for line in self.timings if "perf/step_s" in line]

    @property
    def success_threshold(self) -> float:
        return threshold_of([self.results])

    def is_graded(self, domain: str) -> bool:
        return self.leaves_rates(domain) or domain in self.transfer.get("rewards", {})

    def leaves_rates(self, domain: str) -> bool:
        """Return whether a mean reward is outside 0 to 1, where success rates are."""
        means = [line.get(f"reward/{domain}") for line in self.train]
        return any(mean is not None and not 0 <= mean <= 1 for mean in means)

    def of_stage(self, stage: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [line for line in self.train if line["stage"] == stage["name"]]


def load_run(folder: Path) -> RunData:
    """Read a run folder. Raises UserError if the folder holds no run."""
    config = read_settings(folder)
    curriculum = _read(folder / "curriculum.json", stages=[], replay=0.0, preview=0.0)
    results = _read(folder / "results.json", evaluations=[], baselines={})
    metrics, timings = read_metrics(folder)
    train = _of_training(metrics)
    trained = {line["stage"] for line in train}
    return RunData(
        folder=folder,
        config=config,
        results=results,
        stages=[stage for stage in curriculum["stages"] if stage["name"] in trained],
        replay=curriculum["replay"],
        preview=curriculum["preview"],
        train=train,
        validation=[line for line in metrics if line["kind"] == "validation"],
        timings=_of_training(timings),
        transfer=results.get("transfer") or summary([results]),
    )


@contextmanager
def reading(*folders: Path) -> Iterator[None]:
    """Turn what damaged files of runs raise, or files of other programs, into UserError."""
    names = ", ".join(map(str, folders))
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{error.filename or names}: {reason_of(error)}") from error
    except Exception as error:
        raise UserError(f"{names}: a file in it {FOREIGN} ({fault_and_place(error)})") from error


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a run. Raises UserError if the folder holds no run."""
    path = folder / RUN_SETTINGS
    if not path.is_file():
        raise UserError(
            f"{folder} holds no run, or the run has not begun (no {path.name}); give the folder of "
            "a run"
        )
    config = _read(path, lambda text: yaml.load(text, _Plain))
    if not {"recipe", "data", "grpo", "run"} <= config.keys():
        raise UserError(f"{path} {FOREIGN}")
    return config


class _Plain(Loader):
    """A loader that refuses aliases, of which a few lines make a value of any size."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it holds an alias")
        return super().compose_node(parent, index)


def is_finished(run: RunData) -> bool:
    """Return whether a run was evaluated after each of its stages; without stages, False."""
    stages = {stage["name"] for stage in run.results.get("curriculum", {}).get("stages", ())}
    return bool(stages) and stages <= {evaluation["after"] for evaluation in run.evaluations}


def read_metrics(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the lines of `metrics.jsonl` and of `timings.jsonl`."""
    return _lines_of(folder / METRICS), _lines_of(folder / TIMINGS)


def _lines_of(path: Path) -> list[dict[str, Any]]:
    lines = read_records(path)
    for number, line in enumerate(lines, 1):
        is_text = isinstance(line.get("kind"), str) and isinstance(line.get("stage", ""), str)
        if not (is_text and isinstance(line.get("step"), int)):
            raise UserError(f"{path}, line {number} {FOREIGN}")
    return lines


def _read(path: Path, parse: Callable[[str], Any] = json.loads, **missing: Any) -> dict[str, Any]:
    try:
        return {**missing, **(parse(path.read_text("utf-8")) if path.is_file() else {})}
    except (ValueError, TypeError, RecursionError, yaml.YAMLError):
        raise UserError(f"{path} {FOREIGN}") from None


def _of_training(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    of_steps = {line["step"]: line for line in lines if line["kind"] == "train"}
    return [of_steps[step] for step in sorted(of_steps)]


def transcripts_in(folder: Path) -> dict[tuple[str, int], list[Path]]:
    """Return transcript files of each stage (or `evaluation-...`) and step, in order of time."""
    files = defaultdict[tuple[str, int], list[Path]](list)
    for path in sorted((folder / "trajectories").glob("*/step-*.jsonl.gz")):
        files[path.parent.name, int(path.name.split(".")[0].removeprefix("step-"))].append(path)
    first = {f"evaluation-{after}": i - len(BEFORE_GRPO) for i, after in enumerate(BEFORE_GRPO)}

    def order(key: tuple[str, int]) -> tuple[int, bool]:
        place = -1 if key[0].startswith("rft-") else key[1]  # before the evaluation after RFT
        return first.get(key[0], place), key[0].startswith("evaluation-")

    return {key: files[key] for key in sorted(files, key=order)}


def episode_rows(folder: Path) -> list[list[Any]]:
    """Return a table of at most MAX_EPISODES episodes, evenly spaced over steps and evaluations."""
    files = transcripts_in(folder)
    steps = list(files)[:: ceil(len(files) / MAX_STEPS) or 1]
    return [row for key in steps for row in _rows(key, files[key], MAX_EPISODES // len(steps))]


def rows_of_step(folder: Path, stage: str, step: int) -> list[list[Any]]:
    """Return a table of at most MAX_OF_STEP episodes of a training step."""
    paths = (folder / "trajectories" / stage).glob(f"step-{step:06d}.rank-*.jsonl.gz")
    return _rows((stage, step), paths, MAX_OF_STEP)


def _rows(key: tuple[str, int], paths: Iterable[Path], most: int) -> list[list[Any]]:
    """Return a table of at most `most` episodes, in whole groups if one fits.

    Its order does not depend on the number of ranks.
    """
    episodes = [episode for path in paths for episode in episodes_in(path)]
    episodes.sort(key=lambda episode: (*task_of(episode), episode["trial"]))
    groups = [list(group) for _, group in groupby(episodes, key=task_of)]
    chosen = [episode for group in groups[:: ceil(len(episodes) / most) or 1] for episode in group]
    return [[*key, *_cells(episode)] for episode in chosen[:most]]


def episodes_in(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the episodes of a file of transcripts; raises UserError for a line of another kind."""
    for line in whole_lines(path):
        try:
            episode = json.loads(line)
            is_episode = {"domain", "task_id", "trial"} <= episode.keys()
        except (ValueError, AttributeError, RecursionError):
            is_episode = False
        if not is_episode:
            raise UserError(f"{path} {FOREIGN}")
        yield episode


def task_of(episode: Mapping[str, Any]) -> tuple[str, str]:
    return episode["domain"], episode["task_id"]


def _cells(episode: Mapping[str, Any]) -> list[Any]:
    """Return a transcript's cells under COLUMNS, without stage and step."""
    preface = {"role": "system, by the chat template", "content": episode.get("preface")}
    messages = [preface] * bool(preface["content"]) + episode["messages"]
    conversation = "\n\n".join(map(text_of, messages))
    parts = episode.get("rewards") or episode.get("reward_breakdown") or {}
    rewards = ", ".join(f"{name} {value}" for name, value in parts.items())
    return [*map(episode.get, FIELDS), rewards, conversation]


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message as text: its role, its content, and its calls of tools."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    lines = [f"{call['name']}({json.dumps(call['arguments'])})" for call in calls]
    content = message.get("content")
    return f"{message['role']}: " + "\n".join([content, *lines] if content else lines)


def final_numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of the last evaluation (`final/...`) and the transfer numbers.

    `worse/...` are the changes of what became worse.
    """
    evaluations = results.get("evaluations") or [{"success": {}}]
    names = {"mean": "success", "greedy": "greedy", "reward": "reward"}
    falls = results.get("worse", {}).get("found", [])
    worse = {f"{fall['name']}/{fall['kind']}": fall["change"] for fall in falls}
    flat = _flat("", {"transfer": results.get("transfer"), "worse": worse})
    return {name.removeprefix("/"): value for name, value in flat} | {
        f"final/{domain}/{name}": rates[key]
        for domain, rates in evaluations[-1]["success"].items()
        for key, name in names.items()
        if key in rates
    }


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}/{key}", item)
    elif isinstance(value, list) and len(value) == 3:
        names = (name, f"{name}/low", f"{name}/high")
        yield from ((n, x) for n, x in zip(names, value, strict=True) if isinstance(x, int | float))
    elif isinstance(value, int | float):
        yield name, value


def domains_of(evaluations: Iterable[Evaluation]) -> list[str]:
    return list(dict.fromkeys(domain for e in evaluations for domain in e["success"]))


def before_and_after(evaluations: Sequence[Evaluation]) -> list[Evaluation | None]:
    """Return the last evaluation before GRPO and the last evaluation after a stage of GRPO."""
    before = [e for e in evaluations if e["after"] in BEFORE_GRPO]
    after = [e for e in evaluations if e["after"] not in BEFORE_GRPO]
    return [of[-1] if of else None for of in (before, after)]


def after_name(after: str) -> str:
    """Return the name of an evaluation point in reports."""
    return AFTER.get(after, f"after {after}")


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
