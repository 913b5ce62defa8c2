"""Two steps of each recipe for a Qwen3 on the embedded domains, with a tiny random Qwen3."""

import pytest

from tests.support import random_qwen3, warm
from tests.support.tau2_miniature import write
from tests.support.warm import metrics, results


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
    few = ["--model", str(model), "--mixed-precision", "no", "--max-steps", "2"]
    few += ["--domains", "airline"]
    few += ["--tasks-per-step", "2", "--num-generations", "2", "--max-tokens-per-turn", "4"]
    few += ["--max-turns", "2", "--tasks-per-domain", "4", "--eval-tasks-per-domain", "1"]
    few += ["--eval-trials", "1", "--kl-probe-tasks", "0", "--validation-steps", "0"]
    num_ranks = 1 if recipe.endswith("_1gpu") else 2
    flags = ["--config", recipe, *few, "--report-to", "none", "--output-dir", "out"]
    warm.play(*flags, cwd=tmp_path, num_ranks=num_ranks)
    assert [line["step"] for line in metrics(tmp_path / "out")] == [1, 2]
    evaluations = results(tmp_path / "out")["evaluations"]
    assert [of["after"] for of in evaluations] == ["start", "airline"]
