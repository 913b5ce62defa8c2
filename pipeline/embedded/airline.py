"""Airline: cancel a trip, move it to another day, add a bag, within the fare's rules."""

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
You serve airline customers through tools. Look the reservation up first. Change only what was
asked for, ask only what the rules below need, and end with a short message once the work is done.
- Status flown: nothing can be changed. transfer("flown").
- Cancel. Fare flex: cancel. Fare saver, not insured: transfer("uninsured"). Fare saver, insured:
  ask the customer for the reason; sick: cancel; plans: transfer("plans").
- Move to another day. Fare saver: transfer("fare"). Fare flex: look up the flights of that day and
  move the reservation to the flight that is listed as free.
- Add a bag. The fee depends on the tier: gold 0, silver 20, none 40. Add the bag with that fee and
  tell the customer the fee.
"""

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
Fee = Literal["0", "20", "40"]
Reason = Literal["flown", "uninsured", "plans", "fare"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
FEES = {"gold": "0", "silver": "20", "none": "40"}


class Reservation(BaseModel):
    """One trip of one customer."""

    customer: str
    flight: str
    status: Literal["open", "flown", "cancelled"] = "open"
    fare: Literal["flex", "saver"] = "flex"
    insured: Literal["yes", "no"] = "no"
    tier: Literal["gold", "silver", "none"] = "none"
    bag_fee: str | None = None


class Flight(BaseModel):
    """A departure on another day."""

    day: Day
    seats: Literal["free", "full"]


class AirlineDatabase(Database):
    """Reservations and flights by id."""

    reservations: dict[str, Reservation]
    flights: dict[str, Flight]


class AirlineEnvironment(CaseEnvironment):
    """The airline's tools over one task's database."""

    database_class = AirlineDatabase

    def find_reservation(self, customer: str) -> dict[str, str]:
        """Find the reservation of a customer.

        Args:
            customer: Customer id.
        """
        for key, reservation in self._db.reservations.items():
            if reservation.customer == customer:
                return {"reservation": key}
        raise ToolError(f"no {customer}")

    def get_reservation(self, reservation: str) -> dict[str, str]:
        """Look a reservation up.

        Args:
            reservation: Reservation id.
        """
        return self._shown("reservations", reservation, "status", "fare", "insured", "tier")

    def find_flights(self, day: Day) -> dict[str, str]:
        """List the flights of a day, the free one and the full one.

        Args:
            day: Day of the week.
        """
        return {flight.seats: key for key, flight in self._db.flights.items() if flight.day == day}

    def move(self, reservation: str, flight: str) -> dict[str, str]:
        """Move a reservation to another flight.

        Args:
            reservation: Reservation id.
            flight: Flight id.
        """
        self._record("flights", flight)
        self._record("reservations", reservation).flight = flight
        return {"ok": "yes"}

    def cancel(self, reservation: str) -> dict[str, str]:
        """Cancel a reservation.

        Args:
            reservation: Reservation id.
        """
        self._record("reservations", reservation).status = "cancelled"
        return {"ok": "yes"}

    def add_bag(self, reservation: str, fee: Fee) -> dict[str, str]:
        """Add a bag to a reservation for a fee.

        Args:
            reservation: Reservation id.
            fee: Fee in euros.
        """
        self._record("reservations", reservation).bag_fee = fee
        return {"ok": "yes"}

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
    reservation = named_record(agent, goal, "find_reservation", "reservation")
    record = agent.call("get_reservation", reservation=reservation)
    flown = record["status"] == "flown"
    if goal["family"] == "cancel":
        return _cancel(agent, reservation, record)
    if goal["family"] == "move":
        right = "flown" if flown else "fare" if record["fare"] == "saver" else "move"
        choice = agent.decide(right, ["flown", "fare", "move"])
        if choice != "move":
            return _transferred(agent, choice)
        flights = agent.call("find_flights", day=goal["day"])
        flight = flights[agent.decide("free", ["free", "full"], chained=True)]
        agent.call("move", reservation=reservation, flight=flight)
        return "Done."
    fee = FEES[record["tier"]]
    choice = agent.decide("flown" if flown else fee, ["flown", *FEES.values()])
    if choice == "flown":
        return _transferred(agent, choice)
    agent.call("add_bag", reservation=reservation, fee=choice)
    return f"The fee is {choice}."


def _cancel(agent: Agent, reservation: str, record: dict[str, str]) -> str:
    if record["status"] == "flown":
        right = "flown"
    elif record["fare"] == "flex":
        right = "cancel"
    else:
        right = "ask" if record["insured"] == "yes" else "uninsured"
    choice = agent.decide(right, ["flown", "cancel", "uninsured", "ask"])
    if choice == "ask":
        reason = agent.ask("Why?")
        choice = agent.decide(
            "cancel" if reason == "sick" else "plans", ["cancel", "plans"], chained=True
        )
    if choice != "cancel":
        return _transferred(agent, choice)
    agent.call("cancel", reservation=reservation)
    return "Done."


def _transferred(agent: Agent, reason: str) -> str:
    agent.call("transfer", reason=reason)
    return ""


def _records(random: Random, **fields: str) -> tuple[dict[str, str], AirlineDatabase]:
    """A reservation with these fields, another customer's, and two flights a day on two days."""
    ids = random.sample(IDS, 10)
    day, other_day = random.sample(DAYS, 2)
    flights = {
        ids[4]: Flight(day=day, seats="free"),
        ids[5]: Flight(day=day, seats="full"),
        ids[6]: Flight(day=other_day, seats="free"),
        ids[7]: Flight(day=other_day, seats="full"),
    }
    order = random.sample(list(flights), 4)
    database = AirlineDatabase(
        reservations={
            ids[0]: _reservation(random, ids[1], ids[8], **fields),
            ids[2]: _reservation(random, ids[3], ids[9]),
        },
        flights={key: flights[key] for key in order},
    )
    return {"record": ids[0], "customer": ids[1], "day": day, "free": ids[4]}, database


def _reservation(random: Random, customer: str, flight: str, **fields: str) -> Reservation:
    drawn = {
        "fare": random.choice(["flex", "saver"]),
        "insured": random.choice(["yes", "no"]),
        "tier": random.choice(["gold", "silver", "none"]),
    }
    return Reservation.model_validate({"customer": customer, "flight": flight, **drawn, **fields})


def _fields(family: str, branch: str) -> dict[str, str]:
    """What makes a reservation a case of this branch."""
    if branch == "flown":
        return {"status": "flown"}
    if family == "bags":
        return {"tier": branch}
    if branch in ("flex", "move"):
        return {"fare": "flex"}
    insured = {"uninsured": "no", "sick": "yes", "plans": "yes"}
    return {"fare": "saver", **({"insured": insured[branch]} if branch in insured else {})}


def _draft(random: Random, family: str, branch: str) -> Draft:
    names, database = _records(random, **_fields(family, branch))
    record = database.reservations[names["record"]]
    goal = {"record": names["record"], "customer": names["customer"]}
    facts: tuple[str, ...] = ()
    expected = type(database).model_validate(database.model_dump())
    final = expected.reservations[names["record"]]
    if branch in ("flown", "uninsured", "plans", "fare"):
        expected.case.transferred = branch
    if branch in ("sick", "plans"):
        expected.case.asked = ["reason"]
    if branch in ("flex", "sick"):
        final.status = "cancelled"
    if branch == "move":
        final.flight = names["free"]
    if family == "bags" and branch in FEES:
        final.bag_fee = FEES[branch]
        facts = (FEES[branch],)
    if family == "move":
        goal["day"] = names["day"]
    words = branch if branch in ("sick", "plans") else random.choice(["sick", "plans"])
    day = goal.get("day") if branch == "move" else None
    flights = {k: f.seats for k, f in database.flights.items() if f.day == day}
    return Draft(
        goal=goal,
        database=database,
        expected=expected,
        facts=facts,
        answer={"topic": "reason", "words": words} if family == "cancel" else None,
        visible={"record": record.model_dump(exclude={"customer", "flight"}), "flights": flights},
    )


FAMILIES = (
    Family(
        name="cancel",
        phrasings=("cancel {record}", "please call off {record}", "i can not fly {record}"),
        branches={"flown": 0.10, "flex": 0.28, "uninsured": 0.22, "sick": 0.22, "plans": 0.18},
        easy={"flown": 0.12, "flex": 0.60, "uninsured": 0.28},
        draft=lambda random, branch: _draft(random, "cancel", branch),
    ),
    Family(
        name="move",
        phrasings=(
            "move {record} to {day}",
            "i want {record} on {day}",
            "change {record} to {day}",
        ),
        branches={"flown": 0.12, "fare": 0.28, "move": 0.60},
        easy={"flown": 0.08, "fare": 0.32, "move": 0.60},
        draft=lambda random, branch: _draft(random, "move", branch),
    ),
    Family(
        name="bags",
        phrasings=("add a bag to {record}", "one more bag for {record}", "bag for {record}"),
        branches={"flown": 0.10, "gold": 0.30, "silver": 0.30, "none": 0.30},
        easy={"flown": 0.10, "gold": 0.30, "silver": 0.30, "none": 0.30},
        draft=lambda random, branch: _draft(random, "bags", branch),
    ),
)

WORDS = partial(
    words_of, "airline", AirlineEnvironment, FAMILIES, said=("Why?", "The fee is ", "sick", "none")
)


def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    """`n` airline tasks; see `generation.generate`."""
    return generate("airline", POLICY, FAMILIES, seed, n, split, difficulty)
