"""Learning rates and precision that suit the model, and the recipe of a pretrained model."""

import json
from pathlib import Path

import pytest

from pipeline.config.cli import parse
from pipeline.models import fitting
from pipeline.models.fitting import FULL, FULL_SMALL, LORA, LORA_SMALL, TOY, fitted
from pipeline.models.loading import SHAPES
from tests.support.messages import says

SMOL = SHAPES["HuggingFaceTB/SmolLM2-135M-Instruct"]
QWEN = SHAPES["Qwen/Qwen3-4B"]


def folder_of(path: Path, shape: dict, size: int = 200 << 20) -> str:
    """A model folder with a configuration, and a file of weights that holds nothing."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(shape))
    with (path / "model.safetensors").open("wb") as file:
        file.truncate(size)
    return str(path)


@pytest.fixture(autouse=True)
def plain_cpu(monkeypatch):
    monkeypatch.setattr(fitting, "on_gpu", lambda: False)
    monkeypatch.setattr(fitting, "cpu_multiplies_bf16", lambda: False)


def rates(argv: list[str]) -> tuple:
    config, _ = fitted(parse(argv))
    return (
        config.grpo.learning_rate,
        config.warm_start.learning_rate,
        config.rft.rft_learning_rate,
    )


def test_rates_follow_the_size_of_the_model_and_what_is_trained(tmp_path):
    small, large = folder_of(tmp_path / "s", SMOL), folder_of(tmp_path / "l", QWEN)
    assert rates(["--model", small]) == FULL_SMALL
    assert rates(["--model", small, "--use-peft"]) == LORA_SMALL
    assert rates(["--model", large]) == FULL
    assert rates(["--model", large, "--use-peft"]) == LORA
    toy = folder_of(tmp_path / "t", SMOL, size=2 << 20)
    assert rates(["--model", toy, "--learning-rate", "null"]) == TOY
    assert rates(["--learning-rate", "null"]) == TOY
    given = ["--learning-rate", "3e-6", "--warm-start-learning-rate", "1e-3"]
    assert rates(["--model", small, *given]) == (3e-6, 1e-3, FULL_SMALL.rft)


def test_a_run_says_its_rates_and_where_they_are_from(tmp_path):
    small = folder_of(tmp_path / "s", SMOL)
    _, lines = fitted(parse(["--model", small]))
    assert lines == ["learning_rate: 1e-05 (suits full fine-tuning of 135 M weights)"]
    flags = ["--warm-start-steps", "4", "--rft-rounds", "1", "--use-peft"]
    _, lines = fitted(parse(["--model", small, *flags, "--learning-rate", "5e-5"]))
    assert lines == [
        "learning_rate: 5e-05 (given by the recipe or a flag)",
        "warm_start.learning_rate: 0.0005 (suits LoRA on 135 M weights)",
        "rft_learning_rate: 0.0002 (suits LoRA on 135 M weights)",
    ]
    assert fitted(parse(["--model", small, "--no-grpo"]))[1] == []


def test_a_rate_that_suits_a_toy_is_warned_of(tmp_path):
    small = folder_of(tmp_path / "s", SMOL)
    (warning,) = fitted(parse(["--config", "three_domain_tiny", "--model", small]))[1][-1:]
    says(warning, "warning: learning_rate 0.0004 is 40 times", "of 135 M weights (1e-05)")
    lines = fitted(parse(["--learning-rate", "5e-3"]))[1]
    assert any(line.startswith("warning: learning_rate 0.005 is 17 times") for line in lines)
    assert not any("warning" in line for line in fitted(parse([]))[1])


def test_a_cpu_that_multiplies_bf16_does_for_pretrained_models_alone(tmp_path, monkeypatch):
    small = folder_of(tmp_path / "s", SMOL)
    assert fitted(parse(["--model", small]))[0].model.mixed_precision == "auto"
    monkeypatch.setattr(fitting, "cpu_multiplies_bf16", lambda: True)
    config, lines = fitted(parse(["--model", small]))
    assert config.model.mixed_precision == "bf16"
    says(lines[0], "precision: bf16", "--mixed-precision no")
    assert fitted(parse([]))[0].model.mixed_precision == "auto"
    plain = ["--model", small, "--mixed-precision", "no"]
    assert fitted(parse(plain))[0].model.mixed_precision == "no"
    assert fitted(config) == (config, ["learning_rate: 1e-05 (given by the recipe or a flag)"])


def test_a_pretrained_model_takes_its_own_recipe(tmp_path):
    small = folder_of(tmp_path / "s", SMOL)
    assert parse(["--model", small]).recipe == "pretrained"
    assert parse(["--model", "Qwen/Qwen3-4B"]).recipe == "pretrained"
    assert parse(["--model", small, "--config", "mixed"]).recipe == "mixed"
    assert parse([]).recipe == parse(["--model", "tiny"]).recipe == "three_domain_tiny"


@pytest.mark.parametrize(("rate", "part"), [("1e-8", "30,000"), ("2e-6", "150"), ("1e-5", "")])
def test_a_rate_that_hardly_moves_a_policy_is_a_warning(rate, part):
    _, lines = fitted(parse(["--learning-rate", rate]))
    told = [line for line in lines if "a policy may hardly change" in line]
    assert len(told) == bool(part)
    if part:
        says(told[0], f"warning: learning_rate {float(rate):g} is 1/{part} of what suits a tiny")
