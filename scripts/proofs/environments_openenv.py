"""Servers of OpenEnv's own package, by their URLs; one table.

    python scripts/proofs/environments_openenv.py --openenv-python PYTHON

PYTHON is that of an environment with `pip install openenv-core` (or openenv). Proven is:

- what the server of the tests answers is what OpenEnv's answers, message for message;
- the environment of the documentation's form, the one that `openenv init` writes (with its one
  session), and one whose actions are tools of MCP play scripted episodes;
- runs on 1 and 2 ranks, whose tiny policy has learned to call `step`, have equal tokens and
  rewards; one that is killed and resumed is byte-equal, and no session is left.

The exit code is 1 if a row of the table is missed.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import ROOT, machine, parser_of, write_json
from scripts.proofs.agents import Row, close_row, compared_row, exact, finish, kill
from scripts.proofs.same import compared

SHORT = (
    "--model tiny --warm-start-steps 60 --tasks-per-step 2 --num-generations 4 --max-steps 3 "
    "--save-steps 1 --eval-tasks-per-domain 2 --eval-trials 1 --validation-tasks 1 "
    "--validation-steps 0 --max-turns 6 --max-tokens 1024 --max-tokens-per-turn 24 "
    "--learning-rate 1e-5 --max-error-rate 0 --report-to none --deterministic"
)
SERVER = ROOT / "scripts" / "proofs" / "openenv_server.py"
SESSIONS = 24
LIMIT_S = 120.0  # until a server answers; it imports for long where other jobs run
SAID: list[Any] = [
    {"type": "reset", "data": {"seed": 5, "level": 3}},
    {"type": "state"},
    *({"type": "step", "data": data} for data in ({"by": 1}, {"by": "x", "to": 2}, {"by": 13})),
    *({"type": "step", "data": data} for data in ({}, {"by": 9}, {"by": 1})),
]
RANDOM = ("episode_id", "url", "ctx", "metadata")  # what differs with each session or version


def main(argv: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--openenv-python", type=Path, required=True, help="with openenv-core")
    options = parser.parse_args(argv)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="openenv-") as temporary:
        print("| what | found | |\n| --- | --- | --- |", flush=True)
        for row in openenv(Path(temporary), options):
            figures[row.what] = float(row.holds)
            held = "holds" if row.holds else "MISSED"
            print(f"| {row.what} | {row.found} | {held} |", flush=True)
    write_json(options.json, figures, machine(), vars(options))
    return int(not all(figures.values()))


def openenv(folder: Path, options: Any) -> Iterator[Row]:
    """All rows; `options.openenv_python` is a Python with OpenEnv's package."""
    python = str(options.openenv_python)
    with server([python, str(SERVER), "PORT", str(SESSIONS)], folder) as url:
        yield from same_messages(url)
        yield from scripted("documentation's form", url, "step")
        yield from trained(url, folder)
        yield all_free(url)
    with server([python, str(SERVER), "PORT", "4", "mcp"], folder) as url:
        yield from scripted("tools of MCP", url, "add")
    init = [python, "-m", "openenv.cli", "init", "echo_env"]
    subprocess.run(init, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    app = [python, "-m", "uvicorn", "server.app:app", "--port", "PORT", "--log-level", "warning"]
    with server(app, folder, folder / "echo_env") as url:
        yield from echoed(url)


@contextmanager
def server(command: Sequence[str], folder: Path, cwd: Path | None = None) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    words = [str(port) if word == "PORT" else word for word in command]
    with (folder / "servers.log").open("ab") as log:
        process = subprocess.Popen(words, cwd=cwd or folder, stdout=log, stderr=log)
    try:
        until = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < until:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def same_messages(url: str) -> Iterator[Row]:
    from tests.support.openenv_server import serving

    async def answers(url: str) -> list[Any]:
        import aiohttp

        async with aiohttp.ClientSession() as client:
            async with client.get(f"{url}/schema") as answer:
                told = [(await answer.json())["action"]]
            async with client.ws_connect(f"{url}/ws") as session:
                for message in SAID:
                    await session.send_json(message)
                    told.append(json.loads((await session.receive()).data))
                await session.send_json({"type": "close"})
                told.append(str((await session.receive()).type))
        return told

    with serving() as stand_in:
        pairs = zip(asyncio.run(answers(url)), asyncio.run(answers(stand_in.url)), strict=True)
    equal = [without_random(real) == without_random(ours) for real, ours in pairs]
    yield Row("messages of the tests' server", f"{sum(equal)} of {len(equal)} equal", all(equal))


def without_random(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_random(v) for k, v in value.items() if k not in RANDOM}
    return [without_random(v) for v in value] if isinstance(value, list) else value


def domain_of(url: str) -> Any:
    from pipeline.config.cli import parse
    from pipeline.environments.domains import load_domains

    return load_domains(parse(["--env", f"openenv:{url}"]))["openenv"]


def played(domain: Any, scripts: Sequence[Any], request: str = "") -> Any:
    """Episodes of one task that a scripted policy plays."""
    from pipeline.config.settings import RolloutSettings
    from tests.support import helpers

    limits = RolloutSettings(max_turns=8, max_tokens_per_turn=200, max_tokens=4000)
    tasks = [helpers.make_task("t0", request, domain="openenv")] * len(scripts)
    return helpers.played(scripts, {"openenv": domain}, limits, tasks)[0]


def scripted(what: str, url: str, tool: str) -> Iterator[Row]:
    from tests.support.helpers import call, say

    domain = domain_of(url)
    by_ones = [[call(tool, by=1)] * n + [say("bye")] for n in (1, 2, 3, 4)]
    wrong = [call(tool, by="x"), call("fly"), say("bye")]
    episodes = played(domain, [*by_ones, wrong], "count")
    rewards = [episode.reward for episode in episodes]
    errors = [episode.error for episode in episodes if episode.error]
    # The target is 2, 3 or 4, and an episode ends when it is reached.
    target = rewards.index(1.0) + 1 if 1.0 in rewards else 0
    expected = [float(n >= target) for n in (1, 2, 3, 4)] + [0.0]
    found = f"target {target}, rewards {rewards}{errors[:1] or ''}"
    yield Row(f"{what}: scripted", found, target > 1 and rewards == expected and not errors)


def echoed(url: str) -> Iterator[Row]:
    from pipeline.environments.task_checks import try_task
    from tests.support.helpers import call, make_task, say

    domain = domain_of(url)
    text = try_task(domain, make_task("t0", "", domain="openenv"), "openenv", LIMIT_S)
    episodes = played(domain, [[call("step", message="four"), say("bye")]] * 6)
    rewards = [episode.reward for episode in episodes]
    found = f"begins {text[:40]!r}, rewards {rewards}"
    yield Row("openenv init, one session: six episodes", found, rewards == [0.4] * 6)


def trained(url: str, folder: Path) -> Iterator[Row]:
    """Compare runs on 1 and 2 ranks, and one that is killed and resumed."""
    shown = folder / "counter.jsonl"
    with shown.open("w", encoding="utf-8") as file:
        for number in range(400):
            file.write(json.dumps(demonstration(random.Random(number))) + "\n")
    flags = ["--env", f"openenv:{url}", "--demonstrations", json.dumps({"openenv": str(shown)})]
    runs = {run: folder / run for run in ("1", "2", "killed")}
    for run, here in runs.items():
        ranks = ["--num-gpus", "1" if run == "1" else "2", "--output-dir", str(here)]
        own = [*SHORT.split(), *flags, *ranks]
        if run == "killed":
            kill(own, here)
            own += ["--resume-from-checkpoint", "latest"]
        finish(own, here.with_suffix(".log"))
    episodes = {run: exact(here) for run, here in runs.items()}
    yield close_row("1 and 2 ranks", episodes["1"], episodes["2"])
    differing = [one for one in compared(runs["2"], runs["killed"]) if "trajectories" not in one]
    what = "killed and resumed, 2 ranks"
    yield compared_row(what, episodes["2"], episodes["killed"], differing)
    played = [one for of_step in episodes["1"].values() for one in of_step]
    rewards = sorted({round(end[0], 2) for *_, end in played})
    turns = sum(end[2] for *_, end in played)
    failed = sum(bool(end[3]) for *_, end in played)
    found = f"{len(played)} episodes, {turns} turns, rewards {rewards}, {failed} failed"
    yield Row("episodes", found, not failed and turns > len(played) and len(rewards) > 1)


def demonstration(own: random.Random) -> dict[str, Any]:
    """Return a conversation that often adds too much."""
    target, count = own.randint(2, 4), 0
    begin = {"role": "user", "content": json.dumps({"count": 0, "target": target})}
    messages: list[dict[str, Any]] = [begin]
    while count < target:
        by = own.randint(1, 3)
        count += by
        call = {"function": {"name": "step", "arguments": {"by": by}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        seen = json.dumps({"count": count, "target": target})
        messages.append({"role": "tool", "name": "step", "content": seen})
    return {"messages": [*messages, {"role": "assistant", "content": "Done."}]}


def all_free(url: str) -> Row:
    """Whether as many sessions as there are can be opened at once."""

    async def opened() -> int:
        import aiohttp

        async with aiohttp.ClientSession() as client:
            sessions = [await client.ws_connect(f"{url}/ws") for _ in range(SESSIONS)]
            for session in sessions:
                await session.send_json({"type": "reset", "data": {}})
            answers = [json.loads((await session.receive()).data) for session in sessions]
            for session in sessions:
                await session.send_json({"type": "close"})
        return sum(answer["type"] == "observation" for answer in answers)

    number = asyncio.run(opened())
    return Row("sessions left by all runs", str(SESSIONS - number), number == SESSIONS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
