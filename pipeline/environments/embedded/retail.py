"""Customer service of a shop: cancel an order, exchange an item, or refund an order."""

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
CANCEL_REASONS: tuple[str, ...] = get_args(CancelReason)
TARGETS = {"card": "card", "gift": "voucher", "cash": "bank"}
# For each random field of an order: the possible values, separated by spaces.
OPTIONS = {"status": "pending shipped delivered", "paid": "card gift cash", "size": "small large"}


class Order(BaseModel):
    customer: str
    item: str
    status: Literal["pending", "shipped", "delivered", "cancelled", "recalled"] = "pending"
    paid: Literal["card", "gift", "cash"] = "card"
    size: Literal["small", "large"] = "small"
    cancel_reason: str | None = None
    refunded_to: str | None = None


class Variant(BaseModel):
    """One colour of the ordered item, in stock or out of stock."""

    colour: Colour
    stock: Literal["in", "out"]


class RetailDatabase(Database):
    orders: dict[str, Order]
    variants: dict[str, Variant]


# Values of `Order.status`, separated by spaces. A new order gets one of a text's first two values.
UNDELIVERED = "pending shipped cancelled recalled"
DELIVERED = "delivered delivered"  # two values: `sample_fields` draws no number for a single value
UNSHIPPED = "pending delivered cancelled recalled"
# What an expert quotes, as the prompt has it.
PENDING_RULE = "Status pending: ask the customer for the reason"
RECALL_RULE = "Status shipped: recall the parcel"
DELIVERED_RULE = "Status delivered: transfer with reason delivered"
EARLY_RULE = "Status pending or shipped: transfer with reason undelivered"
EXCHANGE_RULE = "Status delivered: look up the variant of that colour"
SHIPPED_RULE = "Status shipped: transfer with reason shipped"
STOCK_RULES = {
    "exchange": "stock in: exchange for it",
    "stock": "stock out: transfer with reason stock",
}

FAMILIES = (
    Family(
        "cancel",
        ("cancel order {record}", "i do not want {record}", "stop order {record}"),
        {
            "pending": Branch(0.40, 0.0, {"status": "pending"}, "ask", PENDING_RULE),
            "shipped": Branch(0.35, 0.75, {"status": "shipped"}, "recall", RECALL_RULE),
            "delivered": Branch(0.25, 0.25, {"status": "delivered"}, "delivered", DELIVERED_RULE),
        },
    ),
    Family(
        "exchange",
        (
            "exchange {record} for {colour}",
            "i want {record} in {colour}",
            "swap {record} for {colour}",
        ),
        {
            "undelivered": Branch(0.25, 0.30, {"status": UNDELIVERED}, "undelivered", EARLY_RULE),
            "in": Branch(0.45, 0.70, {"status": DELIVERED}, "exchange", EXCHANGE_RULE),
            "out": Branch(0.30, 0.0, {"status": DELIVERED}, "exchange", EXCHANGE_RULE),
        },
    ),
    Family(
        "refund",
        ("refund {record}", "i want my money for {record}", "pay back {record}"),
        {
            "shipped": Branch(0.22, 0.22, {"status": "shipped"}, "shipped", SHIPPED_RULE),
            **{
                way: Branch(
                    0.26, 0.26, {"status": UNSHIPPED, "paid": way}, target, f"{way} to {target}"
                )
                for way, target in TARGETS.items()
            },
        },
    ),
)


def _cancel(agent: Agent, goal: dict[str, str], argument: dict[str, str], choice: str) -> str:
    agent.call("cancel", **argument, reason=agent.ask("Why?"))
    return "Done."


def _exchange(agent: Agent, goal: dict[str, str], argument: dict[str, str], choice: str) -> str:
    variant = agent.call("find_variant", colour=goal["colour"])
    right = "exchange" if variant["stock"] == "in" else "stock"
    choice = agent.decide(right, ["exchange", "stock"], chained=True)
    agent.quote(STOCK_RULES[choice])
    if choice == "stock":
        return "stock"
    agent.call("exchange", **argument, variant=variant["variant"])
    return "Done."


def _refund(agent: Agent, goal: dict[str, str], argument: dict[str, str], target: str) -> str:
    agent.call("refund", **argument, to=target)
    return f"The money goes to {target}."


SERVE = {"ask": _cancel, "exchange": _exchange, **dict.fromkeys(TARGETS.values(), _refund)}
expert = expert_of("order", FAMILIES, SERVE, get_args(Reason))


class RetailEnvironment(CaseEnvironment):
    """Tools that read and change one task's database of a shop."""

    database_class = RetailDatabase
    _expert = staticmethod(expert)

    @tool
    def find_order(self, customer: str) -> dict[str, str]:
        """Find the order of a customer.

        Args:
            customer: Customer id.
        """
        return self._found("orders", "order", customer)

    @tool
    def get_order(self, order: str) -> dict[str, str]:
        """Look an order up.

        Args:
            order: Order id.
        """
        return self._shown("orders", order, "status", "paid", "size")

    @tool
    def find_variant(self, colour: Colour) -> dict[str, str]:
        """Look up the variant of a colour and whether it is in stock.

        Args:
            colour: Colour.
        """
        for key, variant in self._db.variants.items():
            if variant.colour == colour:
                return {"stock": variant.stock, "variant": key}
        raise ToolError(f"no {colour}")

    @tool
    def exchange(self, order: str, variant: str) -> dict[str, str]:
        """Exchange the item of an order for another variant.

        Args:
            order: Order id.
            variant: Variant id.
        """
        self._record("variants", variant)
        return self._changed("orders", order, item=variant)

    @tool
    def cancel(self, order: str, reason: CancelReason) -> dict[str, str]:
        """Cancel an order that has not been shipped.

        Args:
            order: Order id.
            reason: The customer's reason.
        """
        return self._changed("orders", order, status="cancelled", cancel_reason=reason)

    @tool
    def recall(self, order: str) -> dict[str, str]:
        """Recall the parcel of an order on its way.

        Args:
            order: Order id.
        """
        return self._changed("orders", order, status="recalled")

    @tool
    def refund(self, order: str, to: RefundTarget) -> dict[str, str]:
        """Refund an order.

        Args:
            order: Order id.
            to: Where the money goes.
        """
        return self._changed("orders", order, refunded_to=to)

    @tool
    def transfer(self, reason: Reason) -> dict[str, str]:
        """Hand the customer over to a person, which ends the conversation.

        Args:
            reason: Why.
        """
        return self._transfer(reason)


def draft_task(random: Random, family: str, branch: str, case: Branch) -> Draft:
    """Return a task's draft: two customers' orders, and two variants of the ordered item."""
    ids = random.sample(IDS, 8)
    colour, other_colour = random.sample(get_args(Colour), 2)
    stock = branch if branch in ("in", "out") else random.choice(["in", "out"])
    variants = {
        ids[4]: Variant.model_validate({"colour": colour, "stock": stock}),
        ids[5]: Variant(colour=other_colour, stock=random.choice(["in", "out"])),
    }
    order = partial(random_record, random, Order, OPTIONS)
    orders = {
        ids[0]: order(customer=ids[1], item=ids[6], **case.sample_fields(random)),
        ids[2]: order(customer=ids[3], item=ids[7]),
    }
    variants = {key: variants[key] for key in random.sample(list(variants), 2)}
    database = RetailDatabase(orders=orders, variants=variants)
    words = random.choice(CANCEL_REASONS)
    expected = type(database).model_validate_json(database.model_dump_json())
    final = expected.orders[ids[0]]
    if (family, branch) == ("cancel", "pending"):
        final.status = "cancelled"
        final.cancel_reason = words
        expected.case.asked = ["reason"]
    elif (family, branch) == ("cancel", "shipped"):
        final.status = "recalled"
    elif branch == "in":
        final.item = ids[4]
    elif branch in TARGETS:
        final.refunded_to = TARGETS[branch]
    else:
        expected.case.transferred = "stock" if branch == "out" else branch
    variant = {"colour": colour, "stock": stock, "id": ids[4]} if branch in ("in", "out") else {}
    colour_of_goal = {"colour": colour} if family == "exchange" else {}
    return Draft(
        goal={"record": ids[0], "customer": ids[1], **colour_of_goal},
        database=database,
        expected=expected,
        facts=(final.refunded_to,) if final.refunded_to else (),
        answer={"topic": "reason", "words": words} if family == "cancel" else None,
        visible={
            "record": orders[ids[0]].model_dump(exclude={"customer", "item"}),
            "variant": variant,
        },
    )


WORDS = partial(
    words_of,
    "retail",
    RetailEnvironment,
    FAMILIES,
    said=("Why?", "The money goes to ", *CANCEL_REASONS),
)
generate_tasks = partial(
    generate, domain="retail", policy=POLICY, families=FAMILIES, draft_task=draft_task
)
baselines = baselines_of(RetailEnvironment, FAMILIES)
