"""A language model behind an endpoint, with its answers on disk and its budget.

A resumed run pays for no call twice. Each rank appends to a file of its own and reads the files of
all ranks when it starts. A line is written at once, so a killed process loses no answer; an
incomplete last line is dropped.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.common.console import say
from pipeline.common.durable import LinesFile
from pipeline.common.errors import UserError
from pipeline.common.untrusted import shown
from pipeline.config.settings import EndpointSettings
from pipeline.data.tasks import Message
from pipeline.environments.faults import Outage
from pipeline.environments.language_models.endpoint import (
    QUIET_S,
    Endpoint,
    Refused,
    Useless,
    spoken,
)

if TYPE_CHECKING:
    from pipeline.distributed.ranks import Ranks  # imports torch

PATIENCE = 0.9  # share of call_timeout after which a call gives up before the rollout does


class Unanswered(Outage):
    """The endpoint refuses a conversation, for instance because it is too long for its model."""


def key_of(*parts: Any) -> str:
    """Return the hash of JSON values: what was asked of which model."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


class AnswerCache:
    """Answers by key. `num_calls` and `num_tokens` count what all ranks have paid so far.

    Raises UserError for a file that holds no answers.
    """

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._answers: dict[str, Message] = {}
        self.num_calls = 0
        self.num_tokens = 0
        own = folder / f"{name}.jsonl"
        size = 0
        for path in sorted(folder.glob("*.jsonl")):
            lines = path.read_bytes().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith(b"\n")]
            for number, line in enumerate(whole, 1):
                try:
                    self._take(**json.loads(line))
                except (ValueError, TypeError):
                    where = f"{path}, line {number}"
                    remedy = "remove the line, or the file"
                    raise UserError(f"{where}: holds no answer ({shown(line)}); {remedy}") from None
            if path == own:
                size = sum(map(len, whole))
        self._file = LinesFile(own, size)

    def _take(self, *, key: str, message: Message | None, num_tokens: int) -> None:
        self.num_calls += 1
        self.num_tokens += num_tokens
        if message is not None:
            self._answers[key] = message

    def get(self, key: str) -> Message | None:
        return self._answers.get(key)

    def put(self, key: str, message: Message | None, num_tokens: int) -> None:
        """Store a paid answer; None stands for an answer that was of no use."""
        entry: dict[str, Any] = {"key": key, "message": message, "num_tokens": num_tokens}
        self._file.append(json.dumps(entry))
        self._take(**entry)

    def close(self) -> None:
        self._file.close()


def said_on_one_rank(ranks: "Ranks") -> Callable[[str], None]:
    """Return a function that prints a line on the rank that has it first, once in QUIET_S seconds.

    A rank whose calls are done notices no outage, so the main rank alone might print nothing.
    """

    def tell(line: str) -> None:
        if ranks.is_first(f"{line} {time.time() // QUIET_S}"):
            say(line)

    return tell


class LanguageModel:
    """The language model that plays a `role` of a run, on one rank.

    `settings` are those of the role. The answers of the role `customer` are in RUN/customers. Each
    rank may spend an equal share of what is left of the budget (`max_calls`, `max_tokens`). After
    the budget is spent, or after the endpoint has refused all calls, `ended` says why, and each new
    call raises Outage. `call_timeout` is the seconds that a call may take. `as_written` is that of
    `Endpoint`.
    """

    def __init__(
        self,
        role: str,
        settings: EndpointSettings,
        call_timeout: float,
        folder: Path,
        ranks: "Ranks | None" = None,
        *,
        name: str = "",
        as_written: bool = False,
    ) -> None:
        rank = 0 if ranks is None else ranks.rank
        num_ranks = 1 if ranks is None else ranks.num_ranks
        self._role = role
        self._key_name = settings.key
        self._endpoint = Endpoint(
            url=str(settings.url),
            model=str(settings.model),
            temperature=settings.temperature,
            key=os.environ.get(settings.key, "").strip(),
            patience_s=PATIENCE * call_timeout,
            say=say if ranks is None else said_on_one_rank(ranks),
            role=role,
            as_written=as_written,
        )
        self.cache = AnswerCache(folder / f"{role}s", name or f"rank-{rank}")
        self.ended = ""
        self._num_open = 0
        self._as_written = as_written
        self._unanswered = dict[str, Outage]()  # by key; to ask again would be paid for nothing

        def share(limit: int | None, used: int) -> float:
            """Return how much this rank may have spent when it stops."""
            if limit is None:
                return inf
            return used + (limit - used + num_ranks - 1 - rank) // num_ranks

        self._most_calls = share(settings.max_calls, self.cache.num_calls)
        self._most_tokens = share(settings.max_tokens, self.cache.num_tokens)
        self._settings = settings

    def close(self) -> None:
        self.cache.close()

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        seed: int = 0,
        **options: Any,
    ) -> Message:
        """Return the model's next message, from the disk if this was asked before.

        `options` are further fields of the request, which may replace `temperature`. Raises Outage
        if there is no answer, and Unanswered if the endpoint refuses this conversation alone.
        """
        endpoint = self._endpoint
        further = [options] if options else []
        key = key_of(endpoint.model, endpoint.temperature, seed, [*messages], [*tools], *further)
        if (known := self.cache.get(key)) is not None:
            # A file of an earlier version may hold thoughts.
            return known if self._as_written else {**known, "content": spoken(known["content"])}
        if (unanswered := self._unanswered.get(key)) is not None:
            raise type(unanswered)(*unanswered.args)
        self._check_budget()
        self._num_open += 1
        try:
            return await endpoint.answer(
                messages, tools, seed, partial(self.cache.put, key), **options
            )
        except Useless as useless:
            self._unanswered[key] = useless
            raise
        except Refused as refused:
            why = f"{self._role}_url: {endpoint.url} refuses a call ({refused})"
            if not refused.for_all:
                self._unanswered[key] = Unanswered(why)
                raise self._unanswered[key] from None
            names = f"{self._role}_url, {self._role}_model or the key in {self._key_name}"
            is_of_form = str(refused).startswith(("status 400", "status 422"))
            named = [n for n in ("temperature", *options) if re.search(rf"\b{n}\b", str(refused))]
            if is_of_form and named:
                names = f"the {named[0]} of the call"
                names += f" ({self._role}_temperature)" if named[0] == "temperature" else ""
            self.ended = f"{why}; mend {names}"
            raise Outage(why) from None
        finally:
            self._num_open -= 1

    def _check_budget(self) -> None:
        spent = ""
        if self.cache.num_calls + self._num_open >= self._most_calls:
            spent = f"calls: got {self._settings.max_calls}"
        elif self.cache.num_tokens >= self._most_tokens:
            spent = f"tokens: got {self._settings.max_tokens}"
        if spent and not self.ended:
            hint = "go on with --resume-from-checkpoint auto and more, nothing is paid twice"
            self.ended = f"{self._role}_max_{spent}, which is spent; {hint}"
        if self.ended:
            raise Outage(f"{self._role}: {self.ended}")
