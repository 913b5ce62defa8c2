"""A report says what the files of a run folder say, in words, tables and pictures."""

import json
from pathlib import Path

import pytest
import yaml

from pipeline.config import Config, UserError
from pipeline.plots import smooth
from pipeline.report import final_table, main, write_report
from pipeline.run_files import wilson

THREE = ("airline", "retail", "telecom")


@pytest.fixture(autouse=True, scope="module")
def matplotlib_home(tmp_path_factory):
    """Where matplotlib, once imported, keeps its list of fonts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        yield


def success(domain: str, mean: float, greedy: float) -> dict:
    branch = {"mean": mean, "greedy": greedy, "num_tasks": 50}
    return {
        "mean": mean,
        "greedy": greedy,
        "num_tasks": 100,
        "num_trials": 2,
        "families": {"refund": {**branch, "num_tasks": 100}},
        "branches": {"refund/paid": branch, "refund/refused": {**branch, "mean": 0.0}},
    }


def evaluation(after: str, step: int, domains: tuple[str, ...], mean: float) -> dict:
    rates = {domain: success(domain, mean, min(1.0, mean + 0.125)) for domain in domains}
    return {"after": after, "step": step, "success": rates}


def make_run(folder: Path, stages: tuple[str, ...], domains=THREE, validation=True) -> Path:
    """A run of 10 steps a stage; without stages one that evaluates only."""
    folder.mkdir()
    tree = {
        "data": {
            "domains": list(domains),
            "environments": {name: "my.bank:Bank" for name in domains if name not in THREE},
        },
        "grpo": {"use_grpo": bool(stages), "max_steps": 10 * len(stages)},
    }
    settings = Config.model_validate(tree).model_dump(mode="json")
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    rows, evaluations = [], [evaluation("start", 0, domains, 0.0)]
    metrics, timings = [], []
    if stages:
        evaluations.append(evaluation("warm_start", 0, domains, 0.375))
    for index, stage in enumerate(stages):
        of = domains if stage == "mixed" else domains[: index + 1]
        first = 10 * index
        rows.append(
            {
                "name": stage,
                "domains": dict.fromkeys(of, 8),
                "first_step": first,
                "num_steps": 10,
            }
        )
        for step in range(first + 1, first + 11):
            record = {"kind": "train", "stage": stage, "step": step}
            rewards = {f"reward/{domain}": 0.5 + 0.01 * step for domain in of}
            stops = {
                "rollout/stop/completed": 0.75,
                "rollout/stop/max_turns": 0.25,
                "rollout/stop/timeout": 0.0,
            }
            metrics.append({**record, **rewards, **stops})
            timings.append({**record, "perf/step_s": 2.0})
        if validation:
            line = {"kind": "validation", "stage": stage, "step": first + 5}
            metrics.append({**line, **{f"validation/{domain}/success": 0.5 for domain in domains}})
        mean = min(0.875, 0.625 + 0.125 * index)
        evaluations.append(evaluation(stage, first + 10, domains, mean))
    results = {
        "recipe": "three_domain_tiny",
        "seed": 1,
        "num_ranks": 2,
        "split": "test",
        "evaluations": evaluations,
        "floors": {d: {"nothing": 0.0, "transfer": 0.11, "every_tool": 0.02} for d in domains},
        "wall_s": 83.4,
    }
    curriculum = {"stages": rows, "replay": 0.3 if len(rows) > 1 else 0.0}
    (folder / "curriculum.json").write_text(json.dumps(curriculum))
    (folder / "results.json").write_text(json.dumps(results))
    for name, lines in (("metrics.jsonl", metrics), ("timings.jsonl", timings)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def assert_is_a_whole_picture(path: Path, num_colours: int) -> None:
    """Drawn in the colours of its domains, with a white edge: nothing is cut off."""
    import numpy
    from PIL import Image

    pixels = numpy.asarray(Image.open(path).convert("RGB"))
    height, width, _ = pixels.shape
    assert width >= 900
    assert height >= 400
    for edge in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]):
        assert (edge == 255).all(), f"{path.name} is cut off"
    palette = ["0072B2", "D55E00", "009E73", "CC79A7", "E69F00"]
    found = [(pixels == list(bytes.fromhex(colour))).all(axis=2).sum() for colour in palette]
    assert all(count > 50 for count in found[:num_colours]), found
    assert not any(found[num_colours:]), found


def test_the_report_of_a_sequential_run(tmp_path):
    folder = make_run(tmp_path / "my-run", THREE)
    write_report(folder)
    text = (folder / "report.md").read_text()
    assert text.startswith(
        """# my-run

- Recipe `three_domain_tiny`, seed 1, 2 rank(s).
- Model `tiny`; domains airline, retail, telecom; 800 training tasks of each (medium).
- Warm start: 440 supervised steps.
- GRPO: 30 of 30 steps, each 24 groups of 8 episodes, learning rate 0.0003, beta 0.
- Wall time 1 min 23 s. A training step took 2.00 s (median).

## Before and after GRPO

| success | sampled before | sampled after | change | greedy before | greedy after |
| :-- | --: | --: | --: | --: | --: |
| airline | 0.375 | 0.875 | +0.500 | 0.500 | 1.000 |
| retail | 0.375 | 0.875 | +0.500 | 0.500 | 1.000 |
| telecom | 0.375 | 0.875 | +0.500 | 0.500 | 1.000 |
| mean | 0.375 | 0.875 | +0.500 | 0.500 | 1.000 |

On 100 tasks of each domain (test split); before: after the warm start, after: after telecom. """
    )
    for part in (
        "| after retail | 20 |" + 3 * " 0.750 [0.66, 0.82] |" + " 0.750 |",
        "| airline | refund | all | 100 | 0.375 | 0.875 | 0.500 | 1.000 |\n"
        "|  |  | paid | 50 | 0.375 | 0.875 | 0.500 | 1.000 |\n"
        "|  |  | refused | 50 | 0.000 | 0.000 | 0.500 | 1.000 |",
        "| retail | 0.000 | 0.110 | 0.020 |",
        "| retail | 11 to 20 | 8 airline, 8 retail |",
        "Replay: after the first stage 30% of a step's groups, in whole groups, come from the "
        "domains of earlier stages.",
        "| reason | airline | retail | telecom |\n"
        "| :-- | --: | --: | --: |\n"
        "| completed | 75.0% | 75.0% | 75.0% |\n"
        "| max_turns | 25.0% | 25.0% | 25.0% |\n\n",
        "- `results.json`: ",
        "![Training reward and held-out success over the steps](learning_curves.png)",
        "(stage_performance.png)",
    ):
        assert part in text
    assert "trajectories" not in text, "a file that is not there"
    assert_is_a_whole_picture(folder / "learning_curves.png", 3)
    assert_is_a_whole_picture(folder / "stage_performance.png", 3)


@pytest.mark.parametrize(
    ("stages", "domains", "validation"),
    [
        (("mixed",), THREE, True),
        (("airline",), ("airline",), False),
        (
            (*THREE, "bank", "hospital-appointments"),
            (*THREE, "bank", "hospital-appointments"),
            True,
        ),
    ],
    ids=["mixed", "one domain, no validation", "five domains"],
)
def test_pictures_are_whole_for_other_runs(tmp_path, stages, domains, validation):
    folder = make_run(tmp_path / "run", stages, domains, validation)
    write_report(folder)
    assert_is_a_whole_picture(folder / "learning_curves.png", len(domains))
    assert_is_a_whole_picture(folder / "stage_performance.png", len(domains))
    no_replay = "No replay: a stage draws from its own domains only."
    assert (no_replay in (folder / "report.md").read_text()) == (len(stages) == 1)


def test_an_evaluation_only_is_reported_without_before_and_after(tmp_path):
    folder = make_run(tmp_path / "run", ())
    write_report(folder)
    text = (folder / "report.md").read_text()
    assert "GRPO: not used; this run evaluates only." in text
    assert (
        "## Success\n\n| success | sampled | greedy |\n| :-- | --: | --: |\n| airline | 0.000"
        in text
    )
    assert "| domain | family | branch | tasks | sampled | greedy |" in text
    for absent in ("Before and after", "Curriculum", "episodes ended"):
        assert absent not in text
    assert_is_a_whole_picture(folder / "learning_curves.png", 3)
    assert (folder / "stage_performance.png").stat().st_size > 5_000


def test_an_interrupted_run_is_reported_as_far_as_it_came(tmp_path):
    folder = make_run(tmp_path / "run", THREE)
    (folder / "results.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()[:14]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "tr')
    write_report(folder)
    text = (folder / "report.md").read_text()
    assert "GRPO: 13 of 30 steps, each" in text
    assert "There is no evaluation in this folder: the run was interrupted." in text
    assert "| telecom | 21 to 30 |" not in text
    assert (folder / "learning_curves.png").stat().st_size > 5_000


def test_the_control_with_permuted_rewards_says_so(tmp_path):
    folder = make_run(tmp_path / "run", ("mixed",))
    settings = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(
        settings.replace("permute_rewards: false", "permute_rewards: true")
    )
    write_report(folder)
    assert "**A control: rewards were permuted" in (folder / "report.md").read_text()


def test_the_table_for_the_terminal():
    evaluations = [
        evaluation("start", 0, ("airline", "retail"), 0.0),
        evaluation("warm_start", 0, ("airline", "retail"), 0.25),
        evaluation("airline", 10, ("airline", "retail"), 0.5),
        evaluation("retail", 20, ("airline", "retail"), 0.75),
    ]
    evaluations[-1]["success"]["airline"]["mean"] = 0.125
    table = final_table({"evaluations": evaluations})
    assert table == (
        "success  sampled before  sampled after  change  greedy before  greedy after\n"
        "airline           0.250          0.125  -0.125          0.375         0.875\n"
        "retail            0.250          0.750  +0.500          0.375         0.875\n"
        "mean              0.250          0.438  +0.188          0.375         0.875"
    )
    assert final_table({"evaluations": evaluations[:1]}) == (
        "success  sampled  greedy\n"
        "airline    0.000   0.125\n"
        "retail     0.000   0.125\n"
        "mean       0.000   0.125"
    )


def test_before_is_the_start_where_there_was_no_warm_start():
    evaluations = [
        evaluation("start", 0, ("retail",), 0.25),
        evaluation("mixed", 10, ("retail",), 0.5),
    ]
    assert "retail            0.250          0.500  +0.250" in final_table(
        {"evaluations": evaluations}
    )


def test_the_interval_is_wilsons():
    assert wilson(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson(1.0, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)


def test_smoothing_keeps_a_line_straight_and_its_ends_in_place():
    assert smooth([0.5] * 20) == [0.5] * 20
    assert smooth([0.0, 1.0]) == [0.5, 0.5]
    assert smooth(list(range(20)))[4:16] == [float(i) for i in range(4, 16)]


def test_the_command_makes_a_report_again_or_says_why_not(tmp_path, capsys):
    folder = make_run(tmp_path / "run", ("mixed",))
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.md'}\n"
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: report: {tmp_path} holds no run (no config.yaml); give a run folder\n"
    )
    assert main([]) == 2
    with pytest.raises(UserError, match="holds no run"):
        write_report(tmp_path / "nowhere")
