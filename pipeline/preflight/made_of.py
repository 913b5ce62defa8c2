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
from typing import Any

from pipeline.checkpoints.run_folder import hash_of
from pipeline.config.settings import Config
from pipeline.data.tasks import HELD_OUT, MODULE, Task
from pipeline.preflight.tasks import TaskSets


def made_of(
    config: Config, sets: Mapping[str, TaskSets], graded: Mapping[tuple[str, str], Iterable[Task]]
) -> dict[str, str]:
    """Return the SHA-256 of each thing that a run is made of, by its name.

    `graded` has the training tasks of curricula with difficulties, by domain and difficulty. Of
    code, the files of modules that settings name count, and of the modules beside them that they
    import: not this package, and not installed ones.
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
    for target in targets:
        found |= _hashes_of_modules(target.partition(":")[0])
    return found


def _hashes_of_modules(named: str) -> dict[str, str]:
    """Return the hash of a module's file, and of the imported files beside its package, and below.

    Of an installed package, only its own files count.
    """
    files = {
        name: Path(file)
        for name, module in [*sys.modules.items()]
        if (file := getattr(module, "__file__", None))
        and name.partition(".")[0] != __package__.partition(".")[0]
    }
    if named not in files:
        return {}
    is_package = files[named].name == "__init__.py"
    folder = files[named].parents[named.count(".") + is_package]  # from which it was imported
    if folder.name == "site-packages":
        folder /= named.partition(".")[0]
    beside = {
        name: file
        for name, file in files.items()
        if name == named
        or (folder in file.parents and "site-packages" not in file.relative_to(folder).parts)
    }
    return {f"{MODULE}{name}": hash_of(file) for name, file in beside.items() if file.is_file()}


def hash_of_tokenizer(tokenizer: Any) -> str:
    """Return the SHA-256 of a tokenizer's words, special tokens and fitted chat template."""
    parts = [sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map]
    parts.append(tokenizer.chat_template)
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


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
