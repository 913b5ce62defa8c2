"""A user's own loop: `async def play(policy, task) -> float` plays an episode, returns its reward.

The loop runs in the environments' event loop. It asks `await policy.message(messages, tools)` as
often as it wants, also several times at once. What was sampled is what is trained: messages that
continue an earlier conversation go on with its tokens, and any others start a new one.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from pipeline.config.settings import RolloutSettings
from pipeline.data.rng import stream_key
from pipeline.data.rows import messages_problem, with_usual_messages
from pipeline.data.tasks import Message, Task
from pipeline.environments.discovery import Play, schemas_problem
from pipeline.files.untrusted import is_plain
from pipeline.rollout.trajectory import Conversation, Policy, StopReason, Trajectory

REPLIES = ("user", "tool")  # roles of messages with which a conversation goes on
KEYS = ("role", "content", "tool_calls", "name")  # what is compared of messages


class EpisodeOver(Exception):
    """`policy.message` raises this if no further message is allowed.

    A loop that does not catch it ends with reward 0. `reason` says which limit was reached.
    """

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"the episode is over: {reason}")
        self.reason = reason


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
        self._known = dict[Conversation, tuple[list[Message], list[Any]]]()  # messages and tools
        self._starts = Counter[str]()  # number of conversations that began with the same messages
        self._num_messages = 0
        self._is_over = False
        self.end: StopReason | None = None  # the limit that was reached
        self.is_cut = False  # whether the latest message was cut off
        # Each is written by one thread: the loop's, or the rollout's.
        self._num_asked = 0
        self._num_taken = 0
        self._num_answered = 0
        self._since = time.monotonic()  # when the loop began, or got its last message

    @property
    def is_busy(self) -> bool:
        """Whether the loop does something else than wait for messages."""
        num_open = self._num_asked - self._num_answered
        return num_open == 0 or self._num_asked > self._num_taken

    @property
    def busy_s(self) -> float:
        """The seconds since the loop's last message, or 0 while it waits for one."""
        is_open = self._num_asked > self._num_answered
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
        given = with_usual_messages(deepcopy(list(messages)))
        schemas = deepcopy(list(tools or ()))
        if problem := messages_problem(given) or schemas_problem(schemas):
            raise ValueError(f"policy.message: {problem}")
        if not is_plain([given, schemas]):
            raise ValueError(
                "policy.message: it holds what JSON cannot, such as NaN or half a character"
            )
        if self._is_over or self.end is not None:  # this is no message that the loop waits for
            await asyncio.sleep(0)  # or a loop that asks on would block the event loop
            raise EpisodeOver(self.end or StopReason.COMPLETED)
        given = [{key: message[key] for key in KEYS if key in message} for message in given]
        self._num_asked += 1
        try:
            await asyncio.sleep(0)  # messages that are asked for at once come together
            asked = asyncio.run_coroutine_threadsafe(self._next(given, schemas), self._main)
            message = await asyncio.wrap_future(asked)
            self._since = time.monotonic()
            return message
        finally:
            self._num_answered += 1

    async def _next(self, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
        """Run in the rollout's event loop."""
        self._num_taken += 1
        if self.end is None and self._num_messages >= self._limits.max_turns:
            self.end = StopReason.MAX_TURNS
        if self.end is not None:
            raise EpisodeOver(self.end)
        self._num_messages += 1
        conversation = self._conversation_of(messages, tools)
        self._wake()
        said = await self._policy.message(conversation)
        if said is None:
            self.end = StopReason.MAX_TOKENS
            raise EpisodeOver(self.end)
        self._show(conversation.trajectory.messages[-1:])
        self._first.num_malformed_calls += bool(said.parsed.malformed)
        self.is_cut = not said.finished
        message = {k: v for k, v in said.parsed.message().items() if k in KEYS}
        if said.finished:
            self._known[conversation] = [*messages, message], tools
        return {**deepcopy(message), "finish_reason": "stop" if said.finished else "length"}

    def _conversation_of(
        self, messages: list[Message], tools: list[dict[str, Any]]
    ) -> Conversation:
        """Return the conversation that `messages` continue, with the new ones, or a new one."""
        for conversation, (known, its_tools) in self._known.items():
            new = messages[len(known) :]
            goes_on = messages[: len(known)] == known and its_tools == tools
            if goes_on and new and all(message["role"] in REPLIES for message in new):
                del self._known[conversation]  # until its next message is there
                conversation.trajectory.messages += new
                self._show(new)
                return conversation
        # The key must not depend on the order in which conversations that run at once begin.
        start = json.dumps([messages, tools], sort_keys=True)
        key = stream_key("conversation", self._key, start, self._starts[start])
        self._starts[start] += 1
        trajectory = self._first
        if self._conversations:
            trajectory = Trajectory(domain=self._first.domain, task_id=self._first.task_id)
            self._first.further.append(trajectory)
        trajectory.messages = list(messages)
        self._show(trajectory.messages)
        conversation = Conversation(
            trajectory=trajectory,
            schemas=tools,
            key=key,
            greedy=self._greedy,
            is_text=not tools,
        )
        self._conversations.append(conversation)
        return conversation

    def close(self) -> None:
        """End all conversations; whoever asks for another message gets an EpisodeOver."""
        self._is_over = True
        for conversation in self._conversations:
            self._policy.close(conversation)


async def play(loop: Play, policy: LoopPolicy, task: Task) -> Any:
    """Let a loop play; return the reward, which is 0 if the loop does not catch EpisodeOver."""
    try:
        return await loop(policy, task)
    except* EpisodeOver:  # also in a group, as a TaskGroup raises it
        pass
    return 0.0
