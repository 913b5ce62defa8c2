"""An agent as a program in any language: a process of its own for each episode.

The process gets its task as a line of JSON on the standard input, and the address of the policy in
the variables that the clients of OpenAI and Anthropic read. What it prints is the completion. It
has a process group of its own, whose first process is a guard that ends the group when the episode
ends, and when this process ends, however that happens.
"""

import asyncio
import json
import os
import selectors
import shlex
import signal
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from subprocess import DEVNULL, PIPE, Popen
from tempfile import TemporaryFile
from typing import Any

from pipeline.common.errors import UserError
from pipeline.common.untrusted import one_line, parse_json, shown
from pipeline.data.tasks import Task

MAX_PRINTED = 1 << 20  # bytes of a completion
KEPT_ERRORS = 4096  # bytes of the end of the standard error
SHOWN_ERRORS = 300  # characters of it in a message
TICK_S = 0.2  # until it is noticed that a process has ended whose children keep its pipes open
# The guard reads a line, or until the kernel closes its pipe, as this process has ended.
GUARD = ("/bin/sh", "-c", "read _; kill -KILL 0")
# For a program that reads to the end of its input: `sh -c GUARDED SECONDS PROGRAM ...`. `cat` sees
# the end when it is closed, or when this process ends, however that happens; the program sees it,
# too, and has SECONDS to end by itself. Then its process group is killed.
GUARDED = '{ cat; exec >&-; sleep "$0"; kill -KILL 0; } | { "$@"; kill -KILL 0; }'
SCRIPTS = (".py", ".js", ".mjs", ".ts", ".sh", ".rb")  # endings of files that a program runs


class AgentFailed(Exception):
    """A program of `agents` has failed, as one line says."""


class AgentProcess:
    """A loop that runs a command for each episode, and returns what the command prints.

    With `prints_reward`, nothing else scores, and the last line is {"reward": NUMBER}. Else the
    model could print itself a reward. `errors` is the end of the latest standard error.
    """

    def __init__(self, command: str, prints_reward: bool) -> None:
        self.__name__ = command
        self.prints_reward = prints_reward
        self.errors = ""

    async def __call__(self, policy: Any, task: Task) -> Any:
        guard: Any = Popen(GUARD, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, process_group=0)
        try:
            return await asyncio.to_thread(self._run, guard, policy, task)
        finally:
            _end(guard)  # a thread cannot be interrupted

    def _run(self, guard: Any, policy: Any, task: Task) -> Any:
        # The server has set NO_PROXY in this process, so that proxies are for other hosts.
        variables = {
            "OPENAI_BASE_URL": policy.base_url,
            "OPENAI_API_BASE": policy.base_url,
            "OPENAI_API_KEY": policy.api_key,
            "ANTHROPIC_BASE_URL": policy.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": policy.api_key,
        }
        row = task.row() | ({"tools": policy.tools} if policy.tools else {})
        with guard, TemporaryFile() as given:  # a pipe may be full
            given.write(json.dumps(row).encode() + b"\n")
            given.seek(0)
            with Popen(
                shlex.split(self.__name__),
                stdin=given,
                stdout=PIPE,
                stderr=PIPE,
                env=os.environ | variables,
                process_group=guard.pid,
            ) as process:
                try:
                    printed = self._read(process)
                    code = process.wait()
                finally:
                    _end(guard)  # else it would be waited for here
        if code:
            ended = f"exit code {code}"
            if code < 0:
                ended = f"signal {-code} ({signal.strsignal(-code)})"
            why = one_line(self.errors)[-SHOWN_ERRORS:]
            raise AgentFailed(f"{self.__name__} ended with {ended}" + f": {why}" * bool(why))
        return self._reward_in(printed) if self.prints_reward else printed

    def _read(self, process: Any) -> str:
        """Return what a process prints until it ends; its children may have its pipes for longer.

        Raises AgentFailed if it prints too much.
        """
        kept = {process.stdout: b"", process.stderr: b""}
        with selectors.DefaultSelector() as selector:
            for pipe in kept:
                selector.register(pipe, selectors.EVENT_READ, pipe)
            while selector.get_map():
                ready = selector.select(TICK_S)
                for key, _ in ready:
                    chunk = os.read(key.fd, 1 << 16)
                    kept[key.data] += chunk
                    if not chunk:
                        selector.unregister(key.data)
                kept[process.stderr] = kept[process.stderr][-KEPT_ERRORS:]
                self.errors = kept[process.stderr].decode(errors="replace").strip()
                if len(kept[process.stdout]) > MAX_PRINTED:
                    raise AgentFailed(
                        f"{self.__name__} printed more than {MAX_PRINTED >> 10} KiB, and what it "
                        "prints is the completion; print less, or to the standard error"
                    )
                if not ready and process.poll() is not None:
                    break
        return kept[process.stdout].decode(errors="replace").strip()

    def _reward_in(self, printed: str) -> Any:
        last = printed.rpartition("\n")[2]
        with suppress(ValueError):
            said = parse_json(last)
            if isinstance(said, dict) and said.keys() == {"reward"}:
                return said["reward"]
        raise AgentFailed(
            f"{self.__name__} printed {shown(last)} last, and nothing else scores; print "
            '{"reward": 1.0} as the last line, or give reward_funcs'
        )


def _end(guard: Any) -> None:
    """Let a guard end its group. It reads a line, as a fork of this process may have the pipe."""
    with suppress(OSError, ValueError):  # it has ended
        guard.stdin.write(b"\n")
        guard.stdin.close()


def agent_process(where: str, command: str, prints_reward: bool) -> AgentProcess:
    """Return the loop that runs a command. Raises UserError if the command cannot be run."""
    check_command(
        where, command, "give a command, such as 'python my_agent.py', or module:function"
    )
    if find_spec("aiohttp") is None:
        raise UserError(
            f"{where}, and an agent in a process needs aiohttp; install three-domain-grpo[agents]"
        )
    return AgentProcess(command, prints_reward)


def check_command(where: str, command: str, hint: str) -> None:
    """Raise UserError if a command names no program, or a script that is not here."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"{where}, which is no command ({error}); {hint}") from None
    if not words or which(words[0]) is None:
        raise UserError(f"{where}, and there is no program {shown(' '.join(words[:1]))}; {hint}")
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    if script.endswith(SCRIPTS) and not Path(script).is_file():
        raise UserError(f"{where}, and there is no file {shown(script)} here; {hint}")


def files_of(command: str) -> list[Path]:
    """Return the files below this folder that a command, or `module:function`, names."""
    paths = map(Path, shlex.split(command))
    return [p for p in paths if p.is_file() and p.resolve().is_relative_to(Path.cwd())]
