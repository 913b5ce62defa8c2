"""Retail: cancel an order, exchange an item, refund an order, within what its status allows."""

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
You serve a shop's customers through tools. Look the order up first. Change only what was asked
for, ask only what the rules below need, and end with a short message once the work is done.
- Cancel. Status pending: ask the customer for the reason and cancel with it. Status shipped:
  recall the parcel. Status delivered: transfer("delivered").
- Exchange for another colour. Status pending or shipped: transfer("undelivered"). Status
  delivered: look up the variant of that colour; stock in: exchange for it; stock out:
  transfer("stock").
- Refund. Status shipped: transfer("shipped"). Else refund by the way of payment: card to card,
  gift to voucher, cash to bank; tell the customer where the money goes.
"""

Colour = Literal["red", "blue", "green", "black", "white"]
CancelReason = Literal["late", "wrong", "price"]
RefundTarget = Literal["card", "voucher", "bank"]
Reason = Literal["delivered", "undelivered", "stock", "shipped"]
COLOURS: tuple[Colour, ...] = ("red", "blue", "green", "black", "white")
CANCEL_REASONS = ("late", "wrong", "price")
TARGETS = {"card": "card", "gift": "voucher", "cash": "bank"}


class Order(BaseModel):
    """One order of one item."""

    customer: str
    item: str
    status: Literal["pending", "shipped", "delivered", "cancelled", "recalled"] = "pending"
    paid: Literal["card", "gift", "cash"] = "card"
    size: Literal["small", "large"] = "small"
    cancel_reason: str | None = None
    refunded_to: str | None = None


class Variant(BaseModel):
    """A colour of the ordered item."""

    colour: Colour
    stock: Literal["in", "out"]


class RetailDatabase(Database):
    """Orders and variants by id."""

    orders: dict[str, Order]
    variants: dict[str, Variant]


class RetailEnvironment(CaseEnvironment):
    """The shop's tools over one task's database."""

    database_class = RetailDatabase

    def find_order(self, customer: str) -> dict[str, str]:
        """Find the order of a customer.

        Args:
            customer: Customer id.
        """
        for key, order in self._db.orders.items():
            if order.customer == customer:
                return {"order": key}
        raise ToolError(f"no {customer}")

    def get_order(self, order: str) -> dict[str, str]:
        """Look an order up.

        Args:
            order: Order id.
        """
        return self._shown("orders", order, "status", "paid", "size")

    def find_variant(self, colour: Colour) -> dict[str, str]:
        """Look up the variant of a colour and whether it is in stock.

        Args:
            colour: Colour.
        """
        for key, variant in self._db.variants.items():
            if variant.colour == colour:
                return {"stock": variant.stock, "variant": key}
        raise ToolError(f"no {colour}")

    def exchange(self, order: str, variant: str) -> dict[str, str]:
        """Exchange the item of an order for another variant.

        Args:
            order: Order id.
            variant: Variant id.
        """
        self._record("variants", variant)
        self._record("orders", order).item = variant
        return {"ok": "yes"}

    def cancel(self, order: str, reason: CancelReason) -> dict[str, str]:
        """Cancel an order that has not been shipped.

        Args:
            order: Order id.
            reason: The customer's reason.
        """
        record = self._record("orders", order)
        record.status, record.cancel_reason = "cancelled", reason
        return {"ok": "yes"}

    def recall(self, order: str) -> dict[str, str]:
        """Recall the parcel of an order on its way.

        Args:
            order: Order id.
        """
        self._record("orders", order).status = "recalled"
        return {"ok": "yes"}

    def refund(self, order: str, to: RefundTarget) -> dict[str, str]:
        """Refund an order.

        Args:
            order: Order id.
            to: Where the money goes.
        """
        self._record("orders", order).refunded_to = to
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
    order = named_record(agent, goal, "find_order", "order")
    record = agent.call("get_order", order=order)
    serve = {"cancel": _cancel, "exchange": _exchange, "refund": _refund}[goal["family"]]
    return serve(agent, goal, order, record)


def _cancel(agent: Agent, goal: dict[str, str], order: str, record: dict[str, str]) -> str:
    right = {"pending": "ask", "shipped": "recall", "delivered": "delivered"}[record["status"]]
    choice = agent.decide(right, ["ask", "recall", "delivered"])
    if choice == "delivered":
        agent.call("transfer", reason="delivered")
        return ""
    if choice == "recall":
        agent.call("recall", order=order)
    else:
        agent.call("cancel", order=order, reason=agent.ask("Why?"))
    return "Done."


def _exchange(agent: Agent, goal: dict[str, str], order: str, record: dict[str, str]) -> str:
    delivered = record["status"] == "delivered"
    choice = agent.decide("exchange" if delivered else "undelivered", ["undelivered", "exchange"])
    if choice == "exchange":
        found = agent.call("find_variant", colour=goal["colour"])
        right = "exchange" if found["stock"] == "in" else "stock"
        choice = agent.decide(right, ["exchange", "stock"], chained=True)
    if choice != "exchange":
        agent.call("transfer", reason=choice)
        return ""
    agent.call("exchange", order=order, variant=found["variant"])
    return "Done."


def _refund(agent: Agent, goal: dict[str, str], order: str, record: dict[str, str]) -> str:
    right = "shipped" if record["status"] == "shipped" else TARGETS[record["paid"]]
    choice = agent.decide(right, ["shipped", *TARGETS.values()])
    if choice == "shipped":
        agent.call("transfer", reason=choice)
        return ""
    agent.call("refund", order=order, to=choice)
    return f"The money goes to {choice}."


def _order(random: Random, customer: str, item: str, **fields: str) -> Order:
    drawn = {
        "status": random.choice(["pending", "shipped", "delivered"]),
        "paid": random.choice(["card", "gift", "cash"]),
        "size": random.choice(["small", "large"]),
    }
    return Order.model_validate({"customer": customer, "item": item, **drawn, **fields})


def _fields(random: Random, family: str, branch: str) -> dict[str, str]:
    """What makes an order a case of this branch."""
    if family == "cancel" or branch == "shipped":
        return {"status": branch}
    if family == "refund":
        return {"status": random.choice(["pending", "delivered"]), "paid": branch}
    undelivered = random.choice(["pending", "shipped"])
    return {"status": undelivered if branch == "undelivered" else "delivered"}


def _draft(random: Random, family: str, branch: str) -> Draft:
    ids = random.sample(IDS, 8)
    colour, other = random.sample(COLOURS, 2)
    stock = branch if branch in ("in", "out") else random.choice(["in", "out"])
    variants = {
        ids[4]: Variant.model_validate({"colour": colour, "stock": stock}),
        ids[5]: Variant.model_validate({"colour": other, "stock": random.choice(["in", "out"])}),
    }
    database = RetailDatabase(
        orders={
            ids[0]: _order(random, ids[1], ids[6], **_fields(random, family, branch)),
            ids[2]: _order(random, ids[3], ids[7]),
        },
        variants={key: variants[key] for key in random.sample(list(variants), 2)},
    )
    record = database.orders[ids[0]]
    goal = {"record": ids[0], "customer": ids[1]}
    if family == "exchange":
        goal["colour"] = colour
    words = random.choice(CANCEL_REASONS)
    expected, facts = _outcome(database, ids[0], ids[4], family, branch, words)
    shown = (
        {"colour": colour, "stock": variants[ids[4]].stock, "id": ids[4]}
        if branch in ("in", "out")
        else {}
    )
    return Draft(
        goal=goal,
        database=database,
        expected=expected,
        facts=facts,
        answer={"topic": "reason", "words": words} if family == "cancel" else None,
        visible={"record": record.model_dump(exclude={"customer", "item"}), "variant": shown},
    )


def _outcome(
    database: RetailDatabase, order: str, variant: str, family: str, branch: str, words: str
) -> tuple[RetailDatabase, tuple[str, ...]]:
    """The database at the end and the facts to tell."""
    expected = type(database).model_validate(database.model_dump())
    final = expected.orders[order]
    if (family, branch) == ("cancel", "pending"):
        final.status, final.cancel_reason = "cancelled", words
        expected.case.asked = ["reason"]
    elif (family, branch) == ("cancel", "shipped"):
        final.status = "recalled"
    elif (family, branch) == ("exchange", "in"):
        final.item = variant
    elif family == "refund" and branch in TARGETS:
        final.refunded_to = TARGETS[branch]
        return expected, (TARGETS[branch],)
    else:
        expected.case.transferred = "stock" if branch == "out" else branch
    return expected, ()


FAMILIES = (
    Family(
        name="cancel",
        phrasings=("cancel order {record}", "i do not want {record}", "stop order {record}"),
        branches={"pending": 0.40, "shipped": 0.35, "delivered": 0.25},
        easy={"shipped": 0.75, "delivered": 0.25},
        draft=lambda random, branch: _draft(random, "cancel", branch),
    ),
    Family(
        name="exchange",
        phrasings=(
            "exchange {record} for {colour}",
            "i want {record} in {colour}",
            "swap {record} for {colour}",
        ),
        branches={"undelivered": 0.25, "in": 0.45, "out": 0.30},
        easy={"undelivered": 0.30, "in": 0.70},
        draft=lambda random, branch: _draft(random, "exchange", branch),
    ),
    Family(
        name="refund",
        phrasings=("refund {record}", "i want my money for {record}", "pay back {record}"),
        branches={"shipped": 0.22, "card": 0.26, "gift": 0.26, "cash": 0.26},
        easy={"shipped": 0.22, "card": 0.26, "gift": 0.26, "cash": 0.26},
        draft=lambda random, branch: _draft(random, "refund", branch),
    ),
)

WORDS = partial(
    words_of,
    "retail",
    RetailEnvironment,
    FAMILIES,
    said=("Why?", "The money goes to ", *CANCEL_REASONS),
)


def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    """`n` retail tasks; see `generation.generate`."""
    return generate("retail", POLICY, FAMILIES, seed, n, split, difficulty)
