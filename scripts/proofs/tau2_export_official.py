"""Open exported episodes with the official tools: load, grade again, show, prepare a submission.

    PYTHON312 scripts/proofs/tau2_export_official.py FOLDER RESULTS EVALUATION REWARD

FOLDER has one file of each domain, RESULTS is the `results.json` of the run, EVALUATION is `agent`
or the name of an evaluation, and REWARD is the reward mode of the run. This file imports the
standard library and tau2 alone; `tau2_export.py` starts it. With `verifiable`, tasks that need a
judge are graded as in `tau2_official.py`; with `official`, `tau2_verdicts.py` is the judge. The
exit code is 1 if a reward or anything else differs.
"""

# ruff: noqa: E402
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise litellm downloads a file at import

from loguru import logger

logger.remove()

from rich.console import Console
from tau2.data_model.message import AssistantMessage
from tau2.data_model.simulation import Results
from tau2.evaluator import evaluator_nl_assertions
from tau2.metrics.agent_metrics import compute_metrics
from tau2.scripts.evaluate_trajectories import compute_simulation_rewards
from tau2.utils.display import ConsoleDisplay

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tau2_official import reset_shared_objects, tasks_of
from tau2_verdicts import answer

VIEW = ["2", "3", "1", "1", "6"]  # the metrics, the list, the first episode, no note, the end
TAU2 = [sys.executable, "-c", "from tau2.cli import main; main()"]
# Model, customer, organization, submitter, email, name, GitHub, new, type, effort, date, version,
# notes, changed prompts, left-out tasks, which, references, release date
ANSWERS = ["", "none", "us", "", "a@b.example", "", "", "n", "custom", *[""] * 4, "n", "y", "all"]


def judged(model, messages, call_name, **arguments):
    """Stand in for the official call of a language model."""
    return AssistantMessage(role="assistant", content=answer(*(m.content for m in messages)))


def graded(path, reward):
    """Return what differs between the rewards of a file and the official ones."""
    results = Results.load(path)
    if reward == "verifiable":
        known = tasks_of(results.info.environment_info.domain_name)
        results.tasks = [known[task.id] for task in results.tasks]
    reset_shared_objects()
    again = compute_simulation_rewards(results)
    pairs = list(zip(results.simulations, again.simulations, strict=True))
    differ = [
        f"{ours.task_id}/{ours.trial} ({ours.termination_reason.value}): reward "
        f"{ours.reward_info.reward}, official {official.reward_info.reward} "
        f"{official.reward_info.reward_breakdown}"
        for ours, official in pairs
        if ours.reward_info.reward != official.reward_info.reward
    ]
    return results, differ


def shown(results):
    """Return the number of characters that the official display prints of the episodes."""
    ConsoleDisplay.console = Console(file=io.StringIO(), width=120)
    for simulation in results.simulations:
        ConsoleDisplay.display_simulation(simulation, show_details=True)
    return len(ConsoleDisplay.console.file.getvalue())


def ran(arguments, answers):
    text = "\n".join(answers) + "\n" * 20
    return subprocess.run(
        [*TAU2, *arguments], input=text, capture_output=True, text=True, check=False
    )


def main(folder, results_file, evaluation, reward):
    evaluator_nl_assertions.generate = judged
    known, faults = json.loads(Path(results_file).read_text(encoding="utf-8")), []
    if evaluation == "agent":
        (entry,) = known["agents"].values()
        of_run = entry["success"]
    else:
        of_run = next(e for e in known["evaluations"] if e["after"] == evaluation)["success"]
    print("| domain | episodes | reward 1 | ends | different | pass^k | characters shown |")
    print("|---|--:|--:|---|--:|---|--:|")
    for path in sorted(Path(folder).glob("*.json")):
        results, differ = graded(path, reward)
        faults += [f"{path.stem}: {line}" for line in differ]
        metrics = compute_metrics(results)
        official = [metrics.pass_hat_ks[k] for k in sorted(metrics.pass_hat_ks)]
        ours = of_run[path.stem]["pass^k"]
        if [round(p, 9) for p in official] != [round(p, 9) for p in ours]:
            faults.append(f"{path.stem}: pass^k {ours}, official {official}")
        ends = {}
        for simulation in results.simulations:
            name = simulation.termination_reason.value
            ends[name] = ends.get(name, 0) + 1
        rewarded = sum(s.reward_info.reward == 1 for s in results.simulations)
        cells = [path.stem, len(results.simulations), rewarded]
        cells += [", ".join(f"{name} {n}" for name, n in sorted(ends.items())), len(differ)]
        cells += [" ".join(f"{p:.3f}" for p in official), shown(results)]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    files = [str(path) for path in sorted(Path(folder).glob("*.json"))]
    view = ran(["view", "--file", files[0]], VIEW)
    if view.returncode:
        faults.append(f"tau2 view: {view.stdout[-1500:]} {view.stderr[-1500:]}")
    with tempfile.TemporaryDirectory() as out:
        prepared = ran(["submit", "prepare", *files, "--output", out, "--no-verify"], ANSWERS)
        made = list(Path(out).rglob("submission.json"))
        if prepared.returncode or not made:
            faults.append(
                f"tau2 submit prepare: {prepared.stdout[-3000:]} {prepared.stderr[-1500:]}"
            )
        else:
            submission = json.loads(made[0].read_text(encoding="utf-8"))
            rates = {d: of["pass_1"] for d, of in submission["results"].items() if of}
            print(f"tau2 submit prepare: {submission['submission_type']}, pass^1 in % {rates}")
    print("\n".join(faults))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
