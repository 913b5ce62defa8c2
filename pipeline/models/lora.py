"""LoRA (Hu et al. 2021, arXiv 2106.09685) through PEFT: small trained matrices on a frozen model.

A layer's weight W acts as W + lora_alpha / lora_r * B A. Checkpoints hold A and B alone and name
the folder or hub id of the base model, so PEFT loads and merges them too. PEFT is imported inside
functions, because most runs have no adapters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from pipeline.config.settings import ModelSettings
from pipeline.errors import UserError
from pipeline.files.untrusted import reason_of
from pipeline.models.files import ADAPTER_CONFIG, read_json

if TYPE_CHECKING:
    from peft import PeftModel


def attach(model: Any, settings: ModelSettings, base: str, seed: int) -> PeftModel:
    """The model with fresh adapters, whose product is zero; the model itself is frozen.

    `base` is the folder or hub id of its weights. Raises UserError if `lora_target_modules` names
    anything but linear layers between embeddings and output layer.
    """
    from peft import LoraConfig, get_peft_model

    targets = settings.lora_target_modules
    if targets != ["all-linear"]:
        _check_targets(model, targets)
    config = LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(seed)
        try:
            attached = get_peft_model(model, config)
        except (ValueError, NotImplementedError, TypeError) as error:
            raise UserError(
                f"lora_target_modules: got {', '.join(targets)}, which PEFT cannot give adapters "
                f"to in {type(model).__name__} ({reason_of(error)}); name other linear layers"
            ) from None
    config.base_model_name_or_path = base  # PEFT puts the model's own idea of its name there
    _layers(attached)
    return attached.eval()  # new modules are in training mode


def _check_targets(model: Any, targets: list[str]) -> None:
    """UserError for a name that PEFT would ignore, or would take for the output layer, too."""
    head = model.get_output_embeddings()
    named = [(f".{name}", layer) for name, layer in model.named_modules()]
    is_linear = (nn.Linear, Conv1D)
    linear = [name for name, layer in named if isinstance(layer, is_linear) and layer is not head]
    for target in targets:
        count = sum(name.endswith(f".{target}") for name, _ in named)
        if count == 0 or count != sum(name.endswith(f".{target}") for name in linear):
            known = dict.fromkeys(name.rpartition(".")[2] for name in linear)
            raise UserError(
                f"lora_target_modules: got {target!r}; give linear layers below the output layer, "
                f"here {', '.join(known)}, or all-linear by itself"
            )


def base_model(model: Any) -> Any:
    """The model inside one with adapters, its layers still wrapped; any other model unchanged."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def adapters_of(model: PeftModel) -> dict[str, torch.Tensor]:
    """The adapters, not copied, under the names of `adapter_model.safetensors`."""
    from peft import get_peft_model_state_dict

    weights: dict[str, torch.Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return weights


def merged_parameters(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and parameters of the plain model, in its own order, LoRA's products added to them.

    One product is held at a time. UserError if an adapter would be left out.
    """
    layers = _layers(model)
    adapters = {p for layer in layers.values() for p in _pair(layer)}
    for name, parameter in model.get_base_model().named_parameters():
        if parameter not in adapters:
            layer = layers.get(parameter)
            merged = parameter + layer.get_delta_weight("default") if layer else parameter
            yield name.replace(".base_layer", ""), merged


def _pair(layer: Any) -> list[nn.Parameter]:
    """A and B, whichever names this kind of layer has for them."""
    parts = [getattr(layer, name) for name in layer.adapter_layer_names]
    return [p for part in parts if "default" in part for p in part.parameters()]


def _layers(model: PeftModel) -> dict[nn.Parameter, Any]:
    """Each parameter that has adapters, and PEFT's layer that holds them.

    Fused experts and routers have no `weight` of a linear layer: PEFT names their parameter.
    UserError where parameters are trained that are no such adapters.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    by_parameter: dict[nn.Parameter, Any] = {}
    for layer in layers:
        is_fused = isinstance(layer, ParamWrapper)
        by_parameter[layer.get_param() if is_fused else layer.get_base_layer().weight] = layer
    adapters = {p for layer in by_parameter.values() for p in _pair(layer)}
    trained = {p for p in model.parameters() if p.requires_grad}
    if len(by_parameter) < len(layers) or trained - adapters:
        raise UserError(
            f"lora_target_modules: got layers of {type(model.get_base_model()).__name__} whose "
            f"adapters cannot be merged into its weights for sampling (only {len(by_parameter)} of "
            f"its {len(layers)} can be merged); name linear layers of its attention"
        )
    return by_parameter


@torch.no_grad()
def disturb(model: PeftModel, seed: int) -> None:
    """Give adapters random values that show in the logits and keep the model's scale."""
    layers = _layers(model)
    generator = torch.Generator(next(iter(layers)).device).manual_seed(seed)
    for weight, layer in layers.items():
        a, b = _pair(layer)
        b.normal_(generator=generator)  # and then the product is a third of the weight's size
        b.mul_(weight.norm() / (3 * layer.scaling["default"] * a.norm() * len(b) ** 0.5))


def is_adapter(folder: str | Path) -> bool:
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def base_of(folder: str | Path) -> str:
    """The folder or hub id of the model that an adapter folder belongs to.

    A checkpoint beside the folder, which moves together with it, comes before a recorded path.
    """
    name = read_json(Path(folder) / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str):
        raise UserError(
            f"model: the adapters in {folder} name no base model; enter it in {ADAPTER_CONFIG}"
        )
    sibling = Path(folder).resolve().parent / Path(name).name
    base = str(sibling) if sibling.is_dir() else name
    if is_adapter(base):
        raise UserError(
            f"model: the adapters in {folder} have adapters as their base model; mend "
            f"base_model_name_or_path in {ADAPTER_CONFIG}"
        )
    return base


def read_adapters(folder: str | Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Settings and weights of an adapter folder; UserError unless they are plain LoRA's.

    PEFT would load a pickle, and import modules that other kinds of adapters name.
    """
    path = Path(folder) / "adapter_model.safetensors"
    config = read_json(Path(folder) / ADAPTER_CONFIG)
    numbers = [config.get(name) for name in ("r", "lora_alpha")]
    is_lora = config.get("peft_type") == "LORA" and config.get("megatron_config") is None
    if not is_lora or not all(isinstance(number, int | float) for number in numbers):
        raise UserError(f"model: {folder}: {ADAPTER_CONFIG} is not of plain LoRA; give such a one")
    try:
        return config, load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"model: {path} cannot be read as safetensors ({reason_of(error)}); copy it again"
        ) from None


def save(model: PeftModel, folder: Path) -> None:
    """Write the adapters alone, as PEFT does.

    No config.json: with it transformers would look for a whole model here.
    """
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty form of a model card


def load(model: PeftModel, folder: Path) -> None:
    """Take over the adapters of a checkpoint; UserError if names or shapes are others."""
    if not _take(model, read_adapters(folder)[1]):
        raise UserError(f"lora_target_modules: not those of the adapters in {folder}; give its own")


@torch.no_grad()
def _take(model: PeftModel, saved: dict[str, torch.Tensor]) -> bool:
    """Copy adapters to where they were saved from; False if names or shapes are others.

    PEFT's own loading renames keys for some architectures, and may lose adapters by it.
    """
    adapters = adapters_of(model)
    if {n: w.shape for n, w in saved.items()} != {n: w.shape for n, w in adapters.items()}:
        return False
    for name, values in adapters.items():
        values.copy_(saved[name])
    return True


def check_settings(folder: Path, settings: ModelSettings) -> None:
    """UserError if `lora_r` or `lora_alpha` is not that of a checkpoint's adapters."""
    config, _ = read_adapters(folder)
    for name, held in (("lora_r", config["r"]), ("lora_alpha", config["lora_alpha"])):
        if (got := getattr(settings, name)) != held:
            raise UserError(f"{name}: got {got}, but {folder.name} holds adapters of {held}")


def load_merged(base_model: Any, folder: str | Path) -> Any:
    """The plain model with an adapter folder's products added to its weights."""
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict

    _, saved = read_adapters(folder)
    try:
        with torch.random.fork_rng(), quiet():
            model = PeftModel(base_model, LoraConfig.from_pretrained(str(folder)))
            if not _take(model, saved):  # adapters of other software, with its own names
                result: Any = set_peft_model_state_dict(model, saved)
                if lost := [name for name in result.missing_keys if ".lora_" in name]:
                    raise ValueError(f"they leave {lost[0]} without values")
            merged = model.merge_and_unload()
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"model: the adapters in {folder} do not fit their base model ({reason_of(error)}); "
            "give the model that they were trained on"
        ) from None
    return merged.requires_grad_(True)  # PEFT froze it


@contextmanager
def quiet(bars: bool = False) -> Iterator[None]:
    """Without log lines of transformers, warnings of PEFT and, by default, progress bars."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5.23 by an old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # Fused experts are parameters, to which it applies the pattern nevertheless.
        warnings.filterwarnings("ignore", ".*_pattern keys did not match", RuntimeWarning)
        logging.set_verbosity_error()
        if not bars:
            logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if had_bars:
                logging.enable_progress_bar()
