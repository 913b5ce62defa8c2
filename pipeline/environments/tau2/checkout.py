"""A checkout of sierra-research/tau2-bench: its data files, tasks, tools and databases.

The checkout's own code runs. Its package is imported without its `__init__.py`, which would import
litellm, so Python 3.11 and the packages of the extra `tau2` suffice.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError
from pipeline.common.untrusted import one_line, shown

DOMAINS = ("airline", "retail", "telecom")
TESTED_COMMIT = "a2c024725189473d2d7cea3a5cfdbcc67478e41f"  # rewards were compared at this commit
DATABASES = {
    "airline": ("db.json",),
    "retail": ("db.json",),
    "telecom": ("db.toml", "user_db.toml"),
}
POLICIES = {
    "airline": ("policy.md",),
    "retail": ("policy.md",),
    "telecom": ("main_policy_solo.md", "tech_support_workflow_solo.md"),
}


TALKING_POLICIES = POLICIES | {"telecom": ("main_policy.md", "tech_support_manual.md")}
GREETING = re.compile(r'DEFAULT_FIRST_AGENT_MESSAGE\b[^"]*"assistant",\s*content="([^"]+)"')


class Checkout:
    """The checkout in a folder. Raises UserError for another project, or for a faulty file.

    With `is_talking`, a customer talks with the agent; else telecom is in the solo mode.
    """

    def __init__(self, path: Path, name: str, is_talking: bool = False) -> None:
        self.path = path
        self.name = name
        self.is_talking = is_talking
        self.folder = path / "data" / "tau2" / "domains" / name
        if name not in DOMAINS:
            raise UserError(f"tau2: got the domain {shown(name)}; give {', '.join(DOMAINS)}")
        policies = (TALKING_POLICIES if is_talking else POLICIES)[name]
        files = [*DATABASES[name], *policies, "tasks.json", "split_tasks.json"]
        self.files = [self.folder / file for file in files]
        if is_talking:
            tools = "_tools" if name == "telecom" else ""
            self.guidelines = path / f"data/tau2/user_simulator/simulation_guidelines{tools}.md"
            self.files += [self.guidelines, path / "src/tau2/orchestrator/orchestrator.py"]
        for file in self.files:
            if not file.is_file() or not file.stat().st_size:
                raise UserError(
                    f"tau2: {file} is missing or empty; give a whole checkout (git lfs?) of "
                    "sierra-research/tau2-bench"
                )

    @cached_property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """All tasks by id, as the data file has them."""
        return {task["id"]: task for task in self._json("tasks.json", list)}

    def instructions(self, task_id: str) -> dict[str, Any]:
        """Return the parts of the customer's instructions by name."""
        found = self.tasks[task_id]["user_scenario"]["instructions"]
        return found if isinstance(found, dict) else {"task_instructions": found}

    @cached_property
    def splits(self) -> dict[str, list[str]]:
        """The official splits: lists of ids of tasks."""
        splits: dict[str, list[str]] = self._json("split_tasks.json", dict)
        for split in ("train", "test", "base", *["full"] * (self.name == "telecom")):
            unknown = [i for i in splits.get(split, [""]) if i not in self.tasks]
            if unknown:
                file = self.folder / "tasks.json"
                task = shown(unknown[0])
                raise UserError(f"tau2: {file} lacks the task {task} of the split {split}")
        return splits

    def _json(self, file: str, kind: type[Any]) -> Any:
        path = self.folder / file
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"tau2: {path} is cut off or no JSON ({error})") from None
        if not isinstance(value, kind):
            raise UserError(f"tau2: {path} holds no {kind.__name__}; check the file out again")
        return value

    @cached_property
    def greeting(self) -> str:
        """The agent's first message, which the benchmark writes. Raises UserError."""
        found = GREETING.search(self.files[-1].read_text(encoding="utf-8"))
        if found is None:
            raise UserError(f"tau2: {self.files[-1]} has no greeting; give another commit")
        return found[1]

    def customer_prompt(self, scenario: str) -> str:
        """Return the system prompt of the language model that plays a customer."""
        guidelines = self.guidelines.read_text(encoding="utf-8").replace("<PERSONA_GUIDELINES>", "")
        return f"{guidelines}\n\n<scenario>\n{scenario}\n</scenario>"

    @cached_property
    def commit(self) -> str:
        """The checkout's commit, or "unknown" if the folder is not the top of a repository."""
        if _git(self.path, "rev-parse", "--show-toplevel") != str(self.path):
            return "unknown"
        changed = _git(self.path, "diff", "--name-only", "--diff-filter=M", "HEAD", "--", "src")
        return str(_git(self.path, "rev-parse", "HEAD")) + " with local changes" * bool(changed)

    @cached_property
    def data_hash(self) -> str:
        """The first 12 digits of the SHA-256 of the domain's data files."""
        return hashlib.sha256(b"".join(file.read_bytes() for file in self.files)).hexdigest()[:12]

    @cached_property
    def package(self) -> types.SimpleNamespace:
        """The checkout's code: `environment` (a module), `Task`, `ToolCall`, `EnvAssertion`."""
        _import_root(self.path)
        try:
            tasks = importlib.import_module("tau2.data_model.tasks")
            return types.SimpleNamespace(
                environment=importlib.import_module(f"tau2.domains.{self.name}.environment"),
                Task=tasks.Task,
                EnvAssertion=tasks.EnvAssertion,
                ToolCall=importlib.import_module("tau2.data_model.message").ToolCall,
            )
        except (ImportError, AttributeError, ValueError, SyntaxError) as error:
            hint = "give a whole checkout of sierra-research/tau2-bench"
            if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("tau2"):
                hint = "pip install -e '.[tau2]' in the folder of this project"
            why = f"{type(error).__name__}: {one_line(str(error))}"
            what = f"the code of {self.path} does not load ({why})"
            raise UserError(f"tau2: {what}; {hint}") from None

    def make_environment(self) -> Any:
        """Return the official environment with the whole database.

        Raises UserError if a database does not load.
        """
        options: dict[str, Any] = {}
        if self.name == "telecom" and not self.is_talking:
            options = {"solo_mode": True, "policy_type": "workflow"}
        try:
            return self.package.environment.get_environment(**options)
        except ValueError as error:  # also pydantic's ValidationError and toml's errors
            files = " or ".join(str(self.folder / file) for file in DATABASES[self.name])
            why = one_line(str(error))
            raise UserError(f"tau2: {files} is cut off or of another version ({why})") from None


def _git(path: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(path), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@cache
def _import_root(path: Path) -> None:
    """Make `tau2` importable from the checkout. Raises UserError."""
    root = str(path / "src" / "tau2")
    known = sys.modules.get("tau2")
    if known is not None and root not in known.__path__:
        other = next(iter(known.__path__))
        raise UserError(f"tau2: got {path}, but {other} is loaded already; give one checkout")
    package = types.ModuleType("tau2")
    package.__path__ = [root]
    sys.modules["tau2"] = package
    os.environ["TAU2_DATA_DIR"] = str(path / "data")
    os.environ.setdefault("PYTHON_DOTENV_DISABLED", "1")  # a .env file's keys are not for a run
    if importlib.util.find_spec("loguru") is not None:
        importlib.import_module("loguru").logger.disable("tau2")
