"""Finished run folders without a run: small, with every file that reports are made from."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.settings import Config
from pipeline.environments.embedded.cases import PARTS

THREE = ("airline", "retail", "telecom")

STOPS = {
    "rollout/stop/completed": 0.75,
    "rollout/stop/max_turns": 0.25,
    "rollout/stop/timeout": 0.0,
}
DEAD = {
    "rollout/frac_reward_zero_std": 0.5,
    "rollout/all_failed": 0.375,
    "rollout/all_solved": 0.125,
}
TIMES = {
    "perf/step_s": 2.0,
    "perf/sample_s": 1.25,
    "perf/environment_s": 0.25,
    "perf/update_s": 0.5,
    "perf/wait_s": 0.125,
    "perf/peak_memory_mb": 640.0,
}


@pytest.fixture(autouse=True, scope="module")
def matplotlib_home(tmp_path_factory):
    """Where matplotlib, once imported, keeps its list of fonts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        yield


@contextmanager
def edited(path: Path) -> Iterator[Any]:
    """The content of a JSON file; it is written again with what the block has changed."""
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


def success(mean: float, greedy: float) -> dict[str, Any]:
    """100 tasks with two trials, of which the first are solved: first twice, then once."""
    solved = round(200 * mean)
    tasks = {f"task-{i:02}": [float(2 * i < solved), float(2 * i + 1 < solved)] for i in range(100)}
    branch = {"mean": mean, "greedy": greedy, "num_tasks": 50}
    return {
        "mean": mean,
        "greedy": greedy,
        "num_tasks": 100,
        "num_trials": 2,
        "tasks": tasks,
        "tools": {"look_up": {task: [2, int(sum(of) < 2)] for task, of in tasks.items()}},
        "families": {"refund": {**branch, "num_tasks": 100}},
        "branches": {"refund/paid": branch, "refund/refused": {**branch, "mean": 0.0}},
    }


def evaluation(after: str, step: int, means: Mapping[str, float]) -> dict[str, Any]:
    rates = {domain: success(mean, min(1.0, mean + 0.125)) for domain, mean in means.items()}
    return {"after": after, "step": step, "success": rates}


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up an order.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}},
    },
}


def make_run(
    folder: Path,
    stages: Sequence[str],
    domains: Sequence[str] = THREE,
    validation: bool = True,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    last: float = 0.875,
) -> Path:
    """A run of 10 steps a stage; without stages one that evaluates only.

    All domains succeed alike: 0.375 after the warm start, then 0.125 more each stage from 0.625 on
    up to `last`.
    """
    folder.mkdir(parents=True)
    names = {name: "my.bank:Bank" for name in domains if name not in THREE}
    kind = "mixed" if tuple(stages) == ("mixed",) else "sequential"
    tree = {
        "data": {"domains": list(domains), "environments": names},
        "grpo": {"use_grpo": bool(stages), "max_steps": 10 * len(stages), "learning_rate": 3e-4},
        "curriculum": {"curriculum": kind},
    }
    for section, values in (settings or {}).items():
        tree.setdefault(section, {}).update(values)
    config = Config.model_validate(tree).model_dump(mode="json")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    evaluations = [evaluation("start", 0, dict.fromkeys(domains, 0.0))]
    if stages:
        evaluations.append(evaluation("warm_start", 0, dict.fromkeys(domains, 0.375)))
    rows, validations = [], []
    metrics, timings = [], []
    for index, stage in enumerate(stages):
        of = list(domains) if stage == "mixed" else list(domains[: index + 1])
        first = 10 * index
        rows.append(
            {
                "name": stage,
                "own": of if stage == "mixed" else [stage],
                "domains": dict.fromkeys(of, 8),
                "first_step": first,
                "num_steps": 10,
            }
        )
        for step in range(first + 1, first + 11):
            record = {"kind": "train", "stage": stage, "step": step}
            rewards = {f"reward/{domain}": 0.5 + 0.01 * step for domain in of}
            of_last = {f"{key}/{of[-1]}": 0.25 for key in list(DEAD)[1:]}
            of_last[f"rollout/frac_reward_zero_std/{of[-1]}"] = 0.5
            metrics.append({**record, **rewards, **STOPS, **DEAD, **of_last})
            timings.append({**record, **TIMES})
        if validation:
            learned = dict.fromkeys(of[:-1], 0.01 * index)
            place = {"stage": stage, "step": first + 5}
            rewards = {domain: {"a": 1.0, "b": 0.0} for domain in domains}
            validations.append({**place, "success": rewards, "kl": learned})
            numbers = {f"validation/{domain}/success": 0.5 for domain in domains}
            numbers |= {f"validation/{domain}/kl": value for domain, value in learned.items()}
            metrics.append({"kind": "validation", **place, **numbers})
        mean = min(last, 0.625 + 0.125 * index)
        evaluations.append(evaluation(stage, first + 10, dict.fromkeys(domains, mean)))
    curriculum = {
        "curriculum": kind,
        "stages": rows,
        "replay": 0.3 if len(rows) > 1 else 0.0,
    }
    results = {
        "recipe": "three_domain_tiny",
        "seed": 1,
        "num_ranks": 2,
        "split": "test",
        "evaluations": evaluations,
        "validations": validations,
        "task_families": {d: {f"task-{i:02}": "refund" for i in range(100)} for d in domains},
        "baselines": {d: {"nothing": 0.0, "transfer": 0.11, "every_tool": 0.02} for d in domains},
        "training": {
            stage: {
                "episodes": 120,
                "tools": {domains[0]: {"look_up": [40, 10]}},
                "sequences": {domains[0]: {"episodes": 100, "history": 150, "new": 25}},
            }
            for stage in stages
        },
        "curriculum": curriculum,
        "wall_s": 83.4,
        "reward_parts": dict.fromkeys(domains, PARTS),
        "num_train_tasks": dict.fromkeys(domains, 800),
        "tools": {key: [TOOL] for key in domains},
    }
    (folder / "curriculum.json").write_text(json.dumps(curriculum))
    (folder / "results.json").write_text(json.dumps(results))
    for name, lines in (("metrics.jsonl", metrics), ("timings.jsonl", timings)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def pay_any_rewards(folder: Path) -> None:
    """Rewards of a run become any numbers, also negative, huge and equal ones."""
    pays = {"airline": (-3.5, 7.2), "retail": (-1e30, 1e30), "telecom": (5.0, 5.0)}
    results = json.loads((folder / "results.json").read_text())
    for entry in results["evaluations"]:
        for domain, of in entry["success"].items():
            of["tasks"] = {t: [pays[domain][int(r)] for r in rs] for t, rs in of["tasks"].items()}
    (folder / "results.json").write_text(json.dumps(results))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for n, line in enumerate(lines):
        line |= {f"reward/{d}": of[n % 2] for d, of in pays.items() if f"reward/{d}" in line}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def episode(domain: str, task: str, trial: int, reward: float, **others: Any) -> dict[str, Any]:
    """A transcript of four messages: one call of a tool, whose result names the task and trial."""
    call = {"function": {"name": "look_up", "arguments": {"id": task}}}
    return {
        "domain": domain,
        "task_id": task,
        "family": "refund",
        "branch": "paid",
        "trial": trial,
        "reward": reward,
        "stop_reason": "completed" if reward else "max_turns",
        "num_turns": 2,
        "num_sampled_tokens": 5,
        "error": "",
        "messages": [
            {"role": "system", "content": f"You serve {domain} customers."},
            {"role": "user", "content": f"please pay {task}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "look_up", "content": f"order {task} of trial {trial}"},
            {"role": "assistant", "content": "done"},
        ],
        "advantage": round(reward - 0.5, 4),
        "reward_breakdown": {"ended": 1.0, "database": reward},
        "difference": {} if reward else {f"orders.{task}.status": ["open", "paid"]},
        "ids": [[0, 1, 2], [3, 4]],
        "logprobs": [[-0.1, -2.3, -0.01], [-0.7, -4.0]],
        **others,
    }


def write_step(
    folder: Path, stage: str, step: int, episodes: Sequence[Mapping[str, Any]], rank: int = 0
) -> None:
    path = folder / "trajectories" / stage / f"step-{step:06d}.rank-{rank}.jsonl.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in episodes)
