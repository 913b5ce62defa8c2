"""Fills settings that a recipe leaves open with values that suit the model.

A learning rate that suits half a million weights ruins a pretrained model within a few steps.
"""

import math
from typing import NamedTuple

import torch

from pipeline.common.layout import is_toy
from pipeline.config.settings import Config
from pipeline.distributed.devices import on_gpu
from pipeline.models.loading import empty_model

# Number of weights of the model whose rates were measured, and from which on a model gets the rates
# of published runs. Rates of models between them are interpolated (on logarithmic scales).
SMALL = 135_000_000
LARGE = 1_350_000_000
FAR = 5.0  # a learning rate above FAR times the suitable one gets a warning
FAR_BELOW = 100.0  # so does one below this part of the suitable one


class Rates(NamedTuple):
    """Peak learning rates of GRPO, the warm start and rejection fine-tuning."""

    grpo: float
    warm_start: float
    rft: float


TOY = Rates(grpo=3e-4, warm_start=2e-3, rft=2e-4)
# Full fine-tuning of large models: GRPO of DeepSeekMath (arXiv 2402.03300, 4.2), DAPO (2503.14476,
# 4.1) and TRL; supervised: TRL's SFTConfig. Of small ones: measured with SmolLM2-135M
# (docs/results/real_models.md). LoRA: about ten times as much (Schulman et al. 2025, "LoRA Without
# Regret").
FULL = Rates(grpo=1e-6, warm_start=2e-5, rft=5e-6)
FULL_SMALL = Rates(grpo=1e-5, warm_start=1e-4, rft=2e-5)
LORA = Rates(grpo=1e-5, warm_start=2e-4, rft=5e-5)
LORA_SMALL = Rates(grpo=1e-4, warm_start=5e-4, rft=2e-4)


def suitable_rates(config: Config, num_weights: int) -> tuple[Rates, str]:
    """Return the learning rates that suit a model, and what they suit in words."""
    if is_toy(config.model.model):
        return TOY, "a tiny model"
    small, large = (LORA_SMALL, LORA) if config.model.use_peft else (FULL_SMALL, FULL)
    how = "LoRA on" if config.model.use_peft else "full fine-tuning of"
    part = math.log(max(num_weights, SMALL) / SMALL) / math.log(LARGE / SMALL)
    rates = (
        float(f"{a * (b / a) ** min(part, 1.0):.1e}") for a, b in zip(small, large, strict=True)
    )
    return Rates(*rates), f"{how} {num_weights / 1e6:,.0f} M weights"


def fitted(config: Config) -> tuple[Config, list[str]]:
    """Return `config` without open learning rates or precision, and lines for the user.

    Raises UserError if the model's configuration cannot be loaded.
    """
    toy = is_toy(config.model.model)
    num_weights = 0 if toy else int(empty_model(config).num_parameters())
    rates, what = suitable_rates(config, num_weights)
    lines = list[str]()
    is_auto = config.model.mixed_precision == "auto"
    if is_auto and not toy and not on_gpu() and cpu_multiplies_bf16():
        config = config.changed("model", mixed_precision="bf16")
        lines.append("precision: bf16, which this CPU multiplies; --mixed-precision no is fp32")
    settings = (
        ("learning_rate", "grpo", rates.grpo, True),
        ("warm_start.learning_rate", "warm_start", rates.warm_start, config.warm_start.steps > 0),
        ("rft_learning_rate", "rft", rates.rft, config.rft.rft_rounds > 0),
    )
    warnings = list[str]()
    for label, section, suits, is_wanted in settings:
        name = label.removeprefix("warm_start.")
        rate = getattr(getattr(config, section), name)
        config = config.changed(section, **{name: rate or suits})
        if not config.grpo.use_grpo or not is_wanted:
            continue
        if rate is None:
            lines.append(f"{label}: {suits:g} (suits {what})")
            continue
        lines.append(f"{label}: {rate:g} (given by the recipe or a flag)")
        if rate > FAR * suits:
            warnings.append(
                f"warning: {label} {rate:g} is {rate / suits:,.0f} times what suits {what} "
                f"({suits:g}); a policy may break within a few steps"
            )
        if rate < suits / FAR_BELOW:
            warnings.append(
                f"warning: {label} {rate:g} is 1/{suits / rate:,.0f} of what suits {what} "
                f"({suits:g}); a policy may hardly change"
            )
    return config, lines + warnings


def cpu_multiplies_bf16() -> bool:
    """Return whether the CPU has instructions for products of bf16 numbers."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
