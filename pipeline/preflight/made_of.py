"""What a run is made of, by hash: tasks as the run sees them, demonstrations, code of the user's.

All ranks of a run must have the same, and so must a run that goes on from a checkpoint: results
before and after a change under equal names would be compared as if nothing had changed.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path

from pipeline.checkpoints.manifest import hash_of
from pipeline.config.settings import Config
from pipeline.data.tasks import HELD_OUT, Task
from pipeline.preflight.tasks import TaskSets


def made_of(
    config: Config, sets: Mapping[str, TaskSets], graded: Mapping[tuple[str, str], Iterable[Task]]
) -> dict[str, str]:
    """Return the SHA-256 of each thing that a run is made of, by its name.

    `graded` has the training tasks of curricula with difficulties, by domain and difficulty. Of
    code, the files of modules that settings name count; not what they import, and not this package.
    """
    data = config.data
    found = {}
    for name, of in sets.items():
        found[f"training tasks of {name}"] = _hash_of_tasks(of.train)
        found[f"validation tasks of {name}"] = _hash_of_tasks(of.validation)
        found[HELD_OUT + name] = _hash_of_tasks(of.held_out)
    for (name, difficulty), tasks in graded.items():
        found[f"training tasks of {name} ({difficulty})"] = _hash_of_tasks(tasks)
    for name, path in data.demonstrations.items():
        found[f"demonstrations of {name}"] = _hash_of_files(Path(path))
    targets = [*(of.factory for of in data.factories.values()), *data.reward_funcs]
    for name in {target.partition(":")[0] for target in targets}:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and name.partition(".")[0] != __package__.partition(".")[0]:
            found[f"module {name}"] = hash_of(Path(file))
    return found


def _hash_of_tasks(tasks: Iterable[Task]) -> str:
    digest = sha256()
    for task in tasks:
        digest.update(json.dumps(astuple(task), sort_keys=True).encode())
    return digest.hexdigest()


def _hash_of_files(top: Path) -> str:
    digest = sha256()
    for file in [top] if top.is_file() else sorted(top.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(top).as_posix()} {hash_of(file)} ".encode())
    return digest.hexdigest()
