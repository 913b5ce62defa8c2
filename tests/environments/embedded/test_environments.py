"""Environments: the expert earns everything, anything else nothing, and no state ever leaks."""

import hashlib
import json
from collections import Counter
from functools import cache
from itertools import pairwise, product

import pytest

from examples.telecom_chat import REQUESTS
from pipeline.config.domain_names import EMBEDDED_DOMAINS
from pipeline.data.tasks import DIFFICULTIES, SPLITS
from pipeline.environments.discovery import tool_schemas
from pipeline.environments.embedded.cases import (
    IDS,
    Branch,
    Database,
    Draft,
    Family,
    generate,
    shares_of,
)
from pipeline.environments.experts import run_expert
from pipeline.environments.tools import call_tool
from pipeline.evaluation.baselines import play_baselines
from tests.support.helpers import DOMAINS, call, embedded, environments_of, module_of, say

CLASSES = environments_of(embedded())
MODULES = {domain: module_of(domain) for domain in DOMAINS}
in_every_domain = pytest.mark.parametrize("domain", DOMAINS)
in_the_default_domains = pytest.mark.parametrize("domain", EMBEDDED_DOMAINS)
at_every_difficulty = pytest.mark.parametrize("difficulty", DIFFICULTIES)


@cache
def make_tasks(domain, count=60, seed=0, split="train", difficulty="medium"):
    """Tasks that are made once; nobody alters them."""
    return MODULES[domain].generate_tasks(seed, count, split, difficulty)


def some_of(domain, count=30):
    """Tasks of every difficulty."""
    for difficulty in DIFFICULTIES:
        yield from make_tasks(domain, count, difficulty=difficulty)


def some_of_all(count=30):
    """Tasks of every domain and difficulty."""
    for domain in DOMAINS:
        yield from some_of(domain, count)


CONVERSATIONS = {}  # by domain and payload, which is all that an environment reads


def conversation(task):
    """The expert's, which is played once for a task."""
    key = task.domain, task.payload
    if key not in CONVERSATIONS:
        messages, reward = run_expert(CLASSES[task.domain](), MODULES[task.domain].expert, task)
        assert reward == 1.0
        CONVERSATIONS[key] = messages
    return CONVERSATIONS[key]


def expert_messages(task):
    """What the expert says and calls, its messages only."""
    return [message for message in conversation(task) if message["role"] == "assistant"]


def replay(task, messages, environment=None):
    """Say and call these messages in a fresh environment as a rollout does; returns the reward."""
    environment = environment or CLASSES[task.domain]()
    environment.reset(**task.row())
    for message in messages:
        for made in message.get("tool_calls", []):
            call_tool(environment, made["function"]["name"], made["function"]["arguments"])
            if environment.done:
                return environment.get_reward()
        if "tool_calls" not in message:
            user = environment.user
            if user is None or user.reply(message["content"]) is None:
                environment.final_message = message["content"]
                break
    return environment.get_reward()


def function_of(message):
    """Name and arguments of a message's call, or nothing."""
    if "tool_calls" not in message:
        return None, {}
    function = message["tool_calls"][0]["function"]
    return function["name"], function["arguments"]


def is_write(message):
    name, arguments = function_of(message)
    if not name:
        return message["content"] in REQUESTS.values() and not is_check(message)
    return not name.startswith(("find_", "get_")) and "check" not in arguments.values()


def is_check(message):
    return message["content"] == REQUESTS["check"]


def replaced(messages, position, *others):
    return [*messages[:position], *others, *messages[position + 1 :]]


# The reward


@pytest.mark.parametrize(
    "seeds", [[0], pytest.param(range(1, 10), marks=pytest.mark.proof)], ids=["one", "more"]
)
def test_the_expert_earns_everything_on_every_task(seeds):
    """432 tasks of a seed: four domains, three difficulties, every split."""
    played = 0
    for domain, difficulty, seed in product(DOMAINS, DIFFICULTIES, seeds):
        environment = CLASSES[domain]()
        for split, count in (("train", 24), ("validation", 6), ("test", 6)):
            for task in MODULES[domain].generate_tasks(seed, count, split, difficulty):
                _, reward = run_expert(environment, MODULES[domain].expert, task)
                assert reward == 1.0, task
                played += 1
    assert played == 432 * len(seeds)


def choices_of(task, name, key):
    """The values that an argument of a tool may have: those of its schema, or all records."""
    schema = {s["function"]["name"]: s["function"] for s in schemas_of(task)}[name]
    database = json.loads(task.payload)["database"]
    return schema["parameters"]["properties"][key].get("enum") or [*database.get(f"{key}s", {})]


def test_a_write_with_another_choice_earns_nothing():
    """Another reason, fee, way of refund, amount, flight, or another remedy of the phone."""
    tried = Counter()
    for task in some_of_all(30):
        messages = expert_messages(task)
        for position, message in enumerate(messages):
            name, arguments = function_of(message)
            for key, value in arguments.items() if is_write(message) else ():
                for other in choices_of(task, name, key):
                    changed = replaced(messages, position, call(name, **{**arguments, key: other}))
                    assert replay(task, changed) == float(other == value), (task, other)
                    tried[name, key] += other != value
    assert {name for (name, _), count in tried.items() if count} >= {
        *("add_bag", "add_data", "ask_user", "cancel", "move", "refund", "transfer")
    }


def schemas_of(task):
    return tool_schemas(CLASSES[task.domain])


def test_facts_must_be_told_and_told_right():
    told = Counter()
    for task in some_of_all():
        facts = json.loads(task.payload)["facts"]
        if not facts:
            continue
        *work, final = expert_messages(task)
        wrong = {"0": "20", "20": "40", "40": "0", "card": "bank", "voucher": "card"}
        wrong |= {"bank": "voucher", "1": "2", "2": "5", "5": "1"}
        told[facts[0]] += 1
        assert replay(task, [*work, final]) == 1.0
        assert replay(task, [*work, say(f"It is {facts[0].upper()}!")]) == 1.0
        assert replay(task, [*work, say("Done.")]) == 0.0
        assert replay(task, [*work, say(f"The fee is {wrong[facts[0]]}.")]) == 0.0
        assert replay(task, [*work, say(f"It is {facts[0]}0, {facts[0]}x and {facts[0]}_.")]) == 0.0
    assert set(told) == {"0", "20", "40", "card", "voucher", "bank", "1", "2", "5"}


def test_an_episode_that_is_not_brought_to_its_end_earns_nothing():
    for task in some_of_all():
        *work, last = expert_messages(task)
        if "tool_calls" not in last:
            assert replay(task, work) == 0.0


# What the policy text asks for in each branch, lookups (get, flights, variant) among it.
STEPS = {
    "airline": {
        "flown": "get transfer",
        "flex": "get cancel",
        "uninsured": "get transfer",
        "sick": "get ask cancel",
        "plans": "get ask transfer",
        "fare": "get transfer",
        "move": "get find_flights move",
        **dict.fromkeys(("gold", "silver", "none"), "get add_bag"),
    },
    "retail": {
        "pending": "get ask cancel",
        "cancel/shipped": "get recall",
        "delivered": "get transfer",
        "undelivered": "get transfer",
        "in": "get find_variant exchange",
        "out": "get find_variant transfer",
        "refund/shipped": "get transfer",
        **dict.fromkeys(("card", "gift", "cash"), "get refund"),
    },
    "telecom": {
        **dict.fromkeys(("ended", "no_data", "no_roaming"), "get transfer"),
        "due": "get send_bill ask_user:pay resume",
        "paid": "get resume",
        "over": "get ask add_data",
        "off": "get enable_roaming",
        "check": "get ask_user:check ask_user:remedy",
    },
}
STEPS["telecom_chat"] = STEPS["telecom"]
RECORDS = ("get_reservation", "get_order", "get_line")
FINDS = ("find_reservation", "find_order", "find_line")


def step_of(message):
    """What a message of the expert does, in the words of `STEPS`; None for its closing words."""
    name, arguments = function_of(message)
    action = arguments.get("action") or next(
        (action for action, words in REQUESTS.items() if words == message["content"]), None
    )
    if action:
        return f"ask_user:{action if action in ('check', 'pay') else 'remedy'}"
    if name:
        return "get" if name in RECORDS else name
    return "ask" if "?" in message["content"] else None


def worked(task):
    """The expert's messages without the search for a customer's record, and their steps."""
    messages = [m for m in expert_messages(task) if function_of(m)[0] not in FINDS]
    return messages, [step_of(message) for message in messages if step_of(message)]


def found_first(task, messages):
    """The messages after the search for the record, as the expert has begun with it."""
    first = expert_messages(task)[0]
    return [first, *messages] if function_of(first)[0] in FINDS else messages


@in_every_domain
def test_the_expert_takes_the_steps_of_the_policy_text(domain):
    met = set()
    for task in some_of(domain, 60):
        key = next(k for k in (task.branch, f"{task.family}/{task.branch}") if k in STEPS[domain])
        assert " ".join(worked(task)[1]) == STEPS[domain][key], task
        met.add(key)
    assert met == set(STEPS[domain])


@in_every_domain
def test_a_step_earlier_or_later_than_the_policy_says_earns_nothing(domain):
    """Every exchange of two neighbours; a step that ends the episode stays the last."""
    tried = Counter()
    for task in some_of(domain):
        messages, steps = worked(task)
        for i, (first, second) in enumerate(pairwise(steps)):
            swapped = [*messages[:i], messages[i + 1], messages[i], *messages[i + 2 :]]
            assert replay(task, found_first(task, swapped)) == 0.0, (task, steps)
            tried[f"{first} {second}"] += 1
    assert set(tried) == {
        f"{a} {b}" for steps in STEPS[domain].values() for a, b in pairwise(steps.split())
    }


@in_every_domain
def test_a_step_left_out_earns_nothing_nor_one_made_twice_but_for_lookups(domain):
    for task in some_of(domain):
        messages, steps = worked(task)
        for i, step in enumerate(steps):
            left = found_first(task, replaced(messages, i))
            assert replay(task, [*left, say("Done.")]) == 0.0, (task, step)
            twice = found_first(task, [*messages[: i + 1], messages[i], *messages[i + 1 :]])
            is_free = step.startswith(("get", "find")) or step == "transfer"  # the episode is over
            assert replay(task, twice) == float(is_free), (task, step)


def test_what_was_done_in_the_wrong_order_is_shown_beside_the_right_one():
    task = next(t for t in make_tasks("retail") if t.branch == "gift")
    order = json.loads(task.payload)["goal"]["record"]
    environment = CLASSES["retail"]()
    refunds = [call("refund", order=order, to=to) for to in ("card", "bank", "voucher")]
    assert replay(task, [*refunds, say("It is a voucher.")], environment) == 0.0
    assert environment.reward_breakdown == {
        "ended": True,
        "facts": True,
        "database": True,
        "steps": False,
    }
    assert environment.difference == {
        "steps": [
            f"refund({order}, card), refund({order}, bank), refund({order}, voucher)",
            f"get_order({order}), refund({order}, voucher)",
        ]
    }


# State


@in_every_domain
def test_reset_erases_everything(domain):
    used = CLASSES[domain]()
    tasks = make_tasks(domain, 30)
    for before, after in pairwise(tasks):
        replay(before, expert_messages(before), used)
        used.reset(**after.row())
        fresh = CLASSES[domain]()
        fresh.reset(**after.row())
        assert vars(used) == vars(fresh)
        assert replay(after, expert_messages(after), used) == 1.0


# Generation


def test_the_same_seed_gives_the_same_tasks_in_every_process():
    """Byte for byte but for the policy; the digest is that of every run before."""
    digest = hashlib.sha256()
    for domain, difficulty, split in product(EMBEDDED_DOMAINS, DIFFICULTIES, SPLITS):
        tasks = MODULES[domain].generate_tasks(7, 40, split, difficulty)
        of = [(t.id, t.payload, *t.prompt[1:], t.family, t.branch) for t in tasks]
        digest.update(repr(of).encode())
    assert digest.hexdigest() == (
        "36c58a39ea463b39744b5d170fb17ac91a831b9c6ce273847e4faefed4227e83"
    )


@in_every_domain
def test_another_seed_gives_other_tasks_and_a_longer_list_begins_with_the_shorter(domain):
    first = make_tasks(domain, seed=0)
    assert not {task.payload for task in first} & {t.payload for t in make_tasks(domain, seed=1)}
    assert make_tasks(domain, 20) == first[:20]


def seen_by(task):
    """The request and what the tools and the user say to the expert."""
    told = [m["content"] for m in conversation(task) if m["role"] in ("user", "tool")]
    return json.dumps(told)


@in_every_domain
@at_every_difficulty
@pytest.mark.parametrize(
    "size", [15, pytest.param(90, marks=pytest.mark.proof)], ids=["some", "many"]
)
def test_splits_share_no_task_and_no_visible_content(domain, difficulty, size):
    counts = {"train": 3 * size, "validation": size, "test": size}
    tasks = {
        split: [t for seed in (0, 1) for t in make_tasks(domain, count, seed, split, difficulty)]
        for split, count in counts.items()
    }
    for of_task in (seen_by, lambda task: task.payload, lambda task: task.key):
        train, validation, test = ({of_task(task) for task in tasks[split]} for split in SPLITS)
        assert not train & validation
        assert not train & test
        assert not validation & test


@in_every_domain
@at_every_difficulty
def test_families_and_branches_keep_their_shares(domain, difficulty):
    tasks = make_tasks(domain, 150, difficulty=difficulty)
    for family in MODULES[domain].FAMILIES:
        branches = Counter(task.branch for task in tasks if task.family == family.name)
        shares = shares_of(family, difficulty)
        assert branches.total() == 50
        assert set(branches) == set(shares)
        assert all(abs(branches[b] - 50 * share) < 1 for b, share in shares.items())


@in_the_default_domains
def test_difficulties_differ_in_what_the_expert_must_do(domain):
    turns = {}
    for difficulty in DIFFICULTIES:
        played = [expert_messages(task) for task in make_tasks(domain, 90, difficulty=difficulty)]
        first_calls = {function_of(messages[0])[0].partition("_")[0] for messages in played}
        assert first_calls == ({"find"} if difficulty == "hard" else {"get"})
        questions = [m for messages in played for m in messages[:-1] if "tool_calls" not in m]
        assert bool(questions) == (difficulty != "easy")
        turns[difficulty] = sum(map(len, played)) / len(played)
    assert turns["easy"] < turns["medium"] < turns["hard"]


# The mean over the families of the largest share of a branch: (.28 + .60 + .30) / 3 for airline.
COMMONEST = {
    "medium": {"airline": 0.393, "retail": 0.370, "telecom": 0.383},
    "easy": {"airline": 0.5, "retail": 0.57, "telecom": 0.7},
}


@in_the_default_domains
@pytest.mark.parametrize("difficulty", COMMONEST)
def test_the_commonest_case_is_a_baseline_and_nothing_earns_nothing(domain, difficulty):
    tasks = make_tasks(domain, 150, split="test", difficulty=difficulty)
    found = play_baselines(embedded(domain), {domain: tasks})[domain]
    commonest = pytest.approx(COMMONEST[difficulty][domain], abs=0.005)
    assert found == {"nothing": 0.0, "commonest case": commonest}


def test_more_tasks_than_exist_are_refused():
    family = Family(
        name="hello",
        phrasings=("hello {record}",),
        branches={"one": Branch(1.0, 1.0, {}, "")},
    )
    with pytest.raises(ValueError, match="desk: no 4 different train tasks exist; ask for fewer"):
        generate(
            *(0, 4, "train", "medium"),
            domain="desk",
            policy="policy",
            families=[family],
            draft_task=three_drafts,
        )


def three_drafts(random, family, branch, case):
    goal = {"record": random.choice(IDS[:3]), "customer": "K09"}
    return Draft(goal=goal, database=Database(), expected=Database())


# Demonstrations


@in_the_default_domains
@pytest.mark.parametrize("share", [1.0, 0.0])
def test_experts_that_quote_write_the_rule_of_what_they_do(domain, share):
    """Also of a wrong decision: an action of the rule follows each quoted rule."""
    source = MODULES[domain]
    for task in make_tasks(domain, 300):
        played = [
            run_expert(CLASSES[domain](), source.expert, task, share, quotes_rules=is_on)
            for is_on in (True, False)
        ]
        (quoting, reward), (plain, same_reward) = played
        assert reward == same_reward
        quotes = [
            quoted["content"].removesuffix(said["content"]).strip()
            for quoted, said in zip(quoting, plain, strict=True)
        ]
        rules = [quote for quote in quotes if quote]
        assert rules and all(rule in quoting[0]["content"] for rule in rules)
        assert [{**m, "content": ""} for m in quoting] == [{**m, "content": ""} for m in plain]
        for rule, message in zip(quotes, plain, strict=True):
            name, arguments = function_of(message)
            if "transfer" in (name, *rule.split()):
                assert rule.endswith(f"transfer with reason {arguments['reason']}")
            elif rule and name and (written := set(arguments.values()) & set(rule.split())):
                assert rule.endswith(*written)


@in_every_domain
def test_a_demonstrator_is_repeatable_and_leaves_every_choice_likely(domain):
    expert, environment = MODULES[domain].expert, CLASSES[domain]()
    tasks = make_tasks(domain, 300)
    played = [run_expert(environment, expert, task, rule_share=0.3, seed=5) for task in tasks]
    again = [run_expert(environment, expert, task, rule_share=0.3, seed=5) for task in tasks[:60]]
    assert played[:60] == again
    success = sum(reward for _, reward in played) / len(played)
    assert 0.3 < success < 0.65
    ends = {}
    for task, (messages, _) in zip(tasks, played, strict=True):
        ends.setdefault((task.family, task.branch), Counter())[closing(messages)] += 1
    for counts in ends.values():
        assert len(counts) >= 2
        assert max(counts.values()) / counts.total() < 0.85


def closing(messages):
    """The last write of an episode, without the record's id."""
    last = [m for m in messages if m["role"] == "assistant" and is_write(m)][-1]
    name, arguments = function_of(last)
    return name or last["content"], *(v for v in arguments.values() if v not in IDS)


# Tools


def test_schemas_come_from_signatures_and_docstrings():
    schema = tool_schemas(CLASSES["retail"])[0]["function"]
    assert schema["name"] == "cancel"
    assert schema["description"] == "Cancel an order that has not been shipped."
    assert schema["parameters"] == {
        "type": "object",
        "properties": {
            "order": {"type": "string", "description": "Order id."},
            "reason": {
                "type": "string",
                "enum": ["late", "wrong", "price"],
                "description": "The customer's reason.",
            },
        },
        "required": ["order", "reason"],
    }
