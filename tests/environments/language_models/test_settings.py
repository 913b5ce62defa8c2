"""Combinations of settings that cannot serve a customer are refused in one line."""

import pytest

from pipeline.config.rules import check
from pipeline.config.settings import Config
from pipeline.environments.domains import load_domains
from pipeline.environments.language_models.customers import check_scenarios
from tests.support.messages import refusal, says

CUSTOMER = {"url": "http://host/v1", "model": "m"}
SHOPS = {"tau2": "somewhere", "domains": ["airline", "retail"]}


@pytest.mark.parametrize(
    ("section", "values", "line"),
    [
        ("customer", {"max_calls": 9}, "customer_max_calls: got 9, without customer_url, so no"),
        ("customer", {"model": "m"}, "customer_model: got m, without customer_url"),
        ("customer", CUSTOMER | {"model": None}, "customer_model: the customer needs it"),
        ("customer", CUSTOMER | {"key": "NO_KEY"}, "customer_key: got NO_KEY, which is not set"),
        ("judge", {"url": "http://x"}, "judge_model: the judge needs it"),
        ("agent", {"model": "m"}, "agent_model: got m, without agent_url"),
        ("agent", {"url": "http://x"}, "agent_model: the agent needs it; give the name"),
        ("data", {"eval_split": "base"}, "eval_split: got base, which generated tasks do not have"),
        ("data", SHOPS | {"eval_split": "base"}, "eval_split: got base, which has training tasks"),
    ],
)
def test_a_bad_combination_is_one_line(section, values, line):
    assert refusal(check, Config(**{section: values})).startswith(line)


@pytest.mark.parametrize(
    "url",
    [
        *("htp://x", "host:8000", "//x", "file:///x", "http://", "http:/x", "https:///v1"),
        *("http://@:80", "http://a..b/v1", "http://$H/v1", "http://[::1]x", "http://a,b"),
        *("http://-a", "http://8000", "http://x:0/v1", "http://x:99999"),
        *("http://x:-1", "http://x:8o", "http://x:٣", "http://x::80", "http://[::1", "http://x:"),
        *("http://h ost", "http://x\n", "http://a\u200b.b", "http://x/v1?a=b", "http://x#y"),
    ],
)
def test_what_is_no_url_is_refused_at_the_start(url):
    line = refusal(check, Config(judge={"url": url, "model": "m"}))
    says(line, "judge_url: got ", "; give the base URL")


@pytest.mark.parametrize(
    "url",
    ["http://HOST:8000/v1", "HTTPS://a_b.de", "http://[::1]:80/v1", "http://ü.de", "http://h."],
)
def test_a_url_of_any_good_form_is_taken(url):
    check(Config(customer=CUSTOMER | {"url": url}))


def test_a_key_of_another_name_is_taken_if_it_is_set(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    check(Config(customer=CUSTOMER | {"key": "MY_KEY"}))


def test_a_language_model_without_scenarios_is_refused():
    config = Config(data={"domains": ["airline"]}, customer=CUSTOMER)
    domains = load_domains(config)
    tasks = {"airline": domains["airline"].generate_tasks(0, 2, "test", "medium")}
    says(
        refusal(check_scenarios, config, domains, tasks),
        "no task of airline has a scenario; give τ²",
    )
