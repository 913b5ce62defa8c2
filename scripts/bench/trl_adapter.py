"""Adapters with which `trl.GRPOTrainer` trains on the environments of this package.

    GRPOTrainer(
        model,
        train_dataset=Dataset.from_list(rows_without_user(tasks, classes)),
        environment_factory=factories(classes),
        reward_funcs=outcome_reward(chat.end_of_turn_id),
        ...
    )

TRL's episodes differ from the episodes of `pipeline/rollout`. TRL has no simulated user, so
`rows_without_user` leaves out tasks with a user. In TRL, a malformed tool call ends the episode. In
TRL, a tool that sets `done` does not end the episode, but all later tool calls return errors. In
TRL, the model sees an Outage of a tool as an error message.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar

from pipeline.common.errors import UserError
from pipeline.data.tasks import Message, Task
from pipeline.environments.calls import awaited, run_here
from pipeline.environments.discovery import raw_call, tool_methods
from pipeline.environments.tools import call_tool, error_result, is_done


class _Adapter:
    """Hides an environment's `get_reward`, which TRL would call before the final message is set."""

    _environment_class: ClassVar[type[Any]]

    def reset(self, **row: Any) -> str | None:
        self._environment = self._environment_class()
        addition: str | None = run_here(awaited, self._environment.reset(**row))
        return addition

    def _score(self, message: Message, finished: bool) -> float:
        is_final = finished and message["role"] == "assistant" and not message.get("tool_calls")
        if is_final and not is_done(self._environment):
            self._environment.final_message = message["content"]
        self._environment.stop_reason = "completed" if finished else "max_tokens"
        return float(run_here(awaited, self._environment.get_reward()))


def factories(classes: Mapping[str, type[Any]]) -> dict[str, Callable[[], Any]]:
    """Return the value for TRL's `environment_factory`: {domain: class with the domain's tools}.

    The tools check arguments and return JSON, as in the episodes of `pipeline/rollout`.
    """
    adapters: dict[str, Callable[[], Any]] = {}
    for domain, environment_class in classes.items():
        if raw_call(environment_class):
            why = "its class takes raw calls (`schemas` and `call`), and TRL calls methods"
            raise UserError(f"{domain}: {why}; train it with `three-domain-grpo train`")
        methods = tool_methods(environment_class).items()
        tools = {name: _tool(name, method) for name, method in methods}
        members = {**tools, "_environment_class": environment_class}
        adapters[domain] = type(environment_class.__name__, (_Adapter,), members)
    return adapters


def _tool(name: str, method: Callable[..., Any]) -> Callable[..., str]:
    @wraps(method)  # keeps the name, signature and docstring for TRL
    def tool(self: _Adapter, **arguments: Any) -> str:
        if is_done(self._environment):
            return error_result("the conversation has ended")
        return call_tool(self._environment, name, arguments)

    tool.__name__ = name
    return tool


def rows_without_user(
    tasks: Iterable[Task], classes: Mapping[str, type[Any]]
) -> list[dict[str, Any]]:
    rows = []
    for task in tasks:
        environment = classes[task.domain]()
        run_here(awaited, environment.reset(**task.row()))
        if getattr(environment, "user", None) is None:
            rows.append({**task.row(), "environment": task.domain})
    return rows


def outcome_reward(end_of_turn_id: int) -> Callable[..., list[float]]:
    """Return a TRL reward function, which sets `final_message` and then calls `get_reward`."""

    def outcome(
        *,
        completions: Sequence[Sequence[Message]],
        completion_ids: Sequence[Sequence[int]],
        environments: Sequence[_Adapter],
        **_: Any,
    ) -> list[float]:
        triples = zip(completions, completion_ids, environments, strict=True)
        return [e._score(messages[-1], ids[-1] == end_of_turn_id) for messages, ids, e in triples]

    return outcome
