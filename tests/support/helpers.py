"""What several test modules share: small real models, an environment, a scripted policy, real
ranks.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.config.domain_names import EMBEDDED_DOMAINS
from pipeline.config.settings import Config
from pipeline.data.tasks import Message, Task
from pipeline.distributed.ranks import Ranks
from pipeline.environments import Domain, load_domains
from pipeline.models.chat.template import Chat
from pipeline.models.sampling_copy import Weights
from pipeline.models.tiny import tiny_tokenizer
from pipeline.rollout.rollout import Rollout, RolloutRequest, SamplerPolicy
from pipeline.rollout.trajectory import Sampled, Trajectory

if TYPE_CHECKING:
    from pipeline.run_state import Run  # late: tests of units need not load a run

DOMAINS = {  # the embedded domains and the example
    **EMBEDDED_DOMAINS,
    "telecom_chat": "examples.telecom_chat:TelecomChatEnvironment",
}
ALONE = Ranks(0, 1, 5)


def module_of(domain: str) -> Any:
    """The module of an embedded domain or of the example."""
    return import_module(DOMAINS[domain].partition(":")[0])


@cache
def tokenizer() -> Any:
    return tiny_tokenizer()


@cache
def chat() -> Chat:
    return Chat(tokenizer())


@cache
def embedded(*names: str) -> dict[str, Domain]:
    """Embedded domains and the example by name; all of them if none is named."""
    own = {name: DOMAINS[name] for name in names or DOMAINS if name not in EMBEDDED_DOMAINS}
    return load_domains(Config(data={"domains": list(names or DOMAINS), "environments": own}))


def environments_of(domains: Mapping[str, Domain]) -> dict[str, type[Any]]:
    return {name: domain.environment for name, domain in domains.items()}


def make_task(name: str = "t1", request: str = "hello", **fields: Any) -> Task:
    prompt = ({"role": "system", "content": "desk"}, {"role": "user", "content": request})
    return Task(**{"domain": "desk", "id": name, "prompt": prompt, "payload": "{}", **fields})


def save_tasks(tasks: Iterable[Task], path: Path) -> None:
    """Write tasks to a JSON Lines file that `load_tasks` can read."""
    keys = ("domain", "id", "family", "branch")
    with path.open("w", encoding="utf-8") as file:
        for task in tasks:
            row = {key: getattr(task, key) for key in keys} | json.loads(task.columns)
            row["prompt"] = task.prompt[0]["content"] if task.is_text else task.prompt
            row["payload"] = json.loads(task.payload)
            file.write(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n")


def call(name: str, **arguments: Any) -> Message:
    """An assistant message that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Desk:
    """An environment in TRL's style: tools, `reset`, `get_reward`, and nothing else.

    Its payload may name what fails. The reward is the share of the final message's words that are
    "done".
    """

    def reset(self, **row: Any) -> str | None:
        self.row = row
        self._payload = json.loads(row["payload"])
        self.final_message = ""
        if self._payload.get("fails") == "reset":
            raise RuntimeError("no desk")
        addition: str | None = self._payload.get("addition")
        return addition

    def look(self, item: str, times: int = 1) -> dict[str, str]:
        """Look an item up.

        Args:
            item: Name of the item.
            times: How often.
        """
        return {item: "seen " * times}

    async def wait(self, minutes: int) -> str:
        """Wait for a while.

        Args:
            minutes: How long.
        """
        await asyncio.sleep(0)
        return f"{minutes} minutes later"

    def jam(self) -> str:
        """Jam the printer."""
        raise RuntimeError("paper jam")

    def get_reward(self) -> float:
        if self._payload.get("fails") == "get_reward":
            raise KeyError("ledger")
        words = self.final_message.lower().rstrip(".").split()
        return words.count("done") / max(1, len(words))


def rollout_of(
    sampler: Any, chat: Chat, environments: Any, limits: Any, *args: Any, **given: Any
) -> Rollout:
    """A rollout whose policy is a sampler; `environments` are classes or domains by name."""
    domains = {
        name: kind if isinstance(kind, Domain) else Domain(name=name, environment=kind)
        for name, kind in environments.items()
    }
    return Rollout(SamplerPolicy(sampler, chat, limits), chat, domains, limits, *args, **given)


def played(
    scripts: Sequence[Sequence[Message]],
    environments: Any,
    limits: Any,
    tasks: Sequence[Task] = (),
    **given: Any,
) -> "tuple[list[Trajectory], ScriptedSampler]":
    """Trajectories of episodes whose policies say the scripts, and the sampler that said them."""
    tasks = tasks or [make_task(f"t{number}") for number in range(len(scripts))]
    sampler = ScriptedSampler(dict(enumerate(scripts)))
    requests = [RolloutRequest(task=task, trial=n, key=n) for n, task in enumerate(tasks)]
    trajectories = rollout_of(sampler, chat(), environments, limits, **given)(requests)
    assert sampler.num_open == 0
    return trajectories, sampler


class ScriptedSampler:
    """A policy that says given messages: the Sampler's calls without a model.

    `scripts` holds, for each key, the messages of its turns. `contexts` keeps, for each key, every
    token that the conversation held, and `most_open` how many conversations were open at once.
    """

    def __init__(self, scripts: Mapping[int, Sequence[Message]]) -> None:
        self.scripts = {key: list(messages) for key, messages in scripts.items()}
        self.contexts: dict[int, list[int]] = {}
        self.limits: list[int] = []
        self.num_open = self.most_open = 0
        self.num_tokens = self.num_padded_tokens = 0

    def load_weights(self, weights: Weights) -> None:
        pass

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        return torch.zeros(len(ids) - 1)

    def open(
        self, prompts: Sequence[list[int]], keys: Sequence[int], num_drawn: Sequence[int] = ()
    ) -> list[int]:
        self.num_open += len(keys)
        self.most_open = max(self.most_open, self.num_open)
        self.contexts |= {key: list(ids) for key, ids in zip(keys, prompts, strict=True)}
        return list(keys)

    def extend(self, conversation: int, ids: list[int]) -> None:
        self.contexts[conversation] += ids

    def close(self, conversation: int) -> None:
        self.num_open -= 1

    def rest(self) -> None:
        pass

    def end(self) -> None:
        pass

    def sample(
        self,
        conversations: Sequence[int],
        max_tokens: Sequence[int],
        greedy: bool = False,
        until: int | None = None,
    ) -> list[Sampled | None]:
        """The first `until` conversations, in their order, complete their messages."""
        self.limits += max_tokens
        said = [
            self._say(*pair) for pair in list(zip(conversations, max_tokens, strict=True))[:until]
        ]
        return said + [None] * (len(conversations) - len(said))

    def _say(self, key: int, room: int) -> Sampled:
        ids = chat().message_ids(self.scripts[key].pop(0))
        self.contexts[key] += ids[:room]
        logprobs = [-0.5 - position / 100 for position in range(len(ids))]
        return Sampled(ids=ids[:room], logprobs=logprobs[:room], finished=len(ids) <= room)


def start_unwatched(config: Any, **hooks: Any) -> "Run":
    """A run on this rank as `pipeline.train.main` starts it, without its watchdog's thread."""
    from pipeline.checkpoints.resume import share_folder
    from pipeline.distributed.connect import connect
    from pipeline.distributed.watchdog import Watchdog
    from pipeline.models.fitting import fitted
    from pipeline.preflight.check import check_and_prepare
    from pipeline.run_state import open_run

    config, _ = fitted(config)
    accelerator, ranks = connect(config)
    folder = share_folder(config, ranks)
    parts = check_and_prepare(config, ranks)
    watchdog = Watchdog(ranks, config.run.timeout)
    return open_run(config, folder, parts, accelerator, ranks, watchdog, **hooks)
