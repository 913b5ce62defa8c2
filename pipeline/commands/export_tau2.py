"""Writes the episodes of an evaluation for the tools of τ²-bench: view, grade again, submit."""

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.common.console import command
from pipeline.common.durable import write_text
from pipeline.common.errors import UserError
from pipeline.common.layout import RUN_SETTINGS
from pipeline.common.untrusted import reason_of, shown
from pipeline.config.cli import Parser
from pipeline.config.recipe import load_recipe
from pipeline.config.settings import Config
from pipeline.environments.domains import load_domains
from pipeline.environments.tau2.environment import Tau2Environment
from pipeline.environments.tau2.simulations import MAX_ERRORS, results_of
from pipeline.environments.tau2.world import World
from pipeline.report.run_files import load_run

USERS = {"none": "ticket", "scripted": "scripted_customer", "llm": "user_simulator"}
PLAYED = "evaluation-"  # begins the names of folders with the model's own episodes
AGENT = "agent"  # the folder of the episodes that an endpoint as the agent has played


def main(argv: list[str]) -> int:
    """Run `export-tau2 RUN OUT`; raises UserError for a mistake of the user."""
    parser = Parser(prog=command("export-tau2"), description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run with tau2")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for a file of each domain")
    parser.add_argument(
        "--evaluation",
        metavar="NAME",
        help="start, warm_start, the name of a stage, or agent (of --agent-url) [the last one]",
    )
    options = parser.parse_args(argv)
    run = options.run
    out = options.out
    try:
        results = load_run(run).results
    except OSError as error:
        raise UserError(f"{run} cannot be read ({reason_of(error)}); restore it") from None
    if not results["evaluations"]:
        raise UserError(f"{run} has no evaluation yet; give a run with one")
    config = load_recipe(run / RUN_SETTINGS)
    kinds = {name: domain.environment for name, domain in load_domains(config).items()}
    worlds = {n: k.world for n, k in kinds.items() if issubclass(k, Tau2Environment)}
    if not worlds:
        raise UserError(
            f"{run} has no domain of τ²-bench, but domains {', '.join(kinds)}; give a run with tau2"
        )
    evaluation = options.evaluation or str(results["evaluations"][-1]["after"])
    lines = _episodes(run, AGENT if evaluation == AGENT else PLAYED + evaluation)
    player = _agent(config, run, results, evaluation)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be made ({reason_of(error)}); give a new folder") from None
    for name, world in worlds.items():
        played = [line for line in lines if line["domain"] == name]
        about = results["about"][name]
        if world.checkout.data_hash != about["data_sha256"]:
            raise UserError(
                f"tau2: {world.checkout.path} is not the checkout that the run has played on "
                f"({name}); check out {about['commit']}"
            )
        at = datetime.fromtimestamp((run / "results.json").stat().st_mtime, UTC).isoformat()
        kind = "llm_agent_solo" if world.is_solo else "llm_agent"
        info = _info(config, world, about) | {"agent_info": {**player, "implementation": kind}}
        found = results_of(world, played, info, about, at)
        write_text(out / f"{name}.json", json.dumps(found, ensure_ascii=False, indent=1))
        rate = sum(line["reward"] >= 1 for line in played) / len(played)
        print(
            f"{out}/{name}.json: {len(played)} episodes of {len(found['tasks'])} tasks, pass^1 "
            f"{rate:.2f}"
        )
    print(f"in the benchmark's Python: tau2 view --file {out}/{next(iter(worlds))}.json")
    print(f"tau2 submit prepare {out}/*.json --output FOLDER --no-verify, with the type custom")
    return 0


def _episodes(run: Path, folder: str) -> list[dict[str, Any]]:
    """Return the lines of a transcript, in order of domains, tasks and trials."""
    lines = dict[tuple[Any, ...], dict[str, Any]]()
    for path in sorted((run / "trajectories" / folder).glob("step-*.jsonl.gz")):
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                for line in map(json.loads, file):
                    lines[line["domain"], line["task_id"], line["trial"]] = line
        except (OSError, EOFError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({reason_of(error)}); restore it") from None
    if not lines:
        names = [path.name for path in (run / "trajectories").glob("*")]
        known = [n.removeprefix(PLAYED) for n in names if n == AGENT or n.startswith(PLAYED)]
        raise UserError(
            f"--evaluation: got {shown(folder.removeprefix(PLAYED))}; evaluations of {run}: "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    return [lines[key] for key in sorted(lines)]


def _agent(config: Config, run: Path, results: Any, evaluation: str) -> dict[str, Any]:
    limits = config.rollout
    arguments: dict[str, Any] = {"max_tokens": limits.max_tokens_per_turn}
    if evaluation == AGENT:
        name = config.agent.model
        temperature = results["agents"].get(name, {}).get("temperature", limits.temperature)
        return {"llm": name, "llm_args": {"temperature": temperature, **arguments}}
    sampling = {"temperature": limits.temperature, "top_p": limits.top_p, "top_k": limits.top_k}
    name = f"{config.model.model}, {run.resolve().name} after {evaluation}"
    return {"llm": name, "llm_args": sampling | arguments}


def _info(config: Config, world: World, about: dict[str, Any]) -> dict[str, Any]:
    customer = config.customer
    user: dict[str, Any] = {"implementation": USERS[about["user_mode"]]}
    if world.is_solo:
        user = {"implementation": "dummy_user"}
    elif customer.url is not None:
        user |= {"llm": customer.model, "llm_args": {"temperature": customer.temperature}}
    return {
        "git_commit": about["commit"],
        "max_steps": config.rollout.max_turns,
        "max_errors": MAX_ERRORS,
        "user_info": user,
        "seed": config.run.seed,
    }
