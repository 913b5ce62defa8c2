"""The tasks of a domain: official splits, a validation split, families, prompts, tickets.

Train and test are the official splits. Validation tasks are cut from training tasks by a hash of
the id. Telecom also trains and validates on further tasks of the official split `full`: those whose
combination of faults no task of `test` has.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeline.data.tasks import Task
from pipeline.tau2.environment import World, parts_of

VALIDATION_SHARE = 0.2  # of training tasks; telecom: a tenth of the further tasks
MOST_FAULTS_OF_EASY = 3  # a task of telecom with more faults is hard
NOTHING = "nothing to do"  # family of the tasks that doing nothing solves
MOST_NOTHING = 0.2  # largest share of these tasks in training
SOLO = (
    "Work on the customer's ticket alone: look at the line and the phone with the tools, repair "
    "what the policy allows, and call `done` at the end. Every message must call a tool. The "
    "tools of the phone are yours too."
)
TICKET = (
    "Work on the customer's ticket by the policy. The customer cannot be asked, and the ticket has "
    "all that the customer would say. A message without a call of a tool ends the work."
)
TALK = (
    "You are the service agent. In each message, either call tools or write to the customer, not "
    "both; the customer sees only what you write. Follow the policy."
)
LABELS = {
    "reason_for_call": "Why the customer writes",
    "known_info": "What the customer knows",
    "unknown_info": "What the customer does not know",
    "task_instructions": "What the customer wants and accepts",
}


@dataclass(frozen=True)
class TaskSource:
    """Makes the tasks of the domain `name`."""

    name: str
    world: World
    refuel_consent: bool = True

    def __call__(self, seed: int, n: int, split: str, difficulty: str) -> list[Task]:
        """Return the first `n` tasks of a split; `seed` changes nothing. `base` is train and test.

        Raises ValueError if the domain has no such difficulty.
        """
        ids = self.world.checkout.splits["base"] if split == "base" else self.ids[split]
        if difficulty != "medium":
            if not self.world.has_phone:
                known = "only telecom has levels; train telecom alone, or leave it out"
                raise ValueError(f"difficulty: got {difficulty}, but {known}")
            if split == "train":
                is_easy = difficulty == "easy"
                ids = [i for i in ids if (len(faults_of(i)) <= MOST_FAULTS_OF_EASY) == is_easy]
        return [self.task(task_id) for task_id in ids[:n]]

    @cached_property
    def ids(self) -> dict[str, list[str]]:
        """Ids by split: train, validation, test."""
        splits = self.world.checkout.splits
        train = list(splits["train"])
        test = list(splits["test"])
        tested = [{*faults_of(i)} for i in test]
        further = [i for i in splits.get("full", []) if i not in train]
        further = [i for i in further if {*faults_of(i)} not in tested]
        further.sort(key=_digest)
        if further:
            count = -(-len(further) // 10)
        else:
            train.sort(key=_digest)
            train, further = [], train
            count = max(1, round(VALIDATION_SHARE * len(further)))
        validation = further[:count]
        rest = further[count:]
        train = self._in_turn([*train, *rest])
        validation = self._in_turn(validation)
        return {"train": train, "validation": validation, "test": test}

    def _in_turn(self, ids: Sequence[str]) -> list[str]:
        """Return the ids with the families in turn; a prefix has as many of each as possible."""
        places = dict[str, int]()
        turns = list[tuple[int, int]]()
        for index, task_id in enumerate(ids):
            family = self.family(task_id)
            turns.append((places.get(family, 0), index))
            places[family] = places.get(family, 0) + 1
        return [ids[index] for _, index in sorted(turns)]

    @cached_property
    def family_shares(self) -> Mapping[str, float]:
        """Telecom trains on its three kinds evenly. Elsewhere, tasks to refuse are few."""
        families = [self.family(i) for i in self.ids["train"]]
        if self.world.has_phone:
            names = sorted(set(families))
            return {name: 1 / len(names) for name in names}
        share = families.count(NOTHING) / len(families)
        return {NOTHING: MOST_NOTHING} if share > MOST_NOTHING else {}

    def family(self, task_id: str) -> str:
        if self.world.has_phone:
            return kind_of(task_id)
        task = self.world.task(task_id)
        has_to_tell = "COMMUNICATE" in parts_of(task) and task.evaluation_criteria.communicate_info
        return "to do" if self.world.gold_state(task) or has_to_tell else NOTHING

    def task(self, task_id: str) -> Task:
        criteria = self.world.checkout.tasks[task_id]["evaluation_criteria"] or {}
        actions = criteria.get("actions") or ()
        is_transfer = any(action["name"].startswith("transfer") for action in actions)
        branch = "transfer" if is_transfer else ""
        if self.world.has_phone and not is_transfer:
            number = len(faults_of(task_id))
            branch = f"{number} fault{'s' * (number > 1)}"
        family = self.family(task_id)
        ticket = self.ticket(task_id)
        checkout = self.world.checkout
        instruction = SOLO if self.world.is_solo else TALK if checkout.is_talking else TICKET
        system = f"tau2 {checkout.name}\n\n{instruction}\n\n{self.world.policy}"
        asked = [{"role": "user", "content": ticket}]
        if checkout.is_talking:  # the customer's first words come from `reset`
            greeting = {"role": "assistant", "content": checkout.greeting}
            asked = [greeting, {"role": "user", "content": ""}]
        return Task(
            domain=self.name,
            id=task_id,
            prompt=({"role": "system", "content": system}, *asked),
            payload=json.dumps({"id": task_id, "goal": {"kind": family, "ticket": ticket}}),
            family=family,
            branch=branch,
        )

    def ticket(self, task_id: str) -> str:
        """Return the task's own ticket, or a ticket made from the customer's scenario.

        A ticket of telecom gets the customer's consent to buy data, which the scenario has.
        """
        task = self.world.checkout.tasks[task_id]
        instructions = self.world.checkout.instructions(task_id)
        if ticket := task.get("ticket"):
            wants = "refuel" in str(instructions) and "refuel" not in ticket
            return f"{ticket} {self.consent}" if wants and self.refuel_consent else str(ticket)
        told = {label: str(instructions.get(k) or "").strip(" .\n") for k, label in LABELS.items()}
        return "\n\n".join(f"{label}: {text}." for label, text in told.items() if text)

    @cached_property
    def consent(self) -> str:
        """The sentence of other tickets that consents to buy data."""
        tickets = [str(task.get("ticket")) for task in self.world.checkout.tasks.values()]
        found = (re.search(r"[^.]*\brefuel\b.*?\.(?!\d)", ticket) for ticket in tickets)
        return next((match[0].strip() for match in found if match), "")

    @cached_property
    def needing_a_judge(self) -> tuple[list[str], list[str]]:
        """Ids of the tasks with assertions for a judge: (with, without) a text that stands in."""
        found: tuple[list[str], list[str]] = ([], [])
        for task_id, task in self.world.checkout.tasks.items():
            criteria: dict[str, Any] = task["evaluation_criteria"] or {}
            if "NL_ASSERTION" in criteria["reward_basis"] and criteria.get("nl_assertions"):
                found[not criteria.get("communicate_info")].append(task_id)
        return found


def kind_of(task_id: str) -> str:
    """Return the kind of a task of telecom: `mms`, `mobile_data` or `service`."""
    return task_id[1:].partition("_issue]")[0]


def faults_of(task_id: str) -> list[str]:
    """Return the faults in the id of a task of telecom, which has its kind, faults and persona."""
    return task_id.partition("]")[2].partition("[PERSONA")[0].split("|")


def _digest(task_id: str) -> str:
    return hashlib.sha1(task_id.encode()).hexdigest()
