"""A user's own loop: `async def play(policy, task)` plays an episode, and returns its reward.

The loop runs in the environments' event loop, or in a thread of its own if it is not async. It asks
`await policy.message(messages, tools)` as often as it wants, also several times at once. What was
sampled is what is trained: messages that continue an earlier conversation go on with its tokens,
and any others start a new one. A message that the loop no longer waits for is taken back, with its
tokens: it may be asked for again.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from functools import cached_property, partial
from traceback import format_exception
from typing import Any, TypeAlias, cast

from pipeline.common.errors import UserError
from pipeline.common.untrusted import is_plain, parse_json, shown
from pipeline.config.settings import RolloutSettings
from pipeline.data.rng import stream_key
from pipeline.data.rows import messages_problem, with_usual_messages
from pipeline.data.tasks import Message, Task
from pipeline.environments.agent_process import AgentFailed
from pipeline.environments.calls import is_async, run_coroutine
from pipeline.environments.discovery import place_of, schemas_problem
from pipeline.environments.domains import Play
from pipeline.environments.faults import EnvironmentFault, first_of, wait_of
from pipeline.environments.tools import MAX_REWARD, as_number, writable
from pipeline.models.chat.template import Chat
from pipeline.rollout.asked import OVER, Answer, Asked
from pipeline.rollout.asked import EpisodeOver as EpisodeOver
from pipeline.rollout.trajectory import Conversation, Pace, Policy, StopReason, Trajectory

# A tool's result or the customer's answer, and why the episode ends with it, if it does.
Act: TypeAlias = tuple[Any, StopReason | None]
# Codes and texts of the address, of which one is in any client's text.
ENDS = ("episode_over", "context_length_exceeded", OVER, "maximum context length")
REPLIES = ("user", "tool")  # roles of messages with which a conversation goes on
KEYS = ("role", "content", "tool_calls", "name")  # what is kept of messages


class LoopPolicy:
    """The policy that a user's loop asks for messages; one object per episode.

    `first` is the trajectory of the episode, whose `further` gets the sequences of all
    conversations but the first. `wake` is called when a message is asked for, and `show` is shown
    each message of all conversations. With `alone`, each message is sampled by itself, so that its
    rounding depends on no other conversation, and so on no arrival.
    """

    def __init__(
        self,
        policy: Policy,
        chat: Chat,
        limits: RolloutSettings,
        first: Trajectory,
        *,
        key: int,
        greedy: bool,
        pace: Pace,
        alone: bool = False,
        wake: Callable[[], None],
        show: Callable[[list[Message]], None],
        tools: list[dict[str, Any]],
        call: Callable[[str, dict[str, Any]], Awaitable[Act]],
        reply: Callable[[str], Awaitable[Act]],
    ) -> None:
        self._wake = wake
        self._show = show
        self._policy = policy
        self._chat = chat
        self._limits = limits
        self._first = first
        self._key = key
        self._greedy = greedy
        self._pace = pace
        self._alone = alone
        self._main = asyncio.get_running_loop()
        self._conversations = list[Conversation]()
        self._known = dict[Conversation, Asked]()  # its last message
        self._starts = Counter[str]()  # number of conversations that began with the same messages
        self._unsaid = defaultdict[str, list[Conversation]](list)  # ... whose first was taken back
        self._num_messages = 0
        self.is_over = False  # whether the loop has ended
        self._is_closed = False
        self.end: StopReason | None = None  # the limit that was reached
        self.refused: StopReason | None = None  # why a message was refused at the address
        self.is_cut = False  # whether the latest message was cut off, or had no room
        self.lost_connection = False  # whether the loop has ended because of one
        self._asked = list[Asked]()  # those that may not have reached the loop
        self._awaited = set[Future[Any]]()  # what the loop waits for
        self._since = time.monotonic()  # when the loop began, or last got what it had waited for
        self.tools = tools
        self._call = call
        self._reply = reply
        self._in_turn = asyncio.Lock()  # for the environment, which knows one call at a time
        self.fault: EnvironmentFault | None = None  # of environment or endpoint; ends the episode
        self.reward_parts = dict[str, float]()  # which the loop has returned

    @property
    def base_url(self) -> str:
        """The address of an API like OpenAI's that has this policy, for this episode alone.

        For Anthropic's clients, take its `/v1` off. Raises UserError if aiohttp is not installed.
        """
        return str(self._address.base_url)

    @property
    def api_key(self) -> str:
        """The key of `base_url`."""
        return str(self._address.key)

    @cached_property
    def _address(self) -> Any:
        try:
            from pipeline.rollout.address.server import address_of
        except ModuleNotFoundError:
            hint = "install three-domain-grpo[agents]"
            raise UserError(f"policy.base_url: aiohttp is not installed; {hint}") from None
        return address_of(self)

    @property
    def busy_s(self) -> float:
        """The seconds since the loop last waited for something, or 0 while it does."""
        return 0.0 if self._awaited else time.monotonic() - self._since

    async def message(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> Message:
        """Return the model's next message of a conversation; the caller appends it.

        `messages` is the whole conversation, and `tools` are JSON schemas. The message has a
        `content`, `tool_calls` if the model called tools, and the `finish_reason` stop, or length
        if it was cut off after `max_tokens_per_turn`; a conversation cannot go on after a message
        that was cut off, but it can be told anew. A malformed call stays text. Raises EpisodeOver
        if a conversation has no room for a message (`max_tokens`), and after `max_turns` messages
        of all conversations together.
        """
        await asyncio.sleep(0)  # or a loop that asks on would block the event loop
        conversation = with_usual_messages(deepcopy(list(messages)))
        schemas = deepcopy(list(tools or ()))
        try:
            asked = self.ask(messages=conversation, tools=schemas)
            if not is_plain([conversation, schemas]):
                raise ValueError("it holds what JSON cannot, such as NaN or half a character")
        except ValueError as error:
            raise ValueError(f"policy.message: {error}") from None
        future = asyncio.wrap_future(asked.answer)
        asked.is_lost = future.cancelled  # at once, and before `give_up`
        try:
            answer = await future
            if self.is_over:
                raise EpisodeOver(self.end or StopReason.COMPLETED)
            asked.has_arrived = True
            return answer.message
        finally:
            if not asked.has_arrived:
                self.give_up(asked)

    def ask(self, **request: Any) -> Asked:
        """Ask for a message, in any thread; the arguments are those of Asked.

        The messages are JSON in the usual form. The caller says when the message `has_arrived`, or
        that it gives the message up; a message of which nothing is said is not trained. Raises
        ValueError for bad messages, and EpisodeOver.
        """
        asked = Asked(**request)
        if problem := messages_problem(asked.messages) or schemas_problem(asked.tools):
            raise ValueError(problem)
        self._refuse_more()  # at once, as the rollout's thread may sample for long
        asked.messages = [
            {key: message[key] for key in KEYS if key in message} for message in asked.messages
        ]
        asked.answer = self._begin(partial(self._next, asked))
        return asked

    def _begin(self, make: Callable[[], Awaitable[Any]]) -> Future[Any]:
        """Begin to make what the loop waits for, in the rollout's event loop."""
        self._refuse_if_over()
        future = asyncio.run_coroutine_threadsafe(self._made(make), self._main)
        self._awaited.add(future)
        future.add_done_callback(self._end_wait)
        return future

    def _end_wait(self, future: Future[Any]) -> None:
        self._since = time.monotonic()
        self._awaited.discard(future)

    async def _made(self, make: Callable[[], Awaitable[Any]]) -> Any:
        if self._is_closed:  # nobody waits any more
            raise asyncio.CancelledError
        try:
            return await make()
        except EnvironmentFault as fault:  # of the environment, or of an endpoint of the policy
            self.fault = fault
            self.end = StopReason.ENVIRONMENT_ERROR
            raise EpisodeOver(self.end) from None

    async def num_prompt_tokens(self, messages: list[Message], tools: list[dict[str, Any]]) -> int:
        """Return the number of tokens of a conversation as a prompt, in any event loop."""

        async def count() -> int:  # in the rollout's event loop, whose tokenizer it is
            return len(self._chat.prompt_ids(messages, tools))

        counted = asyncio.run_coroutine_threadsafe(count(), self._main)
        return await asyncio.wrap_future(counted)

    def give_up(self, asked: Asked) -> None:
        """Take back a message that the loop does not wait for any more, in the loop's thread."""
        asked.has_arrived = False
        with suppress(RuntimeError):  # the rollout has ended
            self._main.call_soon_threadsafe(self._take_back, asked)

    def _take_back(self, asked: Asked) -> None:
        """Undo a message that has not reached the loop, so that it is not trained."""
        asked.is_taken_back = True
        if asked.task is not None:
            asked.task.cancel()
        if asked.undo is not None and not self._is_closed:
            asked.undo()
            asked.undo = None
            self._first.num_malformed_calls -= asked.is_malformed

    def _refuse_more(self) -> None:
        """Raise EpisodeOver if no further message is allowed."""
        if self.end is None and self._num_messages >= self._limits.max_turns:
            self.end = StopReason.MAX_TURNS
        self._refuse_if_over()

    def _refuse_if_over(self) -> None:
        if self.is_over or self.end is not None:
            raise EpisodeOver(self.end or StopReason.COMPLETED)

    async def _next(self, asked: Asked) -> Answer:
        asked.task = asyncio.current_task()
        if asked.is_taken_back:  # before it has begun
            raise asyncio.CancelledError
        self._refuse_more()
        self._num_messages += 1
        self._asked = [a for a in self._asked if not a.has_arrived]
        self._asked.append(asked)
        conversation = self._conversation_of(asked)
        conversation.max_tokens, conversation.stop = asked.max_tokens, asked.stop
        self._wake()
        turn = await self._policy.message(conversation)
        self.is_cut = turn is None or not (turn.finished or turn.at_stop)
        if turn is None:
            raise EpisodeOver(StopReason.MAX_TOKENS)
        self._show(conversation.trajectory.messages[-1:])
        asked.is_malformed = bool(turn.parsed.malformed)
        self._first.num_malformed_calls += asked.is_malformed
        message = turn.parsed.message()
        asked.history = [*map(compared, (*asked.messages, message))]
        asked.ended_by = "" if turn.finished else "stop" if turn.at_stop else "cut"
        self._known[conversation] = asked
        message = {**deepcopy(message), "finish_reason": "length" if self.is_cut else "stop"}
        if turn.parsed.thoughts:
            message["reasoning_content"] = turn.parsed.thoughts
        return self._answer(asked, conversation, message)

    def _answer(self, asked: Asked, conversation: Conversation, message: Message) -> Answer:
        sequence = conversation.sequence
        sampled = sequence.loss_mask[::-1]
        count = sampled.index(False) if False in sampled else len(sampled)
        start = len(sequence.completion_ids) - count
        ids = sequence.completion_ids[start:]
        decode = self._chat.tokenizer.decode if asked.with_texts else None
        return Answer(
            message=message,
            key=f"{conversation.key:016x}{conversation.trajectory.num_turns:x}",
            prompt_ids=sequence.prompt_ids + sequence.completion_ids[:start],
            ids=ids,
            logprobs=sequence.logprobs[start:],
            texts=[decode([token]) for token in ids] if decode else [],
        )

    def _conversation_of(self, asked: Asked) -> Conversation:
        """Return the conversation that messages continue, with the new ones, or a new one."""
        messages = [*map(compared, asked.messages)]
        for lost in self._asked:  # a message that was given up makes room for another one
            first = [*map(compared, lost.messages)] == messages and lost.tools == asked.tools
            is_next = _new_messages(lost.before, messages) if lost.before else first
            if is_next and lost.undo is not None and not lost.has_arrived and lost.is_lost():
                self._take_back(lost)
        for conversation, known in self._known.items():
            num_new = 0 if known.ended_by else _new_messages(known, messages)
            if num_new and conversation.schemas == asked.tools:
                del self._known[conversation]  # until its next message is there
                known.has_arrived = True  # whoever goes on with it has it
                known.undo = None
                asked.before = known
                asked.undo = self._undo(conversation, known)
                new = asked.messages[-num_new:]
                conversation.trajectory.messages += new
                self._show(new)
                return conversation
        # The key must not depend on the order in which conversations that run at once begin.
        start = json.dumps([messages, asked.tools], sort_keys=True)
        conversation = self._unsaid[start].pop() if self._unsaid[start] else self._new(start, asked)
        if conversation.trajectory is not self._first:
            conversation.trajectory.begun_by = self._why_new(messages, asked.tools)
        conversation.trajectory.messages = list(asked.messages)
        asked.undo = self._undo(conversation, start)
        self._show(conversation.trajectory.messages)
        return conversation

    def _why_new(self, messages: list[Message], tools: list[dict[str, Any]]) -> str:
        """Return why messages continue no conversation; see `Trajectory.begun_by`."""
        if all(message["role"] != "assistant" for message in messages):
            return "new"
        talk = [message for message in messages if message["role"] != "system"]
        for conversation, known in self._known.items():
            if _new_messages(known, messages):
                return known.ended_by or "tools"
            talked = [message for message in known.history if message["role"] != "system"]
            if conversation.schemas == tools and talk[: len(talked)] == talked:
                return "system"
        return "history"

    def _new(self, start: str, asked: Asked) -> Conversation:
        key = stream_key("conversation", self._key, start, self._starts[start])
        self._starts[start] += 1
        trajectory = self._first
        if self._conversations:
            trajectory = Trajectory(domain=self._first.domain, task_id=self._first.task_id)
            self._first.further.append(trajectory)
        conversation = Conversation(
            trajectory=trajectory,
            schemas=asked.tools,
            key=key,
            greedy=self._greedy,
            is_text=not asked.tools,
            alone=self._alone,
            place=None,
            pace=self._pace,
        )
        self._conversations.append(conversation)
        return conversation

    def _undo(self, conversation: Conversation, known: Asked | str) -> Callable[[], None]:
        """Return what makes a conversation as it is now; `known` is what it then continues."""
        rewind = conversation.rewinder()

        def undo() -> None:
            self._policy.close(conversation)
            rewind()
            if isinstance(known, str):
                self._known.pop(conversation, None)
                self._unsaid[known].append(conversation)
            else:
                self._known[conversation] = known

        return undo

    async def call(self, name: str, arguments: dict[str, Any] | str) -> Message:
        """Call a tool of the domain's environment, one after the other.

        Returns the result as a message to append, whose `is_error` says whether the call failed.
        `arguments` may be JSON text, as clients give it. Raises EpisodeOver if the episode is over,
        also by an earlier call.
        """
        given: Any = deepcopy(arguments)
        if isinstance(arguments, str):
            with suppress(ValueError):
                given = parse_json(arguments)
        if not isinstance(given, dict) or not is_plain([name, given]):
            raise ValueError(f"policy.call: {name} needs its arguments by name, as JSON has them")
        return cast("Message", await self._act(partial(self._call, name, given)))

    async def reply(self, text: str) -> str | None:
        """Return the simulated customer's answer to a text; None: it was the final message.

        Without a customer, it always is. Raises EpisodeOver if the episode is over.
        """
        return cast("str | None", await self._act(partial(self._reply, writable(text))))

    async def _act(self, act: Callable[[], Awaitable[Act]]) -> Any:
        """Let the environment act, in the rollout's event loop, after what it does already."""
        await asyncio.sleep(0)  # or a loop that goes on would block the event loop
        return await asyncio.wrap_future(self._begin(partial(self._acted, act)))

    async def _acted(self, act: Callable[[], Awaitable[Act]]) -> Any:
        async with self._in_turn:
            self._refuse_if_over()
            value, self.end = await act()
            return value

    def wait(self, awaitable: Coroutine[Any, Any, Any]) -> Any:
        """Return what a method gives, to a loop that is not async: `wait(message(messages))`."""
        if asyncio._get_running_loop() is not None:
            awaitable.close()
            raise RuntimeError("policy.wait: this code is async; write await")
        return run_coroutine(awaitable)

    def close(self) -> None:
        """End all conversations; whoever asks for another message gets an EpisodeOver."""
        self.is_over = True
        if address := vars(self).get("_address"):  # if the loop has used it
            address.close()
        for asked in self._asked:
            if not asked.has_arrived:
                self._take_back(asked)
        self._is_closed = True
        for conversation in self._conversations:
            self._policy.close(conversation)
        for future in [*self._awaited]:
            future.cancel()


def is_refusal(error: BaseException) -> bool:
    """Return whether an exception of a client, or its cause, tells a refusal of the address."""
    text = "".join(format_exception(error))  # with all causes; clients show the body or the reason
    return any(end in text for end in ENDS)


def _new_messages(known: Asked, messages: list[Message]) -> int:
    """Return the number of replies that messages add to a conversation; 0: they do not go on."""
    size = len(known.history)
    is_reply = all(message["role"] in REPLIES for message in messages[size:])
    return len(messages) - size if is_reply and messages[:size] == known.history else 0


def compared(message: Message) -> Message:
    """Return what is compared of a message: no ids of calls, which clients write anew, no thoughts.

    Clients keep thoughts apart from the content, or drop them.
    """
    names = ("role", "content") if message["role"] == "assistant" else ("role", "content", "name")
    kept = {key: message[key] for key in names if key in message}
    if message["role"] == "assistant" and "</think>" in kept["content"]:
        kept["content"] = kept["content"].rpartition("</think>")[2].strip()
    if calls := message.get("tool_calls"):
        functions = [call["function"] for call in calls]
        pairs = [{"name": f["name"], "arguments": f.get("arguments") or {}} for f in functions]
        kept["tool_calls"] = [{"type": "function", "function": pair} for pair in pairs]
    return kept


# What a loop shall return, by who scores its episodes.
RETURNS = {
    "loop": f"the reward, a number up to {MAX_REWARD:g} or a dict of such numbers, or give "
    "reward_funcs, which score a text",
    "functions": f"a reward, a number up to {MAX_REWARD:g} or a dict of such numbers, or a text or "
    "None, which they score",
    "environment": "the final message, a text, or None; get_reward scores",
}


async def play(
    loop: Play, policy: LoopPolicy, task: Task, scored_by: str = "loop"
) -> float | str | None:
    """Let a loop play; return what it returns: the reward or, if others score, a text or None.

    Of a dict, the sum is the reward, and its numbers are the policy's `reward_parts`. A loop that
    is not async plays in a thread of its own. If a loop does not catch EpisodeOver, the reward is
    0, or what others say. At the address, a client of the loop's raises an exception of its own in
    its place. `scored_by` is a key of RETURNS.
    """
    value: Any = 0.0 if scored_by == "loop" else None
    try:
        try:
            played = loop if is_async(loop) else partial(asyncio.to_thread, loop)
            value = await played(policy, task)
        except* EpisodeOver:  # also in a group, as a TaskGroup raises it
            pass
        finally:
            policy.is_over = True
    except Exception as error:
        has_died = isinstance(error, AgentFailed) and policy.end is not None
        # After signs of life, a refusal breaks the connection.
        is_refused = has_died or is_refusal(error) or wait_of(error) is not None
        if policy.refused is not None and is_refused:
            policy.end = policy.refused
            return 0.0 if scored_by == "loop" else None
        cause = first_of(error)
        # The loop's own deadline may have passed because of what the model has said.
        is_deadline = type(cause) is TimeoutError and isinstance(
            cause.__cause__ or cause.__context__, asyncio.CancelledError
        )
        policy.lost_connection = wait_of(error) is not None and not is_deadline
        raise
    if scored_by != "loop" and (value is None or isinstance(value, str)):
        return value and writable(value)
    name = f"{getattr(loop, '__name__', 'play')}{place_of(loop)}"
    parts = value if isinstance(value, dict) else {"": value}
    try:
        numbers = {str(part): as_number(number, name) for part, number in parts.items()}
        reward = math.fsum(numbers.values())  # .1 + .2 + .7 is 1
    except Exception:  # `__float__` may be user code
        reward = math.nan
    if scored_by == "environment" or not abs(reward) <= MAX_REWARD:
        raise ValueError(f"{name} returned {shown(value)}; return {RETURNS[scored_by]}")
    policy.reward_parts = numbers if value is parts else {}
    return reward
