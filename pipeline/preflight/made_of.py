"""Hashes of all that a run is made of: tasks, demonstrations, user code, tokenizer."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path
from typing import Any

from pipeline.checkpoints.resume import STARTED
from pipeline.checkpoints.run_folder import TEMPLATE, hash_of
from pipeline.config.domain_names import EMBEDDED_DOMAINS, known_domains
from pipeline.config.settings import Config
from pipeline.data.tasks import HELD_OUT, MODULE, Task
from pipeline.environments.agent_process import files_of
from pipeline.environments.task_sets import TaskSets
from pipeline.models.chat.fitting import without_clock

# Attributes of a tokenizer that are not in its tokenizer.json.
RULES = ("clean_up_tokenization_spaces", "split_special_tokens", "response_template")


def made_of(config: Config, tasks: Mapping[str, TaskSets], tokenizer: Any) -> dict[str, str]:
    """Return the SHA-256 of each thing that a run is made of, by its name.

    Of code, the files of modules that settings name count, and of the modules beside them that they
    import: not this package, and not installed ones.
    """
    hashes = dict[str, str]()
    for name, sets in tasks.items():
        hashes |= {
            f"training tasks of {name}": _hash_of_tasks(sets.train),
            f"validation tasks of {name}": _hash_of_tasks(sets.validation),
            HELD_OUT + name: _hash_of_tasks(sets.held_out),
        }
        for difficulty, graded in sets.graded.items():
            hashes[f"training tasks of {name} ({difficulty})"] = _hash_of_tasks(graded)
    for name, target in config.data.agents.items():
        hashes |= {f"file {f} of the agent of {name}": hash_of(f) for f in files_of(target)}
    for name, path in config.data.demonstrations.items():
        hashes[f"demonstrations of {name}"] = _hash_of_files(Path(path))
    return hashes | hashes_of_modules(config) | hashes_of_tokenizer(tokenizer)


def hashes_of_modules(config: Config) -> dict[str, str]:
    """Return the hash of each imported module of user code, by a name for it."""
    hashes = dict[str, str]()
    known = (setting.factory for setting in known_domains(config).values())
    factories = (factory for factory in known if factory not in EMBEDDED_DOMAINS.values())
    for target in (*factories, *config.data.agents.values(), *config.data.reward_funcs):
        hashes |= _hashes_of_modules(target.partition(":")[0])
    return hashes


def hashes_of_tokenizer(tokenizer: Any) -> dict[str, str]:
    """Return the SHA-256 of all that decides what ids a text has, and what text ids have."""
    parts = [
        sorted(tokenizer.get_vocab().items()),
        tokenizer.special_tokens_map,
        without_clock(tokenizer.chat_template),  # earlier versions held no clock
    ]
    rules = [tokenizer.all_special_ids, *(getattr(tokenizer, name, None) for name in RULES)]
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        # Calls of the tokenizer change its padding and truncation.
        rules.append(json.loads(backend.to_str()) | dict.fromkeys(("padding", "truncation")))
    return {
        TEMPLATE: _hash_of([json.dumps(parts, sort_keys=True, default=str)]),
        "rules of the tokenizer": _hash_of([json.dumps(rules, sort_keys=True, default=str)]),
    }


def _hashes_of_modules(named: str) -> dict[str, str]:
    """Return the hash of a module's file, and of the imported files beside its package, and below.

    Of an installed package, only its own files count.
    """
    files = {
        name: file
        for name, module in [*sys.modules.items()]
        if (file := getattr(module, "__file__", None))
        and name.partition(".")[0] not in (__name__.partition(".")[0], *STARTED)
    }
    if named not in files:
        return {}
    own = Path(files[named])
    folder = own.parents[named.count(".") + (own.name == "__init__.py")]  # it was imported from
    if folder.name == "site-packages":
        folder /= named.partition(".")[0]
    inside = os.path.join(folder, "")
    # Of thousands of modules few lie there, so paths are compared as text.
    return {
        f"{MODULE}{name}": hash_of(Path(file))
        for name, file in files.items()
        if (
            name == named
            or (
                file.startswith(inside)
                and "site-packages" not in file.removeprefix(inside).split(os.sep)
            )
        )
        and os.path.isfile(file)
    }


def _hash_of_tasks(tasks: Iterable[Task]) -> str:
    return _hash_of(json.dumps(astuple(task), sort_keys=True) for task in tasks)


def _hash_of_files(top: Path) -> str:
    files = [top] if top.is_file() else filter(Path.is_file, sorted(top.rglob("*")))
    return _hash_of(f"{file.relative_to(top).as_posix()} {hash_of(file)} " for file in files)


def _hash_of(texts: Iterable[str]) -> str:
    digest = sha256()
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()
