"""Our environments in `trl.GRPOTrainer`: factories, rows and a reward function.

    GRPOTrainer(
        model,
        train_dataset=Dataset.from_list(rows_without_user(tasks, classes)),
        environment_factory=factories(classes),
        reward_funcs=outcome_reward(chat.end_of_turn_id),
        ...
    )

TRL differs from our rollouts: it has no user, so tasks with one are left out; a malformed call ends
the episode; a transfer does not, but afterwards no tool works; an Outage of a tool is shown to the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar

from pipeline.data.tasks import Message, Task
from pipeline.environments.tools import call_tool, error_result, settled, tool_methods


class _Adapter:
    """An environment with `reset` and its tools only.

    TRL calls `get_reward` before the final message is set.
    """

    _environment_class: ClassVar[type[Any]]

    def reset(self, **row: Any) -> str | None:
        self._environment = self._environment_class()
        addition: str | None = settled(self._environment.reset(**row))
        return addition

    def _score(self, final_message: str | None) -> float:
        if final_message is not None and not getattr(self._environment, "done", False):
            self._environment.final_message = final_message
        return float(settled(self._environment.get_reward()))


def factories(classes: Mapping[str, type[Any]]) -> dict[str, Callable[[], Any]]:
    """The value of `environment_factory`: for each domain, a class with its tools.

    `call_tool` checks arguments and writes results as JSON, as in our rollouts.
    """
    adapters: dict[str, Callable[[], Any]] = {}
    for domain, environment_class in classes.items():
        tools = {name: _tool(method) for name, method in tool_methods(environment_class).items()}
        members = {**tools, "_environment_class": environment_class}
        adapters[domain] = type(environment_class.__name__, (_Adapter,), members)
    return adapters


def _tool(method: Callable[..., Any]) -> Callable[..., str]:
    @wraps(method)  # TRL reads name, signature and docstring
    def tool(self: _Adapter, **arguments: Any) -> str:
        if getattr(self._environment, "done", False):
            return error_result("the conversation has ended")
        return call_tool(self._environment, method.__name__, arguments)

    return tool


def rows_without_user(
    tasks: Iterable[Task], classes: Mapping[str, type[Any]]
) -> list[dict[str, Any]]:
    """The rows of the tasks without a user."""
    rows = []
    for task in tasks:
        environment = classes[task.domain]()
        settled(environment.reset(**task.row()))
        if getattr(environment, "user", None) is None:
            rows.append({**task.row(), "environment": task.domain})
    return rows


def outcome_reward(end_of_turn_id: int) -> Callable[..., list[float]]:
    """The reward function: it sets the final message of each environment, then gets the reward."""

    def outcome(
        *,
        completions: Sequence[Sequence[Message]],
        completion_ids: Sequence[Sequence[int]],
        environments: Sequence[_Adapter],
        **_: Any,
    ) -> list[float]:
        return [
            environment._score(_final_message(messages, ids[-1] == end_of_turn_id))
            for messages, ids, environment in zip(
                completions, completion_ids, environments, strict=True
            )
        ]

    return outcome


def _final_message(messages: Sequence[Message], finished: bool) -> str | None:
    """The final message of an episode; None if it was cut off or ends with calls."""
    last = messages[-1]
    if not finished or last["role"] != "assistant" or last.get("tool_calls"):
        return None
    content: str = last["content"]
    return content
