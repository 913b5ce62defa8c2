"""Python scripts in processes that need not import the pipeline first, nor do their ranks."""

import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import IO, Any

from pipeline import train
from pipeline.common import children
from pipeline.distributed import launch
from scripts.proofs import ranks

END_S = 20  # for the ranks beside one that failed to end by themselves
Stream = IO[Any] | int | None


class WarmRun:
    """In place of `subprocess.Popen([python, script, ...])`.

    A run in it leaves out the pages and pictures at the end, which take longer than a small run.
    """

    returncode: int | None = None
    stdin: IO[Any] | None = None
    stdout: IO[Any] | None = None

    def __init__(
        self,
        command: Sequence[object],
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        text: bool = False,
    ) -> None:
        mode = "" if text else "b"
        ends: list[Connection | None] = [_given(stdin), _given(stdout), _given(stderr)]
        if stdin == subprocess.PIPE:
            theirs, ours = os.pipe()
            ends[0] = Connection(theirs)
            self.stdin = os.fdopen(ours, f"w{mode}")
        if stdout == subprocess.PIPE:
            ours, theirs = os.pipe()
            ends[1] = Connection(theirs)
            self.stdout = os.fdopen(ours, f"r{mode}")
        words = [str(word) for word in command[1:]]
        place = (dict(os.environ if env is None else env), str(cwd or os.getcwd()))
        joins = stderr == subprocess.STDOUT
        self._process = ranks.FORKSERVER.Process(target=_enter, args=(words, *place, ends, joins))
        self._process.start()
        self.pid = self._process.pid
        for end in ends:
            if end is not None:
                end.close()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        self.returncode = self._process.exitcode
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a warm process", timeout or 0)
        return self.returncode

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def communicate(self) -> tuple[Any, None]:
        said = None if self.stdout is None else self.stdout.read()
        self.wait()
        return said, None

    def send_signal(self, number: int) -> None:
        if self.pid is not None and self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _given(stream: Stream) -> Connection | None:
    """An open file, made into what can be handed to a process that is there already."""
    if stream == subprocess.DEVNULL:
        return Connection(os.open(os.devnull, os.O_RDWR))
    if stream is None or isinstance(stream, int):
        return None
    return Connection(os.dup(stream.fileno()))


def _enter(
    words: list[str],
    environment: dict[str, str],
    folder: str,
    ends: list[Connection | None],
    joins_stderr: bool,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, end in enumerate(ends):
        if end is not None:
            os.dup2(end.fileno(), number)
            end.close()
    if joins_stderr:
        os.dup2(1, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    launch.start_ranks = _fork_ranks
    train.write_report = lambda _: None
    _run_script(words)


def _run_script(words: list[str]) -> None:
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


def _fork_ranks(
    world: launch.World, argv: list[str], entry: Path | None = None, timeout_s: float = 0.0
) -> int:
    """In place of `launch.start_ranks`; who fails first says how the run ended."""
    with TemporaryDirectory(prefix="ranks-") as notes, socket.socket() as free:
        launch._set_environment(world, notes)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        words = [str(entry or launch.RUN), *argv]
        alive = {_fork_rank(rank, world, port, words): rank for rank in range(world.num_ranks)}
        told: list[int] = []

        def tell(number: int, _: object = None) -> None:
            told.append(number)
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        signal.signal(signal.SIGTERM, tell)
        code = 0
        while alive:
            pid, status = os.wait()
            rank = alive.pop(pid)
            ended = os.waitstatus_to_exitcode(status)
            if ended and not code:
                code = launch._exit_code(rank, SimpleNamespace(exitcode=ended))
                end = threading.Timer(END_S, tell, [signal.SIGKILL])
                end.daemon = True
                end.start()
        return launch._code_of_ranks(notes) if signal.SIGTERM in told else code


def _fork_rank(rank: int, world: launch.World, port: int, words: list[str]) -> int:
    if pid := os.fork():
        return pid
    own = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own |= {"WORLD_SIZE": world.num_ranks, "LOCAL_WORLD_SIZE": world.num_ranks}
    os.environ.update({name: str(value) for name, value in own.items()})
    code: Any = 1
    try:
        children.end_with_the_parent()
        _run_script(words)
        code = 0
    except SystemExit as leaving:
        code = leaving.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def warm_subprocess() -> Any:
    """In place of the module `subprocess`, where a script starts Python scripts with it."""
    return SimpleNamespace(
        Popen=WarmRun,
        PIPE=subprocess.PIPE,
        STDOUT=subprocess.STDOUT,
        TimeoutExpired=subprocess.TimeoutExpired,
    )
