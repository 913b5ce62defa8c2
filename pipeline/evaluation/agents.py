"""An endpoint as the agent: a language model that is not trained plays the held-out tasks.

Tasks, environments, customers, trials and keys are those of the model's own evaluation; only the
messages come from the endpoint.
"""

import json
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from pipeline.chat.text import Parsed
from pipeline.config.settings import Config
from pipeline.data.tasks import Message, Task
from pipeline.distributed.ranks import Ranks
from pipeline.endpoints.language_model import LanguageModel, Unanswered
from pipeline.environments.faults import EnvironmentFault
from pipeline.environments.timeouts import Guard
from pipeline.environments.tools import tool_schemas
from pipeline.evaluation.error_rates import commonest, errors_of
from pipeline.evaluation.evaluate import ATTEMPTS, evaluate, failed_trials, success, unscored_trials
from pipeline.files.untrusted import parse_json
from pipeline.rollout.rollout import Rollout
from pipeline.rollout.trajectory import RunRecord, StopReason, Trajectory

Episode = Any  # an episode of a Rollout; its `handle` is the call for the next message


class AgentRollout(Rollout):
    """A copy of a Rollout for which a language model behind an endpoint writes the messages.

    The limits of turns and calls are the same. `max_tokens_per_turn` is sent to the endpoint. The
    length of tool results is counted with the tokenizer of `rollout`; `max_tokens` does not apply.
    A greedy rollout asks for temperature 0. The trajectories have no token ids.
    """

    def __init__(self, rollout: Rollout, model: LanguageModel, temperature: float) -> None:
        super().__init__(
            rollout.sampler,
            rollout.chat,
            rollout.environments,
            rollout.limits,
            rewards=rollout.rewards,
            on_progress=rollout.on_progress,
            faults=rollout.faults,
        )
        self.welcomes, self.model, self.temperature = rollout.welcomes, model, temperature
        self._options: dict[str, Any] = {"max_tokens": rollout.limits.max_tokens_per_turn}
        self._away: list[Episode] = []  # episodes whose environment works
        self._answers: dict[Episode, Message] = {}

    def _run(self, waiting: deque[Episode], greedy: bool) -> None:
        self._options["temperature"] = 0.0 if greedy else self.temperature
        super()._run(waiting, greedy)

    def _go_on(self, away: list[Episode], may_wait: bool) -> list[Episode]:
        self._away = away
        return super()._go_on(away, may_wait)

    def _prompted(self, episodes: Sequence[Episode]) -> list[Episode]:
        for episode in episodes:
            self.on_messages(episode.environment, episode.trajectory.messages)
            self._extend(episode)
        return [*episodes]

    def _extend(self, episode: Episode) -> None:
        """Ask for the next message of an episode, in the background."""
        work = partial(self._ask, episode)
        episode.handle = self._calls.beside(episode.request.task.key, work, self._until)

    async def _ask(self, episode: Episode, guard: Guard) -> None:
        messages = as_sent(episode.trajectory.messages)
        schemas = tool_schemas(self.environments[episode.trajectory.domain])

        async def answer() -> Message:
            seed = episode.request.key % 2**31
            try:
                return await self.model.ask(messages, schemas, seed, **self._options)
            except Unanswered as refusal:  # the conversation is too long for the language model
                return {"content": "", "is_cut": True, "why": str(refusal)}

        self._answers[episode] = await guard("agent", answer, answer)

    def _sample(self, live: list[Episode], greedy: bool) -> list[Episode]:
        """Wait for a message or an environment; take the messages that have come."""
        works = [episode.work for episode in self._away if episode.work is not None]
        self._calls.wait([*(episode.handle for episode in live), *works])
        complete = dict.fromkeys(e for e in live if e.handle.future.done())
        live[:] = [episode for episode in live if episode not in complete]
        for episode in complete:
            self._take_answer(episode)
        return [*complete]

    def _take_answer(self, episode: Episode) -> None:
        trajectory, episode.replies = episode.trajectory, []
        try:
            episode.handle()
        except EnvironmentFault as fault:
            trajectory.error, trajectory.left_out = str(fault), "outage"
            episode.end(StopReason.ENVIRONMENT_ERROR)
            return
        answer = self._answers.pop(episode)
        if why := answer.get("why", ""):
            self.faults.add(trajectory.domain, trajectory.task_id, "agent", why)
        self._take(episode, parsed_of(answer), not answer.get("is_cut"), why)

    def _close(self, episode: Episode) -> None:
        episode.handle = None


def parsed_of(answer: Message) -> Parsed:
    """Return an endpoint's message; a call whose arguments are no object makes it malformed."""
    content, calls = answer["content"].strip(), list[tuple[str, dict[str, Any]]]()
    for function in (call["function"] for call in answer.get("tool_calls", ())):
        name, text = function["name"], function["arguments"]
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
    sent, ids = list[Message](), list[str]()
    for number, message in enumerate(messages):
        one: Message = {"role": message["role"], "content": message["content"]}
        if message["role"] == "tool":
            one |= {"tool_call_id": ids.pop(0)} if ids else {"role": "user"}
        else:
            made = [call["function"] for call in message.get("tool_calls") or ()]
            ids = [f"call{number:03d}{place:02d}" for place in range(len(made))]
            calls = [
                {
                    "id": an_id,
                    "type": "function",
                    "function": {"name": of["name"], "arguments": json.dumps(of["arguments"])},
                }
                for an_id, of in zip(ids, made, strict=True)
            ]
            one |= {"tool_calls": calls} if calls else {}
        sent.append(one)
    return sent


def evaluate_agent(
    agent: AgentRollout, tasks: Sequence[Task], config: Config, ranks: Ranks
) -> tuple[dict[str, Any], list[Trajectory]]:
    """Return an agent's entry in `results.json`, and this rank's sampled episodes.

    The entry has `success`, as an evaluation has, or else `failed`: one line that says why trials
    have failed ATTEMPTS times. All ranks return the same entry.
    """
    num_trials, seed = config.evaluation.eval_trials, config.run.seed
    records, played = evaluate(agent, tasks, num_trials, seed, ranks)
    greedy = list[RunRecord]()
    if not failed_trials(records):
        greedy, _ = evaluate(agent, tasks, 1, seed, ranks, greedy=True)
    ended = next(filter(None, ranks.all_gather_objects(agent.model.ended, "agent")), "")
    trials = [*records, *greedy]
    if failed := failed_trials(trials):
        count = f"{len(failed)} of {len(trials)} trials failed {ATTEMPTS} times"
        return {"failed": ended or f"{count}{commonest(errors_of(failed))}"}, played
    if unscored := unscored_trials(trials):
        return {"failed": f"{len(unscored)} of {len(trials)} trials have no reward"}, played
    found = success(records, greedy, num_trials, config.evaluation.success_threshold)
    return {"temperature": agent.temperature, "success": found}, played
