"""A user's own loop: `async def play(policy, task)` plays an episode, and returns its reward.

The loop runs in the environments' event loop, or in a thread of its own if it is not async. It asks
`await policy.message(messages, tools)` as often as it wants, also several times at once. What was
sampled is what is trained: messages that continue an earlier conversation go on with its tokens,
and any others start a new one. A message that the loop no longer waits for is taken back, with its
tokens: it may be asked for again.
"""

import asyncio
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pipeline.common.untrusted import is_plain, shown
from pipeline.config.settings import RolloutSettings
from pipeline.data.rng import stream_key
from pipeline.data.rows import messages_problem, with_usual_messages
from pipeline.data.tasks import Message, Task
from pipeline.environments.calls import is_async, run_coroutine
from pipeline.environments.discovery import place_of, schemas_problem
from pipeline.environments.domains import Play
from pipeline.environments.faults import first_of, wait_of
from pipeline.environments.tools import MAX_REWARD, as_number, writable
from pipeline.rollout.trajectory import Conversation, Policy, StopReason, Trajectory

Value = TypeVar("Value")
REPLIES = ("user", "tool")  # roles of messages with which a conversation goes on
KEYS = ("role", "content", "tool_calls", "name")  # what is kept of messages
TURNS = 10  # turns of an event loop in which tasks take a message, and may ask for another one


class EpisodeOver(Exception):
    """`policy.message` raises this if no further message is allowed.

    A loop that does not catch it ends with reward 0. `reason` says which limit was reached.
    """

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"the episode is over: {reason}")
        self.reason = reason


@dataclass(eq=False)
class Asked:
    """A message that a loop has asked for; `undo` takes back what was done for it."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    loop: asyncio.AbstractEventLoop
    answer: Future[Message] = field(default_factory=Future)
    task: asyncio.Task[Message] | None = None  # in the rollout's event loop
    undo: Callable[[], None] | None = None
    is_taken: bool = False
    is_malformed: bool = False
    has_arrived: bool = False  # set in the loop's thread
    is_settled: bool = False  # whether the loop has had TURNS to go on; set in the loop's thread


class LoopPolicy:
    """The policy that a user's loop asks for messages; one object per episode.

    `first` is the trajectory of the episode, whose `further` gets the sequences of all
    conversations but the first. `wake` is called when a message is asked for, and `show` is shown
    each message of all conversations.
    """

    def __init__(
        self,
        policy: Policy,
        limits: RolloutSettings,
        first: Trajectory,
        key: int,
        greedy: bool,
        *,
        wake: Callable[[], None],
        show: Callable[[list[Message]], None],
    ) -> None:
        self._wake = wake
        self._show = show
        self._policy = policy
        self._limits = limits
        self._first = first
        self._key = key
        self._greedy = greedy
        self._main = asyncio.get_running_loop()
        self._conversations = list[Conversation]()
        self._known = dict[Conversation, list[Message]]()  # messages that may be continued
        self._starts = Counter[str]()  # number of conversations that began with the same messages
        self._unsaid = defaultdict[str, list[Conversation]](list)  # ... whose first was taken back
        self._num_messages = 0
        self.is_over = False  # whether the loop has ended
        self.end: StopReason | None = None  # the limit that was reached
        self.is_cut = False  # whether the latest message was cut off, or had no room
        self.lost_connection = False  # whether the loop has ended because of one
        self._num_asked = 0  # written in the loop's thread; all below in the rollout's
        self._num_taken = 0
        self._num_said = 0
        self._asked = list[Asked]()  # those that may not have reached the loop
        self._since = time.monotonic()  # when the loop began, or got its last message

    @property
    def is_busy(self) -> bool:
        """Whether the loop does something else than wait for messages."""
        # In this order: the loop's thread may ask for the next message at any moment.
        is_going_on = any(map(_is_going_on, self._asked))
        return is_going_on or self._num_taken == self._num_said or self._num_asked > self._num_taken

    @property
    def busy_s(self) -> float:
        """The seconds since the loop's last message, or 0 while it waits for one."""
        is_open = self._num_asked > self._num_said
        return 0.0 if is_open else time.monotonic() - self._since

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
        conversation = with_usual_messages(deepcopy(list(messages)))
        schemas = deepcopy(list(tools or ()))
        if problem := messages_problem(conversation) or schemas_problem(schemas):
            raise ValueError(f"policy.message: {problem}")
        if not is_plain([conversation, schemas]):
            raise ValueError(
                "policy.message: it holds what JSON cannot, such as NaN or half a character"
            )
        if self.is_over or self.end is not None:  # this is no message that the loop waits for
            await asyncio.sleep(0)  # or a loop that asks on would block the event loop
            raise EpisodeOver(self.end or StopReason.COMPLETED)
        conversation = [
            {key: message[key] for key in KEYS if key in message} for message in conversation
        ]
        self._num_asked += 1
        try:
            await asyncio.sleep(0)  # messages that are asked for at once come together
        except BaseException:
            self._num_asked -= 1
            raise
        asked = Asked(conversation, schemas, asyncio.get_running_loop())
        self._main.call_soon_threadsafe(self._take, asked)
        try:
            message = await asyncio.wrap_future(asked.answer)
            if self.is_over:
                raise EpisodeOver(self.end or StopReason.COMPLETED)
            asked.has_arrived = True
            self.is_cut = message["finish_reason"] == "length"
            return message
        finally:
            if not asked.has_arrived:
                with suppress(RuntimeError):  # the rollout has ended
                    self._main.call_soon_threadsafe(self._take_back, asked)
            self._settle(asked, TURNS)

    def _settle(self, asked: Asked, turns: int) -> None:
        """Wait for some turns of the loop's event loop, then let the sampler go on."""
        if turns:
            asked.loop.call_soon(self._settle, asked, turns - 1)
            return
        asked.is_settled = True
        with suppress(RuntimeError):  # the rollout has ended
            self._main.call_soon_threadsafe(self._wake)

    def _take(self, asked: Asked) -> None:
        """Begin to make a message, in the rollout's event loop."""
        self._asked = [a for a in self._asked if not a.has_arrived or _is_going_on(a)]
        self._asked.append(asked)
        asked.task = asyncio.create_task(self._next(asked))
        asked.task.add_done_callback(lambda task: self._give(asked, task))

    def _give(self, asked: Asked, task: asyncio.Task[Message]) -> None:
        """Give the loop what was made."""
        self._num_taken += not asked.is_taken  # it was given up before
        self._num_said += 1
        if task.cancelled():
            asked.answer.cancel()
        elif not asked.answer.set_running_or_notify_cancel():
            task.exception()  # which nobody waits for
        elif (error := task.exception()) is not None:
            asked.answer.set_exception(error)
        else:
            self._since = time.monotonic()
            asked.answer.set_result(task.result())

    def _take_back(self, asked: Asked) -> None:
        """Undo a message that has not reached the loop, so that it is not trained."""
        if asked.task is not None:
            asked.task.cancel()
        if asked.undo is not None:
            asked.undo()
            asked.undo = None
            self._first.num_malformed_calls -= asked.is_malformed

    async def _next(self, asked: Asked) -> Message:
        asked.is_taken = True
        self._num_taken += 1  # from now on, the policy has it
        if self.end is None and self._num_messages >= self._limits.max_turns:
            self.end = StopReason.MAX_TURNS
        if self.is_over or self.end is not None:
            raise EpisodeOver(self.end or StopReason.COMPLETED)
        self._num_messages += 1
        conversation = self._conversation_of(asked)
        self._wake()
        turn = await self._policy.message(conversation)
        if turn is None:
            self.is_cut = True
            raise EpisodeOver(StopReason.MAX_TOKENS)
        self._show(conversation.trajectory.messages[-1:])
        asked.is_malformed = bool(turn.parsed.malformed)
        self._first.num_malformed_calls += asked.is_malformed
        message = turn.parsed.message()
        if turn.finished:
            self._known[conversation] = [*map(_compared, (*asked.messages, message))]
        return {**deepcopy(message), "finish_reason": "stop" if turn.finished else "length"}

    def _conversation_of(self, asked: Asked) -> Conversation:
        """Return the conversation that messages continue, with the new ones, or a new one."""
        messages = [*map(_compared, asked.messages)]
        for conversation, known in self._known.items():
            new = asked.messages[len(known) :]
            goes_on = messages[: len(known)] == known and conversation.schemas == asked.tools
            if goes_on and new and all(message["role"] in REPLIES for message in new):
                del self._known[conversation]  # until its next message is there
                asked.undo = self._undo(conversation, known)
                conversation.trajectory.messages += new
                self._show(new)
                return conversation
        # The key must not depend on the order in which conversations that run at once begin.
        start = json.dumps([messages, asked.tools], sort_keys=True)
        conversation = self._unsaid[start].pop() if self._unsaid[start] else self._new(start, asked)
        conversation.trajectory.messages = list(asked.messages)
        asked.undo = self._undo(conversation, start)
        self._show(conversation.trajectory.messages)
        return conversation

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
            place=None,
        )
        self._conversations.append(conversation)
        return conversation

    def _undo(self, conversation: Conversation, known: list[Message] | str) -> Callable[[], None]:
        """Return what makes a conversation as it is now; `known` is what it then continues."""
        rewind = conversation.rewinder()

        def undo() -> None:
            self._policy.close(conversation)
            rewind()
            if isinstance(known, str):
                self._unsaid[known].append(conversation)
            else:
                self._known[conversation] = known

        return undo

    def wait(self, awaitable: Coroutine[Any, Any, Value]) -> Value:
        """Return what a method gives, to a loop that is not async: `wait(message(messages))`."""
        if asyncio._get_running_loop() is not None:
            awaitable.close()
            raise RuntimeError("policy.wait: this code is async; write await")
        return run_coroutine(awaitable)

    def close(self) -> None:
        """End all conversations; whoever asks for another message gets an EpisodeOver."""
        self.is_over = True
        for asked in self._asked:
            if not asked.has_arrived:
                self._take_back(asked)
        for conversation in self._conversations:
            self._policy.close(conversation)


def _is_going_on(asked: Asked) -> bool:
    """Return whether a loop may not yet have done what follows its message."""
    is_made = asked.task is not None and asked.task.done()
    return is_made and not asked.is_settled and not asked.loop.is_closed()


def _compared(message: Message) -> Message:
    """Return what is compared of a message: not the ids of calls, which clients write anew."""
    names = ("role", "content") if message["role"] == "assistant" else ("role", "content", "name")
    compared = {key: message[key] for key in names if key in message}
    if calls := message.get("tool_calls"):
        functions = [call["function"] for call in calls]
        pairs = [{"name": f["name"], "arguments": f.get("arguments") or {}} for f in functions]
        compared["tool_calls"] = [{"type": "function", "function": pair} for pair in pairs]
    return compared


async def play(
    loop: Play, policy: LoopPolicy, task: Task, others_score: bool = False
) -> float | str | None:
    """Let a loop play; return what it returns: the reward or, if others score, a text or None.

    A loop that is not async plays in a thread of its own. If a loop does not catch EpisodeOver,
    the reward is 0, or what others say.
    """
    value: Any = None if others_score else 0.0
    try:
        try:
            played = loop if is_async(loop) else partial(asyncio.to_thread, loop)
            value = await played(policy, task)
        except* EpisodeOver:  # also in a group, as a TaskGroup raises it
            pass
        finally:
            policy.is_over = True
    except Exception as error:
        cause = first_of(error)
        # The loop's own deadline may have passed because of what the model has said.
        is_deadline = type(cause) is TimeoutError and isinstance(
            cause.__cause__ or cause.__context__, asyncio.CancelledError
        )
        policy.lost_connection = wait_of(error) is not None and not is_deadline
        raise
    if others_score and value is None:
        return None
    if others_score and isinstance(value, str):
        return writable(value)
    name = f"{getattr(loop, '__name__', 'play')}{place_of(loop)}"
    try:
        reward = as_number(value, name)
    except Exception:  # `__float__` may be user code
        reward = math.nan
    if not abs(reward) <= MAX_REWARD:
        scored = "a text or None" if others_score else "give reward_funcs, which score a text"
        hint = f"return the reward, a number up to {MAX_REWARD:g}, or {scored}"
        raise ValueError(f"{name} returned {shown(value)}; {hint}")
    return reward
