"""LoRA (Hu et al. 2021, arXiv 2106.09685) through PEFT: small trained matrices on a frozen model.

A layer's weight W acts as W + lora_alpha / lora_r * B A. Checkpoints hold A and B alone and name
the folder or hub id of the base model, so PEFT loads and merges them too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.utils.save_and_load import load_peft_weights
from torch import nn
from transformers.pytorch_utils import Conv1D

from pipeline.config import ModelSettings, UserError
from pipeline.model_files import ADAPTER_CONFIG, read_json, weights_in
from pipeline.untrusted import reason_of

WEIGHTS = "adapter_model"  # the stem of their file


def attach(model: Any, settings: ModelSettings, base: str, seed: int) -> PeftModel:
    """The model with fresh adapters, whose product is zero; the model itself is frozen.

    `base` is the folder or hub id that its weights came from. Raises UserError where
    `lora_target_modules` names anything but linear layers between embeddings and output layer.
    """
    targets = settings.lora_target_modules
    every = targets == ["all-linear"]
    if not every:
        _check_targets(model, targets)
    config = LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        target_modules="all-linear" if every else targets,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), _quiet():
        torch.manual_seed(seed)
        attached = get_peft_model(model, config)
    config.base_model_name_or_path = base  # PEFT puts the model's own idea of its name there
    return attached


def _check_targets(model: Any, targets: list[str]) -> None:
    """PEFT ignores a name that fits nothing beside one that fits; the sampler merges no head."""
    head = model.get_output_embeddings()
    named = [(f".{name}", layer) for name, layer in model.named_modules()]
    linear = [(name, layer) for name, layer in named if isinstance(layer, (nn.Linear, Conv1D))]
    linear = [(name, layer) for name, layer in linear if layer is not head]
    for target in targets:
        count = sum(name.endswith(f".{target}") for name, _ in named)
        if count == 0 or count != sum(name.endswith(f".{target}") for name, _ in linear):
            known = dict.fromkeys(name.rpartition(".")[2] for name, _ in linear)
            raise UserError(
                f"lora_target_modules: got {target!r}; give linear layers below the output layer, "
                f"here {', '.join(known)}, or all-linear by itself"
            )


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
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def base_of(folder: str | Path) -> str:
    """The folder or hub id of the model that an adapter folder belongs to.

    A checkpoint of the same run, which moves together with it, comes before a recorded path.
    """
    base = _base_of(folder)
    seen = {Path(folder).resolve()}
    while is_adapter(base):  # it may be a model with adapters, too
        if Path(base).resolve() in seen:
            raise UserError(
                f"model: the adapters in {folder} are their own base model; mend "
                f"base_model_name_or_path in {ADAPTER_CONFIG}"
            )
        seen.add(Path(base).resolve())
        base = _base_of(base)
    return _base_of(folder)


def _base_of(folder: str | Path) -> str:
    name: str | None = _config(folder)["base_model_name_or_path"]
    if name is None:
        raise UserError(
            f"model: the adapters in {folder} name no base model; enter it in {ADAPTER_CONFIG}"
        )
    sibling = Path(folder).resolve().parent / Path(name).name
    return str(sibling) if sibling.is_dir() else name


def _config(folder: str | Path) -> dict[str, Any]:
    found = read_json(Path(folder) / ADAPTER_CONFIG)
    if not isinstance(found.setdefault("base_model_name_or_path", None), str | None):
        raise UserError(f"model: {folder}: {ADAPTER_CONFIG} names no base model; copy it again")
    return found


def check_files(folder: str | Path) -> None:
    """UserError where a folder's adapters are no LoRA, or their weights no whole safetensors file.

    PEFT would read a pickle, and import what other kinds of adapters name.
    """
    weights_in(folder, WEIGHTS)
    config = _config(folder)
    numbers = [config.get(name) for name in ("r", "lora_alpha")]
    is_lora = config.get("peft_type") == "LORA" and config.get("megatron_config") is None
    if not is_lora or not all(isinstance(number, int | float) for number in numbers):
        raise UserError(f"model: {folder}: {ADAPTER_CONFIG} is not of plain LoRA; give such a one")


def save(model: PeftModel, folder: Path) -> None:
    """Write the adapters alone, as PEFT does.

    No config.json: with it transformers would look for a whole model here.
    """
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a form that nobody has filled in


def load(model: PeftModel, folder: Path) -> None:
    """Take over the adapters of a checkpoint; UserError where they are made in another way."""
    check_files(folder)
    saved = load_peft_weights(str(folder), device="cpu")
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    same = {n: w.shape for n, w in saved.items()} == {n: w.shape for n, w in own.items()}
    if not same:
        raise UserError(f"lora_target_modules: not those of the adapters in {folder}; give its own")
    set_peft_model_state_dict(model, saved)


def check_settings(folder: Path, settings: ModelSettings) -> None:
    """UserError where `lora_r` or `lora_alpha` is not that of a checkpoint's adapters."""
    check_files(folder)
    saved = _config(folder)
    for name, held in (("lora_r", saved["r"]), ("lora_alpha", saved["lora_alpha"])):
        if getattr(settings, name) != held:
            got = getattr(settings, name)
            raise UserError(f"{name}: got {got}, but {folder.name} holds adapters of {held}")


def load_merged(base_model: Any, folder: str | Path) -> Any:
    """The plain model with an adapter folder's products added to its weights."""
    check_files(folder)
    try:
        with _quiet():
            return PeftModel.from_pretrained(base_model, str(folder)).merge_and_unload()
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"model: the adapters in {folder} do not fit their base model ({reason_of(error)}); "
            "give the model that they were trained on"
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5.23 by an old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield
