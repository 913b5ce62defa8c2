"""Scores the saved episodes of a run with other reward functions. Nothing is played.

The new reward is the weighted sum of the given functions. What `get_reward` or a loop has returned
is no part of it: it cannot be computed again. The files of the run stay as they are.
"""

import argparse
import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from math import fsum, nan
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.common.console import command, say
from pipeline.common.durable import write_text
from pipeline.common.errors import UserError
from pipeline.common.layout import RUN_SETTINGS
from pipeline.common.untrusted import printable, shown
from pipeline.config.cli import Parser
from pipeline.config.recipe import load_recipe, read_recipe, resolve
from pipeline.config.settings import Config
from pipeline.data.tasks import Task
from pipeline.environments.domains import Domain, load_domains
from pipeline.environments.language_models.language_model import LanguageModel
from pipeline.environments.task_sets import tasks_of_run
from pipeline.evaluation.transfer import mean_over_tasks
from pipeline.report import run_files
from pipeline.report.export import written_whole
from pipeline.report.tables import Rows, aligned, with_interval
from pipeline.report.write import filled, parts_of_page, render, sections_of
from pipeline.rollout.rewards import (
    JUDGE,
    Completion,
    RewardFunctions,
    callables_of,
    columns_of,
    load_reward_functions,
)
from pipeline.rollout.trajectory import FAILED, StopReason, Trajectory, succeeded

MOST_SHOWN = 100  # largest number of episodes on the page
PLAYED = "evaluation-"  # begins the names of folders with the episodes of evaluations
AGENT = "agent"  # the folder of an evaluation of the agent behind an endpoint
FAULTY = "they ended in an error of the environment or the agent"
GONE = "their task is none of the run's tasks now, or has another prompt"
UNSCORED = "no function applies to them, or each gave None or NaN"
LIMITS = {  # an argument of functions -> how it differs from that in a run
    "completion_ids": "completion_ids has sampled tokens alone: those of replies are not saved",
    "environments": "environments has None for each episode: nothing is played",
}
CHANGES = {1: "solved now", 0: "", -1: "not solved any more"}
HEADER = ["", "episodes", "success before", "success now", "solved now", "not any more"]
HEADER += ["reward before", "reward now"]

Files = Mapping[tuple[str, int], Sequence[Path]]  # by (stage or evaluation, step)
Line = dict[str, Any]  # an episode of a transcript, or its rewards
Found = Mapping[tuple[bool, str, str], Sequence[Task]]  # by (is of an evaluation, domain, id)


def main(argv: list[str]) -> int:
    """Run `rescore RUN --reward-funcs ...`; raises UserError for a mistake of the user."""
    options = _parser().parse_args(argv)
    with run_files.reading(options.run):
        run_files.read_settings(options.run)
        files = _files(options.run, options.evaluation)
    run = options.run.resolve()
    config = _config(run, options)
    out = options.output or run.with_name(f"{run.name}-rescored")
    is_full = out.is_dir() and any(out.iterdir())
    if is_full or out.resolve().is_relative_to(run):
        why = "is not empty" if is_full else "is in the run, whose files stay as they are"
        raise UserError(f"--output: got {shown(str(out))}, which {why}; give a new folder")
    with written_whole(out) as folder:
        table = rescore(run, files, config, folder)
    print(aligned(table))
    print(out / "rescored.html")
    return 0


def rescore(run: Path, files: Files, config: Config, folder: Path) -> Rows:
    """Score the episodes of `files`, write what is found into `folder`, and return a table."""
    rewards = load_reward_functions(config)
    assert rewards is not None, "--reward-funcs names one at least"
    if config.judge.url is not None and any(f.asks_judge for f in rewards.functions):
        timeout = config.rollout.call_timeout
        rewards.judge = LanguageModel("judge", config.judge, timeout, folder).ask
    domains = load_domains(config)
    tasks = _tasks_by_id(run, files, config, domains, rewards)
    notes = _notes(domains, rewards, tasks)
    threshold = config.evaluation.success_threshold
    found = defaultdict[tuple[str, str], list[Line]](list)  # by stage or evaluation, and domain
    left_out = Counter[str]()
    with (folder / "rewards.jsonl").open("w", encoding="utf-8") as file:

        def changed() -> Iterator[tuple[Line, Line]]:
            for line, row in _scored(files, domains, rewards, tasks):
                if why := row.pop("left_out", ""):
                    left_out[why] += 1
                    continue
                solved = [
                    r is not None and succeeded(r, threshold) for r in (row["old"], row["new"])
                ]
                row["change"] = 0 if row["old"] is None else int(solved[1]) - int(solved[0])
                found[row["stage"], row["domain"]].append(row)
                file.write(json.dumps(row) + "\n")
                if row["old"] not in (None, row["new"]):
                    yield line, row

        most = heapq.nlargest(MOST_SHOWN, changed(), key=_size)
    total = left_out.total() + sum(map(len, found.values()))
    notes += [f"{num} of {total} episodes are left out: {why}" for why, num in left_out.items()]
    if not found:
        raise UserError(f"rescore: no episode has a new reward: {notes[-1]}")
    for note in notes:
        say(note)
    numbers = [_numbers(*key, rows, threshold) for key, rows in found.items()]
    write_text(folder / "rescored.json", json.dumps(numbers, indent=1))
    table = [HEADER, *map(_cells, numbers)]
    title = f"{run.name}, scored again"
    names = [function.name for function in rewards.functions]
    means = [["", *names]] + [
        [_where(of), *(f"{of['functions'].get(name, nan):.4g}" for name in names)] for of in numbers
    ]
    text = render(
        "rescored.md.jinja",
        title=title,
        run=run,
        functions=rewards.functions,
        threshold=threshold,
        notes=notes,
        rows=table,
        means=means,
    )
    write_text(folder / "rescored.md", printable(text))
    page = filled(
        "rescored.html",
        title=printable(title),
        sections=sections_of(printable(text)),
        svgs={},
        cards=[_card(*pair) for pair in most],
        num_changed=sum(of["changed"] for of in numbers),
        **parts_of_page("page.js"),
    )
    write_text(folder / "rescored.html", page)
    return table


def _size(pair: tuple[Line, Line]) -> tuple[bool, float]:
    """Return how much the reward of an episode has changed; another success counts more."""
    row = pair[1]
    return row["change"] != 0, abs(row["new"] - row["old"])


def _parser() -> argparse.ArgumentParser:
    flags = Parser(prog=command("rescore"), description=__doc__, allow_abbrev=False)
    flags.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    flags.add_argument(
        "--reward-funcs",
        required=True,
        metavar="A,B",
        help="reward functions, called as TRL does: module:function",
    )
    flags.add_argument("--reward-weights", metavar="A,B", help="weight of each function [1]")
    flags.add_argument(
        "--evaluation",
        metavar="NAME",
        help="start, warm_start, the name of a stage, or agent [training and all evaluations]",
    )
    flags.add_argument(
        "--output", type=Path, metavar="FOLDER", help="new or empty folder [RUN-rescored]"
    )
    return flags


def _files(run: Path, evaluation: str | None) -> Files:
    """Return the transcripts of a run, or those of one evaluation. Raises UserError for none."""
    files = run_files.transcripts_in(run)
    if not files:
        raise UserError(f"{run} has no transcripts (trajectories/); give a run that has played")
    if evaluation is None:
        return files
    wanted = AGENT if evaluation == AGENT else PLAYED + evaluation
    if chosen := {place: of for place, of in files.items() if place[0] == wanted}:
        return chosen
    known = dict.fromkeys(name.removeprefix(PLAYED) for name, _ in files if _is_evaluation(name))
    raise UserError(
        f"--evaluation: got {shown(evaluation)}; evaluations of {run}: {', '.join(known) or 'none'}"
    )


def _is_evaluation(stage: str) -> bool:
    return stage.startswith(PLAYED) or stage == AGENT


def _config(run: Path, options: argparse.Namespace) -> Config:
    """Return the settings of a run, with the given functions in place of the run's."""
    path = run / RUN_SETTINGS
    tree = read_recipe(path)
    flags = dict[tuple[str, ...], str]()
    for name in ("reward_funcs", "reward_weights"):
        text = getattr(options, name)
        tree["data"][name] = [] if text is None else [part.strip() for part in text.split(",")]
        flags["data", name] = f"--{name.replace('_', '-')}"
    return resolve(path, {**tree, "customer": {}, "agent": {}}, flags)  # who need not answer


def _tasks_by_id(
    run: Path, files: Files, config: Config, domains: Mapping[str, Domain], rewards: RewardFunctions
) -> Found:
    """Return the tasks that each episode may have played, the likeliest first."""
    with run_files.reading(run):
        wanted = {
            (_is_evaluation(stage), *run_files.task_of(line))
            for (stage, _), paths in files.items()
            for line in chain(*map(run_files.episodes_in, paths))
        }
    readers = callables_of(rewards)
    with suppress(UserError):  # The run's own functions may be gone; they say what makes a task.
        readers = callables_of(load_reward_functions(load_recipe(run / RUN_SETTINGS)))
    found: dict[tuple[bool, str, str], list[Task]] = {}
    for sets in tasks_of_run(config, domains, readers, None).values():
        training = [sets.train, *sets.graded.values(), *sets.sources[::-1], sets.validation]
        for is_evaluation, of in ((False, training), (True, [sets.held_out, *sets.sources])):
            for task in chain(*of):
                key = (is_evaluation, *task.key)
                if key in wanted and task not in found.setdefault(key, []):
                    found[key].append(task)
    return found


def _notes(domains: Mapping[str, Domain], rewards: RewardFunctions, tasks: Found) -> list[str]:
    """Return what differs from a run. Raises UserError for a function that applies to no domain."""
    first = {domain: of[0] for (_, domain, _), of in tasks.items()}
    notes = list[str]()
    for function in rewards.functions:
        given = [JUDGE] if rewards.judge else []
        missing = {d: function.missing([*columns_of(t), *given]) for d, t in first.items()}
        lacking = [
            f"{function.name} is not called for {domain}, whose tasks have no {', '.join(names)}"
            for domain, names in missing.items()
            if names
        ]
        if len(lacking) == len(first) > 0:
            raise UserError(f"--reward-funcs: {lacking[0]}; rename an argument or a column")
        notes += lacking
        notes += [f"{function.name}: {LIMITS[n]}" for n in LIMITS if n in function.parameters]
    for name, domain in domains.items():
        if own := domain.own_reward:
            notes.append(
                f"{name}: the reward of {own} itself cannot be computed again; the new reward is "
                "that of the given functions alone"
            )
        if domain.loop is not None:
            notes.append(
                f"{name}: what its loop returned is not saved; a completion is the messages of an "
                "episode's last conversation"
            )
    return notes


def _scored(
    files: Files, domains: Mapping[str, Domain], rewards: RewardFunctions, tasks: Found
) -> Iterator[tuple[Line, Line]]:
    """Yield each episode with its rewards, a step at a time. Raises UserError if a function fails.

    The functions are called as in a run: once for all episodes of a task in a step. An episode
    without a new reward has `left_out` alone, the reason.
    """
    weights = {function.name: function.weight for function in rewards.functions}
    for (stage, step), paths in files.items():
        with run_files.reading(*paths):
            lines = list(chain(*map(run_files.episodes_in, paths)))
            lines.sort(key=lambda line: (*run_files.task_of(line), line["trial"]))
        is_evaluation = _is_evaluation(stage)
        rewards.trainer_state.global_step = step if is_evaluation else step - 1
        played = list[tuple[Line, Completion]]()
        for line in lines:
            known = tasks.get((is_evaluation, *run_files.task_of(line)), ())
            task = next((t for t in known if _has_prompt(line, t, domains[t.domain])), None)
            if line["stop_reason"] in FAILED and line.get("left_out") != "reward":
                yield line, {"left_out": FAULTY}
            elif task is None:
                yield line, {"left_out": GONE}
            else:
                trajectory = _trajectory(line)
                played.append((line, Completion(domains[task.domain], task, None, trajectory)))
        rewards([completion for _, completion in played])
        for line, completion in played:
            trajectory = completion.trajectory
            if trajectory.stop_reason == StopReason.ENVIRONMENT_ERROR:
                where = f"{line['domain']}, task {shown(line['task_id'])} of {stage}, step {step}"
                raise UserError(f"{where}: {trajectory.error}; mend it")
            new = {name: r for name, r in trajectory.rewards.items() if name in weights}
            known = [weights[name] * reward for name, reward in new.items() if reward is not None]
            yield (
                line,
                {
                    "stage": stage,
                    "step": step,
                    **{name: line[name] for name in ("domain", "task_id", "trial")},
                    "old": None if line.get("left_out") else line["reward"],
                    "new": fsum(known),
                    "rewards": new,
                    "extra": trajectory.extra,
                    "left_out": "" if known else UNSCORED,
                },
            )


def _has_prompt(line: Line, task: Task, domain: Domain) -> bool:
    """Return whether an episode began with a task's prompt, whose request may have grown.

    A loop's conversations may begin otherwise, and so may those with a model as the customer.
    """
    if domain.loop is not None or "customer" in line:
        return True
    asked, begun = (
        [message.get("content") or "" for message in messages[: len(task.prompt)]]
        for messages in (task.prompt, line["messages"])
    )
    is_whole = len(begun) == len(asked) and begun[:-1] == asked[:-1]
    return is_whole and begun[-1].startswith(asked[-1])


def _trajectory(line: Line) -> Trajectory:
    """Return an episode as reward functions need it: messages, and ids that were sampled last."""
    conversations = list[list[Line]]([[]])
    for message in line["messages"]:
        if message["role"] == "conversation":
            conversations.append([])
        else:
            conversations[-1].append(message)
    num_turns = sum(message["role"] == "assistant" for message in conversations[-1])
    turns = line.get("ids", [])
    ids = list(chain(*turns[max(0, len(turns) - num_turns) :]))
    names = {name: line[name] for name in ("domain", "task_id", "reward")}
    first, *further = (Trajectory(**names, messages=messages) for messages in conversations)
    first.further = further
    (further or [first])[-1].append(ids, [0.0] * len(ids))
    return first


def _numbers(stage: str, domain: str, rows: Sequence[Line], threshold: float) -> dict[str, Any]:
    """Return success and mean reward as [value, low, high], changes, and the functions' means."""
    found: dict[str, Any] = {"stage": stage, "domain": domain, "episodes": len(rows)}
    for when in ("old", "new"):
        rewards = defaultdict[str, list[float]](list)
        for row in rows:
            rewards[row["task_id"]] += [] if row[when] is None else [row[when]]
        of_tasks = [of for _, of in sorted(rewards.items()) if of]
        solved = [fmean(succeeded(reward, threshold) for reward in of) for of in of_tasks]
        found[f"{when}_success"] = mean_over_tasks(solved, domain)
        found[f"{when}_reward"] = mean_over_tasks([*map(fmean, of_tasks)], domain)
    by_name = defaultdict[str, list[float]](list)
    for name, reward in chain(*(row["rewards"].items() for row in rows)):
        by_name[name] += [] if reward is None else [reward]
    changes = Counter(row["change"] for row in rows)
    return {
        **found,
        "changed": sum(row["old"] not in (None, row["new"]) for row in rows),
        "gained": changes[1],
        "lost": changes[-1],
        "functions": {name: fmean(of) for name, of in by_name.items() if of},
    }


def _where(of: Mapping[str, Any]) -> str:
    stage = of["stage"]
    is_played = stage.startswith(PLAYED)
    name = (
        f"evaluation {run_files.after_name(stage.removeprefix(PLAYED))}"
        if is_played
        else f"stage {stage}"
    )
    return f"{of['domain']}, {name}"


def _cells(of: Mapping[str, Any]) -> list[str]:
    """Return a row under HEADER."""
    intervals = [f"{when}_{what}" for what in ("success", "reward") for when in ("old", "new")]
    old, new, *means = (with_interval(of[name]) for name in intervals)
    return [_where(of), *map(str, (of["episodes"], old, new, of["gained"], of["lost"])), *means]


def _card(line: Line, row: Line) -> dict[str, Any]:
    """Return what the page shows of an episode that has changed."""
    rewards = [
        ("before", line.get("rewards") or line.get("reward_breakdown", {})),
        ("now", row["rewards"]),
    ]
    messages = list[tuple[str, str]]()
    for message in line["messages"]:
        role, _, text = run_files.text_of(message).partition(": ")
        messages.append((role, printable(text)))
    return {
        **row,
        "where": f"{_where(row)}, step {row['step']}",
        "change": CHANGES[row["change"]],
        "by_name": [(when, *pair) for when, of in rewards for pair in of.items()],
        "stop_reason": line["stop_reason"],
        "messages": messages,
    }
