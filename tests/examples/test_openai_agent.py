"""The agent in OpenAI's SDK plays a domain at the address; without the SDK, a stand-in is used."""

import json
import shlex
import sys
from importlib.util import find_spec

import pytest

from examples.order_desk import OrderEnvironment, expert, generate_tasks
from pipeline.config.settings import Config
from pipeline.environments import load_domains
from pipeline.environments.experts import run_expert
from pipeline.rollout.rollout import Rollout, RolloutRequest, SamplerPolicy
from tests.rollout.test_own_loop import LIMITS, Sampler
from tests.support import ROOT
from tests.support.helpers import call, chat, say
from tests.support.messages import says

pytestmark = pytest.mark.usefixtures("no_stray_processes")

TASKS = generate_tasks(0, 40, "test", "medium")
# What the example uses of the SDK. The message goes back as it came, with more fields than needed.
SDK = """
import json, os, urllib.request
from types import SimpleNamespace

class OpenAI:
    def __init__(self, base_url=None, api_key=None):
        self.base_url = base_url or os.environ["OPENAI_BASE_URL"]
        self.api_key = api_key or os.environ["OPENAI_API_KEY"]
        self.chat = SimpleNamespace(completions=self)

    def with_options(self, base_url, api_key):
        return OpenAI(base_url, api_key)

    def create(self, **body):
        headers = {"Authorization": "Bearer " + self.api_key, "Content-Type": "application/json"}
        text = json.dumps(body, default=vars).encode()
        request = urllib.request.Request(self.base_url + "/chat/completions", text, headers)
        with urllib.request.urlopen(request) as reply:
            answer = json.load(reply, object_hook=lambda pairs: SimpleNamespace(**pairs))
        for choice in answer.choices:
            choice.message.tool_calls = getattr(choice.message, "tool_calls", None)
        return answer
"""


@pytest.fixture(params=["examples.openai_agent:play", "examples/openai_agent.py"])
def agent(request, tmp_path, monkeypatch):
    """The two doors of the example; there is a package openai."""
    if find_spec("openai") is None:
        (tmp_path / "openai.py").write_text(SDK, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("openai", "examples.openai_agent"):
        if name in sys.modules:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(ROOT)
    is_file = request.param.endswith(".py")
    yield shlex.join([sys.executable, request.param]) if is_file else request.param
    for name in ("openai", "examples.openai_agent"):
        sys.modules.pop(name, None)


def played(agent, task, *said):
    """The episode of a task, in which the model says messages."""
    environment = "examples.order_desk:OrderEnvironment"
    data = {"domains": ["orders"], "environments": {"orders": environment}}
    domains = load_domains(Config(data={**data, "agents": {"orders": agent}}))
    limits = LIMITS.model_copy(update={"max_turns": 6})
    rollout = Rollout(SamplerPolicy(Sampler([said]), chat(), limits), chat(), domains, limits)
    (episode,) = rollout([RolloutRequest(task=task, trial=0, key=0)])
    return episode


def test_the_agent_looks_up_and_answers_in_one_sequence_and_earns_the_reward(agent):
    task = TASKS[0]
    goal = json.loads(task.payload)["goal"]
    order, rule = goal["order"], f"{goal['state']}: {goal['action']}"
    episode = played(agent, task, call("get_order", order=order), say(rule))
    assert (episode.error, episode.reward, episode.further) == ("", 1.0, [])
    assert (episode.num_turns, episode.tools) == (2, {"get_order": [1, 0]})
    roles = [message["role"] for message in episode.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert json.loads(episode.messages[3]["content"]) == {"state": goal["state"]}


def test_an_answer_without_a_look_earns_nothing(agent):
    goal = json.loads(TASKS[0].payload)["goal"]
    episode = played(agent, TASKS[0], say(f"{goal['state']}: {goal['action']}"))
    assert (episode.error, episode.reward, episode.num_turns) == ("", 0.0, 1)


def test_the_agent_goes_on_after_a_tool_that_is_none_until_its_turns_are_over(agent):
    episode = played(agent, TASKS[0], *[call("get order/2", order=str(n)) for n in range(6)])
    assert (episode.error, episode.stop_reason.value) == ("", "max_turns")
    assert (episode.reward, episode.num_turns, episode.tools) == (0.0, 6, {"unknown": [6, 6]})
    says(episode.messages[3]["content"], "unknown tool get order/2")


def test_the_expert_earns_the_reward_only_by_following_the_rule():
    broken = 0
    for seed, task in enumerate(TASKS):
        messages, reward = run_expert(OrderEnvironment(), expert, task)
        assert reward == 1.0
        assert messages[-1]["content"] in task.prompt[0]["content"].splitlines()
        messages, reward = run_expert(OrderEnvironment(), expert, task, 0.0, seed)
        rule = messages[-1]["content"].partition(": ")
        assert reward == (rule[2] == task.branch)
        broken += reward == 0
    assert broken > 20


@pytest.mark.parametrize("split", ["train", "validation"])
def test_splits_share_no_order(split):
    def orders(tasks):
        return {json.loads(task.payload)["goal"]["order"] for task in tasks}

    assert not orders(TASKS) & orders(generate_tasks(0, 200, split, "medium"))
