"""`chat`: an episode in the terminal, with a person or with the task's own customer."""

import io
import json
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import yaml

from pipeline.commands.chat import ChatPage, ConversationView, Terminal, main
from pipeline.config.settings import RolloutSettings
from pipeline.rollout.rollout import RolloutRequest
from pipeline.rollout.trajectory import StopReason
from tests.support import SMALL_RUN
from tests.support.endpoint import serving
from tests.support.helpers import (
    ScriptedSampler,
    call,
    chat,
    make_task,
    rollout_of,
    say,
)
from tests.support.messages import refusal, says


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose first domain is a dataset of questions, and whose second one is airline."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # which gets the current folder
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    shutil.copytree(SMALL_RUN, "run")
    asked = [[{"role": "user", "content": f"{n} + 1"}] for n in range(20)]
    rows = [{"prompt": prompt, "answer": "20"} for prompt in asked]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    config["data"] |= {"domains": ["sums", "airline"], "tasks": {"sums": "sums.jsonl"}}
    config["data"]["reward_funcs"] = ["examples.sums_dataset:is_right"]
    Path("run/config.yaml").write_text(yaml.safe_dump(config))
    return "run"


def test_a_checkpoint_serves_the_customer_of_a_held_out_task(run, capsys):
    assert main([run, "--domain", "airline", "--greedy", "--seed", "3"]) == 0
    shown = capsys.readouterr().out
    says(
        shown,
        "checkpoint step-000001 (step 1) of run; greedy, seed 3",
        "rules     airline",
        "transfer(reason)",
        "database  case: asked [], transferred -",
        "reservations.",
        "\ncustomer  ",
        "\nagent     ",
        "\nended     ",
        "\nchanged   ",
        "\nreward    0",
    )
    assert "\033" not in shown  # no colour outside a terminal
    assert main([run, "--domain", "airline", "--greedy", "--seed", "3"]) == 0
    assert capsys.readouterr().out == shown


def test_a_dataset_without_tools_is_served_too(run, capsys):
    assert main([run, "--task", "19"]) == 0
    shown = capsys.readouterr().out
    says(shown, "domain    sums, of sums, airline", "task      19", "customer  19 + 1")
    assert re.search(r"\nreward    [01] \(is_right [01]\)\n", shown)
    assert "tools" not in shown and "database" not in shown


def test_a_person_sees_requests_of_the_domain_and_what_a_tiny_model_can(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main([run, "--human"]) == 0
    shown = capsys.readouterr().out
    examples = re.search(r"\nexamples((?: +\d+ \+ 1\n)+)", shown)[1].split("\n")[:-1]
    assert len({*examples}) == len(examples) >= 2
    says(shown, "note      so small a model answers only such requests")


def test_a_language_model_is_the_customer_of_a_task_with_a_scenario(run, capsys, monkeypatch):
    rows = [{"prompt": "", "answer": "20", "scenario": f"You are {n}."} for n in range(20)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    with serving(lambda body: "Twenty, please.") as server:
        config["customer"] = {"model": "m", "url": server.url}
        Path("run/config.yaml").write_text(yaml.safe_dump(config))
        assert main([run, "--task", "19"]) == 0
        says(capsys.readouterr().out, "customer  m at temperature 0", "customer  Twenty, please.")
        assert server.bodies[0]["messages"][0]["content"].endswith("You are 19.")
        assert Path("run/customers/chat.jsonl").read_text().count("\n") == len(server.bodies)
        monkeypatch.setattr("sys.stdin", io.StringIO("I am a person.\n"))
        number = len(server.bodies)
        assert main([run, "--task", "19", "--human"]) == 0
        assert len(server.bodies) == number


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--domain", "bank"], ["'bank'", "sums, airline"]),
        (["--domain", "airline", "--task", "nix"], ["'nix'", "tasks of airline are"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--checkpoint", "step-000009"], ["'step-000009'", "step-000001"]),
    ],
)
def test_a_wrong_word_is_told_in_one_line(run, arguments, words):
    says(refusal(main, [run, *arguments]), *words)


OWN = make_task(request="the tasks own")


def serve(monkeypatch, typed: str, script, kind, task=OWN, is_human=True):
    """Play an episode with a scripted model, and a person who types these lines."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    customer = ConversationView(is_human, chat(), Terminal())
    rollout = rollout_of(
        ScriptedSampler({0: script}),
        chat(),
        {task.domain: kind},
        RolloutSettings(),
        reply=customer.reply,
        watch=customer.watch,
    )
    return rollout([RolloutRequest(task=task, trial=0, key=0)])[0]


class Desk:
    """A desk whose scripted user must not answer for a person."""

    def reset(self, **row):
        self.user, self.items = None, {"lamp": 1}

    def take(self, item: str) -> str:
        """Take an item.

        Args:
            item: Name of the item.
        """
        self.items[item] -= 1
        return "taken"

    def get_reward(self) -> float:
        return float(self.items["lamp"] == 0)


def test_a_person_types_the_messages_of_the_customer(monkeypatch, capsys):
    script = [say("which?"), call("take", item="lamp"), say("anything else?"), say("never said")]
    trajectory = serve(monkeypatch, "a thing\nthe lamp\n\n", script, Desk)
    said = [m["content"] for m in trajectory.messages if m["role"] == "user"]
    assert said == ["a thing", "the lamp"]
    assert trajectory.stop_reason is StopReason.COMPLETED  # the empty line ended it
    assert trajectory.reward == 1.0
    shown = capsys.readouterr().out
    says(
        shown,
        "request   the tasks own (the task's own: an empty line sends it)",
        'take(item="lamp")',
    )
    assert shown.index("which?") < shown.index("the lamp") < shown.index("anything else?")


def test_enter_sends_the_tasks_own_request_and_the_end_of_input_hangs_up(monkeypatch):
    trajectory = serve(monkeypatch, "\n", [say("which?")], Desk)
    assert [m["content"] for m in trajectory.messages[1:]] == ["the tasks own", "which?"]
    assert trajectory.stop_reason is StopReason.COMPLETED


def test_a_person_who_leaves_before_the_first_message_ends_the_command(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main([run, "--domain", "airline", "--human"]) == 0
    assert capsys.readouterr().out.endswith("\nended before the conversation did\n")


def test_a_person_talks_on_a_page_and_other_pages_cannot_send():
    page = ChatPage("a <b>desk")
    assert "a &lt;b&gt;desk" in urlopen(page.address, timeout=30).read().decode()
    page.tell("rules", ["be kind", "\x1b[2J"])
    page.tell("tools", [])

    def post(words, **headers):
        request = Request(page.address.replace("/?", "/say?"), words.encode(), headers)
        return urlopen(request, timeout=30).status

    with pytest.raises(HTTPError, match="403"):
        post("stolen")
    with pytest.raises(HTTPError, match="403"):
        post("stolen", **{"X-Page": "1", "Host": "another.example"})
    for path in ("", "lines", "say"):
        for token in ("", "?token=", f"?token={page.address.rpartition('=')[2][:-1]}"):
            with pytest.raises(HTTPError, match="403"):
                urlopen(f"{page.address.partition('?')[0]}{path}{token}", timeout=30)

    def lines(since):
        address = page.address.replace("/?", f"/lines?since={since}&")
        return json.loads(urlopen(address, timeout=30).read())

    assert post("too early", **{"X-Page": "1"}) == 200
    with ThreadPoolExecutor() as pool:
        typed = pool.submit(page.typed)
        while not lines(0)["is_waiting"]:
            time.sleep(0.01)
        assert post(" hello ", **{"X-Page": "1"}) == 200
        assert typed.result(30) == "hello"
    found = lines(0)
    assert found["lines"] == [["rules", "be kind\n\\x1b[2J"], ["customer", "hello"]]
    assert lines(2) == {**found, "lines": []}
    assert not found["is_waiting"]
    with pytest.raises(HTTPError, match="403"):
        urlopen(f"{ChatPage('other').address.partition('?')[0]}?{page.address.partition('?')[2]}")
