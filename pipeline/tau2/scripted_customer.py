"""A customer without a language model: a small state machine over a scenario of airline or retail.

The customer says why he writes, then one part of the scenario after the other. Asked for his
identity, he repeats what he knows; asked for anything else, he agrees. He ends the conversation
after a transfer, or when nothing is left to say and the agent asks nothing, or asks whether there
is anything else. Equal messages get equal answers. The English of the scenario is turned from the
second person into the first one by words, not by grammar.
"""

import re
from collections.abc import Mapping
from typing import Any

from pipeline.customers.scenario import spoken

MOST_REPLIES = 20
PARTS = ("known_info", "unknown_info", "task_instructions")  # after `reason_for_call`
FIRST_PERSON = {
    **{"you are": "I am", "you're": "I'm", "you were": "I was", "yourself": "myself"},
    **{"yours": "mine", "your": "my", "you": "I"},
    **{f"{word} you": f"{word} me" for word in ("to", "for", "asks", "tells", "told", "offers")},
}
SECOND = re.compile(rf"\b({'|'.join(sorted(FIRST_PERSON, key=len)[::-1])})\b", re.IGNORECASE)
IDENTITY = re.compile(
    r"\b(id|e-?mail|name|zip|who (are|am)|identity|verify|(order|reservation) (id|number))\b"
)
ELSE = re.compile(r"\b(anything|something) (else|more)\b|\bfurther\b")
TRANSFER = re.compile(r"\btransferr(ed|ing)\b")


class ScriptedCustomer:
    """The customer of one episode; `instructions` are the parts of a scenario by name."""

    def __init__(self, instructions: Mapping[str, Any]) -> None:
        told = {name: in_first_person(str(text)) for name, text in instructions.items() if text}
        self._known = told.get("known_info", "I do not know more than that.")
        self._left = [told[name] for name in PARTS if name in told]
        self.first_words = told.get("reason_for_call") or self._left.pop(0)
        self._num_replies = 0

    def reply(self, message: str) -> str | None:
        """Return the answer to a message, or None if the customer ends the conversation."""
        text = spoken(message).lower()
        self._num_replies += 1
        if TRANSFER.search(text) or self._num_replies > MOST_REPLIES:
            return None
        if self._left:
            return self._left.pop(0)
        if "?" not in text or ELSE.search(text):
            return None
        return self._known if IDENTITY.search(text) else "Yes, please."


def in_first_person(text: str) -> str:
    """Return a text about "you" as a text about "I"."""

    def replaced(match: re.Match[str]) -> str:
        word = FIRST_PERSON[match[0].lower()]
        return word[0].upper() + word[1:] if match[0][0].isupper() else word

    return SECOND.sub(replaced, text).strip()
