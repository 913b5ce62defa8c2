"""Inside a stage: success and divergence on validation tasks, and stages that end on a plateau."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from pipeline.config.settings import Config
from pipeline.evaluation.evaluate import KLProbe
from pipeline.training.token_logprobs import TokenLogprobs
from pipeline.training.updater import Updater
from scripts.proofs.grid import make_trajectory, small_model
from tests.support.helpers import ALONE
from tests.support.warm import jsonl, metrics, play, results

pytestmark = pytest.mark.whole_run

PROBED = [
    *("--domains", "airline,retail", "--max-steps", "12", "--warm-start-steps", "0"),
    *("--tasks-per-domain", "4"),
    *("--tasks-per-step", "2", "--num-generations", "2", "--max-turns", "2"),
    *("--max-tokens-per-turn", "12", "--eval-tasks-per-domain", "1", "--eval-trials", "1"),
    *("--entropy-coef", "0.05", "--report-to", "none"),  # untrained, it earns nothing
    *("--validation-steps", "1", "--validation-tasks", "2", "--kl-probe-tasks", "2"),
    *("--plateau-patience", "1", "--no-drop-zero-std-groups"),
]


def direct(model, trajectory):
    """The divergence of one episode by the formula, from the model's own output."""
    ids = torch.tensor([trajectory.ids])
    with torch.no_grad():
        found = torch.log_softmax(model(ids).logits[0, :-1].double(), -1)
    total, first = 0.0, len(trajectory.prompt_ids)
    for place, (token, mask, old) in enumerate(
        zip(trajectory.completion_ids, trajectory.loss_mask, trajectory.logprobs, strict=True)
    ):
        if mask:
            ratio = float(found[first + place - 1, token]) - old
            total += float(torch.exp(torch.tensor(ratio))) - 1 - ratio
    return total


@pytest.mark.parametrize("text", ["[{", "[" * 100_000, '[{"domain": "a", "odd": 1}]', "[3]", None])
def test_kept_episodes_that_are_gone_or_damaged_are_a_warning(tmp_path, text, capsys):
    (tmp_path / "kl_probe").mkdir()
    if text is not None:
        (tmp_path / "kl_probe" / "mixed.json").write_text(text)
    kept = KLProbe(tmp_path, Config(), ALONE)
    kept.is_wanted = True
    kept.load([SimpleNamespace(name="mixed")])
    state = "gone" if text is None else "damaged"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and line.endswith(
        f"kl_probe/mixed.json is {state}, so there is no KL of mixed"
    )
    assert kept.episodes == {}


def probe(model, anchors, deterministic=False):
    config = Config(run={"deterministic": deterministic}, grpo={"max_tokens_per_microbatch": 16})
    updater = Updater(Accelerator(cpu=True), TokenLogprobs(model, 1.0), ALONE, config)
    kl_probe = KLProbe(Path(), config, ALONE)
    kl_probe.episodes = anchors
    return kl_probe.divergences(updater)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_divergence_is_k3_of_the_kept_tokens_over_their_number(deterministic):
    model = small_model(3)
    desk = [
        make_trajectory([1, 2], [3, 4, 5], [1, 0, 1], domain="desk"),
        make_trajectory([1], [7, 8, 9, 2, 3, 4], domain="desk", task_id="t2"),
    ]
    bank = [make_trajectory([4, 4, 4], [6], domain="bank")]
    found = probe(model, {"desk": desk, "bank": bank}, deterministic)
    assert found["desk"] == pytest.approx(sum(direct(model, t) for t in desk) / 8, rel=1e-5)
    assert found["bank"] == pytest.approx(direct(model, bank[0]), rel=1e-5)
    assert found["bank"] > 0.01
    assert probe(model, {}) == {}


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """Two stages on two ranks, whose validations can never be good enough."""
    cwd = tmp_path_factory.mktemp("probed")
    done = play(*PROBED, "--output-dir", "out", cwd=cwd)
    return cwd / "out", done.stdout


def test_a_stage_on_a_plateau_ends_early_and_the_next_begins_there(probed):
    folder, said = probed
    assert "stage airline ends after 1 of 6 steps: 1 validations without 0.01 more success" in said
    assert [(r["stage"], r["step"]) for r in metrics(folder)] == [
        *(("airline", 1), ("retail", 2)),
    ]
    for stages in (
        json.loads((folder / "curriculum.json").read_text())["stages"],
        results(folder)["curriculum"]["stages"],
    ):
        assert [(s["name"], s["first_step"], s["num_steps"]) for s in stages] == [
            ("airline", 0, 1),
            ("retail", 1, 1),
        ]


def test_validations_watch_what_was_learned_before(probed):
    folder, _ = probed
    rows = metrics(folder, "validation")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert ["validation/airline/kl" in row for row in rows] == [False, False, True]
    assert rows[2]["validation/airline/kl"] > 1e-9
    assert not any("validation/retail/kl" in row for row in rows)  # nothing comes after it
    kept = results(folder)["validations"]
    assert [len(v["success"]["retail"]) for v in kept] == [2, 2, 2]
    timings = [row for row in jsonl(folder / "timings.jsonl") if row["kind"] == "validation"]
    assert len(timings) == 3 and all(row["perf/validation_s"] > 0 for row in timings)


def test_a_resume_from_the_stages_end_ends_the_next_one_at_the_same_step(probed):
    folder, _ = probed
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    play("--resume-from-checkpoint", "copy/checkpoints/stage-1-airline", cwd=folder.parent)
    assert (copy / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    for now, then in zip(results(copy)["validations"], results(folder)["validations"], strict=True):
        assert now == then
