"""Runs on a checkout of τ²-bench: the real one of TAU2_PATH, or the miniature; recipes of Qwen3."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from pipeline.report.write import final_table
from pipeline.run import main
from tests.support import ROOT, random_qwen3, warm
from tests.support.endpoint import agent_of, seed_of, serving
from tests.support.helpers import call, say
from tests.support.tau2_miniature import write
from tests.support.warm import metrics
from tests.support.warm import results as results_of

TAU2_PATH = os.environ.get("TAU2_PATH")
SOURCE = "tau2-bench" if TAU2_PATH else "miniature"
ASKED = "My line is dead."
FEW = [
    *("--report-to", "none", "--output-dir", "out", "--max-steps", "3"),
    *("--eval-tasks-per-domain", "2", "--eval-trials", "1"),
]


@pytest.fixture(params=[SOURCE])
def checkout(request, tmp_path):
    return TAU2_PATH or str(write(tmp_path / "checkout"))


def gold(checkout):
    """The messages of an agent that makes the gold calls of two test tasks of each domain."""
    for domain in ("airline", "retail", "telecom"):
        folder = Path(checkout) / "data" / "tau2" / "domains" / domain
        tasks = {task["id"]: task for task in json.loads((folder / "tasks.json").read_text())}
        for task_id in json.loads((folder / "split_tasks.json").read_text())["test"][:2]:
            criteria = tasks[task_id]["evaluation_criteria"]
            calls = [call(of["name"], **of["arguments"]) for of in criteria["actions"]]
            said = say(" ".join(criteria.get("communicate_info") or ["Done."]))
            yield seed_of(domain, task_id), [*calls, call("done") if domain == "telecom" else said]


def said_by(folder, script, *arguments, code=0):
    """What a script prints in a process of its own; a process imports one checkout only."""
    command = [sys.executable, ROOT / "pipeline" / script, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def test_the_three_domains_run_in_sequence_beside_an_agent(checkout, tmp_path):
    few = [
        *(*FEW, "--tasks-per-step", "2", "--num-generations", "2", "--max-tokens-per-turn", "8"),
        *("--max-turns", "30", "--max-tool-result-tokens", "20000", "--max-tokens", "5000"),
    ]
    argv = ["--config", "tau2_three_smoke", "--tau2", checkout, *few]
    with serving(agent_of(dict(gold(checkout)))) as server:
        done = warm.play(*argv, "--agent-url", server.url, "--agent-model", "gold", cwd=tmp_path)
        num_paid = len(server.bodies)
        again = ["--output-dir", "out", "--resume-from-checkpoint", "auto", "--max-steps", "3"]
        warm.play(*again, cwd=tmp_path)
    assert (len(server.bodies), {*server.paid.values()}) == (num_paid, {1})
    assert "agent gold: success sampled  airline 1.00  retail 1.00  telecom 1.00\n" in done.stdout
    results = results_of(tmp_path / "out")
    header, *rows = final_table(results).splitlines()[:5]
    assert header.split()[2:] == ["before", "GRPO", "after", "GRPO", "change", "gold"]
    assert all(re.search(r" 1\.00 \[0\.\d\d, 1\.00\]$", row) for row in rows)
    agent = results["agents"]["gold"]["success"]
    assert {(of["mean"], of["greedy"], *of["pass^k"]) for of in agent.values()} == {(1.0,) * 3}
    assert len(list((tmp_path / "out" / "trajectories" / "agent").iterdir())) == 2
    assert [*results["about"]] == ["airline", "retail", "telecom"]
    assert {of["reward"] for of in results["about"].values()} == {"verifiable"}
    assert all([*of] == ["nothing", "transfer"] for of in results["baselines"].values())
    assert results["baselines"]["telecom"]["nothing"] == 0
    assert len(results["evaluations"]) == 4
    assert results["transfer"]
    check_export(tmp_path / "out", tmp_path / "files", results)


def check_export(run, out, results):
    """The agent's and the model's episodes, as files for the official tools."""
    for evaluation, rate in (["--evaluation", "agent"], 1.0), ([], None):
        said_by(run.parent, "__main__.py", "export-tau2", run, out, *evaluation)
        files = {path.stem: json.loads(path.read_text()) for path in out.iterdir()}
        assert [*sorted(files)] == ["airline", "retail", "telecom"]
        for domain, file in files.items():
            rewards = [run["reward_info"]["reward"] for run in file["simulations"]]
            success = results["evaluations"][-1]["success"][domain]["mean"]
            assert fmean(rewards) == (success if rate is None else rate)
            assert file["info"]["git_commit"] == results["about"][domain]["commit"]
            agent = file["info"]["agent_info"]
            assert agent["llm"] == ("tiny, out after telecom" if rate is None else "gold")
    wrong = "export-tau2", run, out, "--evaluation", "middle"
    known = "agent, airline, retail, start, telecom"
    assert said_by(run.parent, "__main__.py", *wrong, code=2) == (
        f"error: --evaluation: got 'middle'; evaluations of {run}: {known}\n"
    )


@pytest.mark.skipif(SOURCE == "miniature", reason="the expert needs the real phone")
def test_the_recipe_of_telecom_runs(tmp_path):
    few = [*FEW, "--warm-start-steps", "4", "--tasks-per-step", "2"]
    warm.play("--config", "tau2_telecom_tiny", "--tau2", str(TAU2_PATH), *few, cwd=tmp_path)
    assert [e["after"] for e in results_of(tmp_path / "out")["evaluations"]] == [
        *("start", "warm_start", "telecom"),
    ]


@pytest.mark.proof
def test_the_recipe_of_qwen3_is_checked_and_runs_with_prompts_in_full(checkout, tmp_path):
    recipe = ["--config", "qwen3_4b_tau2_8gpu", "--tau2", checkout, "--customer-model", "m"]
    said = said_by(tmp_path, "run.py", *recipe, "--check")
    assert said.startswith("recipe qwen3_4b_tau2_8gpu: model Qwen/Qwen3-4B\n")
    assert "  airline: 30 steps of " in said and "  telecom: 75 steps of " in said
    model = str(random_qwen3.write(tmp_path / "model", Path(checkout)))
    few = [
        *(*FEW[:4], "--model", model, "--mixed-precision", "no", "--max-steps", "2"),
        *("--domains", "airline,telecom", "--stage-steps", "{}", "--validation-steps", "0"),
        *("--eval-tasks-per-domain", "1", "--eval-trials", "1", "--max-turns", "3"),
        *("--tasks-per-step", "2", "--num-generations", "2", "--max-tokens-per-turn", "8"),
    ]
    with serving(lambda body: "###STOP###" if len(body["messages"]) > 4 else ASKED) as server:
        warm.play(*recipe, *few, "--customer-url", server.url, cwd=tmp_path)
    evaluations = results_of(tmp_path / "out")["evaluations"]
    assert [e["after"] for e in evaluations] == ["start", "airline", "telecom"]
    (path, *_) = (tmp_path / "out" / "trajectories" / "evaluation-telecom").glob("*.gz")
    with gzip.open(path, "rt") as file:
        system, _, request, *_ = json.loads(next(file))["messages"]
    policies = (Path(checkout) / "data/tau2/domains").glob("*/*policy.md")
    assert any(policy.read_text().strip() in system["content"] for policy in policies)
    assert request == {"role": "user", "content": ASKED}


def test_the_recipe_of_qwen3_needs_a_customer(capsys):
    assert main(["--config", "qwen3_4b_tau2_8gpu"]) == 2
    line = "error: customer_url: got http://HOST:8000/v1; give the server's name in place of HOST\n"
    assert capsys.readouterr().err == line


# Its customers as a language model, with a budget

BUDGET = [
    *("--report-to", "none", "--output-dir", "out", "--max-steps", "2", "--eval-trials", "1"),
    *("--tasks-per-step", "2", "--num-generations", "2", "--max-tokens-per-turn", "8"),
    *("--eval-tasks-per-domain", "2", "--domains", "airline", "--validation-steps", "0"),
]


def test_a_run_out_of_budget_is_resumed_and_pays_nothing_twice(tmp_path):
    asked = "I want to cancel my flight."
    with serving(lambda body: "###STOP###" if len(body["messages"]) > 2 else asked) as server:
        llm = ["--customer-url", server.url, "--customer-model", "m"]
        argv = ["--tau2", str(write(tmp_path / "checkout")), *llm, *BUDGET]
        argv = ["--config", "tau2_three_smoke", *argv, "--customer-max-calls", "6"]
        spent = warm.play(*argv, cwd=tmp_path, code=2)
        line = "error: customer_max_calls: got 6, which is spent; go on with "
        assert line in spent.stderr and "Traceback" not in spent.stderr
        assert sum(server.paid.values()) <= 6
        resume = ["--output-dir", "out", "--resume-from-checkpoint", "auto"]
        warm.play(*resume, "--customer-max-calls", "null", cwd=tmp_path)
    assert set(server.paid.values()) == {1}
    assert {body["temperature"] for body in server.bodies} == {0.0}
    (about,) = results_of(tmp_path / "out")["about"].values()
    assert about["customer"] == "m at temperature 0, with the benchmark's user prompt"
    for episode in warm.episodes(tmp_path / "out"):
        assert episode["messages"][2]["content"] == asked == episode["customer"][2]["content"]


# The recipes for a Qwen3 on the embedded domains


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("qwen3_0.6b_1gpu", marks=pytest.mark.proof),
        pytest.param("qwen3_4b_8gpu", marks=pytest.mark.proof),
        pytest.param("qwen3_8b_lora_8gpu", marks=pytest.mark.proof),
        "qwen3_8b_full_8gpu",
        pytest.param("qwen3_32b_lora_8gpu", marks=pytest.mark.proof),
    ],
)
def test_two_steps_of_a_recipe(recipe, tmp_path):
    model = random_qwen3.write(tmp_path / "model", write(tmp_path / "texts"))
    few = [
        *("--model", str(model), "--mixed-precision", "no", "--max-steps", "2"),
        *("--domains", "airline"),
        *("--tasks-per-step", "2", "--num-generations", "2", "--max-tokens-per-turn", "4"),
        *("--max-turns", "2", "--tasks-per-domain", "4", "--eval-tasks-per-domain", "1"),
        *("--eval-trials", "1", "--kl-probe-tasks", "0", "--validation-steps", "0"),
    ]
    num_ranks = 1 if recipe.endswith("_1gpu") else 2
    flags = ["--config", recipe, *few, "--report-to", "none", "--output-dir", "out"]
    warm.play(*flags, cwd=tmp_path, num_ranks=num_ranks)
    assert [line["step"] for line in metrics(tmp_path / "out")] == [1, 2]
    evaluations = results_of(tmp_path / "out")["evaluations"]
    assert [of["after"] for of in evaluations] == ["start", "airline"]
