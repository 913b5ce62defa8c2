"""Run environments of TRL's documentation and examples through the pipeline; one table.

    git clone https://github.com/huggingface/trl /tmp/trl
    python scripts/proofs/trl_environments.py --trl /tmp/trl

The script takes classes, reward functions and datasets out of a checkout of TRL, unchanged, and
writes one module for each example. What stands in a `main()` becomes a variable or an argument.
The clients of game servers are those of `trl_clients.py`. For each example, scripted calls of all
tools must earn the full reward, and `pipeline/run.py` trains on 1 and on 2 ranks: exit code 0, no
failed episode, one request for all episodes of a task, and equal episodes in the first step. Exit
code 1 if an example fails.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from datasets import disable_progress_bars

from pipeline.config.cli import parse
from pipeline.data.tasks import Task
from pipeline.environments import Domain, load_domains
from pipeline.environments.calls import run_here
from pipeline.environments.discovery import tool_methods
from pipeline.environments.task_sets import task_sets
from pipeline.environments.tools import RandomState, ToolAnswer, answer_call, reward_of, started
from pipeline.rollout.rewards import (
    Completion,
    RewardFunctions,
    callables_of,
    load_reward_functions,
)
from pipeline.rollout.trajectory import Trajectory
from scripts.bench.common import ROOT, finish_run

Call = Callable[..., ToolAnswer]  # arguments: name of the tool, and the tool's arguments
DOCUMENT = "docs/source/grpo_trainer.md"
OPENENV = "examples/scripts/openenv"
IMPORTS = (
    "import random\nimport time\nfrom collections import defaultdict\nfrom pathlib import Path\n"
)
CLIENTS = "from scripts.proofs.trl_clients import *\n"
WORDLE_URL = "local:wordle"
CATCH_URL = "local:catch"
FLAGS = [
    *("--model", "tiny", "--warm-start-steps", "0", "--max-steps", "2", "--curriculum", "mixed"),
    *("--tasks-per-step", "4", "--num-generations", "3", "--tasks-per-domain", "12"),
    *("--eval-tasks-per-domain", "4", "--eval-trials", "1", "--validation-steps", "0"),
    *("--max-tokens", "8192", "--max-tool-result-tokens", "2048", "--max-turns", "3"),
    *("--deterministic", "--max-error-rate", "0", "--report-to", "none"),
]


@dataclass(frozen=True, kw_only=True)
class Example:
    """What is taken out of a file of TRL.

    `names` are definitions, in this order; `block` is a text of the code block in a document.
    `before` and `after` are code around the definitions. `environments` has a class, or a factory
    with arguments, for each domain. `arguments` are attributes of `args` in the dataset's code;
    None: without a dataset. `play` calls all tools so that the reward is `reward` or more.
    """

    name: str
    form: str
    file: str
    names: tuple[str, ...]
    environments: Mapping[str, Any]
    play: Callable[[Any, Call], None]
    reward: float
    block: str = ""
    before: str = ""
    after: str = ""
    reward_funcs: tuple[str, ...] = ()
    arguments: Mapping[str, Any] | None = None
    lines: list[str] = field(default_factory=list)  # filled in by `module_of`


# Scripted calls of each example's tools


def play_increment(environment: Any, call: Call) -> None:
    call("increment", step=environment.target - 1)
    call("increment", step=1)


def play_2048(environment: Any, call: Call) -> None:
    for direction in ("left", "up", "right", "down") * 400:
        if call("move", direction=direction).is_last:
            break
    refused(call("move", direction="left"))


def play_wordle(environment: Any, call: Call) -> None:
    client = getattr(environment, "client", None) or environment._wordle_client
    call("guess", guess="[abc]")
    call("guess", guess="[zebra]")
    assert call("guess", guess=f"[{client._game.word}]").is_last
    refused(call("guess", guess="[zebra]"))


def play_catch(environment: Any, call: Call) -> None:
    client = getattr(environment, "client", None) or environment._catch_client
    refused(call("move", direction="up"))
    call("move", direction="right")
    while client._paddle != client._ball:
        call("move", direction="left" if client._ball < client._paddle else "right")
    while not call("stay").is_last:
        pass
    refused(call("stay"))


def play_echo(environment: Any, call: Call) -> None:
    assert call("echo", message="0123456789").content == "0123456789"


def play_sudoku(environment: Any, call: Call) -> None:
    game = environment.client._game
    empty = [(r, c) for r in range(9) for c in range(9) if not game.cells[r][c]]
    for r, c in empty:
        call("place", row=r + 1, col=c + 1, number=game.solution[r][c])
    refused(call("place", row=1, col=1, number=1))
    refused(call("place", row="one", col=1, number=1))


def play_routed(environment: Any, call: Call) -> None:
    if "run_code" in tool_methods(type(environment)):
        call("run_code", code="print(1)")
    else:
        call("move", action="up")


def play_multi(environment: Any, call: Call) -> None:
    play = play_wordle
    others = ("move", "stay")
    if environment.active == "catch":
        play = play_catch
        others = ("guess",)
    for name in others:
        arguments = {"move": {"direction": "left"}, "guess": {"guess": "[zebra]"}}.get(name, {})
        refused(call(name, **arguments))
    play(environment, call)


def refused(answer: ToolAnswer) -> None:
    assert answer.is_error and '"error"' in answer.content, answer


SUDOKU_FUNCTIONS = (
    *("is_valid_board_state", "parse_board", "count_filled_cells", "get_valid_numbers"),
    *("extract_empty_cells_with_candidates", "extract_empty_cells", "extract_board_only"),
)
SUDOKU_REWARDS = (
    *("reward_empty_cell", "reward_valid_moves", "reward_repetition", "reward_progress"),
    "reward_correct",
)
SUDOKU_VARIABLES = "env_url, difficulty, max_turns, api_delay = 'local:sudoku', 'easy', 100, 0.0\n"
SUDOKU_VARIABLES += "system_prompt = Path(CHECKOUT, 'sudoku_prompt.txt').read_text()\n"
MULTI_FACTORY = """
def multi_env(wordle_url, catch_url):
    MultiEnv.wordle_url, MultiEnv.catch_url = wordle_url, catch_url
    return MultiEnv()
"""
MULTI_ARGUMENTS = {"wordle_url": WORDLE_URL, "catch_url": CATCH_URL}
ROUTED_REWARD = """
def reward_func(environments, **kwargs):
    return [1.0 if isinstance(env, (CodingEnv, GameEnv)) else None for env in environments]
"""
EXAMPLES = [
    Example(
        name="Increment",
        form="self-sampling",
        file=DOCUMENT,
        block="random.randint(1, 6)",
        names=("IncrementEnv",),
        environments={"increment": "IncrementEnv"},
        play=play_increment,
        reward=1.0,
    ),
    Example(
        name="Increment, dataset",
        form="columns reach reset",
        file=DOCUMENT,
        block="def reset(self, target, **kwargs)",
        names=("IncrementEnv",),
        environments={"increment": "IncrementEnv"},
        arguments={},
        play=play_increment,
        reward=1.0,
    ),
    Example(
        name="coding and game",
        form="dict, column environment",
        file=DOCUMENT,
        block="class CodingEnv",
        names=("CodingEnv", "GameEnv"),
        environments={"coding": "CodingEnv", "game": "GameEnv"},
        after=ROUTED_REWARD,
        reward_funcs=("reward_func",),
        arguments={},
        play=play_routed,
        reward=1.0,
    ),
    Example(
        name="2048",
        form="self-sampling, reward function",
        file="examples/scripts/grpo_2048.py",
        names=("PROMPT", "Game2048Env", "reward_score"),
        environments={"game2048": "Game2048Env"},
        reward_funcs=("reward_score",),
        arguments={},
        play=play_2048,
        reward=1.0,
    ),
    Example(
        name="Wordle",
        form="client, reward function",
        file=f"{OPENENV}/wordle.py",
        before=f"env_url = {WORDLE_URL!r}\n",
        names=("prompt", "reward_func", "WordleEnv"),
        environments={"wordle": "WordleEnv"},
        reward_funcs=("reward_func",),
        arguments={"dataset_size": 40},
        play=play_wordle,
        reward=1.0,
    ),
    Example(
        name="Catch",
        form="client, reward function",
        file=f"{OPENENV}/catch.py",
        before=f"env_url = {CATCH_URL!r}\n",
        names=("BASE_PROMPT", "reward_from_env", "CatchEnv"),
        environments={"catch": "CatchEnv"},
        reward_funcs=("reward_from_env",),
        arguments={"dataset_size": 40},
        play=play_catch,
        reward=1.0,
    ),
    Example(
        name="Echo",
        form="client, reward function",
        file=f"{OPENENV}/echo.py",
        before="from types import SimpleNamespace\nargs = SimpleNamespace(env_host='local:echo')\n",
        names=("reward_func", "EchoToolEnv"),
        environments={"echo": "EchoToolEnv"},
        reward_funcs=("reward_func",),
        arguments={},
        play=play_echo,
        reward=1.0,
    ),
    Example(
        name="Sudoku",
        form="client, five reward functions, system prompt",
        file=f"{OPENENV}/sudoku.py",
        before=SUDOKU_VARIABLES,
        names=(*SUDOKU_FUNCTIONS, *SUDOKU_REWARDS, "SudokuEnv"),
        environments={"sudoku": "SudokuEnv"},
        reward_funcs=SUDOKU_REWARDS,
        arguments={"dataset_prompt": "Play Sudoku like an expert.", "dataset_size": 40},
        play=play_sudoku,
        reward=4.0,
    ),
    Example(
        name="Wordle and Catch in one",
        form="factory with arguments, column env, None",
        file=f"{OPENENV}/multi_env.py",
        before=f"DEFAULT_WORDLE_URL, DEFAULT_CATCH_URL = {('', '')}\n",
        names=(
            *("wordle_prompt", "catch_prompt", "CATCH_ROWS", "CATCH_COLS", "_format_catch_obs"),
            *("MultiEnv", "wordle_reward", "catch_reward", "n"),
        ),
        environments={"multi": {"factory": "multi_env", "arguments": MULTI_ARGUMENTS}},
        after=MULTI_FACTORY,
        reward_funcs=("wordle_reward", "catch_reward"),
        arguments={},
        play=play_multi,
        reward=1.0,
    ),
]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trl", type=Path, required=True, help="a checkout of TRL")
    parser.add_argument("--only", nargs="+", default=[], help="names of examples")
    options = parser.parse_args(argv)
    print("| example | file: lines | form | result | seconds |\n|---|---|---|---|---|", flush=True)
    failures = 0
    for number, example in enumerate(EXAMPLES):
        if options.only and example.name not in options.only:
            continue
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            result = proved(example, options.trl, Path(folder), f"trl_example_{number}")
        failures += not result.startswith("ok")
        place = f"{example.file}: {', '.join(example.lines)}"
        seconds = round(time.monotonic() - begun)
        print(f"| {example.name} | {place} | {example.form} | {result} | {seconds} |", flush=True)
    return min(failures, 1)


def proved(example: Example, checkout: Path, folder: Path, module: str) -> str:
    """Return "ok" with figures, or the reason of a failure."""
    try:
        (folder / f"{module}.py").write_text(module_of(example, checkout), encoding="utf-8")
        sys.path.insert(0, str(folder))
        flags = [*FLAGS, *flags_of(example, folder, module)]
        num_calls = drive(example, flags)
        runs = [episodes_of(flags, folder, num_ranks) for num_ranks in (1, 2)]
        return f"ok: {num_calls} scripted calls, {compared(runs)}"
    except (AssertionError, LookupError, OSError, RuntimeError, ValueError) as error:
        return f"FAILED: {type(error).__name__} {error}"
    finally:
        sys.path.remove(str(folder))


# Taking an example out of a file


def module_of(example: Example, checkout: Path) -> str:
    """Return the source of a module with the example's definitions, unchanged but for indents."""
    text = (checkout / example.file).read_text(encoding="utf-8")
    first = 1
    if example.block:
        blocks = re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
        found = next(block for block in blocks if example.block in block.group(1))
        first += text[: found.start(1)].count("\n")
        text = found.group(1)
    names = example.names if example.arguments is None else (*example.names, "dataset")
    definitions = dict(defined(ast.parse(text)))
    lines = text.splitlines()
    parts = list[str]()
    for name in names:
        start, end = definitions[name]
        parts.append(textwrap.dedent("\n".join(lines[start - 1 : end])) + "\n")
        if name in example.environments.values() or name == "MultiEnv":
            example.lines.append(f"{start + first - 1}-{end + first - 1}")
    if example.arguments is not None:
        imported = "from datasets import Dataset\nfrom types import SimpleNamespace\n"
        arguments = f"args = SimpleNamespace(**{dict(example.arguments)!r})\n"
        parts[-1] = f"def dataset():\n{textwrap.indent(imported + arguments + parts[-1], '    ')}"
        parts[-1] += "    return dataset\n"
    there = (checkout / example.file).parent.resolve()
    head = [
        "from __future__ import annotations\n",
        IMPORTS,
        CLIENTS,
        f"CHECKOUT = {str(there)!r}\n",
    ]
    return "\n\n".join([*head, example.before, *parts, example.after])


def defined(tree: ast.AST) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name, first and last line of all functions, classes and variables that are assigned."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield node.name, (first, node.end_lineno or first)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, (node.lineno, node.end_lineno or node.lineno)


def flags_of(example: Example, folder: Path, module: str) -> list[str]:
    """Save the example's dataset; return the flags that name dataset, environments and rewards."""
    domains = example.environments
    factories: dict[str, Any] = {}
    for name, given in domains.items():
        is_class = isinstance(given, str)
        factory = {"factory": given} if is_class else given
        target = f"{module}:{factory['factory']}"
        factories[name] = target if is_class else {**factory, "factory": target}
    flags = ["--domains", ",".join(domains), "--environments", json.dumps(factories)]
    if example.arguments is not None:
        disable_progress_bars()
        made = __import__(module).dataset()
        made.save_to_disk(str(folder / "dataset"))
        flags += ["--tasks", json.dumps(dict.fromkeys(domains, str(folder / "dataset")))]
    if example.reward_funcs:
        flags += ["--reward-funcs", ",".join(f"{module}:{f}" for f in example.reward_funcs)]
    return flags


# Scripted calls


def drive(example: Example, flags: list[str]) -> int:
    """Play tasks with scripted calls; return the number of calls. Each play must earn `reward`."""
    config = parse(flags)
    domains = load_domains(config)
    num_calls = 0
    rewards = load_reward_functions(config)
    for domain in domains.values():
        missed = set(tool_methods(domain.environment))
        for task in task_sets(config, domain, callables_of(rewards)).train[:6]:
            plays = [played(example, domain, task, rewards) for _ in range(2)]
            assert plays[0] == plays[1], f"two plays of task {task.id} differ"
            missed.difference_update(name for name, _ in plays[0])
            num_calls += len(plays[0])
        assert not missed, f"{missed} not called"
    return num_calls


def played(
    example: Example, domain: Domain, task: Task, rewards: RewardFunctions | None
) -> list[tuple[str, ToolAnswer]]:
    answers: list[tuple[str, ToolAnswer]] = []
    with RandomState(task):
        environment = run_here(started, domain.make, task.row()).environment

        def call(name: str, **arguments: Any) -> ToolAnswer:
            answers.append((name, run_here(answer_call, environment, name, arguments)))
            return answers[-1][1]

        example.play(environment, call)
        reward = run_here(reward_of, environment)
    said = [*map(dict, task.prompt), {"role": "assistant", "content": "Done."}]
    trajectory = Trajectory(domain=domain.name, task_id=task.id, messages=said, reward=reward)
    if rewards is not None:
        rewards([Completion(domain, task, environment, trajectory)])
    assert not trajectory.error, trajectory.error
    assert trajectory.reward >= example.reward, f"scripted calls earn {trajectory.reward:g}"
    return answers


# Runs of the pipeline


def episodes_of(flags: list[str], folder: Path, num_ranks: int) -> list[SimpleNamespace]:
    """Make a run; return the episodes of training. An episode that failed is an AssertionError."""
    output = folder / f"run-{num_ranks}"
    words = [*flags, "--num-gpus", str(num_ranks), "--output-dir", str(output)]
    paths = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "ACCELERATE_USE_CPU": "true"}
    finish_run(words, folder / f"log-{num_ranks}", **paths)
    training = list[SimpleNamespace]()
    for path in sorted(output.glob("trajectories/*/step-*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                episode = SimpleNamespace(**json.loads(line), step=path.name.partition(".")[0])
                why = episode.error or episode.left_out
                assert not why, f"{path.parent.name}: {episode.task_id}: {why}"
                if not path.parent.name.startswith("evaluation-"):
                    training.append(episode)
    return training


def compared(runs: list[list[SimpleNamespace]]) -> str:
    """Return figures of equal runs. Raises AssertionError where tasks or episodes differ."""
    requests: list[dict[tuple[str, str, str], list[Any]]] = []
    first: list[dict[Any, Any]] = []
    for run in runs:
        requests.append({})
        first.append({})
        for e in run:
            roles = [message["role"] for message in e.messages]
            before = e.messages[: roles.index("assistant")]
            told = requests[-1].setdefault((e.step, e.domain, e.task_id), before)
            assert told == before, f"episodes of task {e.task_id} have different requests"
            if e.step == min(other.step for other in run):
                first[-1][e.domain, e.task_id, e.trial] = (e.ids, e.reward, e.messages)
    assert requests[0] == requests[1], "the tasks on 1 and 2 ranks differ"
    assert first[0] == first[1], "the episodes of the first step on 1 and 2 ranks differ"
    texts = {json.dumps(messages) for messages in requests[0].values()}
    return f"{len(runs[0])} episodes of {len(requests[0])} tasks, {len(texts)} requests"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
