"""LoRA (Hu et al. 2021, arXiv 2106.09685) through PEFT: small trained matrices on a frozen model.

A layer's weight W acts as W + lora_alpha / lora_r * B A. Checkpoints hold A and B alone and name
the folder or hub id of the base model, so PEFT loads and merges them too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.save_and_load import load_peft_weights

from pipeline.config import ModelSettings, UserError

CONFIG = "adapter_config.json"


def attach(model: Any, settings: ModelSettings, base: str, seed: int) -> PeftModel:
    """The model with fresh adapters, whose product is zero; the model itself is frozen.

    `base` is the folder or hub id that its weights came from. Raises UserError where
    `lora_target_modules` fits no layer, or one of the embeddings, which sampling could not merge.
    """
    targets = settings.lora_target_modules
    config = LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            attached = get_peft_model(model, config)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"lora_target_modules: got {','.join(targets)} ({reason})") from None
    for layer in (attached.get_input_embeddings(), attached.get_output_embeddings()):
        if isinstance(layer, BaseTunerLayer):
            raise UserError(
                f"lora_target_modules: got {','.join(targets)}, which holds an embedding or the "
                "output layer; name layers between them, or all-linear"
            )
    return attached


def merged_parameters(model: Any) -> Iterator[torch.Tensor]:
    """The parameters of the plain model, in its own order, LoRA's products added to them."""
    if not isinstance(model, PeftModel):
        yield from model.parameters()
        return
    base: Any = model.get_base_model()
    for name, parameter in base.named_parameters():
        if ".lora_" in name:
            continue
        owner, inside, what = name.rpartition(".base_layer.")
        if inside and what == "weight":
            parameter = parameter + base.get_submodule(owner).get_delta_weight("default")
        yield parameter


def is_adapter(folder: str | Path) -> bool:
    return (Path(folder) / CONFIG).is_file()


def base_of(folder: str | Path) -> str:
    """The folder or hub id of the model that an adapter folder belongs to.

    A checkpoint of the same run, which moves together with it, comes before a recorded path.
    """
    name: str = json.loads((Path(folder) / CONFIG).read_text("utf-8"))["base_model_name_or_path"]
    sibling = Path(folder).resolve().parent / Path(name).name
    return str(sibling) if sibling.is_dir() else name


def save(model: PeftModel, folder: Path) -> None:
    """Write the adapters alone, and the base model's configuration beside them."""
    model.save_pretrained(str(folder), save_embedding_layers=False)
    base: Any = model.get_base_model()
    base.config.save_pretrained(folder)


def load(model: PeftModel, folder: Path) -> None:
    """Take over the adapters of a checkpoint; raises UserError where they have another shape."""
    try:
        set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    except RuntimeError:
        raise UserError(
            f"lora_r, lora_target_modules: not those of the adapters in {folder}; give its settings"
        ) from None


def load_merged(base_model: Any, folder: str | Path) -> Any:
    """The plain model with an adapter folder's products added to its weights."""
    return PeftModel.from_pretrained(base_model, str(folder)).merge_and_unload()
