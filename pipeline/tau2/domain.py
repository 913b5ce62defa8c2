"""A domain of τ²-bench as a `Domain` of a run; `--tau2 PATH` names this module's function."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from pipeline.data.tasks import Task
from pipeline.environments.demonstrations import Demonstration, fields_of
from pipeline.environments.domains import Domain
from pipeline.environments.experts import run_expert
from pipeline.errors import UserError
from pipeline.files.untrusted import one_line, shown
from pipeline.tau2.checkout import DATABASES, TESTED_COMMIT, Checkout
from pipeline.tau2.environment import TalkingEnvironment, Tau2Environment, World
from pipeline.tau2.judge import JudgedEnvironment
from pipeline.tau2.tasks import NOTHING, TaskSource
from pipeline.tau2.telecom_expert import expert

NUM_READ = 300  # training tasks whose demonstrations give the tiny model's tokens
TRANSFER = ("transfer_to_human_agents", {"summary": "The customer needs a human agent."})
SOLO = "a ticket, in solo mode"
TICKET = "a ticket made from the customer's scenario"
SCRIPTED = "a script that tells the scenario part by part"
REPEATS = (
    "one customer, five tickets and the tools' texts, which a tiny model memorises; "
    "in these splits, no combination of faults of a test task is among the training tasks"
)
Calls = list[tuple[str, dict[str, Any]]]


@cache
def tau2_domain(
    path: str,
    domain: str,
    reward: str = "verifiable",
    refuel_consent: bool = True,
    customer: str = "ticket",
    played_by: str = "",
    judged_by: str = "",
) -> Domain:
    """Return the domain `domain` of the checkout in `path`.

    `customer` is ticket, scripted or llm; `played_by` and `judged_by` tell results which language
    models.
    Raises UserError for a faulty checkout, or if the reward `official` needs a judge.
    """
    if reward not in ("verifiable", "official"):
        raise UserError(f"tau2_reward: got {shown(reward)}; give verifiable or official")
    world = _world(Path(path).expanduser().resolve(), domain, customer != "ticket")
    source = TaskSource(domain, world, refuel_consent)
    judged = [i for ids in source.needing_a_judge for i in ids] if reward == "official" else []
    if judged and not judged_by:
        ids = ", ".join(judged)
        raise UserError(
            f"tau2_reward: official needs a judge for {len(judged)} tasks of {domain} ({ids}); "
            "give judge_url and judge_model, or verifiable"
        )
    known = {"world": world, "schemas": world.schemas}
    done: Calls = [("done", {})] if world.is_solo else []
    kind = Tau2Environment if customer == "ticket" else TalkingEnvironment
    kinds = (JudgedEnvironment, kind) if judged else (kind,)
    environment = type(f"Tau2{domain.title()}Environment", kinds, known)
    who = {"scripted": SCRIPTED, "llm": f"{played_by}, with the benchmark's user prompt"}

    _refuse_incomplete(source, environment, done)

    def baselines(task: Task) -> Mapping[str, Sequence[tuple[str, dict[str, Any]]]]:
        return {"nothing": done, "transfer": [TRANSFER, *done]}

    def about() -> dict[str, Any]:
        mode = "none" if customer == "ticket" else customer
        return _about(source, reward, mode, who.get(customer, ""), judged_by if judged else "")

    return Domain(
        name=source.name,
        environment=environment,
        generate_tasks=source,
        expert=expert if world.is_solo else None,
        words=partial(_words, source, environment) if world.is_solo else tuple,
        baselines=baselines,
        about=about,
        family_shares=source.family_shares,
    )


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


def _refuse_incomplete(source: TaskSource, environment: type[Any], done: Calls) -> None:
    """Raise UserError if the gold calls of a test task do not earn 1, as with cut-off databases."""
    for task_id in source.ids["test"]:
        episode = environment()
        criteria = source.world.task(task_id).evaluation_criteria
        said = " ".join(criteria.communicate_info or ())
        try:
            episode.reset(json.dumps({"id": task_id}))
            for action in criteria.actions or ():
                is_customer = action.requestor == "user" and not source.world.is_solo
                call = episode.call_of_customer if is_customer else episode.call
                call(action.name, action.arguments)
            for end in done:
                episode.call(*end)
            episode.stop_reason = "completed"
            episode.messages = [{"role": "assistant", "content": said}]
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


def _about(source: TaskSource, reward: str, mode: str, customer: str, judge: str) -> dict[str, Any]:
    """Return what a reader of results must know about a domain's tasks and rewards."""
    checkout = source.world.checkout
    is_solo = source.world.is_solo
    approximated, unjudged = source.needing_a_judge
    consent = ", with the consent to buy data" if source.refuel_consent else ""
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
        "user_mode": mode,
        "customer": customer or (SOLO + consent if is_solo else TICKET),
        "reward": reward,
        "tasks_in_splits": of_splits(checkout.tasks),
        **({"judge": judge, "nl_assertions_judged": of_splits(judged)} if judge else replaced),
        **{fact: tasks for fact, tasks in peculiar.items() if tasks},
        **({"what_repeats": REPEATS} if is_solo else {}),
    }
