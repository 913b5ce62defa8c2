"""What the worker calls of `verifiers.v1`, and a taskset whose agent asks once."""

import os
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, islice

import aiohttp

from verifiers.v1.clients import eval as clients


@dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str


@dataclass
class ModelContext:
    model: str
    client: EvalClientConfig


@dataclass
class Reward:
    score: float
    weight: float = 1.0

    @property
    def value(self):
        return self.score * self.weight


@dataclass
class Error:
    type: str
    message: str


@dataclass
class Trace:
    rewards: dict
    errors: list = field(default_factory=list)


@dataclass
class Episode:
    ok: bool
    traces: list
    errors: list = field(default_factory=list)


class Data:
    def __init__(self, **fields):
        self.fields = fields

    def model_dump(self, mode, exclude, exclude_none):
        assert (mode, exclude, exclude_none) == ("json", {"idx"}, True)
        return self.fields


@dataclass
class Task:
    data: Data


class Taskset:
    def __init__(self, number=None):
        self.number = number

    @property
    def bounded(self):
        return self.number is not None

    def take(self, number):
        return Taskset(number)

    def __iter__(self):
        tasks = (Task(Data(prompt=f"say {n}", system_prompt="desk")) for n in count())
        return islice(tasks, self.number)


class Env:
    def __init__(self, config):
        self.config = config
        self.taskset = Taskset(config["taskset"].get("size"))
        self.is_serving = False

    @asynccontextmanager
    async def serving(self):
        self.is_serving = True
        try:
            yield
        finally:
            print("served", os.getpid())

    async def run_episode(self, task, context):
        clients.build_async_httpx(context.client)
        assert self.is_serving and os.environ[context.client.api_key_var]
        url = f"{context.client.base_url}/chat/completions"
        body = {"messages": [{"role": "user", "content": task.data.fields["prompt"]}]}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
            said = (await reply.json())["choices"][0]["message"]["content"]
        if said == "fail":
            return Episode(False, [Trace({}, [Error("SandboxError", "it is gone")])])
        right = float(said == task.data.fields["prompt"].split()[1])
        rewards = {"right": Reward(right), "long": Reward(len(said), 0.25), "seen": Reward(9, 0)}
        return Episode(True, [Trace({**rewards, "unscored": None})])
