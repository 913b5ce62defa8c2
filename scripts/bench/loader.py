"""Measure the cost of many tasks: reading them at start-up, and choosing the tasks of each step.

At start-up a rank reads and validates every row of a domain, compares each row with the held-out
tasks, measures its prompt and tries some tasks in the environment. The script measures start-up
from JSON Lines and from a dataset, each in a new process after its imports. The script then chooses
the tasks of a step as in training, for 1 to 1,024 simulated ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

from common import in_fresh_process, machine, save_tasks, write_json

from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage, tasks_of_step
from pipeline.data.tasks import Source, Task, Tasks, load_tasks
from pipeline.embedded.airline import generate_tasks

RANKS = (1, 8, 64, 1024)
RULE = "Refund only what the fare allows and only to the card that paid, whoever asks for it.\n"


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    if arguments.start is not None:
        print(json.dumps(start_up(arguments.start, arguments.num_tasks)))
        return 0
    if arguments.num_tasks < 100:
        parser().error(f"--num-tasks: got {arguments.num_tasks}; give 100 or more")
    where = machine()
    with tempfile.TemporaryDirectory() as folder:
        lines, dataset = Path(folder, "tasks.jsonl"), Path(folder, "dataset")
        save_tasks(make_tasks(arguments.num_tasks, arguments.policy_bytes), lines)
        print(f"{arguments.num_tasks} tasks, {lines.stat().st_size / 1e6:.1f} MB of JSON Lines")
        save_dataset(lines, dataset)
        figures: dict[str, float] = {}
        for kind, source in (("many_tasks", lines), ("many_tasks_dataset", dataset)):
            flags = ["--start", str(source), "--num-tasks", str(arguments.num_tasks)]
            started = in_fresh_process([__file__, *flags], OMP_NUM_THREADS="1")
            figures |= {f"{kind}_{name}": value for name, value in started.items()}
        show_start_up(figures)
        tasks = load_tasks(lines, "airline")
        sizes = [arguments.num_tasks // part for part in (100, 10, 1)]
        picked = pick_all(tasks, sizes, arguments.tasks_per_step, arguments.steps)
    show_picks(picked, sizes)
    write_json(arguments.json, {**figures, **picked}, where, vars(arguments))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--num-tasks", type=int, default=100_000, help="100 or more")
    made.add_argument("--policy-bytes", type=int, default=4000, help="of the text in every prompt")
    made.add_argument("--tasks-per-step", type=int, default=24)
    made.add_argument("--steps", type=int, default=40, help="measured for each number of ranks")
    made.add_argument("--json", type=Path, help="write the figures here as well")
    made.add_argument("--start", type=Path, help=argparse.SUPPRESS)  # in a new process
    return made


def make_tasks(count: int, policy_bytes: int) -> Iterator[Task]:
    """Repeat the airline's tasks under new ids, with a longer policy text."""
    made = generate_tasks(7, min(count, 2000), "train", "medium")
    policy = (RULE * (policy_bytes // len(RULE) + 1))[:policy_bytes]
    for number in range(count):
        task = made[number % len(made)]
        system, *rest = task.prompt
        prompt = ({**system, "content": f"{system['content']}\n{policy}"}, *rest)
        yield replace(task, id=f"t{number:06d}", prompt=prompt)


def save_dataset(lines: Path, folder: Path) -> None:
    from datasets import Dataset, disable_progress_bars

    def rows() -> Iterator[dict[str, Any]]:
        with lines.open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                yield {**row, "payload": json.dumps(row["payload"])}

    disable_progress_bars()
    Dataset.from_generator(rows, cache_dir=str(lines.parent)).save_to_disk(folder)


def start_up(source: Path, num_tasks: int) -> dict[str, float]:
    """Seconds and MB of start-up; the memory of the imports is subtracted.

    `mb` is the peak of resident memory. The peak includes memory-mapped pages of a dataset, which
    all ranks of a machine share. `private_mb` is the memory without mapped pages.
    """
    import datasets  # noqa: F401  (excludes the import from the measurement)

    from pipeline.environments.domains import generated, load_domains
    from pipeline.preflight.tasks import split_source

    data = {
        "domains": ["airline"],
        "tasks": {"airline": str(source)},
        "tasks_per_domain": num_tasks,
    }
    config = Config.model_validate({"data": data})
    domain = load_domains(config.data)["airline"]
    held_out = generated(config.data, domain, config.data.eval_tasks_per_domain, "test")
    resident, private = memory_mb("VmRSS"), memory_mb("RssAnon")
    begun, worked = perf_counter(), process_time()
    tasks = split_source(config, domain, held_out, with_validation=False).train
    found = {"s": perf_counter() - begun, "cpu_s": process_time() - worked}
    assert len(tasks) == num_tasks
    memory = {
        "mb": memory_mb("VmHWM") - resident,
        "private_mb": memory_mb("RssAnon") - private,
    }
    return found | memory


def memory_mb(kind: str) -> float:
    """Resident memory: `VmRSS` (now), `RssAnon` (without mapped files) or `VmHWM` (peak).

    `getrusage` would include memory of the parent process.
    """
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.partition(f"{kind}:")[2].split()[0]) / 1e3


def pick_all(tasks: Tasks, sizes: list[int], count: int, steps: int) -> dict[str, float]:
    """Microseconds of a step, and of a pass's first step, by numbers of tasks and ranks.

    Measurements of all numbers alternate, so that other load on the machine affects all alike.
    """
    spent: dict[str, list[float]] = {}
    for step in range(steps):
        for size in sizes:
            groups = min(count, size)
            steps_per_pass = size // groups
            for num_ranks in RANKS:
                microseconds = pick(tasks[:size], groups, step, num_ranks) * 1e6
                if step % steps_per_pass == 0:
                    spent.setdefault(f"first_step_us_{size}_tasks", []).append(microseconds)
                if step % steps_per_pass or steps_per_pass == 1:
                    name = f"step_us_{size}_tasks_{num_ranks}_ranks"
                    spent.setdefault(name, []).append(microseconds)
    return {name: median(found) for name, found in sorted(spent.items())}


def pick(source: Source, count: int, step: int, num_ranks: int) -> float:
    """Seconds of a step. `num_ranks` is also the seed, so that no permutation is cached."""
    own, groups = ("airline",), {"airline": count}
    stage = Stage(
        index=0, name="s", own=own, difficulty="medium", groups=groups, num_steps=step + 1
    )
    begun = perf_counter()
    tasks = tasks_of_step(stage, step, {"airline": source}, num_ranks)
    share = tasks[::num_ranks]  # Rank 0 samples every num_ranks-th group.
    seconds = perf_counter() - begun
    assert len(share) == -(-count // num_ranks)
    return seconds


def show_start_up(figures: dict[str, float]) -> None:
    print("start-up of a rank     seconds   of them CPU   MB at its peak   MB of its own")
    for name, kind in (("JSON Lines", "many_tasks"), ("dataset", "many_tasks_dataset")):
        units = ("s", "cpu_s", "mb", "private_mb")
        seconds, cpu, peak, own = (figures[f"{kind}_{unit}"] for unit in units)
        print(f"  {name:<20}{seconds:>8.2f}{cpu:>14.2f}{peak:>17.0f}{own:>16.0f}")


def show_picks(figures: dict[str, float], sizes: list[int]) -> None:
    heads = "".join(f"{f'{n} ranks':>12}" for n in RANKS)
    print(f"microseconds a step {heads}   first of a pass")
    for size in sizes:
        cells = "".join(f"{figures[f'step_us_{size}_tasks_{n}_ranks']:>12.0f}" for n in RANKS)
        first = figures[f"first_step_us_{size}_tasks"]
        print(f"  {f'of {size} tasks':<18}{cells}{first:>18.0f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
