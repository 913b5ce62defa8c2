"""Runs of `pipeline/run.py` in processes that need not import it first."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from pipeline import run
from pipeline.report import write
from scripts.proofs import ranks


class WarmRun:
    """In place of `subprocess.Popen([python, "pipeline/run.py", ...])` with one rank."""

    returncode: int | None = None

    def __init__(
        self,
        command: Sequence[str],
        stdout: IO[Any],
        stderr: int = subprocess.STDOUT,
        env: Mapping[str, str] | None = None,
    ) -> None:
        assert Path(command[1]).parts[-2:] == ("pipeline", "run.py")
        place = (dict(os.environ if env is None else env), os.getcwd(), stdout.name)
        self._process = ranks.FORKSERVER.Process(target=_enter, args=(list(command[2:]), *place))
        self._process.start()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        self.returncode = self._process.exitcode
        if self.returncode is None:
            raise subprocess.TimeoutExpired("pipeline/run.py", timeout or 0)
        return self.returncode

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def terminate(self) -> None:
        self._process.terminate()


def _enter(argv: list[str], environment: dict[str, str], folder: str, log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    run.leave(run.main(argv))


def warm_subprocess() -> Any:
    """In place of the module `subprocess`, where a script starts runs and reports with it."""
    return SimpleNamespace(
        Popen=WarmRun,
        run=_report,
        STDOUT=subprocess.STDOUT,
        TimeoutExpired=subprocess.TimeoutExpired,
    )


def _report(command: Sequence[str], **_: Any) -> Any:
    """`python -m pipeline.report FOLDER`."""
    assert list(command[1:3]) == ["-m", "pipeline.report"]
    return SimpleNamespace(returncode=write.main(command[3:]))
