"""Environments by name, each from its real package: equal draws on any ranks, and after a kill.

    python scripts/proofs/environments.py --only textarena opponent three --model FOLDER

The packages of the parts must be installed (`pip install textarena reasoning-gym`); a server of
OpenEnv must run at `--openenv URL` for `three`. Without `--model`, a tiny random model plays, which
earns almost nothing. Proven is, for each source:

- two steps on 1 and on 2 ranks have equal tokens and rewards;
- a run on 2 ranks that is killed in its second step and resumed is byte-equal to the undisturbed;
- three: three sources as three domains in sequence; the transfer matrix and the pages name them as
  the user did (`--keep FOLDER` keeps the run).

The exit code is 1 if a row of the table is missed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this folder
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import finish_run, machine, parser_of, results_of, write_json
from scripts.proofs.agents import Row, close_row, compared_row, exact, finish, kill
from scripts.proofs.environments_mcp import mcp, mcp_http
from scripts.proofs.environments_reasoning_gym import reasoning_gym
from scripts.proofs.environments_verifiers import verifiers
from scripts.proofs.same import compared

SHORT = (
    "--tasks-per-step 2 --num-generations 4 --learning-rate 1e-5 --eval-tasks-per-domain 1 "
    "--eval-trials 1 --validation-tasks 1 --validation-steps 0 --warm-start-steps 0 --max-steps 2 "
    "--report-to none --max-error-rate 0 --max-turns 4 --max-tokens 1024 --max-tokens-per-turn 24"
)


def main(argv: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--model", default="tiny", help="folder of a model [tiny]")
    parser.add_argument("--openenv", metavar="URL", help="a server of OpenEnv, for `three`")
    parser.add_argument("--verifiers-python", nargs=2, metavar="PYTHON", help="with v0, with v1")
    parser.add_argument("--keep", type=Path, help="write the runs here, and keep them")
    options = parser.parse_args(argv)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="environments-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print("| what | found | |\n| --- | --- | --- |", flush=True)
        for part in options.only:
            begun = time.monotonic()
            for row in PARTS[part](folder, options):
                figures[row.what] = float(row.holds)
                held = "holds" if row.holds else "MISSED"
                print(f"| {row.what} | {row.found} | {held} |", flush=True)
            print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)
    write_json(options.json, figures, machine(), vars(options))
    return int(not all(figures.values()))


def plays_alike(
    name: str, flags: Sequence[str], folder: Path, is_one_message: bool = False
) -> Iterator[Row]:
    """Compare runs of a source on 1 and 2 ranks, and one that is killed and resumed."""
    runs = {run: folder / f"{name}-{run}" for run in ("1", "2", "killed")}
    for run, here in runs.items():
        ranks = ["--num-gpus", "1" if run == "1" else "2"]
        more = ["--save-steps", "1", "--deterministic", "--output-dir"]
        own = [*SHORT.split(), *flags, *ranks, *more, str(here)]
        if run == "killed":
            kill(own, here)
            own += ["--resume-from-checkpoint", "latest"]
        finish(own, here.with_suffix(".log"))
    episodes = {run: exact(here) for run, here in runs.items()}
    yield close_row(f"{name}: 1 and 2 ranks", episodes["1"], episodes["2"])
    differing = [one for one in compared(runs["2"], runs["killed"]) if "trajectories" not in one]
    what = f"{name}: killed and resumed, 2 ranks"
    yield compared_row(what, episodes["2"], episodes["killed"], differing)
    played = [one for of_step in episodes["1"].values() for one in of_step]
    rewards = sorted({round(end[0], 2) for *_, end in played})
    turns = sum(end[2] for *_, end in played)
    failed = sum(bool(end[3]) for *_, end in played)
    found = f"{len(played)} episodes, {turns} turns, rewards {rewards}, {failed} failed"
    has_more = len(rewards) > 1 if is_one_message else turns > len(played)
    yield Row(f"{name}: episodes", found, not failed and has_more)


def textarena(folder: Path, options: Any) -> Iterator[Row]:
    """A game of one player."""
    flags = ["--env", "textarena:GuessTheNumber-v0", "--model", options.model]
    yield from plays_alike("GuessTheNumber", flags, folder)


def opponent(folder: Path, options: Any) -> Iterator[Row]:
    """A game of two of TextArena, against an opponent that draws."""
    arguments = {"opponent": "scripts.proofs.environments:any_move"}
    two = {"noughts": {"factory": "textarena:TicTacToe-v0", "arguments": arguments}}
    flags = ["--domains", "noughts", "--environments", json.dumps(two), "--model", options.model]
    yield from plays_alike("TicTacToe", flags, folder)


def any_move(observation: str) -> str:
    """Draw one of the moves that the text of a game names last."""
    import random
    import re

    return random.choice(re.findall(r"\[\d+\]", observation.rpartition("Available Moves:")[2]))


def three(folder: Path, options: Any) -> Iterator[Row]:
    """Three sources in sequence, with the names that the user gave them."""
    names = {"algebra": "reasoning_gym:chain_sum", "words": "textarena:GuessTheNumber-v0"}
    names["mail"] = f"openenv:{options.openenv}"
    here = folder / "three"
    flags = [*SHORT.split(), "--domains", ",".join(names), "--environments", json.dumps(names)]
    flags += ["--model", options.model, "--num-gpus", "2", "--max-steps", "6"]
    said = finish_run([*flags, "--output-dir", str(here)], here.with_suffix(".log"))
    results = results_of(here)
    transfer = results["transfer"]
    stages = [stage["name"] for stage in transfer["stages"] if stage["episodes"]]
    yield Row("three: stages in sequence", ", ".join(stages), stages == [*names])
    shape = [len(row) for row in transfer["domains"]["matrix"]]
    found = f"{len(shape)} evaluations of {', '.join(transfer['domains']['names'])}"
    yield Row("three: transfer matrix", found, shape == [3] * 4)
    page = (here / "report.html").read_text(encoding="utf-8")
    for name, environment in names.items():
        places = {"output": said, "report": page, "results": json.dumps(results)}
        lacking = [
            place for place, text in places.items() if not (name in text and environment in text)
        ]
        found = f"{environment}: lacks in {lacking}" if lacking else environment
        yield Row(f"three: {name}", found, not lacking)


Part = Callable[[Path, Any], Iterator[Row]]
PARTS: dict[str, Part] = {
    "reasoning_gym": reasoning_gym,
    "textarena": textarena,
    "opponent": opponent,
    "three": three,
    "verifiers": verifiers,
    "mcp": mcp,
    "mcp_http": mcp_http,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
