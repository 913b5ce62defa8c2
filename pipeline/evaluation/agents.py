"""An endpoint as the agent: a language model that is not trained plays the held-out tasks.

Tasks, environments, customers, trials and keys are those of the model's own evaluation; only the
messages come from the endpoint.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pipeline.common.untrusted import parse_json
from pipeline.config.settings import Config
from pipeline.data.tasks import Message, Task
from pipeline.distributed.ranks import Ranks
from pipeline.environments.faults import EnvironmentFault
from pipeline.environments.language_models.language_model import LanguageModel, Unanswered
from pipeline.evaluation.evaluate import (
    ATTEMPTS,
    commonest,
    evaluate,
    failed_trials,
    success,
    unscored_trials,
)
from pipeline.models.chat.text import Parsed
from pipeline.rollout.rollout import Progress, Rollout
from pipeline.rollout.trajectory import Conversation, EpisodeRecord, Said, Trajectory


class EndpointPolicy:
    """A policy for which a language model behind an endpoint writes the messages.

    `max_tokens_per_turn` is sent to the endpoint, or less if a user's loop asks for less, and the
    texts at which it ends; `max_tokens` does not apply. A greedy rollout asks for temperature 0.
    The trajectories have no token ids.
    """

    num_waiting = 0  # no message is written together with others

    def __init__(self, rollout: Rollout, model: LanguageModel, temperature: float) -> None:
        self.model = model
        self.temperature = temperature
        self.max_episodes = rollout.policy.max_episodes
        self._rollout = rollout

    async def message(self, conversation: Conversation) -> Said:
        trajectory = conversation.trajectory
        key = trajectory.domain, trajectory.task_id
        ask = partial(self._ask, conversation)
        try:
            answer = await self._rollout.calls.beside(key, "agent", ask, is_async=True)
        except EnvironmentFault as fault:
            fault.outage = True  # the model that is trained has no part in it
            raise
        why = answer.get("why", "")
        if why:
            self._rollout.faults.add(trajectory.domain, trajectory.task_id, "agent", why)
        finished = not answer.get("is_cut")
        return conversation.add(Said(parsed=parsed_of(answer), finished=finished, stopped_by=why))

    async def _ask(self, conversation: Conversation) -> Message:
        most = self._rollout.limits.max_tokens_per_turn
        stop = {"stop": [*conversation.stop]} if conversation.stop else {}
        try:
            return await self.model.ask(
                as_sent(conversation.trajectory.messages),
                conversation.schemas,
                conversation.key % 2**31,
                max_tokens=min(most, conversation.max_tokens or most),
                temperature=0.0 if conversation.greedy else self.temperature,
                **stop,
            )
        except Unanswered as refusal:  # the conversation is too long for the language model
            return {"content": "", "is_cut": True, "why": str(refusal)}

    def step(self) -> None:
        raise AssertionError("no conversation waits for a step")

    def close(self, conversation: Conversation) -> None:
        """End a conversation, of which an endpoint keeps nothing."""


def agent_rollout(rollout: Rollout, model: LanguageModel, temperature: float) -> Rollout:
    """Return a copy of a rollout for which a language model behind an endpoint is the policy."""
    agent = replace(rollout, deterministic=False)
    agent.policy = EndpointPolicy(agent, model, temperature)
    return agent


def parsed_of(answer: Message) -> Parsed:
    """Return an endpoint's message; a call whose arguments are no object makes it malformed."""
    content = answer["content"].strip()
    calls = list[tuple[str, dict[str, Any]]]()
    for function in (call["function"] for call in answer.get("tool_calls", ())):
        name = function["name"]
        text = function["arguments"]
        try:
            arguments = parse_json(text)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            why = f"the arguments of {name} are no JSON object"
            return Parsed(content=f"{content}\n{name}({text})".strip(), malformed=why)
        calls.append((name, arguments))
    return Parsed(content=content, calls=calls)


def as_sent(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation in OpenAI's protocol, in which calls have ids that results name.

    The error that answers a malformed call names no call, so it is sent as the user's message.
    """
    sent = list[Message]()
    ids = list[str]()
    for number, message in enumerate(messages):
        one: Message = {"role": message["role"], "content": message["content"]}
        if message["role"] == "tool":
            one |= {"tool_call_id": ids.pop(0)} if ids else {"role": "user"}
        else:
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            ids = [f"call{number:03d}{place:02d}" for place in range(len(functions))]
            calls = [
                {
                    "id": an_id,
                    "type": "function",
                    "function": {
                        "name": function["name"],
                        "arguments": json.dumps(function["arguments"]),
                    },
                }
                for an_id, function in zip(ids, functions, strict=True)
            ]
            one |= {"tool_calls": calls} if calls else {}
        sent.append(one)
    return sent


def evaluate_agent(
    agent: Rollout,
    tasks: Sequence[Task],
    config: Config,
    ranks: Ranks,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], list[Trajectory]]:
    """Return an agent's entry in `results.json`, and this rank's sampled episodes.

    The entry has `success`, as an evaluation has, or else `failed`: one line that says why trials
    have failed ATTEMPTS times. All ranks return the same entry.
    """
    policy = agent.policy
    assert isinstance(policy, EndpointPolicy)
    num_trials = config.evaluation.eval_trials
    seed = config.run.seed
    records, played = evaluate(agent, tasks, num_trials, seed, ranks, progress=progress)
    greedy = list[EpisodeRecord]()
    if config.evaluation.eval_greedy and not failed_trials(records):
        greedy, _ = evaluate(agent, tasks, 1, seed, ranks, greedy=True, progress=progress)
    ended = next(filter(None, ranks.all_gather_objects(policy.model.ended, "agent")), "")
    trials = [*records, *greedy]
    if failed := failed_trials(trials):
        count = f"{len(failed)} of {len(trials)} trials failed {ATTEMPTS} times"
        return {"failed": ended or f"{count}{commonest(failed)}"}, played
    if unscored := unscored_trials(trials):
        return {"failed": f"{len(unscored)} of {len(trials)} trials have no reward"}, played
    found = success(records, greedy, num_trials, config.evaluation.success_threshold)
    return {"temperature": policy.temperature, "success": found}, played
