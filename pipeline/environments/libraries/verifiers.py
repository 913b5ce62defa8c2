"""Environments of Prime Intellect's verifiers, by name: v0 (`load_environment`) and v1 (tasksets).

They run unmodified in a process of their own, one for each rank, in any Python that has verifiers:
its pins never meet those of this package. Its client finds the policy at the episode's address. The
weighted parts of its rubric are the parts of the reward.
"""

import asyncio
import json
import os
import secrets
import shutil
import sys
import weakref
from contextlib import closing
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from pipeline.common.console import installed
from pipeline.common.errors import UserError
from pipeline.common.untrusted import shown
from pipeline.data.rng import permutation
from pipeline.data.rows import with_usual_messages
from pipeline.data.splits import LEAST, Census, same_by
from pipeline.data.tasks import SPLITS, Task
from pipeline.environments.agent_process import GUARDED
from pipeline.environments.domains import Domain
from pipeline.environments.faults import Outage

WORKER = Path(__file__).with_name("verifiers_worker.py")
INSTALL = "python -m venv vf && vf/bin/pip install verifiers uv; arguments: {python: vf/bin/python}"
NO_PROXY = ("NO_PROXY", "no_proxy")  # hosts that no proxy is for
OUTAGES = ("InfraError", "SandboxError", "TunnelError")  # what verifiers says of services
ENDED = "the process of verifiers has ended"
END_S = 5  # for the process, to end what it holds


class Worker:
    """A loop that plays episodes in the process of an environment, over a connection for each.

    When the process has ended, each episode is an Outage.
    """

    __name__ = "verifiers"

    def __init__(self, python: str, name: str, arguments: dict[str, Any]) -> None:
        """Start the process: its programs are beside its Python, and modules are found here.

        Raises RuntimeError if it cannot load the environment.
        """
        environment = os.environ | {
            "PATH": f"{os.path.dirname(python)}:{os.environ.get('PATH', '')}",
            "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{os.getcwd()}".lstrip(":"),
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            **{key: f"{os.environ.get(key, '')},127.0.0.1,localhost" for key in NO_PROXY},
        }
        command = ["/bin/sh", "-c", GUARDED, str(END_S), python, str(WORKER)]
        process: Any = Popen(command, stdin=PIPE, stdout=PIPE, env=environment, process_group=0)
        self.end = weakref.finalize(self, process.stdin.close)
        self._key = secrets.token_hex()  # other users of the machine can connect, too
        load = {"name": name, "arguments": arguments, "key": self._key}
        try:
            process.stdin.write(json.dumps(load).encode() + b"\n")
            process.stdin.flush()
            said = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            said = dict[str, Any](error=ENDED)
        if "error" in said:
            process.communicate()  # ends it
            raise RuntimeError(said["error"])
        self.told = said  # its `rows`, `version` and `port`

    async def __call__(self, policy: Any, task: Task) -> Any:
        request = {"key": self._key, "url": policy.base_url, **json.loads(task.payload)}
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.told["port"])
            with closing(writer):  # the process cancels an episode whose connection is closed
                writer.write(json.dumps(request).encode() + b"\n")
                answer = json.loads(await reader.read())
        except (OSError, ValueError):
            raise Outage(f"{ENDED}; resume the run") from None
        if error := answer.get("error"):
            raise (Outage if any(kind in error for kind in OUTAGES) else RuntimeError)(error)
        return answer["value"]


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
    tasks = trained or evaluated
    drawn = Census(tasks, same).split(None, len(tasks), len(tasks))
    parts = [(tasks, drawn.train), (tasks, drawn.validation), (tasks, drawn.held_out)]
    if trained and evaluated:
        held = Census(evaluated, same).drawn(len(evaluated))
        free = Census(trained, same, held_out=evaluated).split(None, 0, 0).train
        if free and len(held) > 1:
            parts = [(trained, free), (evaluated, held[::2]), (evaluated, held[1::2])]
    return {
        split: [of[number] for number in numbers]
        for split, (of, numbers) in zip(SPLITS, parts, strict=True)
    }


def verifiers(name: str, python: str = sys.executable, **arguments: Any) -> Domain:
    """Return the domain of an environment of verifiers, which the given Python has.

    `arguments` are those of `load_environment`, or of the taskset, whose agent's configuration is
    `agent`. Raises UserError.
    """
    installed("aiohttp", "pip install 'three-domain-grpo[agents]'")  # of the policy's address
    if not (path := shutil.which(python)):
        raise UserError(f"there is no Python {shown(python)}; {INSTALL}")
    try:
        worker = Worker(os.path.abspath(path), name, arguments)
    except RuntimeError as error:
        missing = "No module named 'verifiers'" in str(error)
        hint = INSTALL if missing else f"mend it, or install what it needs for {path}"
        raise UserError(f"{error}; {hint}") from None
    sets = [
        [_task(kind, row, index) for index, row in enumerate(of)]
        for kind, of in zip(("train", "eval"), worker.told["rows"], strict=True)
    ]
    splits = _splits(*sets)
    if not all(splits.values()):
        count = len(sets[0] + sets[1])
        raise UserError(f"it has {count} tasks, and too few differ; give {LEAST} or more")

    def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
        tasks = splits[split]
        return [tasks[number] for number in permutation(len(tasks), "verifiers", seed)[:n]]

    version = worker.told["version"]
    return Domain(
        name="",
        loop=worker,
        generate_tasks=generate_tasks,
        about=lambda: {"environment": f"verifiers:{name}", "verifiers": version},
        is_process=not version.startswith("0.1."),  # an episode of v1 has some
    )
