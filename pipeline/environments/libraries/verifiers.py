"""Environments of Prime Intellect's verifiers, by name: v0 (`load_environment`) and v1 (tasksets).

They run unmodified in a process of their own, one for each rank, in any Python that has verifiers:
its pins never meet those of this package. Its client finds the policy at the episode's address. The
weighted parts of its rubric are the parts of the reward.
"""

import asyncio
import itertools
import json
import os
import shutil
import sys
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from pipeline.common.console import installed
from pipeline.common.errors import UserError
from pipeline.common.untrusted import shown
from pipeline.data.rng import permutation
from pipeline.data.rows import with_usual_messages
from pipeline.data.splits import LEAST, Census, same_by
from pipeline.data.tasks import Task
from pipeline.environments.domains import Domain
from pipeline.environments.faults import Outage

WORKER = Path(__file__).with_name("verifiers_worker.py")
INSTALL = "python -m venv vf && vf/bin/pip install verifiers uv; arguments: {python: vf/bin/python}"
NO_PROXY = ("NO_PROXY", "no_proxy")  # hosts that no proxy is for
# `cat` sees the end of its input when this process ends, however that happens, and the worker sees
# it, too. It has some seconds to end what it holds. Then its process group is killed.
GUARDED = '{ cat; exec >&-; sleep 5; kill -KILL 0; } | { "$@"; kill -KILL 0; }'


class Worker:
    """A loop that plays episodes in the process of an environment, which begins again if it ends.

    A thread reads the answers. What is not answered when the process ends is an Outage.
    """

    __name__ = "verifiers"

    def __init__(self, python: str, name: str, arguments: dict[str, Any]) -> None:
        self._command = ["/bin/sh", "-c", GUARDED, "sh", python, str(WORKER)]
        self._load = {"name": name, "arguments": arguments}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._process: Any = None
        self._waiting = dict[int, Future[Any]]()
        self.about = {"environment": f"verifiers:{name}"}

    def ask(self, **request: Any) -> tuple[int, Future[Any]]:
        """Send a request; return its number, and its answer."""
        answer = Future[Any]()
        answer.set_running_or_notify_cancel()  # makes `answer.cancel` ineffective
        with self._lock:
            if self._process is None or self._process.stdout.closed:
                self._start()
            number = next(self._numbers)
            self._waiting[number] = answer
            self._send(id=number, **request)
        return number, answer

    def _start(self) -> None:
        """Start the process: its programs are beside its Python, and modules are found here."""
        inherited = os.environ
        proxies = {name: f"{inherited.get(name, '')},127.0.0.1,localhost" for name in NO_PROXY}
        variables = {
            "PATH": f"{os.path.dirname(self._command[4])}:{inherited.get('PATH', '')}",
            "PYTHONPATH": f"{inherited.get('PYTHONPATH', '')}:{os.getcwd()}".lstrip(":"),
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        }
        environment = inherited | variables | proxies
        process: Any = Popen(
            self._command, stdin=PIPE, stdout=PIPE, env=environment, process_group=0
        )
        self._process, self._waiting = process, {}
        arguments = (process, self._waiting, self._lock, self.about)
        threading.Thread(target=_read, args=arguments, daemon=True).start()
        weakref.finalize(self, process.stdin.close)
        self._send(**self._load)

    def _send(self, **line: Any) -> None:
        with suppress(OSError, ValueError):  # it has ended
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()

    async def __call__(self, policy: Any, task: Task) -> Any:
        played = json.loads(task.payload)
        number, answer = self.ask(call="play", url=policy.base_url, **played)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self._send(id=number, call="cancel")
            raise


def _read(process: Any, waiting: dict[int, Future[Any]], lock: Any, about: dict[str, Any]) -> None:
    """Take a process's answers until it ends. A line that is no answer ends it."""
    why = "the process of verifiers has ended"
    with suppress(ValueError, KeyError, TypeError, OSError):
        for line in process.stdout:
            said = json.loads(line)
            if "version" in said:
                about["verifiers"] = said["version"]
            elif "id" not in said:
                why = said["error"]
            elif "error" in said:
                kind = Outage if said["is_outage"] else RuntimeError
                waiting.pop(said["id"]).set_exception(kind(said["error"]))
            else:
                waiting.pop(said["id"]).set_result(said["value"])
    with lock, suppress(OSError):  # it has not read all
        process.stdout.close()
        process.stdin.close()
    for answer in waiting.values():
        answer.set_exception(Outage(why))
    process.wait()


def _task(name: str, row: dict[str, Any], index: int) -> Task:
    prompt = row.get("prompt")
    if not prompt:
        raise UserError(f"its row {index} has no prompt: {shown(row)}; give each row one")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if row.get("system_prompt"):
        messages = [{"role": "system", "content": row["system_prompt"]}, *messages]
    return Task(
        domain="",
        id=f"{name}-{index}",
        prompt=tuple(with_usual_messages(messages)),
        payload=json.dumps({"row": row, "index": index}),
        family=str(row.get("task") or ""),
    )


def _splits(trained: list[Task], evaluated: list[Task]) -> dict[str, list[Task]]:
    """Return the tasks of each split; no prompt is in two of them.

    Half of the tasks to evaluate are for validations, half are held out. Without them, both are
    drawn by a hash.
    """
    same = same_by(())
    if trained and evaluated:
        held = Census(evaluated, same).drawn(len(evaluated))
        free = Census(trained, same, held_out=evaluated).split(None, 0, 0).train
        if free and len(held) > 1:
            of = {"train": (trained, free), "validation": (evaluated, held[::2])}
            of["test"] = evaluated, held[1::2]
            return {name: [tasks[n] for n in numbers] for name, (tasks, numbers) in of.items()}
    tasks = trained or evaluated
    split = Census(tasks, same).split(None, len(tasks), len(tasks))
    parts = {"train": split.train, "validation": split.validation, "test": split.held_out}
    return {name: [tasks[number] for number in numbers] for name, numbers in parts.items()}


def verifiers(name: str, python: str = sys.executable, **arguments: Any) -> Domain:
    """Return the domain of an environment of verifiers, which the given Python has.

    `arguments` are those of `load_environment`, or of the taskset, whose agent's configuration is
    `agent`. Raises UserError.
    """
    installed("aiohttp", "pip install 'three-domain-grpo[agents]'")  # of the policy's address
    if not (path := shutil.which(python)):
        raise UserError(f"there is no Python {shown(python)}; {INSTALL}")
    worker = Worker(os.path.abspath(path), name, arguments)
    try:
        rows = worker.ask(call="rows")[1].result()
    except (Outage, RuntimeError) as error:
        missing = "No module named 'verifiers'" in str(error)
        hint = INSTALL if missing else f"mend it, or install what it needs for {path}"
        raise UserError(f"{error}; {hint}") from None
    sets = [
        [_task(kind, row, index) for index, row in enumerate(of)]
        for kind, of in zip(("train", "eval"), rows, strict=True)
    ]
    splits = _splits(*sets)
    if not all(splits.values()):
        count = len(sets[0] + sets[1])
        raise UserError(f"it has {count} tasks, and too few differ; give {LEAST} or more")

    def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
        tasks = splits[split]
        return [tasks[number] for number in permutation(len(tasks), "verifiers", seed)[:n]]

    return Domain(
        name="",
        loop=worker,
        generate_tasks=generate_tasks,
        about=lambda: worker.about,
        is_process=not worker.about["verifiers"].startswith("0.1."),  # an episode of v1 has some
    )
