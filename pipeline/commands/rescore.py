"""Scores the saved episodes of a run with other reward functions. Nothing is played.

The new reward is the weighted sum of the given functions. What `get_reward` or a loop has returned
is no part of it: it cannot be computed again. The files of the run stay as they are. Further flags
are settings of the run, such as --reward-weights and --success-threshold.
"""

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.common.console import command, say
from pipeline.common.errors import UserError
from pipeline.common.layout import RUN_SETTINGS
from pipeline.common.untrusted import printable, shown
from pipeline.config.cli import Parser, parse
from pipeline.config.settings import Config
from pipeline.data.datasets import has_split, open_tasks
from pipeline.data.tasks import Task
from pipeline.environments.domains import Domain, generated, load_domains
from pipeline.environments.language_models.language_model import LanguageModel
from pipeline.evaluation.transfer import mean_over_tasks
from pipeline.report.export import written_whole
from pipeline.report.run_files import (
    episodes_in,
    read_settings,
    reading,
    task_of,
    text_of,
    transcripts_in,
)
from pipeline.report.tables import Rows, aligned, with_interval
from pipeline.report.write import filled, parts_of_page
from pipeline.rollout.rewards import (
    JUDGE,
    Completion,
    RewardFunctions,
    columns_of,
    load_reward_functions,
)
from pipeline.rollout.trajectory import FAILED, Trajectory, succeeded

MOST_SHOWN = 100  # largest number of episodes on the page
Files = Mapping[tuple[str, int], Sequence[Path]]  # by (stage or evaluation, step)
Line = dict[str, Any]  # an episode of a transcript, or its rewards


def main(argv: list[str]) -> int:
    """Run `rescore RUN --reward-funcs ...`; raises UserError for a mistake of the user."""
    flags = Parser(prog=command("rescore"), description=__doc__, allow_abbrev=False)
    flags.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    flags.add_argument(
        "--reward-funcs",
        required=True,
        metavar="A,B",
        help="reward functions, called as TRL does: module:function",
    )
    flags.add_argument(
        "--stage",
        metavar="NAME",
        help="a stage of training, or an evaluation, such as evaluation-start [all]",
    )
    flags.add_argument(
        "--output", type=Path, metavar="FOLDER", help="new or empty folder [RUN-rescored]"
    )
    options, further = flags.parse_known_args(argv)
    read_settings(options.run)
    saved = transcripts_in(options.run)
    files = {place: saved[place] for place in saved if options.stage in (None, place[0])}
    if not files:
        known = ", ".join(dict.fromkeys(stage for stage, _ in saved)) or "none"
        raise UserError(
            f"--stage: got {shown(options.stage)}; transcripts of {options.run}: {known}"
        )
    run = options.run.resolve()
    # The run's own weights are those of its own functions.
    settings = ["--config", str(run / RUN_SETTINGS), "--reward-weights", "none", *further]
    config = parse([*settings, "--reward-funcs", options.reward_funcs])
    out = options.output or run.with_name(f"{run.name}-rescored")
    if out.resolve().is_relative_to(run):
        raise UserError(f"--output: got {shown(str(out))}, a folder in the run; give a new one")
    with written_whole(out) as folder:
        table = rescore(f"{run.name}, scored again", files, config, folder)
    print(aligned(table), out / "rescored.html", sep="\n")
    return 0


def rescore(title: str, files: Files, config: Config, folder: Path) -> Rows:
    """Score the episodes of `files`, write rewards and a page into `folder`; return a table."""
    rewards = load_reward_functions(config)
    assert rewards is not None, "--reward-funcs names one at least"
    if config.judge.url is not None:
        rewards.judge = LanguageModel(
            "judge", config.judge, config.rollout.call_timeout, folder
        ).ask
    left_out = Counter[str]()
    groups = defaultdict[str, list[Line]](list)
    most = list[tuple[tuple[bool, float], Line, Line]]()
    with (folder / "rewards.jsonl").open("w", encoding="utf-8") as file:
        for line, row in _scored(files, config, rewards, left_out):
            file.write(json.dumps(row) + "\n")
            groups[f"{row['domain']}, {row['stage']}"].append(row)
            if row["old"] not in (None, row["new"]):
                size = (row["old_success"] != row["new_success"], abs(row["new"] - row["old"]))
                most = heapq.nlargest(MOST_SHOWN, [*most, (size, line, row)], key=itemgetter(0))
    total = left_out.total() + sum(map(len, groups.values()))
    notes = [f"{num} of {total} episodes are left out: {why}" for why, num in left_out.items()]
    if not groups:
        raise UserError(f"rescore: no episode has a new reward: {notes[-1]}")
    for note in notes:
        say(note)
    header = ["", "episodes", "success before", "success now", "reward before", "reward now"]
    table = [[*header, "solved now", "not any more"], *map(_cells, groups, groups.values())]
    page = filled(
        "rescored.html",
        title=printable(title),
        functions=rewards.functions,
        threshold=config.evaluation.success_threshold,
        notes=notes,
        table=table,
        episodes=most,
        num_changed=sum(
            row["old"] not in (None, row["new"]) for of in groups.values() for row in of
        ),
        printable=printable,
        text_of=text_of,
        **parts_of_page("page.js"),
    )
    (folder / "rescored.html").write_text(page, encoding="utf-8")
    return table


def _episodes(paths: Sequence[Path]) -> list[Line]:
    """Return the episodes of a step, those of a task as neighbours. Raises UserError."""
    with reading(*paths):
        return sorted(
            chain(*map(episodes_in, paths)), key=lambda line: (*task_of(line), line["trial"])
        )


def _tasks_of(domain: Domain, config: Config) -> Iterator[Task]:
    """Yield the tasks that a domain's episodes may have: for training, then held out."""
    data = config.data
    name = domain.name
    source = data.tasks.get(name)
    if source is not None:
        yield from open_tasks(name, source, data.dataset_train_split, True)
    else:
        for level in dict.fromkeys([data.difficulty, *config.curriculum.difficulties]):
            yield from generated(config, domain, data.num_train_tasks, "train", level)
    if name in data.eval_tasks:
        yield from open_tasks(
            name, data.eval_tasks[name], data.dataset_test_split, True, "eval_tasks"
        )
    elif source is None or domain.generate_tasks is not None:
        yield from generated(config, domain, data.eval_tasks_per_domain, data.eval_split)
    elif has_split(source, data.dataset_test_split):
        yield from open_tasks(name, source, data.dataset_test_split, True)


def _tasks_by_key(
    files: Files, config: Config, domains: Mapping[str, Domain], rewards: RewardFunctions
) -> Mapping[tuple[str, str], Sequence[Task]]:
    """Return the tasks that each episode may have, by domain and id.

    Raises UserError for a function with an argument that is no column of theirs.
    """
    wanted = {task_of(line) for paths in files.values() for line in _episodes(paths)}
    tasks = defaultdict[tuple[str, str], list[Task]](list)
    for task in chain.from_iterable(_tasks_of(of, config) for of in domains.values()):
        if task.key in wanted:
            tasks[task.key].append(task)
    columns = {JUDGE} if rewards.judge else set[str]()
    columns = columns.union(*(columns_of(of[0]) for of in tasks.values()))
    for function in rewards.functions if tasks else ():
        if missing := function.missing(columns):
            raise UserError(
                f"--reward-funcs: {function.name} is never called: tasks have no "
                f"{', '.join(missing)}; rename an argument or a column"
            )
    return tasks


def _scored(
    files: Files, config: Config, rewards: RewardFunctions, left_out: Counter[str]
) -> Iterator[tuple[Line, Line]]:
    """Yield each episode with its rewards, a step at a time; count others by the reason.

    The functions are called as in a run: once for all episodes of a task in a step. Raises
    UserError if a function fails. Where async ones are called, whose answers may have a price, the
    task's episodes are left out instead, as in a run.
    """
    domains = load_domains(config)
    tasks = _tasks_by_key(files, config, domains, rewards)
    threshold = config.evaluation.success_threshold
    for (stage, step), paths in files.items():
        is_evaluation = stage == "agent" or stage.startswith("evaluation-")
        rewards.trainer_state.global_step = step if is_evaluation else step - 1
        played = list[tuple[Line, Completion]]()
        for line in _episodes(paths):
            known = [
                t for t in tasks.get(task_of(line), ()) if _has_prompt(line, t, domains[t.domain])
            ]
            if line["stop_reason"] in FAILED and line.get("left_out") != "reward":
                left_out["they ended in an error of the environment or the agent"] += 1
            elif not known:
                left_out["their task is none of the run's tasks now, or has another prompt"] += 1
            else:
                task = known[-1 if is_evaluation else 0]
                completion = Completion(domains[task.domain], task, None, _trajectory(line))
                played.append((line, completion))
        rewards([completion for _, completion in played])
        for line, trajectory in ((line, completion.trajectory) for line, completion in played):
            if trajectory.stop_reason in FAILED and not rewards.num_calls:
                raise UserError(
                    f"{line['domain']}, task {shown(line['task_id'])} of {stage}, step {step}: "
                    f"{trajectory.error}; mend it"
                )
            if trajectory.left_out:
                left_out[trajectory.error] += 1
            else:
                old = None if line.get("left_out") else line["reward"]
                yield (
                    line,
                    {
                        "stage": stage,
                        "step": step,
                        **{name: line[name] for name in ("domain", "task_id", "trial")},
                        "old": old,
                        "new": trajectory.reward,
                        "old_success": None if old is None else bool(succeeded(old, threshold)),
                        "new_success": bool(succeeded(trajectory.reward, threshold)),
                        "rewards": {
                            f.name: trajectory.rewards.get(f.name) for f in rewards.functions
                        },
                        "extra": trajectory.extra,
                    },
                )


def _has_prompt(line: Line, task: Task, domain: Domain) -> bool:
    """Return whether an episode began with a task's prompt, whose request may have grown.

    The wording of rules may change. A loop's conversations may begin otherwise, and so may those
    with a model as the customer.
    """
    return (domain.loop is not None or "customer" in line) or all(
        (said.get("content") or "").startswith(asked.get("content") or "")
        for asked, said in zip(task.prompt, line["messages"], strict=False)
        if asked["role"] != "system"
    )


def _trajectory(line: Line) -> Trajectory:
    """Return an episode as reward functions need it: messages, and ids that were sampled last."""
    conversations = [
        [*of]
        for is_heading, of in groupby(line["messages"], lambda m: m["role"] == "conversation")
        if not is_heading
    ] or [[]]
    num_turns = sum(message["role"] == "assistant" for message in conversations[-1])
    ids = [*chain(*line.get("ids", [])[::-1][:num_turns][::-1])]
    # None: the reward of get_reward or a loop cannot be computed again.
    names: Line = {"domain": line["domain"], "task_id": line["task_id"], "reward": None}
    first, *further = (Trajectory(**names, messages=messages) for messages in conversations)
    first.further = further
    first.last_conversation.append(ids, [0.0] * len(ids))
    return first


def _cells(name: str, rows: Sequence[Line]) -> list[str]:
    """Return the cells under HEADER."""
    means = list[str]()
    for key in ("old_success", "new_success", "old", "new"):
        values = defaultdict[str, list[float]](list)
        for row in (row for row in rows if row[key] is not None):
            values[row["task_id"]].append(row[key])
        means.append(
            with_interval(mean_over_tasks([fmean(values[t]) for t in sorted(values)], name))
        )
    changes = Counter((row["old_success"], row["new_success"]) for row in rows)
    return [name, str(len(rows)), *means, str(changes[False, True]), str(changes[True, False])]
