"""Environments written for TRL's `environment_factory` train here as they are."""

import json
import random
import re
from collections import defaultdict
from functools import cache, partial, partialmethod, singledispatchmethod, wraps
from typing import Any

import pytest
from datasets import Dataset

from pipeline.config.cli import parse
from pipeline.config.settings import Config
from pipeline.environments import load_domains
from pipeline.environments.discovery import tool_methods, tool_problem, tool_schemas
from pipeline.environments.task_checks import try_task
from pipeline.environments.task_sets import task_sets
from pipeline.environments.tools import RandomState, call_tool, reset_arguments
from pipeline.preflight.parts import prepare
from pipeline.rollout.rewards import load_reward_functions
from pipeline.rollout.trajectory import StopReason
from tests.support import trl_forms
from tests.support.helpers import (
    call,
    make_task,
    played,
    say,
)
from tests.support.messages import refusal

FORMS = "tests.support.trl_forms"
LIMITS = {"max_tokens": 1500, "max_tokens_per_turn": 100, "max_tool_result_tokens": 200}
ROWS = [
    *({"environment": "total", "prompt": f"Add up to {n}.", "target": n} for n in range(1, 9)),
    *({"environment": "strict", "prompt": f"Lower {n}.", "target": n} for n in range(1, 9)),
]
BOTH = {
    "total": f"{FORMS}:Total",
    "strict": {"factory": f"{FORMS}:make_strict", "arguments": {"limit": 2}},
}
HITS = [f"{FORMS}:hits", f"{FORMS}:lowered"]


def config_of(environments, rollout=LIMITS, **data):
    data = {"tasks_per_domain": 6, "eval_tasks_per_domain": 3, **data}
    data |= {"domains": list(environments), "environments": environments}
    return Config.model_validate(
        {"data": data, "rollout": rollout, "warm_start": {"steps": 0}}, strict=False
    )


def domain_of(name, **data):
    return load_domains(config_of({"own": f"{FORMS}:{name}"}, **data))["own"]


@pytest.fixture
def routed(tmp_path):
    """A folder with a dataset of two domains, without splits."""
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "rows"))
    return dict.fromkeys(BOTH, str(tmp_path / "rows"))


# Episodes


def episodes(config, tasks, script, group=2):
    """Play `script` in each episode of a group of each task."""
    tasks = [task for task in tasks for _ in range(group)]
    rewards, scripts = load_reward_functions(config), [script] * len(tasks)
    return played(scripts, load_domains(config), config.rollout, tasks, rewards=rewards)[0]


def replies(trajectory):
    return [m["content"] for m in trajectory.messages if m["role"] == "tool"]


def test_a_group_of_a_self_sampling_environment_has_one_task_and_one_course():
    config = config_of({"own": f"{FORMS}:Safe"})
    tasks = task_sets(config, load_domains(config)["own"]).train
    script = [call("turn", number=0, way="right"), call("turn", number=0), say("no")]
    played = episodes(config, tasks, script)
    of_task = defaultdict(set)
    for t in played:
        of_task[t.task_id].add((t.messages[0]["content"], *replies(t)))
    assert {len(seen) for seen in of_task.values()} == {1}
    assert len(of_task) == len(set.union(*of_task.values())) == 6
    assert played[0].messages[0]["content"].startswith("Open safe ")
    assert replies(played[0])[0].startswith("right 0.")
    assert replies(played[0])[1].startswith("left 0.")
    backwards = episodes(config, tasks[::-1], script, group=1)
    assert [replies(t) for t in backwards] == [replies(t) for t in played[::-2]]


def test_a_tool_that_raises_is_shown_to_the_model_and_done_ends_the_episode():
    config = config_of({"own": f"{FORMS}:Safe"})
    task = task_sets(config, load_domains(config)["own"]).train[0]
    with RandomState(task):
        number = random.randint(1, 50)
    wrong = call("turn", number=0, way="up")
    opened = call("turn", number=number)
    opened["tool_calls"] *= 2
    (played,) = episodes(config, [task], [wrong, opened], group=1)
    assert json.loads(replies(played)[0])["error"].startswith("wrong arguments: way: ")
    assert len(replies(played)) == 2  # the call after the last one is not made
    assert (played.stop_reason, played.reward) == (StopReason.COMPLETED, 1.0)


def test_a_tool_result_that_is_too_long_is_one_warning(capsys):
    config = config_of({"own": f"{FORMS}:Safe"}, {**LIMITS, "max_tool_result_tokens": 9})
    script = [call("turn", number=0), call("turn", number=0), say("no")]
    (played,) = episodes(config, [make_task(domain="own")], script, group=1)
    assert replies(played) == ['{"error": "result too long"}'] * 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: own: turn failed on task t1: its result has ")
    assert line.endswith(" tokens, max_tool_result_tokens is 9")


def test_two_environments_of_one_dataset_with_reward_functions(routed):
    config = config_of(BOTH, tasks=routed, reward_funcs=HITS)
    prepared = prepare(config)
    drawn = "8 tasks: 1 held out, 1 for validations, 6 for training; drawn by a hash of the task"
    summed = "hits (weight 1) and lowered (weight 1)"
    assert prepared.notes == [
        *(f"{name}: {drawn}" for name in BOTH),
        "strict: the tool lower has no docstring, so a model sees only its name",
        *(f"{name}: the reward is the sum of {summed}" for name in BOTH),
    ]
    script = [call("add", numbers=[2, 1]), call("done"), say("3")]
    (task,) = [task for task in prepared.train["total"] if task.id == "2"]
    (total,) = episodes(config, [task], script, group=1)
    assert replies(total) == ["3", "noted"]  # a tool `done` does not end the episode
    assert (total.reward, total.rewards) == (1.0, {"hits": 1.0, "lowered": None})
    script = [call("lower", step=9), say("ok")]
    (strict,) = episodes(config, prepared.train["strict"][:1], script, group=1)
    assert strict.messages[0]["content"] == "Lower 1. Limit 2."
    assert replies(strict) == ["-1"]
    assert strict.rewards == {"hits": None, "lowered": 1.0}


# Tasks that cannot be repeated


def is_kept(name):
    domain = domain_of(name)
    return try_task(domain, make_task(domain="own", request=""), "own", 10.0)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Server", "its text differs"),
        ("OwnGenerator", "self.number differs"),
        ("KeptGenerator", "self.rng differs"),
        ("NumpyGenerator", "self.board differs"),
        ("Inside", "self.game differs"),
        ("Background", "its text differs"),
    ],
)
def test_a_reset_that_no_task_decides_is_refused(name, what):
    message = refusal(is_kept, name)
    assert message.startswith(f"own: task 't1': reset starts another episode each time ({what}")
    assert "let reset(self, id, **kwargs) draw from " in message
    assert ("numpy.random" in message) == (name != "Background")


def test_a_reset_that_the_task_decides_is_kept():
    assert is_kept("KeyedBackground") == is_kept("KeyedBackground")
    assert is_kept("Session") == "Guess."
    assert is_kept("Safe").startswith("Open safe ")


def test_long_texts_of_reset_are_measured_before_a_run():
    message = refusal(prepare, config_of({"own": f"{FORMS}:Safe"}, {"max_tokens": 50}))
    assert message.startswith("limits are too low: a prompt of own has ")
    notes = prepare(config_of({"own": f"{FORMS}:Safe"}, {**LIMITS, "max_tool_result_tokens": 9}))
    forgotten, note = notes.notes
    assert forgotten.startswith("own: the static method describe (trl_forms.py, line ")
    assert note.startswith("own: reset returns ")
    assert note.endswith("tool results of more than max_tool_result_tokens (9) become errors")


# Parts


def test_a_task_without_a_column_that_reset_takes_is_refused():
    with pytest.raises(TypeError, match="reset needs target, and the task has id, other"):
        reset_arguments(trl_forms.Strict().reset, {"id": "1", "other": 4})


def test_a_factory_makes_environments_of_its_class():
    assert domain_of("Safe").environment is trl_forms.Safe
    for factory in ("Strict", "make_strict"):
        environments = {"own": {"factory": f"{FORMS}:{factory}", "arguments": {"limit": 7}}}
        config = config_of(environments, reward_funcs=HITS)
        made = load_domains(config)["own"].make()
        assert type(made) is trl_forms.Strict
        assert made.limit == 7
    assert "TypeError" in refusal(domain_of, "make_strict")
    assert refusal(domain_of, "Strict") == (
        f"environments: own: got '{FORMS}:Strict', which has no get_reward(); "
        "add it, or give reward_funcs"
    )
    assert "name a class or a function" in refusal(domain_of, "np")


def without_wraps(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def with_wraps(function):
    return wraps(function)(without_wraps(function))


def by_place(function):
    @wraps(function)
    def wrapper(self, *args):
        return function(self, *args)

    return wrapper


class Retry:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def give(self, item: str, to: str = "me") -> str:
    return f"{item} {to}"


def of_none(item: str) -> str: ...
def alone() -> str: ...
def by_place_only(self, item: str, /) -> str: ...
def by_place_or_not(self, item: str = "lamp", /, to: str = "me") -> str: ...
def many(self, *items: str) -> str: ...
def named(self, **items: str) -> str: ...
def yields(self, item: str) -> str:
    yield item


async def yields_later(self, item: str) -> str:
    yield item


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (by_place_only, "takes item by position only, but a model gives names; take out the `/`"),
        (by_place_or_not, "takes item by position only"),
        (many, "takes *items, which a model cannot see; give each argument a name"),
        (named, "takes **items, which a model cannot see"),
        (without_wraps(give), "takes *args, which a model cannot see; give each argument a name ("),
        (by_place(give), "has a decorator that does not pass its arguments on by name (got an un"),
        (of_none, "does not take self first; add it"),
        (alone, "does not take self first; add it"),
        (yields, "yields its result, which no model sees; return it"),
        (yields_later, "yields its result"),
        (partial(give, to="you"), "is a partial, so no model can call it; write it as a method"),
        (partialmethod(give, to="you"), "is a partialmethod, so no model can call it"),
        (singledispatchmethod(give), "is a singledispatchmethod, so no model"),
        (cache(give), "is a _lru_cache_wrapper, so no model can call it"),
        (Retry(give), "is a Retry, so no model can call it; write it as a method, or name it _"),
    ],
)
def test_a_tool_that_no_model_can_call_is_refused_by_name_and_place(member, words, monkeypatch):
    monkeypatch.setattr(trl_forms.Total, "hand", member, raising=False)
    monkeypatch.setattr(trl_forms, "Copy", type("Copy", (trl_forms.Total,), {}), raising=False)
    message = refusal(partial(domain_of, "Copy", reward_funcs=HITS))
    place = "" if isinstance(member, Retry) else r" \(test_trl_forms.py, line \d+\)"
    begin = rf"environments: own: got '{FORMS}:Copy', whose hand{place} "
    assert re.match(begin + re.escape(words), message), message


def test_wrapped_methods_aliases_and_lambdas_are_tools_under_their_own_names():
    class Desk:
        hand = with_wraps(give)
        pass_on = give
        look = lambda self: "lamp"  # noqa: E731

        def take(self: Any, item: str) -> str: ...

    assert tool_problem(Desk) == ""
    functions = [schema["function"] for schema in tool_schemas(Desk)]
    names = ["hand", "look", "pass_on", "take"]
    assert [f["name"] for f in functions] == [*tool_methods(Desk)] == names
    assert list(functions[0]["parameters"]["properties"]) == ["item", "to"]
    assert call_tool(Desk(), "hand", {"item": "lamp"}) == "lamp me"
    assert call_tool(Desk(), "pass_on", {"item": "lamp", "to": "you"}) == "lamp you"
    assert call_tool(Desk(), "look", {}) == "lamp"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{"factry": "m:f"}', "got {'factry': 'm:f'}; factory: Field required"),
        ('{"factory": "m:f", "args": {}}', "got {}; args: Extra inputs are not permitted"),
        ('{"factory": "m"}', "got own: 'm'; write module:Class"),
    ],
)
def test_a_wrong_factory_is_named(given, message):
    assert message in refusal(parse, ["--environments", f'{{"own": {given}}}'])
