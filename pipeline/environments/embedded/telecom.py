"""Customer service of a phone company. Only the customer can change the customer's phone."""

from functools import partial
from random import Random
from typing import Literal, get_args

from pydantic import BaseModel

from pipeline.environments.embedded.cases import (
    IDS,
    Branch,
    CaseEnvironment,
    Database,
    Draft,
    Family,
    baselines_of,
    expert_of,
    generate,
    random_record,
    tool,
    words_of,
)
from pipeline.environments.embedded.cases import MAX_TASKS as MAX_TASKS
from pipeline.environments.experts import Agent

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
# For each random field of a phone line: the possible values, separated by spaces.
OPTIONS = {"bill": "due paid", "plan": "basic plus", "usage": "over under", "roaming": "on off"}


class Line(BaseModel):
    customer: str
    status: Literal["active", "paused", "ended"] = "active"
    bill: Literal["due", "paid"] = "paid"
    plan: Literal["basic", "plus"] = "plus"
    usage: Literal["over", "under"] = "under"
    roaming: Literal["on", "off"] = "on"
    bill_sent: bool = False
    added: str | None = None


class Device(BaseModel):
    """The customer's phone: the phone's fault, and all remedies that the customer has tried."""

    fault: str
    remedies: list[str] = []


class TelecomDatabase(Database):
    lines: dict[str, Line]
    device: Device


def done_by_user(database: TelecomDatabase, action: UserAction) -> dict[str, str]:
    """Carry out an action of the customer, such as a payment; return the action's result."""
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


ROAMING_OFF = {"plan": "plus", "roaming": "off"}
# What an expert quotes, as the prompt has it.
ENDED_RULE = "Status ended: transfer with reason ended"
DUE_RULE = "Status paused, bill due: send the bill"
PAID_RULE = "Status paused, bill paid: resume the line"
ACTIVE_RULE = "Status active: have the phone checked"
NO_DATA_RULE = "Plan basic: transfer with reason no_data"
OVER_RULE = "Usage over the limit: ask the customer how much to add"
UNDER_RULE = "Usage under the limit: have the phone checked"
NO_ROAMING_RULE = "Plan basic: transfer with reason no_roaming"
OFF_RULE = "Roaming off: enable it"
ON_RULE = "Roaming on: have the phone checked"

FAMILIES = (
    Family(
        "service",
        ("no service on {record}", "{record} does not work", "i can not call with {record}"),
        {
            "ended": Branch(0.22, 0.30, {"status": "ended"}, "ended", ENDED_RULE),
            "due": Branch(0.30, 0.0, {"status": "paused", "bill": "due"}, "bill", DUE_RULE),
            "paid": Branch(0.20, 0.70, {"status": "paused", "bill": "paid"}, "resume", PAID_RULE),
            "check": Branch(0.28, 0.0, {"status": "active"}, "check", ACTIVE_RULE),
        },
    ),
    Family(
        "data",
        ("slow data on {record}", "{record} is slow", "no internet with {record}"),
        {
            "no_data": Branch(0.24, 0.30, {"plan": "basic"}, "no_data", NO_DATA_RULE),
            "over": Branch(0.36, 0.0, {"plan": "plus", "usage": "over"}, "ask", OVER_RULE),
            "check": Branch(0.40, 0.70, {"plan": "plus", "usage": "under"}, "check", UNDER_RULE),
        },
    ),
    Family(
        "abroad",
        ("{record} fails abroad", "i travel with {record}", "no signal abroad on {record}"),
        {
            "no_roaming": Branch(0.25, 0.30, {"plan": "basic"}, "no_roaming", NO_ROAMING_RULE),
            "off": Branch(0.30, 0.70, ROAMING_OFF, "enable_roaming", OFF_RULE),
            "check": Branch(0.45, 0.0, {"plan": "plus", "roaming": "on"}, "check", ON_RULE),
        },
    ),
)


def _bill(agent: Agent, goal: dict[str, str], argument: dict[str, str], choice: str) -> str:
    agent.call("send_bill", **argument)
    agent.call("ask_user", action="pay")
    agent.call("resume", **argument)
    return "Done."


def _add_data(agent: Agent, goal: dict[str, str], argument: dict[str, str], choice: str) -> str:
    amount = agent.ask("How much?")
    agent.call("add_data", **argument, amount=amount)
    return f"Added {amount}."


def _check(agent: Agent, goal: dict[str, str], argument: dict[str, str], choice: str) -> str:
    fault = agent.call("ask_user", action="check")["fault"]
    remedy = agent.decide(REMEDIES[fault], list(REMEDIES.values()), chained=True)
    agent.quote(next(f"{found}: {cure}" for found, cure in REMEDIES.items() if cure == remedy))
    agent.call("ask_user", action=remedy)
    return "Done."


SERVE = {"bill": _bill, "check": _check, "ask": _add_data}
expert = expert_of("line", FAMILIES, SERVE, get_args(Reason))


class TelecomEnvironment(CaseEnvironment):
    """Tools that read and change a task's database; only the tool `ask_user` changes the phone."""

    database_class = TelecomDatabase
    _expert = staticmethod(expert)

    @tool
    def find_line(self, customer: str) -> dict[str, str]:
        """Find the line of a customer.

        Args:
            customer: Customer id.
        """
        return self._found("lines", "line", customer)

    @tool
    def get_line(self, line: str) -> dict[str, str]:
        """Look a line up.

        Args:
            line: Line id.
        """
        return self._shown("lines", line, "status", "bill", "plan", "usage", "roaming")

    @tool
    def send_bill(self, line: str) -> dict[str, str]:
        """Send the customer the bill of a line.

        Args:
            line: Line id.
        """
        self._changed("lines", line, bill_sent=True)
        return {"bill": "sent"}

    @tool
    def resume(self, line: str) -> dict[str, str]:
        """Resume a paused line.

        Args:
            line: Line id.
        """
        return self._changed("lines", line, status="active")

    @tool
    def add_data(self, line: str, amount: Amount) -> dict[str, str]:
        """Add data to a line.

        Args:
            line: Line id.
            amount: Gigabytes.
        """
        return self._changed("lines", line, added=amount)

    @tool
    def enable_roaming(self, line: str) -> dict[str, str]:
        """Enable roaming on a line.

        Args:
            line: Line id.
        """
        return self._changed("lines", line, roaming="on")

    @tool
    def ask_user(self, action: UserAction) -> dict[str, str]:
        """Ask the user to do something: check the phone, pay a bill that was sent, or try a remedy
        on the phone.

        Args:
            action: What the user shall do.
        """
        return done_by_user(self._db, action)

    @tool
    def transfer(self, reason: Reason) -> dict[str, str]:
        """Hand the customer over to a person, which ends the conversation.

        Args:
            reason: Why.
        """
        return self._transfer(reason)


def draft_task(random: Random, family: str, branch: str, case: Branch) -> Draft:
    """Return a task's draft: two customers' phone lines, and the first customer's phone."""
    ids = random.sample(IDS, 4)
    fault = random.choice(list(REMEDIES))
    line = partial(random_record, random, Line, OPTIONS)
    lines = {
        ids[0]: line(customer=ids[1], **case.sample_fields(random)),
        ids[2]: line(customer=ids[3]),
    }
    database = TelecomDatabase(lines=lines, device=Device(fault=fault))
    words = random.choice(get_args(Amount))
    expected = type(database).model_validate_json(database.model_dump_json())
    final = expected.lines[ids[0]]
    if branch in get_args(Reason):
        expected.case.transferred = branch
    elif branch == "check":
        expected.device = Device(fault="none", remedies=[REMEDIES[fault]])
    elif branch == "off":
        final.roaming = "on"
    elif branch == "over":
        expected.case.asked = ["amount"]
        final.added = words
    else:
        final.status = "active"
        if branch == "due":
            final.bill = "paid"
            final.bill_sent = True
    return Draft(
        goal={"record": ids[0], "customer": ids[1]},
        database=database,
        expected=expected,
        facts=(words,) if branch == "over" else (),
        answer={"topic": "amount", "words": words} if family == "data" else None,
        visible={
            "record": lines[ids[0]].model_dump(exclude={"customer"}),
            "fault": fault if branch == "check" else "",
            "amount": words if branch == "over" else "",
        },
    )


WORDS = partial(
    words_of,
    "telecom",
    TelecomEnvironment,
    FAMILIES,
    said=("How much?", "Added ", "sent", "fault", '{"fault": "'),
    values=REMEDIES,
)
generate_tasks = partial(
    generate, domain="telecom", policy=POLICY, families=FAMILIES, draft_task=draft_task
)
baselines = baselines_of(TelecomEnvironment, FAMILIES)
