"""Datasets of reasoning-gym, for `scripts/proofs/environments.py --only reasoning_gym`.

Proven is:

- of each dataset that needs no PYTHONHASHSEED, two processes with other hash seeds and other states
  of the global random numbers make equal tasks, and score a saved task with equal rewards; the
  dataset's own answer earns the full reward;
- runs on 1 and 2 ranks, and one that is killed, of a composite of two datasets.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.bench.common import ROOT
from scripts.proofs.agents import Row

NUM_TASKS = 2
DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
MIX = {"datasets": [{"name": "chain_sum", "config": DIGIT}, {"name": "products", "config": DIGIT}]}
FACTORY = {"factory": "reasoning_gym:composite", "arguments": MIX}
NO_ANSWER = ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"]


def reasoning_gym(folder: Path, options: Any) -> Iterator[Row]:
    """All rows."""
    from scripts.proofs.environments import plays_alike

    flags = ["--domains", "mix", "--environments", json.dumps({"mix": FACTORY})]
    flags += ["--warm-start-steps", "60", "--tasks-per-domain", "100"]
    yield from plays_alike("reasoning-gym", flags, folder, is_one_message=True)
    yield from each_dataset()


def each_dataset() -> Iterator[Row]:
    command = [sys.executable, "-m", "scripts.proofs.environments_reasoning_gym"]
    processes = [
        subprocess.Popen(
            [*command, str(seed)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    first, second = (json.loads(process.communicate()[0].splitlines()[-1]) for process in processes)
    differing = sorted(name for name in first if first[name] != second[name])
    found = f"{len(first) - len(differing)} of {len(first)} equal in two processes"
    found += f"; other: {', '.join(differing)}" * bool(differing)
    yield Row("reasoning-gym: tasks and rewards of each dataset", found, not differing)
    few = sorted(name for name, (tasks, _) in first.items() if len(tasks) < NUM_TASKS)
    below = sorted(name for name, (_, rewards) in first.items() if min(rewards, default=0) < 1)
    found = f"{len(first) - len(below)} of {len(first)} earn 1"
    found += f"; without one: {', '.join(below)}" * bool(below)
    found += f"; fewer than {NUM_TASKS} tasks: {', '.join(few)}" * bool(few)
    yield Row("reasoning-gym: their own answers", found, below == NO_ANSWER and not few)


def played_datasets() -> dict[str, Any]:
    """Return for each dataset its tasks, and the rewards of its own answers."""
    from reasoning_gym.factory import DATASETS

    from pipeline.environments.libraries.reasoning_gym import ORDERED_BY_HASH
    from pipeline.environments.libraries.reasoning_gym import reasoning_gym as domain_of

    found = {}
    for name in sorted(DATASETS.keys() - ORDERED_BY_HASH):
        domain = domain_of(name, **(MIX if name == "composite" else {}))
        assert domain.generate_tasks is not None
        tasks = domain.generate_tasks(0, NUM_TASKS, "train", "medium")
        rewards = []
        for task in tasks:
            episode = domain.make()
            episode.reset(task.payload)
            episode.final_message = json.loads(task.payload).get("goal", {"answer": ""})["answer"]
            rewards.append(episode.get_reward())
        found[name] = ([[task.prompt[0]["content"], task.payload] for task in tasks], rewards)
    return found


if __name__ == "__main__":
    import numpy as np

    random.seed(sys.argv[1])
    np.random.seed(int(sys.argv[1]))
    print(f"\n{json.dumps(played_datasets())}")  # one of them prints dots
