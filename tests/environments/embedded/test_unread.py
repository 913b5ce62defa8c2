"""No policy that never reads the record of a request earns much in the embedded domains."""

import json
from itertools import product
from statistics import fmean

import pytest

from pipeline.environments.discovery import tool_schemas
from pipeline.environments.tools import call_tool
from pipeline.evaluation.baselines import baselines
from tests.support.helpers import DOMAINS, embedded, module_of
from tests.support.unread import unread, unread_by_family

# The mean over the families of the largest share of a branch: (.28 + .60 + .30) / 3 for airline.
COMMONEST = {"airline": 0.393, "retail": 0.370, "telecom": 0.383}


@pytest.mark.parametrize("domain", DOMAINS)
def test_policies_that_never_look_earn_next_to_nothing_in_the_embedded_domains(domain):
    tasks = module_of(domain).generate_tasks(0, 150, "test", "medium")
    domains = embedded(domain)
    found = baselines(domains, {domain: tasks})[domain]
    assert found.pop("nothing") == 0.0
    name = "commonest case"
    assert found == (
        {name: pytest.approx(COMMONEST[domain], abs=0.005)} if domain in COMMONEST else {}
    )
    alike, by_family = (best(domains[domain], tasks) for best in (unread, unread_by_family))
    assert alike <= by_family < 0.5


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_single_action_earns_more_than_the_best_that_never_reads_the_record(domain):
    """After all lookups that the request names; the closing words hold the chosen value."""
    own = embedded(domain)[domain]
    environment = own.environment
    tasks = module_of(domain).generate_tasks(3, 40, "test", "medium")
    schemas = [schema["function"] for schema in tool_schemas(environment)]
    lookups = [s for s in schemas if s["name"].startswith("get_")]
    lookups += [s for s in schemas if s["name"].startswith("find_")]
    earned = {}
    for schema in (schema for schema in schemas if schema not in lookups):
        given = schema["parameters"]["properties"]
        for values in product(*(p.get("enum", ["goal"]) for p in given.values())):
            arguments = dict(zip(given, values, strict=True))
            earned[schema["name"], values] = fmean(
                blindly(environment(), task, lookups, schema["name"], arguments) for task in tasks
            )
    assert len(earned) > 5
    assert 0.05 < max(earned.values()) <= min(unread(own, tasks), 0.15)
    for best in (unread, unread_by_family):
        assert best(own, tasks) == best(own, tasks[::-1])


def blindly(environment, task, lookups, tool, arguments):
    """Look up what the request names, do one thing and say its value; returns the reward."""
    environment.reset(**task.row())
    goal = json.loads(task.payload)["goal"]
    for schema in lookups:
        (given,) = schema["parameters"]["properties"]
        call_tool(environment, schema["name"], {given: goal.get(given, goal["record"])})
    right = {name: goal["record"] if v == "goal" else v for name, v in arguments.items()}
    call_tool(environment, tool, right)
    environment.final_message = f"Done. {' '.join(right.values())}"
    return environment.get_reward()


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_policy_has_a_title_and_a_rule_on_each_line(domain):
    (task,) = module_of(domain).generate_tasks(0, 1, "test", "medium")
    title, underline, empty, role, *rules = task.prompt[0]["content"].split("\n")
    assert (title, underline, empty) == (domain, "=" * len(domain), "")
    assert role.startswith("You serve ") and role.endswith(" once the work is done.")
    assert rules and all(rule.startswith("- ") and rule.endswith(".") for rule in rules)
