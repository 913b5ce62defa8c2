"""One run that many tests read: the README's first command, with few steps."""

import fcntl
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT

SMALL = [
    *("--max-tokens-per-turn", "12", "--max-turns", "5", "--tasks-per-domain", "8"),
    *("--eval-trials", "1", "--validation-steps", "0", "--report-to", "none"),
]
# Three domains in sequence, a step each. Almost untrained, the model earns nothing: the entropy is
# what there is to learn from. On one rank the bits are those of two.
FLAGS = [
    *(*SMALL, "--warm-start-steps", "2", "--warm-start-batch-size", "4", "--max-steps", "3"),
    *("--tasks-per-step", "4", "--num-generations", "4", "--eval-tasks-per-domain", "2"),
    *("--no-drop-zero-std-groups", "--entropy-coef", "0.05", "--save-steps", "1"),
    *("--deterministic", "--beta", "0.1", "--reference-per-stage"),
]
FILES = ["--profile", "2", "--watch", "--report-to", "tensorboard", "--log-completions-steps", "1"]
# A Python with which the script need not install what this process has.
INSTALLED = f"""#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip" | "-c "*) ;;
    *) exec {shlex.quote(sys.executable)} "$@" ;;
esac
"""


class SharedRun(NamedTuple):
    folder: Path
    printed: str

    @property
    def checkout(self) -> Path:
        return self.folder.parents[1]


def first_command() -> list[str]:
    """The first command that the README shows."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"```bash\n(.*)\n", readme)[:1]
    return shlex.split(line, comments=True)


def made_once(shared: Path) -> SharedRun:
    """The run of this session of tests, made by the process of tests that comes first."""
    checkout = shared / "checkout"
    with (shared / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not checkout.exists():
            _make(checkout)
    (folder,) = (checkout / "runs").iterdir()
    return SharedRun(folder, (checkout / "printed").read_text(encoding="utf-8"))


def _make(checkout: Path) -> None:
    checkout.mkdir()
    for name in ("accelerate_configs", "constraints.txt", "pipeline", "pyproject.toml", "recipes"):
        (checkout / name).symlink_to(ROOT / name)
    (checkout / "scripts").mkdir()
    for path in (ROOT / "scripts").glob("*.sh"):
        (checkout / "scripts" / path.name).symlink_to(path)
    python = checkout / "python"
    python.write_text(INSTALLED)
    python.chmod(0o755)
    own = {"PYTHON": str(python), "NUM_GPUS": "2", "ACCELERATE_USE_CPU": "true"}
    with (checkout / "printed").open("w") as printed:
        command = [*first_command(), *FLAGS, *FILES]
        done = subprocess.run(
            command, cwd=checkout, env=os.environ | own, stdout=printed, stderr=printed
        )
    assert done.returncode == 0, (checkout / "printed").read_text(encoding="utf-8")
