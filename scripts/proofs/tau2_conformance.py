"""Compare the rewards of `pipeline/tau2/` with the official evaluator's, through the tool calls.

    python scripts/proofs/tau2_conformance.py --tau2 CHECKOUT --official PYTHON312

CHECKOUT is a checkout of sierra-research/tau2-bench, and PYTHON312 a Python in which the checkout
is installed (see `tau2_official.py`). The cases are the gold calls of every task (telecom: all of
`full`), gold without any one call that changes a database, gold with other arguments, types, orders
and additions, unknown tools, random calls, and what the model says. Both sides play each case; the
reward, the text of each tool result and the number of errors must be equal, and where the official
evaluator raises, the reward is not positive. Then come the floors,
the times, and a check that no episode has changed what all episodes share.

The exit code is 1 if anything differs. `--cases` is the number of cases of each kind of change in
telecom; airline and retail, whose official scores are slow, get fewer.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.config.settings import Config
from pipeline.data.tasks import Task
from pipeline.environments.calls import run_here
from pipeline.environments.domains import Domain, load_domains
from pipeline.environments.tools import answer_call, reward_of
from scripts.proofs.tau2_cases import DOMAINS, Case, Maker, cases_of

Played = dict[str, Any]
SHARES = {"telecom": 1.0, "retail": 0.25, "airline": 1 / 12}  # of the number of cases
TIMED = 5  # cases of each domain in which the official evaluator's time is measured
LEAST_RATIO = 100
# Success in %: nothing on test and on all tasks, transfer at once on test and on all. The last line
# leaves NL_ASSERTION out; `verifiable` demands the texts of the judge's assertions instead.
FLOORS = {
    "airline": (35.0, 46.0, 35.0, 46.0),
    "retail": (5.0, 6.1, 5.0, 6.1),
    "telecom": (0.0, 0.0, 30.0, 17.5),
    "retail, NL_ASSERTION left out": (10.0, 9.6, 10.0, 9.6),
}


def started(domain: Domain, task: str) -> Any:
    """Return an environment of the pipeline in the initial state of an official task."""
    row = Task(domain=domain.name, id=task, prompt=(), payload=json.dumps({"id": task})).row()
    environment = domain.make()
    environment.reset(**row)
    return environment


def play(domain: Domain, case: Case) -> Played:
    """Play a case as a rollout does; the seconds are CPU seconds of `reset` and of the reward."""
    begun = time.process_time()
    environment = started(domain, case["task"])
    seconds, errors, reason = time.process_time() - begun, 0, "max_turns"
    messages = []  # as a rollout writes the messages
    for message in case["messages"]:
        functions = [{"type": "function", "function": call} for call in message["calls"]]
        written = {"role": "assistant", "content": message["content"] or ""}
        messages.append(written | ({"tool_calls": functions} if functions else {}))
        ended = not functions
        for call in message["calls"]:
            answer = run_here(answer_call, environment, call["name"], call["arguments"])
            messages.append({"role": "tool", "name": call["name"], "content": answer.content})
            errors += answer.is_error
            if ended := answer.is_last:
                break
        if ended:
            reason = "completed"
            break
    texts = [m["content"] for m in messages if m["role"] == "tool" and m["name"] != "done"]
    begun = time.process_time()
    try:
        reward = run_here(reward_of, environment, reason, messages)
    except Exception:  # a rollout records the exception, and the episode earns 0
        reward = None
    seconds += time.process_time() - begun
    parts = dict(environment.reward_breakdown)
    return {"reward": reward, "parts": parts, "texts": texts, "errors": errors, "seconds": seconds}


def differs(case: Case, ours: dict[str, Any], official: dict[str, Any]) -> str:
    """Return what differs between the two sides, in one line, or an empty text."""
    if official["failure"]:
        failed = (
            f"reward {ours['reward']}, the official evaluator raises {official['failure'][:300]}"
        )
        return failed if ours["reward"] else ""
    if ours["reward"] != official["reward"]:
        return f"reward {ours['reward']}, official {official['reward']} {official['parts']}"
    if case["kind"] == "calls beside done" or official["end"] == "too_many_errors":
        shared = min(len(ours["texts"]), len(official["texts"]))  # some calls do not take place
        official = official | {"texts": official["texts"][:shared]}
        ours = official | {"texts": ours["texts"][:shared]}
    for number, (mine, theirs) in enumerate(zip(ours["texts"], official["texts"], strict=False)):
        if mine != theirs:
            return f"result {number}: {mine[:300]!r}, official {theirs[:300]!r}"
    if len(ours["texts"]) != len(official["texts"]):
        return f"{len(ours['texts'])} results, official {len(official['texts'])}"
    if ours["errors"] != official["errors"]:
        return f"{ours['errors']} errors, official {official['errors']}"
    return ""


def whole_database(environment: Any) -> str:
    """Return the databases of an official environment as one text."""

    def dumped(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: dumped(value[key]) for key in value}
        return value.model_dump(warnings=False) if hasattr(value, "model_dump") else value

    kits = [kit for kit in (environment.tools, environment.user_tools) if kit is not None]
    tables = [{n: dumped(getattr(k.db, n)) for n in type(k.db).model_fields} for k in kits]
    return json.dumps(tables, sort_keys=True, default=str)


def leaked(domain: Domain, path: Path, task: str) -> bool:
    """Return whether an episode that begins now differs from one on databases loaded anew."""
    from pipeline.environments.tau2.checkout import Checkout

    fresh, here = Checkout(path, domain.name).make_environment(), started(domain, task)
    state = here._task.initial_state
    for action in (state.initialization_actions if state else None) or ():
        fresh.run_env_function_call(action)
    return whole_database(here._environment) != whole_database(fresh)


def official_side(python: str, cases: list[Case], folder: Path) -> subprocess.Popen[bytes]:
    """Start the official side in another process."""
    lines = (json.dumps(case) + "\n" for case in cases)
    (folder / "cases.jsonl").write_text("".join(lines), encoding="utf-8")
    script = Path(__file__).with_name("tau2_official.py")
    return subprocess.Popen([python, script, folder / "cases.jsonl", folder / "results.jsonl"])


def print_table(cases: list[Case], ours: list[Played], official: list[Played]) -> int:
    """Print the counts and what differs; return the number of cases that differ."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    faults = []
    for case, mine, theirs in zip(cases, ours, official, strict=True):
        name, kind = case["domain"], case["kind"]
        if fault := differs(case, mine, theirs):
            faults.append(f"{name} {kind} task {case['task']}: {fault}")
        counts[kind][f"{name} {'different' if fault else 'equal'}"] += 1
        counts[kind][f"{name} rewarded"] += bool(theirs["reward"])
    names = sorted({case["domain"] for case in cases})
    print("| equal / different (reward 1) | " + " | ".join(names) + " |")
    print("|---|" + "--:|" * len(names))
    for kind, of in counts.items():
        cells = (
            f"{of[f'{d} equal']} / {of[f'{d} different']} ({of[f'{d} rewarded']})" for d in names
        )
        print(f"| {kind} | {' | '.join(cells)} |")
    failures = [theirs["failure"][:200] for theirs in official if theirs["failure"]]
    print(f"{len(cases)} cases, {len(faults)} different", *faults[:40], sep="\n")
    print(f"{len(failures)} cases where the official evaluator raises", *failures[:3], sep="\n")
    return len(faults)


def print_gold(cases: list[Case], ours: list[Played]) -> bool:
    """Print how often gold earns 1; return whether gold always does."""
    fine = True
    for name in sorted({case["domain"] for case in cases}):
        pairs = zip(cases, ours, strict=True)
        gold = [p["reward"] for c, p in pairs if (c["domain"], c["kind"]) == (name, "gold")]
        print(f"{name}: gold earns 1 on {gold.count(1.0)} of {len(gold)}")
        fine = fine and gold.count(1.0) == len(gold)
    return fine


def floors(domain: Domain, maker: Maker, ignored: str = "") -> tuple[float, ...]:
    """Return the success in % of doing nothing and of transferring at once, on test and on all."""
    found = []
    for kind in ("nothing", "transfer"):
        for split in ("test", "base"):
            played = [play(domain, case) for case in maker.floors(split) if case["kind"] == kind]
            parts = [{k: v for k, v in one["parts"].items() if k != ignored} for one in played]
            found.append(round(100 * fmean(all(of.values()) for of in parts), 1))
    return tuple(found)


def print_floors(domains: dict[str, Domain], makers: dict[str, Maker]) -> bool:
    """Print the success of the two floor policies; return whether each success is as known."""
    found = {name: floors(domains[name], maker) for name, maker in makers.items()}
    if "retail" in makers:
        name = "retail, NL_ASSERTION left out"
        found[name] = floors(domains["retail"], makers["retail"], "COMMUNICATE")
    print("| floor, success in % | nothing: test | all | transfer: test | all |")
    print("|---|--:|--:|--:|--:|")
    for name, values in found.items():
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in values) + " |")
    return all(values == FLOORS[name] for name, values in found.items())


def print_times(cases: list[Case], ours: list[Played], official: list[Played]) -> bool:
    """Print CPU milliseconds of an episode; return whether the ratio is large enough."""
    fine = True
    print("| ms of reset and reward | first, with gold | again | official | ratio |")
    print("|---|--:|--:|--:|--:|")
    for name in sorted({case["domain"] for case in cases}):
        of = [n for n, case in enumerate(cases) if case["domain"] == name]
        theirs = 1000 * fmean(official[n]["seconds"] for n in of if cases[n].get("timed"))
        first = 1000 * fmean(ours[n]["seconds"] for n in of if cases[n]["kind"] == "gold")
        again = 1000 * fmean(ours[n]["seconds"] for n in of if cases[n]["kind"] != "gold")
        print(f"| {name} | {first:.2f} | {again:.2f} | {theirs:.0f} | {theirs / again:.0f} |")
        fine = fine and theirs / again >= LEAST_RATIO
    return fine


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tau2", type=Path, required=True, help="a checkout")
    parser.add_argument("--official", required=True, help="a Python with the checkout installed")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    parser.add_argument("--cases", type=int, default=60, help="of each kind of change in telecom")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    domains = load_domains(Config(data={"tau2": options.tau2, "domains": options.domains}))
    makers, cases = {}, []
    for name in options.domains:
        schemas, rng = domains[name].tools, random.Random(options.seed)
        makers[name] = Maker(options.tau2, name, schemas, rng)
        made = list(cases_of(makers[name], math.ceil(SHARES[name] * options.cases)))
        cases += [case | {"timed": number < TIMED} for number, case in enumerate(made)]
    cases = json.loads(json.dumps(cases))  # as both sides read the cases
    with TemporaryDirectory() as folder:
        process = official_side(options.official, cases, Path(folder))
        ours = [play(domains[case["domain"]], case) for case in cases]
        if process.wait():
            return 1
        lines = (Path(folder) / "results.jsonl").read_text("utf-8").splitlines()
        official = [json.loads(line) for line in lines]
    fine = not print_table(cases, ours, official)
    fine = print_gold(cases, ours) and fine
    fine = print_floors(domains, makers) and fine
    fine = print_times(cases, ours, official) and fine
    for name, maker in makers.items():
        if leaked(domains[name], options.tau2, next(iter(maker.tasks))):
            print(f"{name}: an episode changed what all episodes share")
            fine = False
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
