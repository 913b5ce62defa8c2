"""A domain of τ²-bench as a `Domain` of a run; `--tau2 PATH` names this module's function.

Train and test are the official splits. Validation tasks are cut from training tasks by a hash of
the id. Telecom also trains and validates on further tasks of the official split `full`: those whose
combination of faults no task of `test` has.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError
from pipeline.common.untrusted import one_line, shown
from pipeline.data.tasks import Task
from pipeline.environments.demonstrations import Demonstration, fields_of
from pipeline.environments.domains import Domain
from pipeline.environments.experts import run_expert
from pipeline.environments.tau2.checkout import DATABASES, TESTED_COMMIT, Checkout
from pipeline.environments.tau2.environment import (
    JudgedEnvironment,
    TalkingEnvironment,
    Tau2Environment,
    parts_of,
)
from pipeline.environments.tau2.telecom_expert import expert
from pipeline.environments.tau2.world import World

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

NUM_READ = 300  # training tasks whose demonstrations give the tiny model's tokens
TRANSFER = ("transfer_to_human_agents", {"summary": "The customer needs a human agent."})
PLAYED_SOLO = "a ticket, in solo mode"
PLAYED_TICKET = "a ticket made from the customer's scenario"
SCRIPTED = "a script that tells the scenario part by part"
REPEATS = (
    "one customer, five tickets and the tools' texts, which a tiny model memorises; "
    "in these splits, no combination of faults of a test task is among the training tasks"
)
ToolCalls = list[tuple[str, dict[str, Any]]]


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
            return issue_of(task_id)
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
        parts = {label: str(instructions.get(k) or "").strip(" .\n") for k, label in LABELS.items()}
        return "\n\n".join(f"{label}: {text}." for label, text in parts.items() if text)

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


def issue_of(task_id: str) -> str:
    """Return the kind of a task of telecom: `mms`, `mobile_data` or `service`."""
    return task_id[1:].partition("_issue]")[0]


def faults_of(task_id: str) -> list[str]:
    """Return the faults in the id of a task of telecom, which has its kind, faults and persona."""
    return task_id.partition("]")[2].partition("[PERSONA")[0].split("|")


def _digest(task_id: str) -> str:
    return hashlib.sha1(task_id.encode()).hexdigest()


@cache
def tau2_domain(
    path: str,
    domain: str,
    *,
    reward: str = "verifiable",
    refuel_consent: bool = True,
    customer: str = "ticket",
    played_by: str = "",
    judged_by: str = "",
    **unknown: object,
) -> Domain:
    """Return the domain `domain` of the checkout in `path`.

    `reward` is verifiable, or official: a judge decides what only a language model can.
    `refuel_consent` gives telecom's tickets the consent to buy data. `customer` is ticket or
    scripted; `played_by` and `judged_by` name the language models that play the customer and judge.
    Raises UserError for a faulty checkout, or if the reward `official` needs a judge.
    """
    if problem := _problem(reward, customer, domain, played_by, unknown):
        raise UserError(f"tau2: {problem}")
    customer = "llm" if played_by else customer
    world = _world(Path(path).expanduser().resolve(), domain, customer != "ticket")
    source = TaskSource(domain, world, refuel_consent)
    judged = [i for ids in source.needing_a_judge for i in ids] if reward == "official" else []
    if judged and not judged_by:
        ids = ", ".join(judged)
        raise UserError(
            f"tau2: reward: official needs a judge for {len(judged)} tasks of {domain} ({ids}); "
            "give judge_url and judge_model, or verifiable"
        )
    known = {"world": world, "schemas": world.schemas}
    done: ToolCalls = [("done", {})] if world.is_solo else []
    kind = Tau2Environment if customer == "ticket" else TalkingEnvironment
    kinds = (JudgedEnvironment, kind) if judged else (kind,)
    environment = type(f"Tau2{domain.title()}Environment", kinds, known)
    _refuse_incomplete(source, environment, done)

    def baselines(task: Task) -> Mapping[str, Sequence[tuple[str, dict[str, Any]]]]:
        return {"nothing": done, "transfer": [TRANSFER, *done]}

    return Domain(
        name=source.name,
        environment=environment,
        generate_tasks=source,
        expert=expert if world.is_solo else None,
        words=partial(_words, source, environment) if world.is_solo else tuple,
        baselines=baselines,
        about=partial(_about, source, reward, customer, played_by, judged_by if judged else ""),
        family_shares=source.family_shares,
    )


def _problem(
    reward: str, customer: str, domain: str, played_by: str, unknown: Mapping[str, object]
) -> str:
    """Return the first mistake in the arguments of `tau2_domain`, or an empty text."""
    if unknown:
        got = shown(next(iter(unknown)))
        return f"got the argument {got}; give reward, refuel_consent or customer"
    if reward not in ("verifiable", "official"):
        return f"reward: got {shown(reward)}; give verifiable or official"
    if customer not in ("ticket", "scripted"):
        hint = "give ticket or scripted, or customer_url for a language model"
        return f"customer: got {shown(customer)}; {hint}"
    if customer == "scripted" and (played_by or domain == "telecom"):
        who = f"customer_url is {played_by}" if played_by else "telecom has none"
        return f"customer: got scripted, but {who}; take it out"
    return ""


@cache
def _words(source: TaskSource, environment: type[Any]) -> list[str]:
    """Return the fields of clean and of flawed demonstrations of telecom, and the tools' names."""
    made = list[Demonstration]()
    for task, share in product(source(0, NUM_READ, "train", "medium"), (1.0, 0.6)):
        with suppress(LookupError, TypeError, ValueError):  # a warm start refuses such an expert
            messages, _ = run_expert(environment(), expert, task, share)
            made.append(Demonstration(task.id, messages, None))
    names = " ".join(["\ntools:", *(schema["function"]["name"] for schema in environment.schemas)])
    return [*fields_of(made), f"tau2 telecom{names}", "tau2 telecom", names]


def _refuse_incomplete(source: TaskSource, environment: type[Any], done: ToolCalls) -> None:
    """Raise UserError if the gold calls of a test task do not earn 1, as with cut-off databases."""
    for task_id in source.ids["test"]:
        episode = environment()
        criteria = source.world.task(task_id).evaluation_criteria
        last_message = " ".join(criteria.communicate_info or ())
        try:
            episode.reset(json.dumps({"id": task_id}))
            for action in criteria.actions or ():
                is_customer = action.requestor == "user" and not source.world.is_solo
                call = episode.call_of_customer if is_customer else episode.call
                call(action.name, action.arguments)
            for end in done:
                episode.call(*end)
            episode.stop_reason = "completed"
            episode.messages = [{"role": "assistant", "content": last_message}]
            earned: float | str = Tau2Environment.get_reward(episode)  # without the judge
        except Exception as error:  # whatever the checkout's code raises on such data
            earned = one_line(f"{type(error).__name__}: {error}")
        if earned != 1:
            files = ", ".join(DATABASES[source.world.checkout.name])
            why = f"the gold calls of task {shown(task_id)} do not earn 1 ({earned})"
            what = f"{source.world.checkout.folder}: {files} or tasks.json are cut off or changed"
            raise UserError(f"tau2: {what}: {why}; check them out again")


@cache
def _world(path: Path, name: str, is_talking: bool) -> World:
    checkout = Checkout(path, name, is_talking)
    assert checkout.tasks and checkout.splits  # both are checked when they are read
    assert not is_talking or checkout.greeting
    return World(checkout)


def _about(
    source: TaskSource, reward: str, customer: str, played_by: str, judge: str
) -> dict[str, Any]:
    """Return what a reader of results must know about a domain's tasks and rewards."""
    checkout = source.world.checkout
    is_solo = source.world.is_solo
    approximated, unjudged = source.needing_a_judge
    consent = ", with the consent to buy data" if source.refuel_consent else ""
    who = {
        "ticket": PLAYED_SOLO + consent if is_solo else PLAYED_TICKET,
        "scripted": SCRIPTED,
        "llm": f"{played_by}, with the benchmark's user prompt",
    }
    other = f" (rewards were compared with the official ones at {TESTED_COMMIT})"

    def named(is_such: Callable[[str], Any]) -> dict[str, list[str]]:
        found = {split: [*filter(is_such, ids)] for split, ids in known.items()}
        return {split: ids for split, ids in found.items() if ids}

    # Telecom has 2,000 tasks to train on; its results are of the test split.
    known = {"test": source.ids["test"]} if source.world.has_phone else source.ids
    peculiar = {
        "gold_calls_fail": named(lambda i: source.world.failing_gold_calls(source.world.task(i))),
        "solved_by_nothing": named(lambda i: source.family(i) == NOTHING),
    }

    def of_splits(wanted: Collection[str]) -> dict[str, int]:
        return {split: sum(i in wanted for i in ids) for split, ids in source.ids.items()}

    judged = [*approximated, *unjudged]
    replaced = {
        "nl_assertions_replaced_by_communicate": of_splits(approximated),
        "nl_assertions_not_checked": of_splits(unjudged),
    }
    return {
        "benchmark": f"τ²-bench {checkout.name}",
        "commit": checkout.commit + other * (checkout.commit != TESTED_COMMIT),
        "data_sha256": checkout.data_hash,
        "user_mode": "none" if customer == "ticket" else customer,
        "customer": who[customer],
        "reward": reward,
        "tasks_in_splits": of_splits(checkout.tasks),
        **({"judge": judge, "nl_assertions_judged": of_splits(judged)} if judge else replaced),
        **{fact: tasks for fact, tasks in peculiar.items() if tasks},
        **({"what_repeats": REPEATS} if is_solo else {}),
    }
