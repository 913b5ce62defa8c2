"""`pipeline/run.py` in a process that has imported what it needs, which else takes seconds."""

import atexit
import os
import signal
import sys
from multiprocessing import util
from pathlib import Path
from typing import Any

from pipeline import run
from scripts.proofs.ranks import FORKSERVER, free_port
from tests.support import ROOT

RUN = str(ROOT / "pipeline" / "run.py")


def warm_ranks(
    num_ranks: int, flags: list[str], told: dict[str, str] | None = None, **hooks: Any
) -> "list[WarmLauncher]":
    """Ranks in this folder as another launcher starts them, which has `told` them more."""
    place = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return [
        WarmLauncher(
            [sys.executable, RUN, *flags], os.environ | place | own | (told or {}), **hooks
        )
        for own in ({"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(num_ranks))
    ]


class WarmLauncher:
    """In place of `subprocess.Popen([python, "pipeline/run.py", ...])`; `hooks` are the run's.

    What it says goes to a file if one is given, or else to `stdout` and `stderr` in this folder.
    """

    def __init__(
        self, command, env=None, *, ignored=(), default=(), stdout=None, stderr=None, **hooks: Any
    ) -> None:
        assert [*command[:2]] == [sys.executable, RUN]
        place = (command[2:], dict(os.environ if env is None else env), os.getcwd())
        names = [stdout.name] * 2 if stdout else ["stdout", "stderr"]
        self.said = [os.path.abspath(name) for name in names]
        self.process = FORKSERVER.Process(
            target=_launch, args=(*place, self.said, ignored, default, hooks)
        )
        self.process.start()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    poll = returncode.fget

    def wait(self) -> int | None:
        self.process.join()  # pytest has a limit
        self.stdout, self.stderr = (Path(name).read_text() for name in self.said)
        return self.returncode

    def terminate(self) -> None:
        self.process.terminate()


def _launch(argv, environment, folder, said, ignored, default, hooks) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, name in enumerate(said, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for number in default:  # tests in the background of a shell ignore SIGINT
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    # At the exit of a process that was not forked, what multiprocessing has registered comes first.
    atexit.unregister(util._exit_function)
    atexit.register(run._end_children)
    atexit.register(util._exit_function)
    try:
        run.leave(run.main(argv, **hooks))
    finally:
        atexit._run_exitfuncs()
