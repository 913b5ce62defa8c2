"""Customer service of an airline: cancel a reservation, move a reservation, or add a bag."""

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

Seats = Literal["free", "full"]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
Fee = Literal["0", "20", "40"]
Reason = Literal["flown", "uninsured", "plans", "fare"]
FEES = {"gold": "0", "silver": "20", "none": "40"}
# For each random field of a reservation: the possible values, separated by spaces.
OPTIONS = {"fare": "flex saver", "insured": "yes no", "tier": "gold silver none"}


class Reservation(BaseModel):
    customer: str
    flight: str
    status: Literal["open", "flown", "cancelled"] = "open"
    fare: Literal["flex", "saver"] = "flex"
    insured: Literal["yes", "no"] = "no"
    tier: Literal["gold", "silver", "none"] = "none"
    bag_fee: str | None = None


class Flight(BaseModel):
    """One flight on one day of the week; the flight is full or has free seats."""

    day: Day
    seats: Seats


class AirlineDatabase(Database):
    reservations: dict[str, Reservation]
    flights: dict[str, Flight]


INSURED = {"fare": "saver", "insured": "yes"}
UNINSURED = {"fare": "saver", "insured": "no"}
# What an expert quotes, as the prompt has it.
FLOWN = "Status flown: nothing can be changed. transfer with reason flown"
UNINSURED_RULE = "Fare saver, not insured: transfer with reason uninsured"
INSURED_RULE = "Fare saver, insured: ask the customer for the reason"
FARE_RULE = "Fare saver: transfer with reason fare"
MOVE_RULE = "Fare flex: look up the flights of that day"

FAMILIES = (
    Family(
        "cancel",
        ("cancel {record}", "please call off {record}", "i can not fly {record}"),
        {
            "flown": Branch(0.10, 0.12, {"status": "flown"}, "flown", FLOWN),
            "flex": Branch(0.28, 0.60, {"fare": "flex"}, "cancel", "Cancel. Fare flex: cancel"),
            "uninsured": Branch(0.22, 0.28, UNINSURED, "uninsured", UNINSURED_RULE),
            "sick": Branch(0.22, 0.0, INSURED, "ask", INSURED_RULE),
            "plans": Branch(0.18, 0.0, INSURED, "ask", INSURED_RULE),
        },
    ),
    Family(
        "move",
        ("move {record} to {day}", "i want {record} on {day}", "change {record} to {day}"),
        {
            "flown": Branch(0.12, 0.08, {"status": "flown"}, "flown", FLOWN),
            "fare": Branch(0.28, 0.32, {"fare": "saver"}, "fare", FARE_RULE),
            "move": Branch(0.60, 0.60, {"fare": "flex"}, "move", MOVE_RULE),
        },
    ),
    Family(
        "bags",
        ("add a bag to {record}", "one more bag for {record}", "bag for {record}"),
        {
            "flown": Branch(0.10, 0.10, {"status": "flown"}, "flown", FLOWN),
            **{t: Branch(0.30, 0.30, {"tier": t}, fee, f"{t} {fee}") for t, fee in FEES.items()},
        },
    ),
)


def _ask_reason(agent: Agent, goal: dict[str, str], argument: dict[str, str], choice: str) -> str:
    right = "cancel" if agent.ask("Why?") == "sick" else "plans"
    choice = agent.decide(right, ["cancel", "plans"], chained=True)
    agent.quote("sick: cancel" if choice == "cancel" else "plans: transfer with reason plans")
    if choice == "plans":
        return "plans"
    agent.call("cancel", **argument)
    return "Done."


def _move(agent: Agent, goal: dict[str, str], argument: dict[str, str], choice: str) -> str:
    flights = agent.call("find_flights", day=goal["day"])
    flight = flights[agent.decide("free", ["free", "full"], chained=True)]
    agent.call("move", **argument, flight=flight)
    return "Done."


def _add_bag(agent: Agent, goal: dict[str, str], argument: dict[str, str], fee: str) -> str:
    agent.call("add_bag", **argument, fee=fee)
    return f"The fee is {fee}."


SERVE = {"ask": _ask_reason, "move": _move, **dict.fromkeys(FEES.values(), _add_bag)}
expert = expert_of("reservation", FAMILIES, SERVE, get_args(Reason))


class AirlineEnvironment(CaseEnvironment):
    """Tools that read and change one task's database of an airline."""

    database_class = AirlineDatabase
    _expert = staticmethod(expert)

    @tool
    def find_reservation(self, customer: str) -> dict[str, str]:
        """Find the reservation of a customer.

        Args:
            customer: Customer id.
        """
        return self._found("reservations", "reservation", customer)

    @tool
    def get_reservation(self, reservation: str) -> dict[str, str]:
        """Look a reservation up.

        Args:
            reservation: Reservation id.
        """
        return self._shown("reservations", reservation, "status", "fare", "insured", "tier")

    @tool
    def find_flights(self, day: Day) -> dict[str, str]:
        """List the flights of a day, the free one and the full one.

        Args:
            day: Day of the week.
        """
        return {flight.seats: key for key, flight in self._db.flights.items() if flight.day == day}

    @tool
    def move(self, reservation: str, flight: str) -> dict[str, str]:
        """Move a reservation to another flight.

        Args:
            reservation: Reservation id.
            flight: Flight id.
        """
        self._record("flights", flight)
        return self._changed("reservations", reservation, flight=flight)

    @tool
    def cancel(self, reservation: str) -> dict[str, str]:
        """Cancel a reservation.

        Args:
            reservation: Reservation id.
        """
        return self._changed("reservations", reservation, status="cancelled")

    @tool
    def add_bag(self, reservation: str, fee: Fee) -> dict[str, str]:
        """Add a bag to a reservation for a fee.

        Args:
            reservation: Reservation id.
            fee: Fee in euros.
        """
        return self._changed("reservations", reservation, bag_fee=fee)

    @tool
    def transfer(self, reason: Reason) -> dict[str, str]:
        """Hand the customer over to a person, which ends the conversation.

        Args:
            reason: Why.
        """
        return self._transfer(reason)


def draft_task(random: Random, family: str, branch: str, case: Branch) -> Draft:
    """Return a task's draft: two customers' reservations, and two flights on each of two days."""
    ids = random.sample(IDS, 10)
    day, other_day = random.sample(get_args(Day), 2)
    departures = [Flight(day=d, seats=s) for d in (day, other_day) for s in get_args(Seats)]
    flights = dict(zip(ids[4:8], departures, strict=True))
    flights = {key: flights[key] for key in random.sample(list(flights), 4)}
    reservation = partial(random_record, random, Reservation, OPTIONS)
    reservations = {
        ids[0]: reservation(customer=ids[1], flight=ids[8], **case.sample_fields(random)),
        ids[2]: reservation(customer=ids[3], flight=ids[9]),
    }
    database = AirlineDatabase(reservations=reservations, flights=flights)
    expected = type(database).model_validate_json(database.model_dump_json())
    final = expected.reservations[ids[0]]
    if branch in ("sick", "plans"):
        expected.case.asked = ["reason"]
    if branch in get_args(Reason):
        expected.case.transferred = branch
    elif branch in ("flex", "sick"):
        final.status = "cancelled"
    elif branch == "move":
        final.flight = ids[4]
    else:
        final.bag_fee = FEES[branch]
    words = branch if branch in ("sick", "plans") else random.choice(["sick", "plans"])
    listed = {k: f.seats for k, f in flights.items() if branch == "move" and f.day == day}
    record = reservations[ids[0]].model_dump(exclude={"customer", "flight"})
    day_of_goal = {"day": day} if family == "move" else {}
    return Draft(
        goal={"record": ids[0], "customer": ids[1], **day_of_goal},
        database=database,
        expected=expected,
        facts=(final.bag_fee,) if final.bag_fee else (),
        answer={"topic": "reason", "words": words} if family == "cancel" else None,
        visible={"record": record, "flights": listed},
    )


WORDS = partial(
    words_of, "airline", AirlineEnvironment, FAMILIES, said=("Why?", "The fee is ", "sick", "none")
)
generate_tasks = partial(
    generate, domain="airline", policy=POLICY, families=FAMILIES, draft_task=draft_task
)
baselines = baselines_of(AirlineEnvironment, FAMILIES)
