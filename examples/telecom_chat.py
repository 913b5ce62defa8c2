"""An example of a domain of one's own in which a user talks: telecom without the tool `ask_user`.

The agent asks the customer in a message. The customer acts on the phone and answers. A run takes
this domain with the flags `--domains telecom_chat` and
`--environments '{telecom_chat: examples.telecom_chat:TelecomChatEnvironment}'`.
`pipeline/environments/domains.py` lists the parts of a domain's module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pipeline.data.tasks import Task
from pipeline.environments.embedded import telecom
from pipeline.environments.embedded.cases import MAX_TASKS as MAX_TASKS
from pipeline.environments.embedded.cases import with_title, words_of
from pipeline.environments.embedded.telecom import (
    TelecomDatabase,
    TelecomEnvironment,
    UserAction,
    done_by_user,
)
from pipeline.environments.experts import Agent
from pipeline.environments.tools import User

POLICY = """
You serve a phone company's customers through tools and in words. Look the line up first. Change
only what is at fault, ask only what the rules below need, and end with a short message that asks
for nothing once the work is done.
- No service. Status ended: transfer("ended"). Status paused, bill due: send the bill, ask the
  customer to pay it, resume the line. Status paused, bill paid: resume the line. Status active:
  have the phone checked.
- Slow data. Plan basic: transfer("no_data"). Usage over the limit: ask the customer how much to
  add, add it, tell them the amount. Usage under the limit: have the phone checked.
- No service abroad. Plan basic: transfer("no_roaming"). Roaming off: enable it. Roaming on: have
  the phone checked.
- Phone check: only the customer can touch the phone. Ask them to check it, in a message of its
  own; they tell one fault. Then ask them for its remedy, and for no other:
  airplane: turn airplane mode off; loose_sim: reinsert the SIM card; old_apn: reset the APN;
  frozen: restart the phone; wifi_only: turn mobile data on; low_power: turn the battery saver off;
  wrong_band: set the band to automatic.
"""

# The expert's message that asks for each action.
REQUESTS = {
    "check": "Please check your phone.",
    "pay": "Please pay the bill.",
    "fly_off": "Please turn airplane mode off.",
    "reseat": "Please reinsert the SIM card.",
    "reset_apn": "Please reset the APN.",
    "restart": "Please restart the phone.",
    "data_on": "Please turn mobile data on.",
    "saver_off": "Please turn the battery saver off.",
    "auto_band": "Please set the band to automatic.",
}
# A clause asks for an action if the clause has all words of one of the action's texts.
WORDINGS: dict[UserAction, tuple[str, ...]] = {
    "check": ("check phone", "check device", "check it", "look phone", "phone show"),
    "pay": ("pay bill", "pay it", "settle bill"),
    "fly_off": (
        *("turn airplane off", "switch airplane off", "disable airplane", "leave airplane"),
        *("turn flight mode off", "switch flight mode off", "disable flight mode"),
    ),
    "reseat": ("reinsert sim", "reseat sim", "take sim out", "remove sim"),
    "reset_apn": ("reset apn", "restore apn", "apn default"),
    "restart": ("restart phone", "restart device", "reboot phone", "reboot device"),
    "data_on": (
        *("turn mobile data on", "switch mobile data on", "enable mobile data"),
        *("turn cellular data on", "switch cellular data on", "enable cellular data"),
    ),
    "saver_off": (
        *("turn saver off", "switch saver off", "disable saver"),
        *("turn saving off", "switch saving off", "disable saving"),
    ),
    "auto_band": ("set band automatic", "set band auto", "switch band automatic"),
}
TOLD = "It shows {}."
DONE, PAID, NO_BILL = "Done.", "I have paid it.", "I have no bill."

_VERBS = "|".join(sorted({text.split()[0] for texts in WORDINGS.values() for text in texts}))
_ASKS = re.compile(
    r"\bplease\b|\b(can|could|would|will) you\b|\byou (should|must|need to|have to)\b|\byou to\b"
    rf"|^((now|then|next|first|just|and|try|to|,) )*({_VERBS})\b|^what does\b"
)
_ASKS_NOT = re.compile(r"\b(not|dont|never|without|nothing|no need|avoid)\b")
_CLAUSES = re.compile(r",|\b(?:and|then|but|or)\b")


def asked_for(message: str) -> list[UserAction]:
    """Return the actions that a message asks for, in the order of the message's clauses."""
    actions: list[UserAction] = []
    for sentence in re.split(r"[.!?;:\n]+", re.sub("['\u2019]", "", message.lower())):
        words = " ".join(re.findall(r"[a-z_]+|,", sentence))
        if _ASKS.search(words):
            actions += [action for clause in _CLAUSES.split(words) for action in _actions(clause)]
    return actions


def _actions(clause: str) -> Iterator[UserAction]:
    """Yield the action that a clause asks for, if any; a negated clause asks only for a check."""
    words = set(clause.split())
    for action, wordings in WORDINGS.items():
        if any(words.issuperset(wording.split()) for wording in wordings):
            if action == "check" or not _ASKS_NOT.search(clause):
                yield action
            return


@dataclass
class PhoneUser:
    """A customer who performs the actions that a message asks for, or answers one question."""

    database: TelecomDatabase
    answers: User | None
    steps: list[str] = field(default_factory=list)  # the steps of the episode

    def reply(self, message: str) -> str | None:
        if actions := asked_for(message):
            # The policy text asks for a check in a separate message. The expert never has joined
            # steps, so a check together with other actions earns no reward.
            joined = [" ".join(actions)] if "check" in actions else actions
            self.steps += [f"ask_user({asked})" for asked in joined]
            return " ".join(self._do(action) for action in actions)
        return self.answers.reply(message) if self.answers else None

    def _do(self, action: UserAction) -> str:
        result = done_by_user(self.database, action)
        if action == "check":
            return TOLD.format(result["fault"])
        if action == "pay":
            return PAID if result["bill"] == "paid" else NO_BILL
        return DONE


class _Talker(Agent):
    """An agent that replaces calls of `ask_user` by messages to the customer."""

    def call(self, tool: str, /, **arguments: Any) -> Any:
        if tool != "ask_user":
            return super().call(tool, **arguments)
        before, after = TOLD.split("{}")
        answer = self.ask(REQUESTS[arguments["action"]])
        return {"fault": answer.removeprefix(before).removesuffix(after)}


def expert(agent: Agent, goal: dict[str, str]) -> str:
    """Serve one request by the policy."""
    return telecom.expert(_Talker(**vars(agent)), goal)


class TelecomChatEnvironment(TelecomEnvironment):
    """The tools of telecom without `ask_user`."""

    ask_user = None  # type: ignore[assignment]  # removes the tool
    _expert = staticmethod(expert)  # pyrefly: ignore[bad-assignment]

    def reset(self, **row: Any) -> str | None:
        addition = super().reset(**row)
        self.user = PhoneUser(self._db, self.user, self._steps)
        return addition


FAMILIES = telecom.FAMILIES
WORDS = partial(
    words_of,
    "telecom_chat",
    TelecomChatEnvironment,
    FAMILIES,
    said=(*REQUESTS.values(), *TOLD.split("{}"), DONE, PAID, NO_BILL),
)


def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    """Return the tasks of telecom for the same arguments, with this domain's policy text."""
    system = {"role": "system", "content": with_title("telecom_chat", POLICY)}
    return [
        replace(task, domain="telecom_chat", prompt=(dict(system), *task.prompt[1:]))
        for task in telecom.generate_tasks(seed, n, split, difficulty)
    ]
