"""The process in which an environment of verifiers plays, in any Python that has verifiers.

It imports nothing of this package. The first line of its input names the environment, and a line of
its output tells the environment's data and a port, all in JSON. Each connection to the port plays
an episode, many at once. The process ends when its input ends, as the rank ends.
"""

import asyncio
import json
import logging
import os
import shutil
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))  # its modules have the names of libraries
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]
MAX_ENDLESS = 1000  # tasks of a taskset without an end
MAX_TEXT = 500  # characters of an error
MAX_BYTES = 1 << 30  # of a request
KEY = "POLICY_API_KEY"  # verifiers wants a variable with a key, but the address has it


class Environment:
    """An environment of verifiers v0."""

    serving = nullcontext

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        import verifiers
        from openai import AsyncOpenAI

        self.env = verifiers.load_environment(name, **arguments)
        if self.env.requires_group_rollouts:
            raise ValueError("its rubric compares the episodes of a group; score each by itself")
        self.client = AsyncOpenAI(base_url="http://unused", api_key="unused", timeout=None)

    def rows(self) -> list[list[Any]]:
        """Return the rows to train on, and those to evaluate."""
        return [
            [*(rows or ())] for rows in (self.env.build_dataset(), self.env.build_eval_dataset())
        ]

    async def play(self, row: dict[str, Any], index: int, url: str) -> dict[str, float]:
        """Return the parts of the reward, which add up to it."""
        from verifiers.clients import OpenAIChatCompletionsClient

        client = OpenAIChatCompletionsClient(self.client.with_options(base_url=url))
        output = await self.env.run_rollout(row, client, "policy", {})
        if error := output.get("error"):
            raise RuntimeError(error["error_chain_repr"])
        rubrics = getattr(self.env.rubric, "rubrics", [self.env.rubric])
        pairs = [pair for one in rubrics for pair in zip(one.funcs, one.weights, strict=True)]
        weights = {getattr(function, "__name__", ""): weight for function, weight in pairs}
        metrics = output.get("metrics") or {}
        parts = {name: weights[name] * metrics[name] for name in metrics if weights.get(name)}
        rest = output["reward"] - sum(parts.values())
        return parts if abs(rest) < 1e-9 else {**parts, "other": rest}  # by rules of its own


class Taskset:
    """A taskset of verifiers v1, or an environment with one agent, whose seat is `agent`."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        from verifiers.v1.clients import eval as clients
        from verifiers.v1.utils import loaders

        # Each address, and so each episode, would get an HTTP client of 1 MiB that is kept.
        http = clients.build_async_httpx(clients.BaseClientConfig(api_key_var=KEY))
        clients.build_async_httpx = lambda config: http
        if not shutil.which("uv"):
            raise ValueError("verifiers starts its programs with uv; pip install uv beside it")
        has_own = loaders.default_harness_id(name) == name
        harness = {} if has_own else {"harness": {"id": "null"}}  # bash runs what the model says
        agent = {"runtime": {"type": "subprocess"}, **harness, **arguments.pop("agent", {})}
        config = {"agent": agent, "taskset": {**arguments, "id": name}}
        self.env = loaders.load_environment(loaders.resolve_env_config(config))
        self.serving = self.env.serving
        tasks = self.env.taskset
        self.tasks = [*(tasks if tasks.bounded else tasks.take(MAX_ENDLESS))]

    def rows(self) -> list[list[Any]]:
        return [
            [
                task.data.model_dump(mode="json", exclude={"idx"}, exclude_none=True)
                for task in self.tasks
            ],
            [],
        ]

    async def play(self, row: dict[str, Any], index: int, url: str) -> dict[str, float]:
        import verifiers.v1 as vf

        client = vf.EvalClientConfig(base_url=url, api_key_var=KEY)
        context = vf.ModelContext(model="policy", client=client)
        episode = await self.env.run_episode(self.tasks[index], context)
        if not episode.ok:
            errors = [*episode.errors, *(one for trace in episode.traces for one in trace.errors)]
            raise RuntimeError("; ".join(f"{one.type}: {one.message}" for one in errors))
        rewards = episode.traces[0].rewards.items()
        return {name: reward.value for name, reward in rewards if reward and reward.weight}


def described(error: BaseException, name: str) -> str:
    """Return the first cause of an exception as one line, with a line of the environment's file."""
    while error.__cause__ is not None:  # in verifiers' own words
        error = error.__cause__
    module = os.sep + name.rpartition("/")[2].replace("-", "_")
    own = [
        f" ({os.path.basename(frame.filename)}, line {frame.lineno}: {frame.line})"
        for frame in traceback.extract_tb(error.__traceback__)
        if module in frame.filename
    ]
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_TEXT] + "".join(own[-1:])


async def serve(env: Any, name: str, key: str, lines: Any, out: Any) -> None:
    """Play an episode for each connection; what still plays when the input ends is cancelled."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            request = json.loads(await reader.readline() or "{}")
            if request.pop("key", "") != key:
                return
            own: Any = asyncio.current_task()
            closed = asyncio.create_task(reader.read())
            closed.add_done_callback(lambda _: own.cancel())
            try:
                answer = json.dumps({"value": await env.play(**request)}, default=float)
            except Exception as error:
                answer = json.dumps({"error": described(error, name)})
            writer.write(answer.encode())

    async with env.serving():
        server = await asyncio.start_server(play, "127.0.0.1", limit=MAX_BYTES, backlog=1024)
        told = {
            "version": sys.modules["verifiers"].__version__,
            "rows": env.rows(),
            "port": server.sockets[0].getsockname()[1],
        }
        print(json.dumps(told, default=str), file=out, flush=True)
        await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), lines.read)


def main() -> None:
    lines, out = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # libraries print
    os.environ[KEY] = "unused"
    notes = logging.StreamHandler()
    told = dict[Any, Any]()  # what always fails is told once, and why nothing loads, by the rank
    notes.addFilter(
        lambda note: (
            not note.name.endswith("env_utils")
            and told.setdefault((note.pathname, note.lineno), note) is note
        )
    )
    logging.basicConfig(handlers=[notes], format="warning: verifiers: %(message)s")

    load = json.loads(lines.readline())
    name, key = load["name"], load.pop("key")
    try:
        import verifiers

        env = (Environment if hasattr(verifiers, "load_environment") else Taskset)(**load)
        asyncio.run(serve(env, name, key, lines, out))
    except Exception as error:
        print(json.dumps({"error": described(error, name)}), file=out, flush=True)


if __name__ == "__main__":
    main()
