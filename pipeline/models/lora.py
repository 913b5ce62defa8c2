"""LoRA (Hu et al. 2021, arXiv 2106.09685) with PEFT: small trained matrices beside frozen weights.

A layer with the frozen weight W uses W + lora_alpha / lora_r * B A in place of W. The trained
matrices A and B are an adapter. Trainer and sampler compute W x and B A x apart, because the sum
W + B A would lose small updates in bf16. A checkpoint holds the adapters and the name (folder or
hub id) of the base model, so the library PEFT can load a checkpoint, too. PEFT is imported inside
functions, because most runs have no adapters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from pipeline.common.children import rehearse
from pipeline.common.errors import UserError
from pipeline.common.layout import ADAPTER_CONFIG
from pipeline.common.untrusted import printable, reason_of
from pipeline.config.settings import ModelSettings
from pipeline.distributed.sharding import fill
from pipeline.models.model_files import read_json

ADAPTER_FILE = "adapter_model.safetensors"

if TYPE_CHECKING:
    from peft import PeftModel


def attach(
    model: Any, settings: ModelSettings, base: str, seed: int, dtype: torch.dtype = torch.float32
) -> PeftModel:
    """Freeze a model as `dtype` and add new adapters, which change no output before training.

    Adapters are float32, and are multiplied in float32 with inputs that were cast from `dtype`.
    `base` is the folder or hub id of the model's weights. Raises UserError if `lora_target_modules`
    names a module that is not a linear layer, or names the output layer, or if PEFT would add an
    adapter to a weight of less precision.
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
    cast(model, dtype)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        try:
            attached = get_peft_model(model, config)
        except (ValueError, NotImplementedError, TypeError) as error:
            raise UserError(
                f"lora_target_modules: got {', '.join(targets)}, which PEFT cannot give adapters "
                f"to in {type(model).__name__} ({reason_of(error)}); name other linear layers"
            ) from None
    config.base_model_name_or_path = base  # replaces PEFT's name of the base model
    _check_layers(attached)
    return attached.eval()  # PEFT's new modules start in training mode.


def _check_targets(model: Any, targets: list[str]) -> None:
    """Raise UserError for a target that names no linear layer, or that names the output layer."""
    head = model.get_output_embeddings()
    is_linear = {  # name of a module -> whether an adapter can be added to the module
        f".{name}": isinstance(module, nn.Linear | Conv1D) and module is not head
        for name, module in model.named_modules()
    }
    for target in targets:
        found = [linear for name, linear in is_linear.items() if name.endswith(f".{target}")]
        if not found or not all(found):
            known = dict.fromkeys(n.rpartition(".")[2] for n, linear in is_linear.items() if linear)
            raise UserError(
                f"lora_target_modules: got {target!r}; give linear layers below the output layer, "
                f"here {', '.join(known)}, or all-linear by itself"
            )


def base_model(model: Any) -> Any:
    """Return the model inside PEFT's wrapper, or the model itself if the model has no adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapters_of(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return the adapters as {name in `adapter_model.safetensors`: the model's own tensor}."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, save_embedding_layers=False)


def cast(model: Any, dtype: torch.dtype) -> None:
    """Convert a model's parameters, except adapters, to `dtype`; buffers keep their types."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            parameter.data = parameter.data.to(dtype)


def _check_layers(model: PeftModel) -> None:
    """Raise UserError unless training changes adapters alone, which can be merged without loss."""
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    named = base.named_parameters()
    parameters = {n.replace(".base_layer", ""): p for n, p in named if ".lora_" not in n}
    # PEFT's layers for fused experts and routers have a `parameter_name`.
    layers = {n: layer for n, layer in base.named_modules() if isinstance(layer, LoraLayer)}
    adapted = {f"{n}.{getattr(x, 'parameter_name', 'weight')}" for n, x in layers.items()}
    adapted = {name.replace(".base_layer", "") for name in adapted}
    if adapted - parameters.keys() or any(p.requires_grad for p in parameters.values()):
        raise UserError(
            f"lora_target_modules: got layers of {type(base).__name__} whose adapters cannot be "
            "merged into its weights; name linear layers of its attention"
        )
    added = [n for n, layer in layers.items() if hasattr(layer, "parameter_name")]
    if added and parameters[next(iter(parameters))].dtype != torch.float32:
        raise UserError(
            f"lora_target_modules: got {printable(added[0])}, where PEFT adds the adapter to "
            "weights in bf16 and small updates are lost; name linear layers of the attention, or "
            "set mixed_precision no"
        )


def is_adapter(folder: str | Path) -> bool:
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def base_named_in(folder: str | Path) -> str:
    """Return the folder or hub id of the base model for a folder with adapters.

    A folder that lies beside `folder` and has the base model's name takes priority, because both
    folders may have been moved together.
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
    """Return the configuration and the weights of the adapters in a folder.

    Raises UserError unless the adapters are LoRA without `megatron_config`. PEFT itself would load
    a pickle, and would import a module that a configuration with `megatron_config` names.
    """
    path = Path(folder) / ADAPTER_FILE
    config = read_json(Path(folder) / ADAPTER_CONFIG)
    is_lora = config.get("peft_type") == "LORA" and config.get("megatron_config") is None
    numbers = [config.get("r"), config.get("lora_alpha")]
    if not is_lora or not all(isinstance(number, int | float) for number in numbers):
        raise UserError(f"model: {folder}: {ADAPTER_CONFIG} is not of plain LoRA; give such a one")
    try:
        return config, load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"model: {path} cannot be read as safetensors ({reason_of(error)}); copy it again"
        ) from None


def save(model: PeftModel, folder: Path, trained: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write the adapters, but no config.json, which would make transformers expect a full model.

    `trained` has the whole parameters of a sharded model's adapters.
    """
    model.save_pretrained(str(folder), save_embedding_layers=False, state_dict=trained)
    base_model(model).generation_config.save_pretrained(folder)  # what ends a message
    (folder / "README.md").unlink(missing_ok=True)  # PEFT writes an empty model card.


@torch.no_grad()
def load(model: PeftModel, folder: str | Path) -> None:
    """Load a checkpoint's adapters into a model; raises UserError if names or shapes differ.

    PEFT's own loading renames the keys of some architectures, and may lose adapters.
    """
    saved = read_adapters(folder)[1]
    if not _have_shapes(model, saved):
        raise UserError(f"lora_target_modules: not those of the adapters in {folder}; give its own")
    for name, values in adapters_of(model).items():
        fill(values, saved[name])


def _have_shapes(model: PeftModel, saved: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a model's adapters have the names and shapes of others."""
    wanted = {name: weight.shape for name, weight in adapters_of(model).items()}
    return wanted == {name: weight.shape for name, weight in saved.items()}


def check_settings(folder: Path, settings: ModelSettings) -> None:
    """Raise UserError if `lora_r` or `lora_alpha` differs from the value in a checkpoint."""
    config, _ = read_adapters(folder)
    for name, held in (("lora_r", config["r"]), ("lora_alpha", config["lora_alpha"])):
        if (got := getattr(settings, name)) != held:
            raise UserError(f"{name}: got {got}, but {folder.name} holds adapters of {held}")


def load_merged(base_model: Any, folder: str | Path) -> Any:
    """Merge the adapters in a folder into the weights of a base model; return the base model."""
    from peft import LoraConfig, PeftModel

    what = f"model: {folder}: {ADAPTER_CONFIG}"
    _, saved = read_adapters(folder)

    def add_without_memory() -> None:
        with torch.device("meta"), quiet():
            shape = PeftModel(base_model.to("meta"), LoraConfig.from_pretrained(str(folder)))
        if not _have_shapes(shape, saved):
            hint = "copy both again, or give the model that they were trained on"
            raise UserError(f"{what} asks for other adapters than {ADAPTER_FILE} has; {hint}")

    # A configuration may have expressions that take endless time, or ask for endless layers.
    rehearse(what, add_without_memory, "give names of modules there, and fewer layers")
    try:
        with torch.random.fork_rng(devices=[]), quiet():
            model = PeftModel(base_model, LoraConfig.from_pretrained(str(folder)))
            load(model, folder)
            merged = model.merge_and_unload()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # PEFT raises all kinds of errors for a wrong configuration
        raise UserError(
            f"model: the adapters in {folder} do not fit their base model ({reason_of(error)}); "
            "give the model that they were trained on"
        ) from None
    return merged.requires_grad_(True)  # PEFT has frozen the weights.


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off log lines and progress bars of transformers, and two warnings of PEFT."""
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()  # `quiet` never turns the progress bars on again.
    with warnings.catch_warnings():
        # PEFT 0.21 uses a name that is deprecated in transformers 5.23.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # PEFT searches the modules for fused experts, but fused experts are not modules.
        warnings.filterwarnings("ignore", ".*_pattern keys did not match", RuntimeWarning)
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
