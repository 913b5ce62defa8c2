"""List the files and wings whose functions one optimizer step calls.

`python scripts/bench/step_trace.py` makes a small run on two ranks. In the run, every message calls
a tool and every group trains. The script records the functions that rank 0 calls between the second
and the third optimizer step of GRPO, and prints JSON. Functions that evaluate, save, track or watch
are left out, with all functions that they call.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from itertools import count, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.proofs.ranks import play_ranks

NUM_RANKS = 2
WARM_START = 12  # optimizer steps of the warm start: enough for the model to end messages
FLAGS = [
    *("--model", "tiny", "--domains", "airline", "--tasks-per-domain", "40"),
    *("--warm-start-steps", str(WARM_START), "--warm-start-batch-size", "8"),
    *("--max-steps", "3", "--save-steps", "0"),
    *("--tasks-per-step", "2", "--num-generations", "4", "--validation-steps", "0"),
    *("--eval-tasks-per-domain", "1", "--eval-trials", "1", "--report-to", "none"),
    *("--num-gpus", str(NUM_RANKS), "--family-shares", "{}"),
]
# Wings, files and functions that the list leaves out.
ASIDE = (
    *("evaluation", "checkpoints", "report"),
    *("training/step_metrics.py", "distributed/watchdog.py"),
)
ASIDE_FUNCTION = "save_transcripts"


@cache
def is_aside(file: str, function: str) -> bool:
    """Whether the list leaves out a function, or the file of the function."""
    return function == ASIDE_FUNCTION or file.startswith(ASIDE)


def traced() -> dict[str, Any]:
    """The files and wings of one optimizer step."""
    with TemporaryDirectory() as folder:
        first, *others = play_ranks(play, NUM_RANKS, folder, timeout_s=600)
    if failed := [result for result in (first, *others) if isinstance(result, str)]:
        raise RuntimeError(failed[0])
    wings = sorted({file.split("/")[0].removesuffix(".py") for file in first})
    return {"num_wings": len(wings), "wings": wings, "num_files": len(first), "files": first}


class Trace:
    """Records calls of the package's functions while the attribute `on` is true."""

    def __init__(self, package: Path) -> None:
        self._package = f"{package}{os.sep}"
        self.on = False
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


def play(folder: str) -> dict[str, list[str]]:
    """Run the pipeline on this rank; return the functions of one step by file."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import pipeline.run
    import pipeline.train

    trace = Trace(Path(str(pipeline.__file__)).parent)
    steps = count(1)

    def stepped(*_: object) -> None:
        step = next(steps)
        if step == WARM_START:
            make_groups_live()
        trace.on = step == WARM_START + 2
        sys.setprofile(trace if trace.on else None)

    threading.setprofile(trace)
    register_optimizer_step_post_hook(stepped)
    make_messages_call_tools()
    pipeline.train.write_report = lambda *_: None  # the report takes longer than the steps
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        code = pipeline.run.main([*FLAGS, "--output-dir", str(Path(folder, "out"))])
    if code or next(steps) != WARM_START + 4:
        raise RuntimeError(f"exit code {code}, or not {WARM_START + 3} optimizer steps")
    return {file: sorted(names) for file, names in sorted(trace.called.items())}


def make_groups_live() -> None:
    """Replace rewards by 0 and 1 in turns, so that every group trains."""
    from pipeline.environments.embedded.airline import AirlineEnvironment

    rewards = cycle((0.0, 1.0))
    of_domain = AirlineEnvironment.get_reward

    def get_reward(self: Any) -> float:
        of_domain(self)
        return next(rewards)

    AirlineEnvironment.get_reward = get_reward  # type: ignore[method-assign]


def make_messages_call_tools() -> None:
    """Replace every finished message by a tool call. Every second call finds nothing."""
    from pipeline.models.chat.template import Chat

    numbers = count()
    of_chat = Chat.parse

    def parse(self: Any, ids: list[int], tools: Any = (), finished: bool | None = None) -> Any:
        if finished:
            number = next(numbers)
            day = '{"name": "find_flights", "arguments": {"day": "mon"}}'
            missing = f'{{"name": "find_reservation", "arguments": {{"customer": "c{number}"}}}}'
            text = f"<tool_call>{(day, missing)[number % 2]}</tool_call>"
            ids = [*self.tokenizer.encode(text, add_special_tokens=False), ids[-1]]
        return of_chat(self, ids, tools, finished)

    Chat.parse = parse  # type: ignore[method-assign]


if __name__ == "__main__":
    print(json.dumps(traced(), indent=1))
