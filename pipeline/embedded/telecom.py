"""Telecom: bring a line, mobile data or roaming back.

The phone is the customer's, and only they can touch it.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Literal

from pydantic import BaseModel

from pipeline.data.tasks import Task
from pipeline.embedded.generation import IDS, Draft, Family, generate
from pipeline.embedded.generation import MAX_TASKS as MAX_TASKS
from pipeline.embedded.scripted import CaseEnvironment, Database, named_record
from pipeline.embedded.words import words_of
from pipeline.environments.experts import Agent
from pipeline.environments.tools import ToolError

POLICY = """
You serve a phone company's customers through tools. Look the line up first. Change only what is at
fault, ask only what the rules below need, and end with a short message once the work is done.
- No service. Status ended: transfer("ended"). Status paused, bill due: send the bill, ask the user
  to pay, resume the line. Status paused, bill paid: resume the line. Status active: have the phone
  checked.
- Slow data. Plan basic: transfer("no_data"). Usage over the limit: ask the customer how much to
  add, add it, tell them the amount. Usage under the limit: have the phone checked.
- No service abroad. Plan basic: transfer("no_roaming"). Roaming off: enable it. Roaming on: have
  the phone checked.
- Phone check: ask the user to check; they report one fault. Ask them for its remedy, and for no
  other:
  airplane: fly_off; loose_sim: reseat; old_apn: reset_apn; frozen: restart; wifi_only: data_on;
  low_power: saver_off;
  wrong_band: auto_band.
"""

Amount = Literal["1", "2", "5"]
Reason = Literal["ended", "no_data", "no_roaming"]
UserAction = Literal[
    "check", "pay", "fly_off", "reseat", "reset_apn", "restart", "data_on", "saver_off", "auto_band"
]
REMEDIES = {
    "airplane": "fly_off",
    "loose_sim": "reseat",
    "old_apn": "reset_apn",
    "frozen": "restart",
    "wifi_only": "data_on",
    "low_power": "saver_off",
    "wrong_band": "auto_band",
}
AMOUNTS = ("1", "2", "5")


class Line(BaseModel):
    """One phone line."""

    customer: str
    status: Literal["active", "paused", "ended"] = "active"
    bill: Literal["due", "paid"] = "paid"
    plan: Literal["basic", "plus"] = "plus"
    usage: Literal["over", "under"] = "under"
    roaming: Literal["on", "off"] = "on"
    bill_sent: bool = False
    added: str | None = None


class Device(BaseModel):
    """The customer's phone: what is wrong with it, and every remedy tried on it."""

    fault: str
    remedies: list[str] = []


class TelecomDatabase(Database):
    """Lines by id, and the phone on the customer's side."""

    lines: dict[str, Line]
    device: Device


def done_by_user(database: TelecomDatabase, action: UserAction) -> dict[str, str]:
    """What the customer finds or does, and what comes of it."""
    device = database.device
    if action == "check":
        return {"fault": device.fault}
    if action == "pay":
        sent = [line for line in database.lines.values() if line.bill_sent]
        for line in sent:
            line.bill = "paid"
        return {"bill": "paid" if sent else "none"}
    device.remedies.append(action)
    if REMEDIES.get(device.fault) == action:
        device.fault = "none"
    return {"ok": "yes"}


class TelecomEnvironment(CaseEnvironment):
    """The company's tools over one task's database; `ask_user` is the only way to the phone."""

    database_class = TelecomDatabase

    def find_line(self, customer: str) -> dict[str, str]:
        """Find the line of a customer.

        Args:
            customer: Customer id.
        """
        for key, line in self._db.lines.items():
            if line.customer == customer:
                return {"line": key}
        raise ToolError(f"no {customer}")

    def get_line(self, line: str) -> dict[str, str]:
        """Look a line up.

        Args:
            line: Line id.
        """
        return self._shown("lines", line, "status", "bill", "plan", "usage", "roaming")

    def send_bill(self, line: str) -> dict[str, str]:
        """Send the customer the bill of a line.

        Args:
            line: Line id.
        """
        self._record("lines", line).bill_sent = True
        return {"bill": "sent"}

    def resume(self, line: str) -> dict[str, str]:
        """Resume a paused line.

        Args:
            line: Line id.
        """
        self._record("lines", line).status = "active"
        return {"ok": "yes"}

    def add_data(self, line: str, amount: Amount) -> dict[str, str]:
        """Add data to a line.

        Args:
            line: Line id.
            amount: Gigabytes.
        """
        self._record("lines", line).added = amount
        return {"ok": "yes"}

    def enable_roaming(self, line: str) -> dict[str, str]:
        """Enable roaming on a line.

        Args:
            line: Line id.
        """
        self._record("lines", line).roaming = "on"
        return {"ok": "yes"}

    def ask_user(self, action: UserAction) -> dict[str, str]:
        """Ask the user to do something: check the phone, pay a bill that was sent, or try a remedy
        on the phone.

        Args:
            action: What the user shall do.
        """
        return done_by_user(self._db, action)

    def transfer(self, reason: Reason) -> dict[str, str]:
        """Hand the customer over to a person, which ends the conversation.

        Args:
            reason: Why.
        """
        return self._transfer(reason)

    def _serve(self, agent: Agent, goal: dict[str, str]) -> str:
        return expert(agent, goal)


def expert(agent: Agent, goal: dict[str, str]) -> str:
    """Serve one request by the policy."""
    line = named_record(agent, goal, "find_line", "line")
    record = agent.call("get_line", line=line)
    serve = {"service": _service, "data": _data, "abroad": _abroad}[goal["family"]]
    return serve(agent, line, record)


def _service(agent: Agent, line: str, record: dict[str, str]) -> str:
    if record["status"] == "paused":
        right = "bill" if record["bill"] == "due" else "resume"
    else:
        right = "ended" if record["status"] == "ended" else "check"
    choice = agent.decide(right, ["ended", "bill", "resume", "check"])
    if choice == "ended":
        return _transferred(agent, choice)
    if choice == "check":
        return _check(agent)
    if choice == "bill":
        agent.call("send_bill", line=line)
        agent.call("ask_user", action="pay")
    agent.call("resume", line=line)
    return "Done."


def _data(agent: Agent, line: str, record: dict[str, str]) -> str:
    right = (
        "no_data" if record["plan"] == "basic" else "ask" if record["usage"] == "over" else "check"
    )
    choice = agent.decide(right, ["no_data", "ask", "check"])
    if choice == "no_data":
        return _transferred(agent, choice)
    if choice == "check":
        return _check(agent)
    amount = agent.ask("How much?")
    agent.call("add_data", line=line, amount=amount)
    return f"Added {amount}."


def _abroad(agent: Agent, line: str, record: dict[str, str]) -> str:
    right = "enable" if record["roaming"] == "off" else "check"
    right = "no_roaming" if record["plan"] == "basic" else right
    choice = agent.decide(right, ["no_roaming", "enable", "check"])
    if choice == "no_roaming":
        return _transferred(agent, choice)
    if choice == "check":
        return _check(agent)
    agent.call("enable_roaming", line=line)
    return "Done."


def _check(agent: Agent) -> str:
    fault = agent.call("ask_user", action="check")["fault"]
    remedy = agent.decide(REMEDIES[fault], list(REMEDIES.values()), chained=True)
    agent.call("ask_user", action=remedy)
    return "Done."


def _transferred(agent: Agent, reason: str) -> str:
    agent.call("transfer", reason=reason)
    return ""


def _line(random: Random, customer: str, **fields: str) -> Line:
    drawn = {
        "bill": random.choice(["due", "paid"]),
        "plan": random.choice(["basic", "plus"]),
        "usage": random.choice(["over", "under"]),
        "roaming": random.choice(["on", "off"]),
    }
    return Line.model_validate({"customer": customer, **drawn, **fields})


def _fields(family: str, branch: str) -> dict[str, str]:
    """What makes a line a case of this branch."""
    if family == "service":
        bill = {"bill": branch} if branch in ("due", "paid") else {}
        return {"status": {"ended": "ended", "check": "active"}.get(branch, "paused"), **bill}
    if branch in ("no_data", "no_roaming"):
        return {"plan": "basic"}
    if family == "data":
        return {"plan": "plus", "usage": "over" if branch == "over" else "under"}
    return {"plan": "plus", "roaming": "off" if branch == "off" else "on"}


def _draft(random: Random, family: str, branch: str) -> Draft:
    ids = random.sample(IDS, 4)
    device = Device(fault=random.choice(list(REMEDIES)))
    lines = {
        ids[0]: _line(random, ids[1], **_fields(family, branch)),
        ids[2]: _line(random, ids[3]),
    }
    database = TelecomDatabase(lines=lines, device=device)
    record = database.lines[ids[0]]
    words = random.choice(AMOUNTS)
    expected, facts = _outcome(database, ids[0], branch, words)
    return Draft(
        goal={"record": ids[0], "customer": ids[1]},
        database=database,
        expected=expected,
        facts=facts,
        answer={"topic": "amount", "words": words} if family == "data" else None,
        visible={
            "record": record.model_dump(exclude={"customer"}),
            "fault": device.fault if branch == "check" else "",
            "amount": words if branch == "over" else "",
        },
    )


def _outcome(
    database: TelecomDatabase, line: str, branch: str, words: str
) -> tuple[TelecomDatabase, tuple[str, ...]]:
    """The database at the end and the facts to tell."""
    expected = type(database).model_validate(database.model_dump())
    final = expected.lines[line]
    if branch in ("ended", "no_data", "no_roaming"):
        expected.case.transferred = branch
    elif branch == "check":
        expected.device.remedies = [REMEDIES[expected.device.fault]]
        expected.device.fault = "none"
    elif branch == "off":
        final.roaming = "on"
    elif branch == "over":
        expected.case.asked = ["amount"]
        final.added = words
        return expected, (words,)
    else:
        final.status = "active"
        if branch == "due":
            final.bill, final.bill_sent = "paid", True
    return expected, ()


FAMILIES = (
    Family(
        name="service",
        phrasings=(
            "no service on {record}",
            "{record} does not work",
            "i can not call with {record}",
        ),
        branches={"ended": 0.22, "due": 0.30, "paid": 0.20, "check": 0.28},
        easy={"ended": 0.30, "paid": 0.70},
        draft=lambda random, branch: _draft(random, "service", branch),
    ),
    Family(
        name="data",
        phrasings=("slow data on {record}", "{record} is slow", "no internet with {record}"),
        branches={"no_data": 0.24, "over": 0.36, "check": 0.40},
        easy={"no_data": 0.30, "check": 0.70},
        draft=lambda random, branch: _draft(random, "data", branch),
    ),
    Family(
        name="abroad",
        phrasings=(
            "{record} fails abroad",
            "i travel with {record}",
            "no signal abroad on {record}",
        ),
        branches={"no_roaming": 0.25, "off": 0.30, "check": 0.45},
        easy={"no_roaming": 0.30, "off": 0.70},
        draft=lambda random, branch: _draft(random, "abroad", branch),
    ),
)

WORDS = partial(
    words_of,
    "telecom",
    TelecomEnvironment,
    FAMILIES,
    said=("How much?", "Added ", "sent", "fault", '{"fault": "'),
    values=REMEDIES,
)


def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    """`n` telecom tasks; see `generation.generate`."""
    return generate("telecom", POLICY, FAMILIES, seed, n, split, difficulty)
