"""Rewards of the adapter against a slow reference on whole databases, for every kind of case.

With TAU2_PATH the checkout is the real one, otherwise the miniature of `tests/support/`; the tests'
ids say which. `scripts/proofs/tau2_conformance.py` compares with the official evaluator itself.
"""

import copy
from functools import partial
from statistics import fmean

import pytest

from pipeline.environments.tau2.checkout import Checkout
from pipeline.environments.tau2.world import changes_of
from scripts.proofs.tau2_cases import CHANGES, DONE, cases_of, changed, minus, texts, together
from scripts.proofs.tau2_conformance import FLOORS, leaked, play, started, whole_database
from tests.environments.tau2.conftest import SOURCE

# Tools store arguments of any type, and pydantic warns of them when the official code dumps them.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
IS_REAL = SOURCE == "tau2-bench"
MINIATURE_FLOORS = {"airline": (50, 50), "retail": (50, 50), "telecom": (0, 50)}


class Reference:
    """Plays and scores a case by the official rules on fresh, whole databases."""

    def __init__(self, path, domain):
        self.checkout, self.world = Checkout(path, domain.name), domain.environment.world
        self.package = self.checkout.package

    def begin(self, task):
        official = self.checkout.make_environment()
        if official.user_tools is not None:
            official.user_tools.default_vpn_details = copy.deepcopy(self.world._vpn)
        state = task.initial_state
        for action in (state.initialization_actions if state else None) or ():
            official.run_env_function_call(action)
        return official

    def answer(self, official, call):
        return official.get_response(self.package.ToolCall(**call))

    def __call__(self, case):
        """Return the reward and the texts of the tool results."""
        task, solo = self.world.task(case["task"]), case["domain"] == "telecom"
        official, calls, said, errors, results, ended = self.begin(task), [], [], 0, [], False
        for message in case["messages"]:
            said.append(message["content"] or "")
            stops = solo and any(call["name"] == "done" for call in message["calls"])
            ended = stops or not message["calls"]
            if ended or errors >= 10:
                ended = errors < 10 and (stops or not solo)
                break
            answers = [self.answer(official, call) for call in message["calls"]]
            calls += message["calls"]
            errors += sum(answer.error for answer in answers)
            results += [answer.content for answer in answers]
        graded = ended and errors < 10
        return float(graded and self.passes(task, official, calls, said)), results

    def passes(self, task, official, calls, said):
        criteria, gold = task.evaluation_criteria, self.begin(task)
        for action in criteria.actions or ():
            self.answer(gold, {"name": action.name, "arguments": action.arguments})
        made = [self.package.ToolCall(**call) for call in calls]
        heard = "\n".join(said).lower().replace(",", "")
        try:
            works = [official.run_env_assertion(a, False) for a in criteria.env_assertions or ()]
        except AttributeError:
            works = [False]
        parts = {
            "DB": whole_database(official) == whole_database(gold),
            "ENV_ASSERTION": all(works),
            "ACTION": all(any(map(a.compare_with_tool_call, made)) for a in criteria.actions or ()),
            "COMMUNICATE": all(i.lower() in heard for i in criteria.communicate_info or ()),
        }
        parts["NL_ASSERTION"] = parts["COMMUNICATE"] or not criteria.nl_assertions
        return all(parts[part.value] for part in criteria.reward_basis)


@pytest.fixture
def reference(checkout_path, domain):
    return Reference(checkout_path, domain)


def test_the_gold_calls_of_every_task_earn_1(domain, maker):
    earned = [play(domain, maker.case("gold", t, maker.gold(t)))["reward"] for t in maker.tasks]
    assert earned and set(earned) == {1.0}


def test_the_floors_are_those_of_the_benchmark(domain, maker):
    cases = [(case["kind"], play(domain, case)["reward"]) for case in maker.floors("test")]
    found = tuple(
        100 * fmean(reward for floor, reward in cases if floor == kind)
        for kind in ("nothing", "transfer")
    )
    assert found == (FLOORS[domain.name][::2] if IS_REAL else MINIATURE_FLOORS[domain.name])


@pytest.mark.parametrize("kind", ["minus", "texts", "together", *(c.__name__ for c in CHANGES)])
def test_a_case_earns_what_whole_databases_say(domain, maker, reference, kind):
    number = 2 if IS_REAL and domain.name != "telecom" else 6
    if kind == "minus":
        cases = list(minus(maker))
        cases = maker.rng.sample(cases, min(number, len(cases)))
    else:
        ways = {"texts": texts, "together": together}
        cases = list(ways.get(kind, partial(changed, kinds=[kind]))(maker, number))
    assert cases
    for case in cases:
        ours, (reward, results) = play(domain, case), reference(case)
        assert ours["reward"] == reward, case
        same = min(len(results), len(ours["texts"]))  # calls beside `done` do not take place
        assert ours["texts"][:same] == results[:same], case


def test_the_state_of_an_episode_is_the_difference_of_whole_databases(domain, maker, reference):
    for task in list(maker.tasks)[: 3 if IS_REAL else 6]:
        ours, whole = started(domain, task), reference.begin(domain.environment.world.task(task))
        before = whole_database(whole)
        for call in maker.gold(task):
            ours.call(call["name"], call["arguments"])
            reference.answer(whole, call)
        after = whole_database(whole)
        assert whole_database(ours._environment) == after
        if domain.name != "telecom":  # telecom has no overlay
            assert bool(changes_of(ours._environment.tools.db)) == (after != before)


def test_no_episode_changes_what_all_episodes_share(domain, maker, checkout_path):
    for case in cases_of(maker, 1) if not IS_REAL else changed(maker, 5):
        play(domain, case)
    assert not leaked(domain, checkout_path, next(iter(maker.tasks)))


@pytest.mark.parametrize("domain", ["telecom"], indirect=True)
def test_calls_in_the_message_of_done_do_not_take_place(domain, maker):
    task = next(iter(maker.tasks))
    calls = maker.gold(task)
    beside = [{"content": None, "calls": [*calls, dict(DONE)]}]
    assert play(domain, maker.case("beside", task, [], beside))["reward"] == 0.0
    before = [{"content": None, "calls": calls}, *maker.end()]
    assert play(domain, maker.case("before", task, [], before))["reward"] == 1.0


@pytest.mark.parametrize("domain", ["airline"], indirect=True)
def test_commas_in_what_the_model_says_do_not_count(domain, maker):
    task = next(task for task in maker.tasks if maker.said(task))
    told = " ".join(f"{text[:1]},{text[1:]}".upper() for text in maker.said(task))
    for text, reward in ((told, 1.0), ("no", 0.0)):
        case = maker.case("commas", task, maker.gold(task), maker.end(text))
        assert play(domain, case)["reward"] == reward
