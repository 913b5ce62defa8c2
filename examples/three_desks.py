"""Three desks with the same tools, words and requests, and with rules that contradict each other.

    three-domain-grpo train --config smollm2_three --num-gpus 2

A customer has a flight, an order or a plan. The agent writes the rule for the case, and acts. In no
two domains does the same case have the same answer. There are two forms:

- Reading: `flights`, `shop`, `phone`. The six rules of the desk stand in the system message, and
  the tier in the record, which the agent looks up. Six cases (two requests, three tiers), four
  actions.
- Remembering: `flights_hidden`, `shop_hidden`, `phone_hidden`. No rule stands in the prompt; only
  demonstrations and rewards teach the rules. Three cases (the tiers, which the customers say),
  three actions. The rules are a Latin square, so only the name of the desk and the tier together
  decide.

`{flights: "examples.three_desks:flights_hidden"}` among the `environments` makes a domain that is
called flights.

Training tasks always have the standing rules of their domain (family `standing`). In the reading
form, half of the held-out tasks have rules that were never trained (family `new`): each task has a
table of its own, in which each rule differs from the standing rule of its domain. A model that
remembers the standing rules instead of reading fails there. Reports have a row for each family.
The branch of a task is its case: with `even_branches`, all cases are drawn equally often.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from pipeline.data.tasks import SPLITS, Message, Task
from pipeline.environments import Agent
from pipeline.environments.domains import Call, Domain

Table = dict[str, str]  # case -> action

THINGS = {"flights": "flight", "shop": "order", "phone": "plan"}
TIERS = ("gold", "silver", "basic")
ACTIONS = ("refund", "credit", "refuse", "swap")
CASES = [f"{request} {tier}" for request in ("cancel", "change") for tier in TIERS]
ANSWERS = {
    "flights": ["swap", "refund", "refuse", "refund", "credit", "swap"],
    "shop": ["refund", "refuse", "credit", "credit", "swap", "refuse"],
    "phone": ["credit", "swap", "refund", "swap", "refuse", "credit"],
}
STANDING: dict[str, Table] = {
    desk: dict(zip(CASES, answers, strict=True)) for desk, answers in ANSWERS.items()
}
HIDDEN: dict[str, Table] = {
    "flights": {"gold": "credit", "silver": "refuse", "basic": "refund"},
    "shop": {"gold": "refuse", "silver": "refund", "basic": "credit"},
    "phone": {"gold": "refund", "silver": "credit", "basic": "refuse"},
}
HEADING = "\nRules:\n"


class HiddenDesk:
    """The decision about one customer."""

    def reset(self, payload: str, **row: Any) -> None:
        self.goal, self.decision, self.done = json.loads(payload)["goal"], "", False

    def refund(self) -> dict[str, str]:
        """Pay the price back."""
        return self._decide("refund")

    def credit(self) -> dict[str, str]:
        """Give a voucher."""
        return self._decide("credit")

    def refuse(self) -> dict[str, str]:
        """Leave everything as it is."""
        return self._decide("refuse")

    def _decide(self, action: str) -> dict[str, str]:
        self.decision, self.done = action, True  # the first decision ends the episode
        return {"done": action}

    def get_reward(self) -> float:
        return float(self.decision == self.goal["rules"][self.goal["case"]])


class Desk(HiddenDesk):
    """A desk with records, and with a fourth action."""

    def get_record(self, number: str) -> dict[str, str]:
        """Look up a record.

        Args:
            number: Number of the record.
        """
        tier = self.goal["case"].split()[-1]
        return {"tier": tier if number == self.goal["number"] else "no such record"}

    def swap(self) -> dict[str, str]:
        """Give another one."""
        return self._decide("swap")


def expert(agent: Agent, goal: dict[str, Any]) -> str:
    if hasattr(agent.environment, "get_record"):
        agent.call("get_record", number=goal["number"])
    options = [action for action in ACTIONS if hasattr(agent.environment, action)]
    # In a random order: a decision against the rule is often the first option.
    options = agent.random.sample(options, len(options))
    action = agent.decide(goal["rules"][goal["case"]], options)
    agent.think(f"- {goal['quoted']}: {action}")
    agent.call(action)
    return "Done."


def generate_tasks(
    desk: str, is_hidden: bool, seed: int, n: int, split: str, difficulty: str
) -> list[Task]:
    random, tasks, cases = Random(f"{seed} {split} {desk}"), list[Task](), list[str]()
    standing = (HIDDEN if is_hidden else STANDING)[desk]
    for index in range(n):
        cases = cases or random.sample([*standing], len(standing))
        case = cases.pop()
        is_new = not is_hidden and split != "train" and index // len(standing) % 2 == 1
        rules = new_rules(desk, random) if is_new else standing
        number = str(100 + 3 * random.randrange(300) + SPLITS.index(split))  # of this split alone
        quoted = f"{desk} {case}" if is_hidden else case
        goal = {"number": number, "case": case, "quoted": quoted, "rules": rules}
        system = {"role": "system", "content": system_text(desk, None if is_hidden else rules)}
        start = f"My tier is {case}. Cancel" if is_hidden else f"I want to {case.split()[0]}"
        user = {"role": "user", "content": f"{start} {THINGS[desk]} {number}."}
        task = Task(
            domain=desk,
            id=f"{split}-{index}",
            prompt=(system, user),
            payload=json.dumps({"goal": goal}),
            family="new" if is_new else "standing",
            branch=case,
        )
        tasks.append(task)
    return tasks


def system_text(desk: str, rules: Table | None) -> str:
    """Return the system message; without `rules`, that of the remembering form."""
    start = f"You serve the {desk} desk."
    if rules is None:
        return f"{start} Say the rule of the {desk} desk, follow it."
    lines = "\n".join(f"- {case}: {action}" for case, action in rules.items())
    return f"{start} Look up the record, quote its rule, follow it.{HEADING}{lines}"


def new_rules(desk: str, random: Random) -> Table:
    """Return rules that no domain has; each differs from the standing rule of the desk.

    As in the standing rules, the two requests of a tier have different answers.
    """
    while True:
        rules = {
            case: random.choice([action for action in ACTIONS if action != old])
            for case, old in STANDING[desk].items()
        }
        requests_matter = all(rules[f"cancel {tier}"] != rules[f"change {tier}"] for tier in TIERS)
        if requests_matter and rules not in STANDING.values():
            return rules


def baselines(task: Task) -> dict[str, list[Call]]:
    """Return answers that do not read: one action, another request's rule, or rules by heart.

    The standing rules of the domain itself, by heart, are no answer to the family `new`. In the
    remembering form, they are all that there is to learn, and no baseline.
    """
    goal = json.loads(task.payload)["goal"]
    case, rules = goal["case"], goal["rules"]
    is_hidden = case in TIERS
    actions = ACTIONS[:3] if is_hidden else ACTIONS
    answers = {f"always {action}": action for action in actions}
    if not is_hidden:
        answers["as if each request were cancel"] = rules[f"cancel {case.split()[1]}"]
    for desk in STANDING:
        if not is_hidden or desk != task.domain:
            answers[f"standing rules of {desk}"] = standing_rule(desk, case)
    return {name: [(action, {})] for name, action in answers.items()}


def standing_rule(desk: str, case: str) -> str:
    return (HIDDEN if case in TIERS else STANDING)[desk][case]


def without_rules(tasks: Iterable[Task]) -> list[Task]:
    """Return tasks of the reading form without the rules in their system messages."""
    shorter = list[Task]()
    for task in tasks:
        system, user = task.prompt
        text = system["content"].partition(HEADING)[0]
        shorter.append(replace(task, prompt=({**system, "content": text}, user)))
    return shorter


def decision_of(messages: Sequence[Message]) -> str:
    """Return the first action that the assistant called in a conversation, or ""."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    names = (call["function"]["name"] for call in calls)
    return next((name for name in names if name in ACTIONS), "")


def followed(decisions: Iterable[tuple[Task, str]]) -> Counter[str]:
    """Count decisions, made of a task and an action, by whose rules they follow.

    The keys are `right` (the rules of the task), else the desk whose standing rule gives the
    action, else `none`. In the family `standing`, each other desk that is counted is interference:
    the rules of another domain decided.
    """
    counts = Counter[str]()
    for task, action in decisions:
        goal = json.loads(task.payload)["goal"]
        case = goal["case"]
        others = (desk for desk in STANDING if standing_rule(desk, case) == action)
        counts["right" if action == goal["rules"][case] else next(others, "none")] += 1
    return counts


def desk(name: str, is_hidden: bool = False) -> Domain:
    return Domain(
        name=name,
        environment=HiddenDesk if is_hidden else Desk,
        generate_tasks=partial(generate_tasks, name, is_hidden),
        expert=expert,
        baselines=baselines,
    )


def flights() -> Domain:
    return desk("flights")


def shop() -> Domain:
    return desk("shop")


def phone() -> Domain:
    return desk("phone")


def flights_hidden() -> Domain:
    return desk("flights", is_hidden=True)


def shop_hidden() -> Domain:
    return desk("shop", is_hidden=True)


def phone_hidden() -> Domain:
    return desk("phone", is_hidden=True)
