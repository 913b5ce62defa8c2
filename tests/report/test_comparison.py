"""Comparisons of runs: seeds share a configuration, and mixed training is the reference."""

import shutil

import pytest

from pipeline.commands.main import main as command
from pipeline.config.recipe import load_recipe
from pipeline.evaluation.transfer import differences, summary
from pipeline.report import comparison
from pipeline.report.plots.drawing import ci_text
from pipeline.report.write import main, render, rich
from tests.support.messages import refusal, says
from tests.support.report_runs import THREE, edited, make_run, matplotlib_home  # noqa: F401

pytestmark = pytest.mark.whole_run


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two values of replay with two seeds each, and mixed training."""
    folder = tmp_path_factory.mktemp("sweep")
    for seed in (1, 2):
        for replay, last in ((0.05, 0.625), (0.5, 0.75)):
            settings = {"curriculum": {"replay": replay}, "run": {"seed": seed}}
            run = folder / f"replay={replay}-seed-{seed}"
            make_run(run, THREE, settings=settings, last=last)
        settings = {"curriculum": {"replay": seed / 10}, "run": {"seed": seed}}  # without effect
        mixed = make_run(folder / f"mixed-seed-{seed}", ("mixed",), settings=settings)
        with edited(mixed / "results.json") as results:
            results["training"]["mixed"]["episodes"] = 360  # as many as in three stages
    return folder


def configurations_of(sweep):
    runs, _ = comparison.finished(comparison.runs_in([sweep]))
    return comparison.configurations_of(runs)


def markdown_of(configurations):
    data = comparison.comparison_data(configurations)
    return render("comparison.md.jinja", title="two runs", **data)


@pytest.fixture(scope="module")
def configurations(sweep):
    return configurations_of(sweep)


def test_seeds_of_equal_settings_are_one_configuration_and_mixed_is_the_first(configurations):
    assert [(c.label, len(c.runs)) for c in configurations] == [
        ("mixed (reference)", 2),
        ("replay 0.05", 2),
        ("replay 0.5", 2),
    ]
    assert [[run.config["run"]["seed"] for run in c.runs] for c in configurations] == 3 * [[1, 2]]


def test_numbers_are_those_of_all_seeds_and_their_difference_to_mixed(configurations):
    reference, first, _ = configurations
    results = [run.results for run in first.runs]
    mixed = [run.results for run in reference.runs]
    assert first.transfer == summary(results)
    assert first.against_mixed == differences(results, mixed)
    assert first.against_mixed["average_accuracy"][0] == pytest.approx(0.0)


@pytest.mark.filterwarnings("error::UserWarning")  # a layout that found no room for its axes
def test_the_command_compares_the_runs_of_a_folder(sweep, configurations, tmp_path, capsys):
    folder = tmp_path / "all"
    shutil.copytree(sweep, folder)
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'comparison.md'}\n"
    text = (folder / "comparison.md").read_text()
    _, first, _ = configurations
    for name in ("stage_gain", "forgetting"):
        assert f" {ci_text(first.transfer['metrics'][name], '+')} |" in text
    assert "| mixed (reference) | 2 | 360 | 0.62 [" in text
    assert "- replay 0.05: `replay=0.05-seed-1`, `replay=0.05-seed-2`" in text
    page = (folder / "comparison.html").read_text()
    assert ci_text(first.transfer["metrics"]["forgetting"], "+") in page
    assert "<svg" in page
    assert (folder / "pareto.png").stat().st_size > 10_000


def test_a_configuration_is_named_by_the_settings_in_which_it_differs_from_most(tmp_path):
    warm_start = {"warm_start": {"steps": 150}}
    grid = ({}, {"grpo": {"beta": 0.05}}, {"curriculum": {"replay": 0.5}}, warm_start)
    for number, settings in enumerate(grid):
        make_run(tmp_path / str(number), THREE, settings=settings)
    assert [c.label for c in configurations_of(tmp_path)] == [
        "sequential",
        "beta 0.05",
        "replay 0.5",
        "warm_start_steps 150",
    ]
    (tmp_path / "file").touch()
    same = [str(tmp_path / name) for name in ("0", "1", "1/../0")]
    says(
        refusal(main, [*same, "--output", str(tmp_path / "file")]),
        "--output: got ",
        "file, which cannot be a folder",
    )
    assert main([*same, "--output", str(tmp_path / "both")]) == 0
    text = (tmp_path / "both" / "comparison.md").read_text()
    assert text.startswith("# Comparison of 2 runs\n"), "a run counts once"


@pytest.mark.parametrize("kind", ["a copy", "a resumed copy", "another run of the seed"])
def test_a_seed_counts_once(tmp_path, capsys, kind):
    for seed in (1, 2):
        make_run(tmp_path / "all" / f"seed-{seed}", THREE, settings={"run": {"seed": seed}})
    first = tmp_path / "all" / "seed-1"
    again = tmp_path / "all" / "seed-1-again"
    if kind == "another run of the seed":
        make_run(again, THREE, settings={"run": {"seed": 1}}, last=0.75)
    else:
        shutil.copytree(first, again)
    if kind == "a resumed copy":
        shutil.rmtree(again)
        resumed = {"output_dir": str(again), "resume_from_checkpoint": "latest", "num_gpus": 2}
        make_run(again, THREE, settings={"run": {"seed": 1, **resumed}})
    assert main([str(tmp_path / "all")]) == 0
    why = f"has the settings and the seed of {first}, so it is no further seed and is left out"
    assert capsys.readouterr().err == f"warning: {again} {why}\n"
    text = (tmp_path / "all" / "comparison.md").read_text()
    assert text.startswith("# Comparison of 2 runs\n")
    assert (
        "**Left out**, because another run has the same settings and seed: `seed-1-again`." in text
    )
    assert "| sequential | 2 |" in text
    both = [str(first), str(again), "--output", str(tmp_path / "both")]
    assert main(both) == 0
    assert "| sequential | 1 |" in (tmp_path / "both" / "comparison.md").read_text()


def test_runs_of_different_recipes_have_short_names_and_a_table_of_their_settings(tmp_path):
    for name in ("three_domain_tiny", "pretrained"):
        tree = load_recipe(name).model_dump(mode="json")
        tree = {section: values for section, values in tree.items() if isinstance(values, dict)}
        tree["data"]["domains"] = list(THREE)
        settings = make_run(tmp_path / name, THREE, settings=tree) / "config.yaml"
        settings.write_text(
            settings.read_text().replace("recipe: three_domain_tiny", f"recipe: {name}")
        )
    found = configurations_of(tmp_path)
    labels = [c.label for c in found]
    assert labels[0].startswith("recipe pretrained, model HuggingFaceTB/")
    assert labels[1].startswith("recipe three_domain_tiny, model tiny")
    assert all(len(label) < 90 and " more" in label for label in labels)
    text = markdown_of(found)
    assert f"## Settings that differ\n\n| setting | {labels[0]} | {labels[1]} |\n" in text
    assert "| warm_start_steps | 0 | 440 |" in text


def test_runs_given_one_by_one_need_a_place_for_their_comparison(sweep, tmp_path, capsys):
    runs = [str(sweep / f"{name}-seed-1") for name in ("replay=0.05", "replay=0.5")]
    assert command(["report", *runs]) == 2
    assert "say where the comparison goes: --output FOLDER" in capsys.readouterr().err
    assert main([*runs, "--output", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert "There is no mixed training among these runs" in text
    assert "Difference to mixed" not in text


def test_success_at_the_end_is_paired_by_task_and_unequal_tasks_are_named(sweep, tmp_path):
    for name in ("replay=0.05", "replay=0.5"):
        for seed in (1, 2):
            run = f"{name}-seed-{seed}"
            shutil.copytree(sweep / run, tmp_path / run)
            with edited(tmp_path / run / "results.json") as results:
                for entry in results["evaluations"] if name == "replay=0.5" else ():
                    tasks = entry["success"]["retail"]["tasks"]
                    entry["success"]["retail"]["tasks"] = {t: tasks[t] for t in [*tasks][60:80]}
                    entry["success"]["telecom"]["tasks"] = {"other": [1.0, 1.0]}
    found, unequal = comparison.minus_first(configurations_of(tmp_path))
    changes = found["replay 0.5"]
    # Of 100 tasks with two trials, 62.5 were solved and 75 are: of tasks 60 to 79, 2.5 and 15.
    value, low, high = changes["airline"]
    assert value == 0.125 and 0.05 < low < value < high < 0.2
    assert changes["retail"][0] == pytest.approx(12.5 / 20) and "telecom" not in changes
    assert unequal == [
        "replay 0.5: retail 20 and 100 (20 in both), telecom 1 and 100 (0 in both)",
    ]
    text = markdown_of(configurations_of(tmp_path))
    assert (
        f"| replay 0.5 | {ci_text(changes['airline'], '+')} | {ci_text(changes['retail'], '+')} |"
        in text
    )
    assert f"**Unequal held-out tasks**, of a row and of replay 0.05: {unequal[0]}." in text


def test_a_run_is_a_link_to_its_report_if_it_has_one(sweep, tmp_path):
    folder = tmp_path / "a b"
    folder.mkdir()
    for name in ("with", "without"):
        shutil.copytree(sweep / f"replay={0.5 if name == 'with' else 0.05}-seed-1", folder / name)
    (folder / "with" / "report.html").write_text("")
    assert (
        main([str(folder / "with"), str(folder / "without"), "--output", str(tmp_path / "c")]) == 0
    )
    page = (tmp_path / "c" / "comparison.html").read_text()
    assert '<a href="../a%20b/with/report.html"><code>with</code></a>' in page
    assert "<code>without</code></li>" in page.replace("\n", "")
    for text in (
        "[`x`](//host/report.html)",
        "[`x`](https://host/report.html)",
        "[x](a/report.html)",
    ):
        assert "<a" not in rich(text)


@pytest.mark.parametrize("other", ["episodes", "tasks"])
def test_mixed_training_with_other_episodes_or_tasks_is_no_reference(sweep, tmp_path, other):
    for name in ("mixed", "replay=0.05", "replay=0.5"):
        shutil.copytree(sweep / f"{name}-seed-1", tmp_path / "all" / name)
    with edited(tmp_path / "all" / "mixed" / "results.json") as results:
        if other == "episodes":
            results["training"]["mixed"]["episodes"] = 400
        for entry in results["evaluations"] if other == "tasks" else ():
            of = entry["success"]["airline"]
            of["tasks"] = {f"other-{task}": rewards for task, rewards in of["tasks"].items()}
    found = configurations_of(tmp_path / "all")
    assert [c.against_mixed for c in found] == [None, None, None]
    assert "\n\n**Without a reference**: replay 0.05; replay 0.5. No" in markdown_of(found)


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "left on another machine"])
def test_seeds_that_share_a_warm_start_each_are_still_one_configuration(tmp_path, is_there):
    for seed in (1, 2):
        warm = make_run(tmp_path / "warm" / f"seed-{seed}", (), settings={"run": {"seed": seed}})
        model = {"model": str(warm / "checkpoints" / "warm-start")}
        settings = {"model": model, "warm_start": {"steps": 0}, "run": {"seed": seed}}
        make_run(tmp_path / "runs" / f"seed-{seed}", THREE, settings=settings)
    if not is_there:
        shutil.rmtree(tmp_path / "warm")
    [found] = configurations_of(tmp_path / "runs")
    assert (found.label, len(found.runs)) == ("sequential", 2)


def test_a_run_that_is_not_finished_is_left_out_and_named(tmp_path, capsys):
    make_run(tmp_path / "all" / "a", THREE)
    interrupted = make_run(tmp_path / "all" / "b", THREE)
    with edited(interrupted / "results.json") as results:
        results["evaluations"].pop()
    assert main([str(tmp_path / "all")]) == 0
    assert f"warning: {interrupted} is not finished, or was not" in capsys.readouterr().err
    text = (tmp_path / "all" / "comparison.md").read_text()
    assert (
        "**Left out**, because they are not finished, or were not evaluated before GRPO: `b`."
        in text
    )


def test_without_any_finished_run_there_is_nothing_to_compare(tmp_path):
    make_run(tmp_path / "all" / "a", ())
    says(
        refusal(configurations_of, tmp_path / "all"),
        "got no finished run with stages to compare (a)",
    )
