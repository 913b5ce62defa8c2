"""Export episodes of τ²-bench, and let the official tools load, grade, show and submit them.

    python scripts/proofs/tau2_export.py --tau2 CHECKOUT --official PYTHON312

CHECKOUT is a checkout of sierra-research/tau2-bench, and PYTHON312 a Python in which the checkout
is installed. A server of this script is the agent on held-out tasks of the three domains, with four
trials of each task: gold; gold without a call that changes a database; other calls; and a call that
cannot be read, then several calls in a message (in solo mode with `done` among them). It plays with
tickets (telecom: solo mode), with customers of another server, who call the phone's tools, and with
retail's official reward, for which a third server is the judge (`tau2_verdicts.py`).
`tau2_export_official.py` then opens the exported files in PYTHON312. The exit code is 1 if a file
does not load, a reward or a pass^k differs, or a tool refuses a file.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.config.settings import Config
from pipeline.environments.domains import load_domains
from scripts.bench.common import machine
from scripts.proofs.tau2_cases import CHANGES, DOMAINS, Call, Maker, Message, mutating
from scripts.proofs.tau2_verdicts import answer
from tests.support.endpoint import calling, seed_of, serving

TRIALS, SEED, AGENT = 4, 1, "script"
RUN = f"--config tau2_three_smoke --no-grpo --seed {SEED} --eval-trials {TRIALS} --max-turns 60 "
RUN += f"--max-tool-result-tokens 8000 --report-to none --agent-model {AGENT} "
DO = "Please do this on your phone: "
STOP = "###STOP###"
MODES = ("ticket", "verifiable"), ("llm", "verifiable"), ("ticket", "official")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tau2", type=Path, required=True, help="a checkout")
    parser.add_argument("--official", required=True, help="a Python with the checkout installed")
    parser.add_argument("--tasks", type=int, default=20, help="held-out tasks of each domain")
    parser.add_argument("--num-gpus", type=int, default=2, help="ranks")
    options = parser.parse_args(argv)
    fine = True
    print("  ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="tau2-export-") as folder:
        for number, (customer, reward) in enumerate(MODES):
            run = Path(folder) / str(number)
            if reward == "official":  # a third of retail's test tasks needs the judge
                options.tasks = max(40, options.tasks)
            play(run, customer, reward, options)
            for evaluation in ("agent", "start"):
                out = run / "exported" / evaluation
                export = [sys.executable, "-m", "pipeline", "export-tau2", run, out]
                subprocess.run([*export, "--evaluation", evaluation], check=True)
                official = Path(__file__).with_name("tau2_export_official.py")
                arguments = [official, out, run / "results.json", evaluation, reward]
                opened = subprocess.run([options.official, *arguments], check=False)
                fine = opened.returncode == 0 and fine
    return 0 if fine else 1


def play(run: Path, customer: str, reward: str, options: argparse.Namespace) -> None:
    """Let the agent of this script play the held-out tasks of the domains."""
    names = list(DOMAINS) if reward == "verifiable" else ["retail"]
    arguments = {"reward": reward} | ({} if customer == "llm" else {"customer": customer})
    data = {"tau2": options.tau2, "domains": names, "tau2_arguments": arguments}
    models = {"url": "http://x", "model": "m"}
    sections = {"customer": models} if customer == "llm" else {}
    domains = load_domains(Config(data=data, judge=models, **sections))
    scripts = dict[int, list[Message]]()
    for name, domain in domains.items():
        schemas = domain.tools
        maker = Maker(options.tau2, name, schemas, random.Random(SEED))
        for task in domain.generate_tasks(0, options.tasks, "test", "medium"):
            for trial in range(TRIALS):
                seed = seed_of(name, task.id, trial, SEED)
                scripts[seed] = script(maker, task.id, trial, customer == "llm")
    greeted = int(customer == "llm")  # the agent's greeting is in the prompt

    def agent(body: dict[str, Any]) -> dict[str, Any]:
        said = sum(message["role"] == "assistant" for message in body["messages"]) - greeted
        messages = scripts[body["seed"]]
        return as_sent(messages[said] if said < len(messages) else {"content": STOP, "calls": []})

    with (
        serving(agent) as server,
        serving(customers_words) as of_customer,
        serving(lambda body: answer(*(m["content"] for m in body["messages"]))) as judge,
    ):
        words = f"{RUN} --eval-tasks-per-domain {options.tasks} --agent-url {server.url} "
        words += f"--num-gpus {options.num_gpus} "
        if customer == "llm":
            words += f"--customer-url {of_customer.url} --customer-model script "
        if reward == "official":
            words += f"--judge-url {judge.url} --judge-model hash "
            words += "--domains retail "
        flags = [*words.split(), "--tau2", str(options.tau2), "--output-dir", str(run)]
        flags += ["--tau2-arguments", json.dumps(arguments)]
        subprocess.run([sys.executable, "pipeline/run.py", *flags], check=True)
        if reward == "official":
            print(f"the judge was asked {len(judge.bodies)} times")


def script(maker: Maker, task: str, trial: int, talks: bool) -> list[Message]:
    """Return the agent's messages in a trial of a task."""
    text, calls = "; ".join(maker.said(task)), actions(maker, task)
    writing = [place for place, call in enumerate(calls) if call["name"] in mutating()]
    if trial == 1 and writing:
        del calls[maker.rng.choice(writing)]
    if trial == 2 and not talks:
        calls = maker.rng.choice(CHANGES)(maker, calls) or calls
    messages = [one(call, talks) for call in calls]
    end = [{"content": f"Finished. {text}", "calls": []}] if talks else maker.end(text)
    if trial == 3 and calls:
        unreadable: Message = {"content": "Hm.", "calls": [{**calls[0], "arguments": "unread"}]}
        if not talks:  # in solo mode, the calls beside `done` do not take place
            beside = [call for message in end for call in message["calls"]]
            together: Message = {"content": None, "calls": [*calls[1:], *beside]}
            messages = [one(calls[0], talks), *([together] if together["calls"] else [])]
        messages.insert(0, unreadable)
    return [*messages, *end]


def actions(maker: Maker, task: str) -> list[Call]:
    """Return the gold calls of a task; `by` says who calls."""
    made = maker.tasks[task]["evaluation_criteria"]["actions"] or []
    found: list[Call] = json.loads(json.dumps(made))
    return [
        {"name": of["name"], "arguments": of["arguments"], "by": of.get("requestor", "assistant")}
        for of in found
    ]


def one(call: Call, talks: bool) -> Message:
    """Return a message with a call, or the request that the customer calls it."""
    if talks and call.get("by") == "user":
        return {"content": DO + json.dumps(call), "calls": []}
    return {"content": None, "calls": [call]}


def as_sent(message: Message) -> dict[str, Any]:
    calls = [
        {
            "id": f"call-{number}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for number, call in enumerate(message["calls"])
    ]
    return {"content": message["content"], "tool_calls": calls}


def customers_words(body: dict[str, Any]) -> str | dict[str, Any]:
    """Answer as a customer who does what the agent asks for."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return "I have done it."
    if last["content"].startswith(DO):
        call = json.loads(last["content"].removeprefix(DO))
        return calling(call["name"], len(body["messages"]), **call["arguments"])
    return STOP if last["content"].startswith("Finished") else "I need help, please."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
