"""A report says what the files of a run folder say, in words, tables and pictures."""

import json
import re

import pytest

from pipeline.commands.main import main as command
from pipeline.evaluation.transfer import summary
from pipeline.report.plots import pictures
from pipeline.report.plots.drawing import ci_text
from pipeline.report.run_files import is_finished, load_run
from pipeline.report.tables import report_data
from pipeline.report.write import final_table, main, render, write_comparison, write_report
from tests.support.messages import refusal, says
from tests.support.report_runs import (  # noqa: F401
    THREE,
    edited,
    evaluation,
    make_run,
    matplotlib_home,
    pay_any_rewards,
)


@pytest.fixture(scope="module")
def sequential(tmp_path_factory):
    """The folder of a sequential run with its report."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "my-run", THREE)
    few = {name: pictures.OF_RUN[name] for name in ("learning_curves", "stage_performance")}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pictures, "OF_RUN", few)
        write_report(folder)
    return folder


def markdown_of(folder):
    write_report(folder)
    return (folder / "report.md").read_text()


@pytest.fixture
def without_pictures(monkeypatch):
    """Reports whose pictures are not drawn: of the tests that read the words alone."""
    monkeypatch.setattr("pipeline.report.plots.pictures.OF_RUN", {})


def test_the_report_of_a_sequential_run(sequential):
    folder = sequential
    text = (folder / "report.md").read_text()
    assert text.startswith(
        """# my-run

- Recipe `three_domain_tiny`, seed 1, 2 rank(s).
- Model `tiny`; domains airline, retail, telecom; training tasks of each: 800 (medium).
- Warm start: 440 supervised steps.
- GRPO: 30 of 30 steps, each 24 groups of 8 episodes, learning rate 0.0003, beta 0.
- Wall time 83 s.
- A training step took 2.00 s (median).

## Success

| success, sampled | before GRPO | after GRPO | change |
| :-- | --: | --: | --: |
| airline | 0.38 [0.28, 0.47] | 0.88 [0.81, 0.94] | +0.50 [+0.41, +0.60] |
| retail | 0.38 [0.28, 0.47] | 0.88 [0.81, 0.94] | +0.50 [+0.40, +0.59] |
| telecom | 0.38 [0.28, 0.47] | 0.88 [0.81, 0.94] | +0.50 [+0.41, +0.60] |
| mean | 0.38 [0.32, 0.43] | 0.88 [0.84, 0.91] | +0.50 [+0.45, +0.56] |

| success, greedy | before GRPO | after GRPO |
| :-- | --: | --: |
| airline | 0.50 [0.40, 0.59] | 1.00 [0.96, 1.00] |
| retail | 0.50 [0.40, 0.60] | 1.00 [0.96, 1.00] |
| telecom | 0.50 [0.40, 0.60] | 1.00 [0.96, 1.00] |
| mean | 0.50 [0.44, 0.56] | 1.00 [0.99, 1.00] |

On 100 tasks of each domain (test split); before GRPO = after the warm start; after GRPO = after \
telecom. """
    )
    assert "| airline | 2.75 | 450 | 75 |" in text
    for part in (
        "| refund | 100 | 0.38 | 0.88 | 0.50 | 1.00 |\n"
        "| refund/paid | 50 | 0.38 | 0.88 | 0.50 | 1.00 |\n"
        "| refund/refused | 50 | 0.00 | 0.00 | 0.50 | 1.00 |",
        "| retail | nothing | 0.00 |\n| retail | transfer | 0.11 |\n| retail | every tool | 0.02 |",
        "| retail | 11 to 20 | 8 airline, 8 retail |",
        "Replay: after the first stage a share of 0.3 of a step's groups, in whole groups, comes "
        "from the domains of earlier stages.",
        "| reason | airline | retail | telecom |\n"
        "| :-- | --: | --: | --: |\n"
        "| completed | 0.750 | 0.750 | 0.750 |\n"
        "| max_turns | 0.250 | 0.250 | 0.250 |\n\n",
        "| stage | domain | all failed | all solved | in all |\n| :-- | :-- | --: | --: | --: |\n"
        "| airline | all | 0.375 | 0.125 | 0.500 |\n"
        "| airline | airline | 0.250 | 0.250 | 0.500 |\n"
        "| retail | all | 0.375 | 0.125 | 0.500 |\n",
        "- `results.json`: ",
        "![Training reward and held-out success over the steps](learning_curves.png)",
        "(stage_performance.png)",
    ):
        assert part in text
    assert "trajectories" not in text, "a file that is not there"
    assert (folder / "stage_performance.png").stat().st_size > 5_000


def test_a_report_counts_the_tasks_that_the_run_had(tmp_path, without_pictures):
    """Files have other numbers than the setting for generated tasks, and no difficulty."""

    def said(numbers, settings):
        domains = list(numbers)
        folder = make_run(tmp_path / "-".join(domains), domains, domains, settings=settings)
        with edited(folder / "results.json") as results:
            results["num_train_tasks"] = numbers
        lines = markdown_of(folder).splitlines()
        return next(line for line in lines if line.startswith("- Model"))

    file = {"data": {"tasks": {"sums": "sums.jsonl"}, "reward_funcs": ["my_rewards:correct"]}}
    assert said({"airline": 800, "sums": 61}, file).endswith(
        "domains airline, sums; training tasks: airline 800 (medium), sums 61."
    )
    assert said({"sums": 61}, file).endswith("domains sums; training tasks: 61.")
    graded = {"curriculum": {"difficulties": ["easy", "hard"]}}
    assert said({"airline": 9}, graded).endswith("training tasks: 9 (easy, hard).")


def test_a_run_of_an_own_domain_is_not_named_after_the_default_recipe(tmp_path, without_pictures):
    bank = {"data": {"environments": {"bank": "my_pkg.bank:BankEnvironment"}}}
    sums = {"data": {"tasks": {"sums": "sums.jsonl"}, "reward_funcs": ["my_rewards:correct"]}}
    told = {
        "bank": (bank, "bank (environment `my_pkg.bank:BankEnvironment`)"),
        "sums": (
            sums,
            "sums (environment `my.bank:Bank`, tasks `sums.jsonl`), rewards `my_rewards:correct`",
        ),
    }
    for name, (settings, words) in told.items():
        folder = make_run(tmp_path / name, [name], [name], settings=settings)
        assert f"- Own domains: {words}, seed 1, 2 rank(s).\n" in markdown_of(folder)
        for file in ("report.md", "report.html"):
            assert "three_domain_tiny" not in (folder / file).read_text(), file
            assert "medium" not in (folder / file).read_text(), file


def test_an_evaluation_only_is_reported_without_before_and_after(tmp_path, without_pictures):
    text = markdown_of(make_run(tmp_path / "run", ()))
    assert "GRPO: not used; this run evaluates only." in text
    assert (
        "## Success\n\n| success | sampled | greedy |\n| :-- | --: | --: |\n| airline | 0.00 ["
        in text
    )
    assert "| airline | tasks | sampled | greedy |" in text
    for absent in ("before GRPO", "Curriculum", "episodes ended"):
        assert absent not in text


@pytest.mark.parametrize("left_out", [("greedy",), ("start",), ("greedy", "start")])
def test_what_was_not_evaluated_is_left_out_of_reports(tmp_path, left_out, monkeypatch):
    drawn = ("stage_performance", "accuracy_matrix") if left_out[1:] else ()
    monkeypatch.setattr(pictures, "OF_RUN", {name: pictures.OF_RUN[name] for name in drawn})
    folder = make_run(tmp_path / "run", ("airline", "retail"), ("airline", "retail"))
    with edited(folder / "results.json") as results:
        results |= {"transfer": {}, "success_threshold": 1.0}
        if "start" in left_out:
            results["evaluations"] = results["evaluations"][2:]
        for of in (of for e in results["evaluations"] for of in e["success"].values()):
            for part in (of, *of["families"].values(), *of["branches"].values()):
                if "greedy" in left_out:
                    del part["greedy"]
    text = markdown_of(folder)
    table = final_table(json.loads((folder / "results.json").read_text()))
    for said in (text, table):
        assert ("greedy" in said.replace("eval_greedy", "")) == ("greedy" not in left_out)
        assert ("eval_on_start" in said) == ("start" in left_out)
    assert ("No task was played greedily (`eval_greedy`)." in text) == ("greedy" in left_out)
    assert ("## Transfer and forgetting" in text) == ("start" not in left_out)
    assert "| after retail | 20 | 0.75 [" in text
    assert is_finished(load_run(folder))
    if "start" in left_out:
        assert "no finished run" in refusal(lambda: write_comparison([folder], tmp_path / "both"))


def test_an_interrupted_run_is_reported_as_far_as_it_came(tmp_path, without_pictures):
    folder = make_run(tmp_path / "run", THREE)
    (folder / "results.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()[:14]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "tr')
    text = markdown_of(folder)
    assert "GRPO: 13 of 30 steps, each" in text
    assert "There is no evaluation in this folder: the run was interrupted." in text
    assert "| telecom | 21 to 30 |" not in text


def test_what_was_left_out_of_training_is_told_by_domain_and_kind(tmp_path):
    folder = make_run(tmp_path / "run", ("mixed",))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines[:2]:
        line |= {"rollout/left_out": 3.0, "rollout/left_out/reset/retail": 1.0}
        line |= {"rollout/left_out/outage/airline": 2.0, "rollout/too_few_left": 0.25}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = render("run.md.jinja", drawn=(), **report_data(load_run(folder)))
    assert "| airline | outage | 4 |\n| retail | reset | 2 |" in text
    assert "| stage | domain | all failed | all solved | fewer than two left | in all |" in text
    assert "| mixed | all | 0.375 | 0.125 | 0.050 | 0.500 |" in text


def test_rewards_of_any_size_have_an_interval_and_a_table(tmp_path, without_pictures):
    folder = make_run(tmp_path / "run", ("mixed",))
    pay_any_rewards(folder)
    text = markdown_of(folder)
    (table,) = re.findall(r"## Mean reward\n\n.*\n.*\n((?:\|.*\n)+)", text)
    airline, retail, telecom = table.splitlines()
    assert re.fullmatch(r"\| airline \| 0\.51 \[-0\.\d+, 1\.\d+\] \| 3\.19 \[.*\] \|", airline)
    assert retail.startswith("| retail | -2.5e+29 [")
    assert telecom == "| telecom | 5.00 [5.00, 5.00] | 5.00 [5.00, 5.00] |"
    assert "| success, sampled | step | airline | retail | telecom | mean |" in text
    assert "| after the warm start | 0 | 0.38 [" in text  # shares of 1, as ever


def test_every_transfer_number_is_that_of_the_summary_with_its_interval(sequential):
    text = (sequential / "report.md").read_text()
    results = json.loads((sequential / "results.json").read_text())
    found = summary([results])
    assert found["metrics"]["backward_transfer"][0] == pytest.approx(0.1875)
    for name, words in (
        ("stage_gain", "new-domain gain"),
        ("backward_transfer", "backward transfer"),
        ("forward_transfer", "forward transfer"),
        ("forgetting", "forgetting"),
    ):
        value, low, high = found["metrics"][name]
        assert low < value < high
        assert f"| {words} | {value:+.2f} [{low:+.2f}, {high:+.2f}] |" in text
    matrix = found["domains"]["matrix"]
    for row, point, step in zip(matrix, ("the warm start", *THREE), (0, 10, 20, 30), strict=True):
        assert f"| after {point} | {step} | " + " | ".join(map(ci_text, row)) + " |" in text
    refund = found["families"]["backward_transfer"]["airline/refund"]
    assert f"| airline/refund | {ci_text(refund, '+')}" in text
    every = " | ".join(ci_text(row[0]) for row in found["tools"]["matrix"])
    assert f"| airline/look_up | {every} | " in text
    assert "| 120 | 0.75 |" in text, "calls in training"
    assert ci_text([0.5, None, None]) == "-", "a number without an interval"
    assert f"| airline | pass^2 | {ci_text(found['passes']['airline']['pass^2'][0])} |" in text


def test_a_run_of_one_stage_has_a_matrix_and_no_transfer(tmp_path, without_pictures):
    folder = make_run(tmp_path / "run", ("mixed",))
    text = markdown_of(folder)
    assert "| after mixed | 10 | 0.62 [" in text
    assert "| total gain | +0.25 [" in text
    assert "backward transfer |" not in text.split("## Tools")[0]
    assert "No replay: a stage draws nothing from the domains of earlier stages." in text
    assert "transfer" not in final_table(json.loads((folder / "results.json").read_text()))


def test_the_table_for_the_terminal():
    evaluations = [
        evaluation("start", 0, {"airline": 0.0, "retail": 0.0}),
        evaluation("warm_start", 0, {"airline": 0.25, "retail": 0.25}),
        evaluation("airline", 10, {"airline": 0.5, "retail": 0.5}),
        evaluation("retail", 20, {"airline": 0.125, "retail": 0.75}),
    ]
    gains = {"airline": [-0.125, -0.2, -0.05], "retail": [0.5, 0.375, 0.625]}
    transfer = {"domains": {"gain": gains}, "metrics": {"total_gain": [0.1875, 0.1, 0.275]}}
    table = final_table({"evaluations": evaluations, "transfer": transfer})
    assert table.splitlines() == [
        "success, sampled        before GRPO         after GRPO                change",
        "airline           0.25 [0.17, 0.34]  0.12 [0.07, 0.19]  -0.12 [-0.20, -0.05]",
        "retail            0.25 [0.17, 0.34]  0.75 [0.66, 0.83]  +0.50 [+0.38, +0.62]",
        "mean              0.25 [0.19, 0.31]  0.44 [0.38, 0.49]  +0.19 [+0.10, +0.28]",
        "",
        "success, greedy        before GRPO         after GRPO",
        "airline          0.38 [0.28, 0.47]  0.25 [0.17, 0.34]",
        "retail           0.38 [0.29, 0.48]  0.88 [0.81, 0.94]",
        "mean             0.38 [0.32, 0.45]  0.56 [0.51, 0.62]",
        "before GRPO = after the warm start; after GRPO = after retail; in brackets: 95 % "
        "intervals",
    ]
    assert final_table({"evaluations": evaluations[:1]}).splitlines() == [
        "success            sampled             greedy",
        "airline  0.00 [0.00, 0.04]  0.12 [0.06, 0.19]",
        "retail   0.00 [0.00, 0.04]  0.12 [0.06, 0.18]",
        "mean     0.00 [0.00, 0.02]  0.12 [0.07, 0.17]",
        "in brackets: 95 % intervals",
    ]


def test_a_domain_that_failed_is_marked_and_named():
    evaluations = [
        evaluation("warm_start", 0, {"airline": 0.5, "bank": 0.25, "desk": 0.0}),
        evaluation("mixed", 9, {"airline": 0.75, "bank": 0.0, "desk": 0.125}),
    ]
    lines = final_table({"evaluations": evaluations}).splitlines()
    names = [line.split("  ")[0] for line in lines]
    domains = ["airline", "bank (!)", "desk", "mean"]
    assert names[:11] == ["success, sampled", *domains, "", "success, greedy", *domains]
    assert lines[12:] == ["(!) bank failed: no sampled episode succeeds at the end of the run"]
    assert "(!)" not in final_table({"evaluations": evaluations[:1]})


def test_the_report_says_what_failed_and_what_became_worse(tmp_path, without_pictures):
    folder = make_run(tmp_path / "run", ("mixed",))
    text = markdown_of(folder)
    assert " failed: " not in text and "made worse" not in text
    fall = {"name": "airline/move", "kind": "sampled", "num_tasks": 5, "before": 1.0, "after": 0.0}
    with edited(folder / "results.json") as results:
        results["evaluations"][-1]["success"]["retail"]["mean"] = 0
        results["worse"] = {"compared": 66, "found": [{**fall, "change": [-1.0, -1.0, -1.0]}]}
    says(
        markdown_of(folder),
        "**retail failed: no sampled episode succeeds at the end of the run.**",
        "| airline/move | 5 | sampled | 1.00 | 0.00 | -1.00 [-1.00, -1.00] |",
        "1 of 66 comparisons (domains, families, branches; about 2 by chance)",
    )


def test_the_terminal_shows_pass_hat_1_to_4_where_tasks_have_4_trials():
    evaluations = [evaluation("start", 0, {"retail": 0.5})]
    rates = {f"pass^{k}": [[0.5 / k, 0.25 / k, 0.75 / k]] for k in (1, 2, 3, 4)}
    shown = final_table({"evaluations": evaluations, "transfer": {"passes": {"retail": rates}}})
    assert shown.splitlines()[4:] == [
        "in all of k trials             pass^1             pass^2             pass^3"
        "             pass^4",
        "retail              0.50 [0.25, 0.75]  0.25 [0.12, 0.38]  0.17 [0.08, 0.25]"
        "  0.12 [0.06, 0.19]",
        "in brackets: 95 % intervals",
    ]
    del rates["pass^4"]
    few = final_table({"evaluations": evaluations, "transfer": {"passes": {"retail": rates}}})
    assert "pass^" not in few


def test_the_command_makes_a_report_again_or_says_why_not(tmp_path, capsys, without_pictures):
    folder = make_run(tmp_path / "run", ("mixed",))
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.md'}\n"
    (tmp_path / "empty").mkdir()
    assert command(["report", str(tmp_path / "empty")]) == 2
    says(capsys.readouterr().err, "error: ", str(tmp_path / "empty"), "give the folder of a run")
    says(refusal(main, []), "arguments are required: FOLDER; --help")
    says(refusal(write_report, tmp_path / "nowhere"), "holds no run")


def test_agents_stand_beside_the_model(without_pictures, tmp_path):
    folder = make_run(tmp_path / "run", THREE)
    with edited(folder / "results.json") as results:
        last = results["evaluations"][-1]["success"]
        agent = {"success": {d: {**of, "pass^k": [of["mean"], 0.75]} for d, of in last.items()}}
        results["agents"] = {"gpt": agent, "gone": {"failed": "agent_url: refuses a call"}}
    text = markdown_of(folder)
    assert "| success, sampled | before GRPO | after GRPO | change | gpt |\n" in text
    row = "| airline | 0.38 [0.28, 0.47] | 0.88 [0.81, 0.94] | +0.50 [+0.41, +0.60] | "
    assert f"{row}0.88 [0.81, 0.94] |\n" in text
    assert "| success, greedy | before GRPO | after GRPO | gpt |\n" in text
    assert "**agent gone failed: agent_url: refuses a call.**" in text
    assert "| agent | domain | pass^1 | pass^2 |\n" in text
    assert "\n| gpt | airline | 0.88 | 0.75 |\n" in text
    said = final_table(results).splitlines()
    assert "(!) agent gone failed: agent_url: refuses a call" in said
    results["evaluations"] = results["evaluations"][:1]
    assert final_table(results).split("\n")[0].split() == [
        *("success", "sampled", "greedy", "sampled,", "gpt", "greedy,", "gpt"),
    ]


def test_a_report_has_the_outcomes_of_tasks_and_the_draws_of_families(tmp_path, without_pictures):
    folder = make_run(tmp_path / "run", ("mixed",))
    assert "Tasks by their last groups" not in markdown_of(folder)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(line for line in lines if line["kind"] == "train"):
        line |= {"tasks/always_solved": 3.0, "tasks/mixed": 12.0, "tasks/never_solved": 5.0}
        line |= {"draws/retail/": 0.5} | ({"draws/airline/cancel": 1.0} if number > 4 else {})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = markdown_of(folder)
    assert (
        "\n\n- Tasks by their last groups: always solved 3, mixed 12, never solved 5.\n"
        "- Shares of the draws: retail/ 0.500, airline/cancel 0.500.\n\n" in text
    )
