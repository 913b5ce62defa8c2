"""Environments of verifiers' own packages, for `scripts/proofs/environments.py --only verifiers`.

`--verifiers-python V0 V1` names two Pythons, each with one of

    pip install verifiers==0.1.14 reasoning-gym
    pip install verifiers==0.4.0 uv

Proven is, for environments of v0 (tools, a user, reasoning-gym) and tasksets of v1 (with and
without tools) that know nothing of the training:

- a scripted policy plays them: rewards, parts, parallel calls, one sequence, the end of a run's
  turns, and a process that is killed;
- runs on 1 and 2 ranks are equal, also one that is killed and resumed;
- no process is left.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from scripts.bench.common import ROOT
from scripts.proofs.agents import Row

HERE = ROOT / "scripts" / "proofs" / "verifiers_environments"
LIMIT_S = 60.0


def verifiers(folder: Path, options: Any) -> Iterator[Row]:
    """All rows; `options.verifiers_python` are two Pythons."""
    from scripts.proofs.environments import plays_alike

    os.environ["PYTHONPATH"] = f"{ROOT}:{HERE}"  # where an environment is found
    v0, v1 = map(str, options.verifiers_python)
    yield from scripted("desk_v0", v0, has_tools=True)
    yield from scripted("asked_v0", v0)
    yield from scripted("sums_v0", v0)
    yield from scripted("plain_v1", v1)
    yield from scripted("desk_v1", v1, has_tools=True)
    yield killed("desk_v0", v0)
    yield killed("desk_v1", v1)
    for name, python in (("desk_v0", v0), ("plain_v1", v1)):
        setting = {"factory": f"verifiers:{name}", "arguments": {"python": python}}
        flags = ["--domains", "desk", "--environments", json.dumps({"desk": setting})]
        flags += ["--model", options.model]
        yield from plays_alike(name, flags, folder, is_one_message=True)
    until = time.monotonic() + LIMIT_S
    left = processes_of(v0, v1)
    while left and time.monotonic() < until:  # an environment has some seconds to end what it holds
        time.sleep(1)
        left = processes_of(v0, v1)
    yield Row("verifiers: processes left", str(len(left)), not left)


def processes_of(*pythons: str) -> list[Any]:
    """Return the processes whose program stands beside one of the Pythons."""
    folders = tuple(os.path.dirname(python) for python in pythons)
    here = (os.getpid(), os.getppid())
    running = (one for one in psutil.process_iter(["cmdline"]) if one.pid not in here)
    return [one for one in running if (one.info["cmdline"] or [""])[0].startswith(folders)]


def domain_of(name: str, python: str) -> Any:
    from pipeline.environments.libraries.verifiers import verifiers as domain

    return replace(domain(name, python=python), name="desk")


def played(domain: Any, *scripts: Any) -> Any:
    """Episodes of a task, each played by a script, one after the other."""
    from pipeline.config.settings import RolloutSettings
    from pipeline.rollout.rollout import Rollout, RolloutRequest, SamplerPolicy
    from tests.rollout.test_own_loop import Sampler
    from tests.support.helpers import chat

    limits = RolloutSettings(max_turns=4, max_tokens_per_turn=100, max_tokens=2000)
    task = replace(domain.generate_tasks(0, 1, "train", "medium")[0], domain="desk")
    episodes = []
    for script in scripts:
        policy = SamplerPolicy(Sampler([script]), chat(), limits)
        request = RolloutRequest(task=task, trial=0, key=0)
        episodes += Rollout(policy, chat(), {"desk": domain}, limits)([request])
    return episodes


def scripted(name: str, python: str, has_tools: bool = False) -> Iterator[Row]:
    from tests.support.helpers import call, say

    begun = time.monotonic()
    domain = domain_of(name, python)
    ids = {s: {t.id for t in domain.generate_tasks(0, 99, s, "medium")} for s in SPLITS}
    shared = [one for split in ids.values() for one in split]
    sizes = ", ".join(f"{len(of)} {split}" for split, of in ids.items())
    distinct = len(set(shared)) == len(shared) and all(ids.values())
    yield Row(f"{name}: tasks of {domain.about()['verifiers']}", sizes, distinct)
    look = call("look", item="item0")
    both = {**look, "tool_calls": [*look["tool_calls"], *call("look", item="item1")["tool_calls"]]}
    scripts = [[say("blue red green"), say("blue red green")], [say("x" * 30)] * 2]
    if has_tools:
        scripts = [[both, say("blue red green")], [look, say("x" * 30)], [look] * 5]
    episodes = played(domain, *scripts)
    found = "; ".join(f"{e.reward:.3g} {e.reward_breakdown}" for e in episodes)
    sums = all(abs(sum(e.reward_breakdown.values()) - e.reward) < 1e-9 for e in episodes)
    one_sequence = all(len(e.sequences) == 1 for e in episodes)
    whole = not any(e.error for e in episodes) and sums and one_sequence
    if has_tools:
        whole &= episodes[0].reward > 1 > episodes[1].reward
        whole &= [m["role"] for m in episodes[0].messages].count("tool") == 2
        found += f"; after 4 turns {episodes[2].stop_reason}"
    yield Row(f"{name}: scripts ({time.monotonic() - begun:.0f} s)", found, whole)
    domain.loop.end()  # as when its rank ends


SPLITS = ("train", "validation", "test")


def killed(name: str, python: str) -> Row:
    """Kill the process of an environment, and all that it has started, as a lack of memory may."""
    from tests.support.helpers import say

    domain = domain_of(name, python)
    me = psutil.Process()
    workers = [child for child in me.children(recursive=True) if is_worker(child)]
    worker = max(workers, key=psutil.Process.create_time)
    worker.send_signal(signal.SIGKILL)
    psutil.wait_procs([worker], LIMIT_S)
    (episode,) = played(domain, [say("blue red green")] * 2)
    return Row(f"{name}: its process killed", episode.error, episode.left_out == "outage")


def is_worker(process: Any) -> bool:
    words = list[str]()
    with suppress(psutil.NoSuchProcess):
        words = process.cmdline()
    return len(words) == 2 and words[1].endswith("verifiers_worker.py")
