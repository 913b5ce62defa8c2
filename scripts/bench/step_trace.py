"""List the files and rooms whose functions one optimizer step calls.

`python scripts/bench/step_trace.py [--checkout FOLDER]` starts a small run on two ranks. In the
run, every message calls a tool and every group trains. The script records the functions that rank 0
calls between the second and the third optimizer step of GRPO, and prints JSON. Functions that
evaluate, save, track or watch are left out, with all functions that they call.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import count, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 2
WARM_START = 12  # optimizer steps of the warm start: enough for the model to end messages
FLAGS = [
    *("--model", "tiny", "--domains", "airline", "--tasks-per-domain", "40"),
    *("--warm-start-steps", str(WARM_START), "--warm-start-batch-size", "8"),
    *("--max-steps", "3", "--save-steps", "0"),
    *("--tasks-per-step", "2", "--num-generations", "4", "--validation-steps", "0"),
    *("--eval-tasks-per-domain", "1", "--eval-trials", "1", "--report-to", "none"),
    *("--num-gpus", str(NUM_RANKS), "--output-dir", "out"),
    *("--family-shares", "{}"),  # the default recipe's came later than the compared commits
]
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
# Rooms and files that the list leaves out.
ASIDE = (
    *("evaluation", "checkpoints", "tracking"),
    *("distributed/watchdog.py", "distributed/sentinel.py"),
    # Checkouts of earlier commits have the following files.
    *("rollout/transcripts.py", "evaluate.py", "validation.py", "continual.py", "error_shares.py"),
    *("checkpoint.py", "manifest.py", "run_folder.py", "tracking.py", "trackers.py", "flops.py"),
    *("step_metrics.py", "profiling.py", "watchdog.py", "sentinel.py"),
)
# The last function is the present one; earlier commits have the others.
ASIDE_FUNCTIONS = ("save_trajectories", "save_when_due", "save_transcripts")


@cache
def is_aside(file: str, function: str) -> bool:
    """Whether the list leaves out a function, or the file of the function."""
    named = any(file == name or file.startswith(f"{name}/") for name in ASIDE)
    return named or file.startswith("wandb_") or function in ASIDE_FUNCTIONS


def traced(checkout: Path) -> dict[str, Any]:
    """The files and rooms of one optimizer step of the package in `checkout`."""
    with TemporaryDirectory() as folder:
        place = {"WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS, "MASTER_PORT": free_port()}
        shared = {"PYTHONPATH": checkout, "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1"}
        ranks = []
        for rank in range(NUM_RANKS):
            of_rank = {**place, **shared, "RANK": rank, "LOCAL_RANK": rank}
            environment = {**os.environ, **{name: str(value) for name, value in of_rank.items()}}
            command = [sys.executable, str(Path(__file__).resolve()), "--inside", f"{rank}.json"]
            ranks.append(subprocess.Popen(command, cwd=folder, env=environment, **PIPES))
        said = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError("the run failed:\n" + "\n".join(said))
        files = json.loads((Path(folder) / "0.json").read_text(encoding="utf-8"))
    rooms = sorted({file.split("/")[0].removesuffix(".py") for file in files})
    return {"num_rooms": len(rooms), "rooms": rooms, "num_files": len(files), "files": files}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Trace:
    """Records calls of the package's functions while the attribute `on` is true."""

    def __init__(self, package: Path) -> None:
        self._package, self.on = f"{package}{os.sep}", False
        self.called: dict[str, set[str]] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if not self.on or event != "call" or not (file := self._file_of(frame)):
            return
        name = frame.f_code.co_name
        if name in self.called.get(file, ()) or name == "<module>":  # "<module>" is an import.
            return
        within: FrameType | None = frame
        while within is not None:
            if (of := self._file_of(within)) and is_aside(of, within.f_code.co_name):
                return
            within = within.f_back
        self.called.setdefault(file, set()).add(name)

    def _file_of(self, frame: FrameType) -> str:
        """The path of a frame's file within the package; "" for other files."""
        name = frame.f_code.co_filename
        return name[len(self._package) :] if name.startswith(self._package) else ""

    def by_file(self) -> dict[str, list[str]]:
        return {file: sorted(names) for file, names in sorted(self.called.items())}


def play(output: Path) -> None:
    """Run the pipeline, and trace the calls between two optimizer steps."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import pipeline
    from pipeline import run

    trace, num_steps = Trace(Path(str(pipeline.__file__)).parent), 0

    def stepped(*_: object) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == WARM_START:
            make_groups_live()
        trace.on = num_steps == WARM_START + 2
        if trace.on:
            sys.setprofile(trace)
        elif num_steps == WARM_START + 3:
            sys.setprofile(None)
            output.write_text(json.dumps(trace.by_file()), encoding="utf-8")

    threading.setprofile(trace)
    register_optimizer_step_post_hook(stepped)
    make_messages_call_tools()
    leave_the_report_out()
    code = run.main(FLAGS)
    if code == 0 and num_steps < WARM_START + 3:
        raise RuntimeError(f"there were {num_steps} optimizer steps with the warm start")
    run.leave(code)


def make_groups_live() -> None:
    """Replace rewards by 0 and 1 in turns, so that every group trains."""
    rewards = cycle((0.0, 1.0))
    environment = first_of("embedded.airline", "environments.airline").AirlineEnvironment
    of_domain = environment.get_reward

    def get_reward(self: Any) -> float:
        of_domain(self)
        return next(rewards)

    environment.get_reward = get_reward


def leave_the_report_out() -> None:
    """Do not write a report, which takes longer than the steps."""
    first_of("train").write_report = lambda *_: None


def make_messages_call_tools() -> None:
    """Replace every finished message by a tool call. Every second call finds nothing."""
    chat, numbers = first_of("chat.template", "chat").Chat, count()
    of_chat = chat.parse

    def parse(self: Any, ids: list[int], tools: Any = (), finished: bool | None = None) -> Any:
        if finished:
            number = next(numbers)
            day = '{"name": "find_flights", "arguments": {"day": "mon"}}'
            missing = f'{{"name": "find_reservation", "arguments": {{"customer": "c{number}"}}}}'
            text = f"<tool_call>{(day, missing)[number % 2]}</tool_call>"
            ids = [*self.tokenizer.encode(text, add_special_tokens=False), ids[-1]]
        return of_chat(self, ids, tools, finished)

    chat.parse = parse


def first_of(*modules: str) -> Any:
    """Import the first module that exists. Later names are for checkouts of older commits."""
    for module in modules:
        with suppress(ModuleNotFoundError):
            return import_module(f"pipeline.{module}")
    raise ModuleNotFoundError(" or ".join(modules))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="root of a repository")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        sys.path.pop(0)  # removes the folder of this script
        play(options.inside.resolve())
    print(json.dumps(traced(options.checkout.resolve()), indent=1))


if __name__ == "__main__":
    main()
