"""The proof of forgetting: its rows are settings, and its measures have their closed forms."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import three_desks
from pipeline.common.errors import UserError
from pipeline.config.cli import flags_of, parse
from pipeline.environments.domains import generated, load_domains
from pipeline.models.tiny import tiny_model
from scripts.proofs import forgetting
from scripts.proofs.forgetting_measures import (
    answers_by_desk,
    by_answer,
    correlations,
    dots_of,
    kl_of,
    logprobs_of,
    ranks_of,
    steps_until,
)
from tests.support.helpers import tokenizer

FLAGS = ["--config", "forgetting", *forgetting.TINY.split()]


@pytest.mark.parametrize("row", forgetting.ROWS)
def test_every_row_is_another_setting_that_the_command_line_takes(row, tmp_path):
    study = forgetting.Study(tmp_path, FLAGS, 1, 1)
    changed = parse([*FLAGS, *flags_of(study.settings(row))]) != parse(FLAGS)
    assert changed == (row != forgetting.SEQUENCE)


def test_the_row_that_learns_a_domain_again_has_the_stages_of_the_sequence_before(tmp_path):
    study = forgetting.Study(tmp_path, FLAGS, 1, 1)
    steps = study.num_steps()
    again = study.settings(forgetting.RELEARN)
    assert again["order"] == ["airline", "retail", "telecom", "airline"]
    assert again["stage_steps"] == {**steps, "airline-2": steps["airline"]}
    assert again["max_steps"] == sum(again["stage_steps"].values())


def test_a_dot_has_what_a_stage_lost_of_earlier_domains_and_how_far_it_moved_on_each():
    matrix = [[0.0, 0.0, 0.0], [0.8, 0.1, 0.0], [0.5, 0.9, 0.0], [0.6, 0.7, 1.0]]
    drifts = [{"a": 0.3, "b": 0.1}, {"a": 0.2, "b": 0.4, "c": 0.05}]
    first, second = dots_of([["a"], ["b"], ["c"]], drifts, matrix)
    assert first == pytest.approx({"stage": 2, "forgotten": 0.3, "kl_old": 0.3, "kl_new": 0.1})
    assert second == pytest.approx({"stage": 3, "forgotten": 0.05, "kl_old": 0.3, "kl_new": 0.05})
    again = dots_of([["a"], ["b"], ["a"]], [drifts[0], {"a": 0.2, "b": 0.4}], matrix)[1]
    assert again == pytest.approx({"stage": 3, "forgotten": 0.2, "kl_old": 0.4, "kl_new": 0.2})


def test_the_divergence_is_that_of_whole_distributions_at_the_sampled_tokens():
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]), torch.tensor([[0.25, 0.25, 0.5]])
    first = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    second = 0.1 * math.log(0.4) + 0.2 * math.log(0.8) + 0.7 * math.log(1.4)
    found = kl_of(p.double().log(), q.double().log().expand(2, 3))
    assert found == pytest.approx(first + second, abs=1e-6)
    model = tiny_model(tokenizer(), 0).eval()
    ids = [5, 6, 7, 8, 9]
    rows = logprobs_of(model, ids, [2, 4])
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    assert torch.allclose(rows, whole[[1, 3]], atol=1e-6)  # a token is predicted one place before


def test_correlations_are_of_all_dots_and_equal_values_share_their_ranks():
    assert ranks_of(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    runs = [
        [{"forgotten": x + y, "kl_old": math.exp(x + y), "kl_new": 2.0 - x - y} for y in (0, 0.3)]
        for x in (0.1, 0.2, 0.6, 0.95)
    ]
    found = correlations(runs)
    for name, value in (("spearman_old", 1), ("pearson_old", 1), ("spearman_new", -1)):
        assert found[name] == pytest.approx([value] * 3)
    assert found["spearman_old_minus_new"] == pytest.approx([2, 2, 2])
    value, low, high = found["pearson_new"]
    assert -1 < value < -0.8
    assert low < value < high


def test_steps_to_a_level_are_those_of_a_moving_mean():
    rewards = [0.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    assert steps_until(rewards, 0.75, window=4) == 5
    assert steps_until(rewards, 1.0, window=2) == 5
    assert steps_until(rewards, 1.0, window=4) is None


def test_answers_count_as_right_by_the_last_domain_by_the_other_or_none():
    counts = [{"right": 6, "phone": 2}, {"right": 1, "shop": 1}]
    kinds = [{forgetting.kind_of(k, ["phone"]): n for k, n in of.items()} for of in counts]
    assert by_answer(kinds) == {"right": 0.7, "last": 0.2, "other": 0.1}
    assert forgetting.kind_of("shop", ["flights", "shop", "phone"]) == "other"


def test_answers_of_desks_that_hide_their_rules_are_counted_by_whose_rules_they_follow(tmp_path):
    desks = "{shop: examples.three_desks:shop_hidden, phone: examples.three_desks:phone_hidden}"
    flags = ["--domains", "shop,phone", "--environments", desks, "--eval-tasks-per-domain", "3"]
    config = parse(flags)
    domains = load_domains(config)
    tasks = generated(config, domains["shop"], 3, "test")
    with gzip.open(tmp_path / "step-000001.rank-0.jsonl.gz", "wt") as file:
        for task, desk in zip(tasks, ("shop", "phone", ""), strict=True):
            tier = task.branch
            name = three_desks.HIDDEN[desk][tier] if desk else "transfer"
            said = {"role": "assistant", "tool_calls": [{"function": {"name": name}}]}
            line = {"domain": "shop", "task_id": task.id, "trial": 0, "messages": [said]}
            file.write(json.dumps(line) + "\n")
    found = answers_by_desk(config, domains, tmp_path)
    assert found == {"shop": {"right": 1, "phone": 1, "none": 1}, "phone": {}}


def test_runs_of_one_domain_after_the_other_are_reported_as_stages_of_one_run(tmp_path):
    def part(success):
        entry = {"after": "rft", "success": success}
        return {"evaluations": [entry], "rft": [{"episodes": 8}, {"episodes": 8}], "seed": 1}

    rates = [{"a": {"mean": x}, "b": {"mean": y}} for x, y in ((0.1, 0.2), (0.8, 0.3), (0.5, 0.9))]
    before = [{"after": "warm_start", "success": rates[0]}]
    found = forgetting.chained({"a": part(rates[1]), "b": part(rates[2])}, before)
    assert [e["after"] for e in found["evaluations"]] == ["warm_start", "a", "b"]
    assert found["training"] == {"a": {"episodes": 16}, "b": {"episodes": 16}}
    assert forgetting.matrix_of(found) == [[0.1, 0.2], [0.8, 0.3], [0.5, 0.9]]


def test_points_are_bold_if_the_interval_over_three_seeds_excludes_zero():
    found = {"backward_transfer": [-0.05, -0.08, -0.02]}
    text = forgetting.points("backward_transfer", found, [found], None)
    assert text == "-5.0 (-8.0 to -2.0) [-5]"
    assert forgetting.points("backward_transfer", found, [found], found) == text
    bold = forgetting.points("backward_transfer", found, [found] * 3, found)
    assert bold == "**-5.0 (-8.0 to -2.0) [-5, -5, -5]**"
    assert forgetting.points("forgetting", found, [found], found) == "-"


def test_the_tables_of_a_model_replace_those_of_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- forgetting.py: tiny -->\nold\n<!-- end of tiny -->\nb\n")
    forgetting.put_in(page, "tiny", "new")
    wanted = "a\n<!-- forgetting.py: tiny -->\n\nnew\n\n<!-- end of tiny -->\nb\n"
    assert page.read_text() == wanted
    with pytest.raises(UserError, match=r"forgetting\.py: reading"):
        forgetting.put_in(page, "reading", "new")


def test_the_command_refuses_what_has_no_data_and_an_unknown_row(capsys, tmp_path):
    assert forgetting.main(["--only-report", "--output-dir", str(tmp_path / "none")]) == 2
    assert "holds no finished run" in capsys.readouterr().err
    for flags, text in ((["--figure", str(Path("a.png"))], "--raw"), (["--rows", "x"], "sequence")):
        with pytest.raises(SystemExit) as raised:
            forgetting.main(flags)
        assert raised.value.code == 2
        assert text in capsys.readouterr().err
