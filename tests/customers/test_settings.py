"""Combinations of settings that cannot serve a customer are refused in one line."""

import pytest

from pipeline.config.rules import check
from pipeline.config.settings import Config, DataSettings
from pipeline.customers import check_scenarios
from pipeline.environments.domains import load_domains
from pipeline.errors import UserError

LLM = {"customer": "llm", "customer_url": "http://host/v1", "customer_model": "m"}
SHOPS = {"tau2": "somewhere", "domains": ["airline", "retail"]}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"customer_url": "http://x"}, "customer_url: got http://x, with customer ticket, which"),
        ({"max_customer_calls": 9}, "max_customer_calls: got 9, with customer ticket"),
        (LLM | {"customer_url": None}, "customer_url: the customer needs it"),
        (LLM | {"customer_model": None}, "customer_model: the customer needs it"),
        (LLM | {"customer_url": "host:8000"}, "customer_url: got 'host:8000'; give the base URL"),
        (LLM | {"customer_key": "NO_SUCH_KEY"}, "customer_key: got NO_SUCH_KEY, which is not set"),
        ({"customer": "scripted"}, "customer: got scripted for airline,retail,telecom; it is for"),
        ({**SHOPS, "customer": "scripted", "tau2": None}, "customer: got scripted for airline,"),
        ({"eval_split": "base"}, "eval_split: got base, which the domains of tau2 have alone"),
        (SHOPS | {"eval_split": "base"}, "eval_split: got base, which has training tasks"),
    ],
)
def test_a_bad_combination_is_one_line(data, line):
    with pytest.raises(UserError) as caught:
        check(Config(data=data))
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


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
@pytest.mark.parametrize("role", ["customer", "judge", "agent"])
def test_what_is_no_url_is_refused_at_the_start(role, url):
    of = {f"{role}_url": url, f"{role}_model": "m"}
    sections = {
        "customer": {"data": {**LLM, **of}},
        "judge": {"data": {**SHOPS, "tau2_reward": "official", **of}},
        "agent": {"evaluation": of},
    }
    with pytest.raises(UserError, match=f"^{role}_url: got .*; give the base URL") as e:
        check(Config(**sections[role]))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "url",
    ["http://HOST:8000/v1", "HTTPS://a_b.de", "http://[::1]:80/v1", "http://ü.de", "http://h."],
)
def test_a_url_of_any_good_form_is_taken(url):
    check(Config(data=LLM | {"customer_url": url}))


@pytest.mark.parametrize("data", [LLM, {**SHOPS, "customer": "scripted"}, {}])
def test_a_good_combination_is_not(data, monkeypatch):
    check(Config(data=data))
    monkeypatch.setenv("MY_KEY", "secret")
    check(Config(data={**LLM, "customer_key": "MY_KEY"}))


def test_a_language_model_without_scenarios_is_refused():
    data = DataSettings(domains=["airline"], **LLM)
    domains = load_domains(data)
    tasks = {"airline": domains["airline"].generate_tasks(0, 2, "test", "medium")}
    with pytest.raises(UserError, match="no task of airline has a scenario; give τ²"):
        check_scenarios(data, domains, tasks)
