"""LoRA (Hu et al. 2021, arXiv 2106.09685) through PEFT: small trained matrices on a frozen model.

A layer's weight W acts as W + lora_alpha / lora_r * B A. Checkpoints hold A and B alone and name
the folder or hub id of the base model, so PEFT loads and merges them too. PEFT is imported where
it is used: most runs have no adapters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pipeline.config.settings import ModelSettings
from pipeline.errors import UserError
from pipeline.files.untrusted import reason_of
from pipeline.models.files import ADAPTER_CONFIG, read_json, weights_in
from pipeline.models.layers import outer_layers

if TYPE_CHECKING:
    from peft import PeftModel

WEIGHTS = "adapter_model"  # the stem of their file
MAX_GAP = 5e-4  # nats between the model with adapters and the merged one, in fp32
Layers = dict[nn.Parameter, Any]  # PEFT's layers by the parameter that their adapters change


def attach(model: Any, settings: ModelSettings, base: str, seed: int) -> PeftModel:
    """The model with fresh adapters, whose product is zero; the model itself is frozen.

    `base` is the folder or hub id that its weights came from. Raises UserError where
    `lora_target_modules` names anything but linear layers between embeddings and output layer.
    """
    from peft import LoraConfig, get_peft_model

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
        try:
            attached = get_peft_model(model, config)
        except (ValueError, NotImplementedError, TypeError) as error:
            raise UserError(
                f"lora_target_modules: got {', '.join(targets)}, which PEFT cannot give adapters "
                f"to in {type(model).__name__} ({reason_of(error)}); name other linear layers"
            ) from None
    config.base_model_name_or_path = base  # PEFT puts the model's own idea of its name there
    attached.eval()  # as it came: modules are made in training mode
    if not any(parameter.is_meta for parameter in attached.parameters()):
        _check_merging(attached)
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


def base_model(model: Any) -> Any:
    """The model inside one with adapters, which sit in it still; any other model as it is."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def adapters_of(model: PeftModel) -> dict[str, torch.Tensor]:
    """The adapters, not copied, under the names of `adapter_model.safetensors`."""
    from peft import get_peft_model_state_dict

    own: dict[str, torch.Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return own


def merged_parameters(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and parameters of the plain model, in its own order, LoRA's products added to them.

    One product is held at a time. UserError where an adapter would be left out.
    """
    layers = _layers(model)
    adapters = {p for layer in layers.values() for p in _pair(layer)}
    for name, parameter in model.get_base_model().named_parameters():
        if parameter not in adapters:
            whole = _merged(parameter, layers[parameter]) if parameter in layers else parameter
            yield name.replace(".base_layer", ""), whole


def _merged(parameter: torch.Tensor, layer: Any) -> torch.Tensor:
    whole: torch.Tensor = parameter + layer.get_delta_weight("default")
    return whole


def _pair(layer: Any) -> list[nn.Parameter]:
    """A and B, whichever names this kind of layer has for them."""
    parts = [getattr(layer, name) for name in layer.adapter_layer_names]
    return [p for part in parts if "default" in part for p in part.parameters()]


def _layers(model: PeftModel) -> Layers:
    """Each parameter that has adapters, and the layer that holds them.

    Fused experts and routers have no `weight` of a linear layer: PEFT names their parameter.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    found: Layers = {}
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        fused = isinstance(layer, ParamWrapper)
        found[layer.get_param() if fused else layer.get_base_layer().weight] = layer
    pairs = [_pair(layer) for layer in found.values()]
    trained = {p for p in model.parameters() if p.requires_grad}
    if len(found) < len(layers) or trained - {p for pair in pairs for p in pair}:
        raise _not_supported(model, f"only {len(found)} of its {len(layers)} can be merged")
    return found


def _not_supported(model: PeftModel, why: str) -> UserError:
    name = type(model.get_base_model()).__name__
    return UserError(
        f"lora_target_modules: got layers of {name} whose adapters cannot be merged into its "
        f"weights for sampling ({why}); name linear layers of its attention"
    )


@torch.no_grad()
def _check_merging(model: PeftModel) -> None:
    """UserError where the model with adapters is not the model into which they are merged.

    Adapters get random values for it, and their own back. A router on the border between two
    experts may choose differently for no more than rounding, so one agreement of three suffices.
    """
    layers = _layers(model)
    kept = [(p, p.clone()) for layer in layers.values() for p in _pair(layer)]
    try:
        gaps = (_gap(model, layers, seed) for seed in range(3))
        gap = next((gap for gap in gaps if gap <= MAX_GAP), None)
        if gap is None:
            raise _not_supported(model, f"it computes something else, by over {MAX_GAP:g} nats")
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of a layer that PEFT wraps, but cannot run
        raise _not_supported(model, reason_of(error)) from None
    finally:
        for parameter, before in kept:
            parameter.copy_(before)


def _gap(model: PeftModel, layers: Layers, seed: int) -> float:
    """The largest difference of log-probabilities, in nats, once adapters have random values."""
    disturb(model, seed)
    ids = torch.arange(1, 9, device=next(iter(layers)).device)[None]
    ids = ids % model.get_input_embeddings().num_embeddings
    apart = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    with model.disable_adapter(), _merged_for_passes(model, layers):
        whole = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    return float((apart - whole).abs().nan_to_num(torch.inf).max())


@torch.no_grad()
def disturb(model: PeftModel, seed: int) -> None:
    """Give adapters random values that show in the logits, and yet make no other model."""
    layers = _layers(model)
    generator = torch.Generator(next(iter(layers)).device).manual_seed(seed)
    for weight, layer in layers.items():
        a, b = _pair(layer)
        b.normal_(generator=generator)  # and then the product is a third of the weight's size
        b.mul_(weight.norm() / (3 * layer.scaling["default"] * a.norm() * len(b) ** 0.5))


@contextmanager
def _merged_for_passes(model: PeftModel, layers: Layers) -> Iterator[None]:
    """The weights with their adapters added: those of one layer at a time, while it computes."""
    kept: dict[nn.Parameter, torch.Tensor] = {}
    left = dict(layers)

    def merge(inside: list[nn.Parameter]) -> None:
        for parameter in inside:
            kept[parameter] = parameter.data
            parameter.data = _merged(parameter, layers[parameter])

    def restore(inside: list[nn.Parameter]) -> None:
        for parameter in inside:
            parameter.data = kept.pop(parameter)

    handles = []
    for block in outer_layers(model):
        inside = [parameter for parameter in block.parameters() if parameter in layers]
        for parameter in inside:
            left.pop(parameter, None)
        handles.append(block.register_forward_pre_hook(lambda *_, ps=inside: merge(ps)))
        handles.append(block.register_forward_hook(lambda *_, ps=inside: restore(ps)))
    try:
        merge(list(left))
        yield
    finally:
        restore(list(kept))
        for handle in handles:
            handle.remove()


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
    from peft.utils.save_and_load import load_peft_weights

    check_files(folder)
    if not _take(model, load_peft_weights(str(folder), device="cpu")):
        raise UserError(f"lora_target_modules: not those of the adapters in {folder}; give its own")


@torch.no_grad()
def _take(model: PeftModel, saved: dict[str, torch.Tensor]) -> bool:
    """Copy adapters to where they were saved from; False where names or shapes are others.

    PEFT's own loading renames keys for some architectures, and may lose adapters by it.
    """
    own = adapters_of(model)
    if {n: w.shape for n, w in saved.items()} != {n: w.shape for n, w in own.items()}:
        return False
    for name, values in own.items():
        values.copy_(saved[name])
    return True


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
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict
    from peft.utils.save_and_load import load_peft_weights

    check_files(folder)
    trained = {name for name, p in base_model.named_parameters() if p.requires_grad}
    try:
        with torch.random.fork_rng(), _quiet():
            model = PeftModel(base_model, LoraConfig.from_pretrained(str(folder)))
            saved = load_peft_weights(str(folder), device="cpu")
            if not _take(model, saved):  # those of other software, in names of its own
                left: Any = set_peft_model_state_dict(model, saved)
                if lost := [name for name in left.missing_keys if ".lora_" in name]:
                    raise ValueError(f"they leave {lost[0]} without values")
            whole = model.merge_and_unload()
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"model: the adapters in {folder} do not fit their base model ({reason_of(error)}); "
            "give the model that they were trained on"
        ) from None
    for name, parameter in whole.named_parameters():  # PEFT froze them
        parameter.requires_grad_(name in trained)
    return whole


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5.23 by an old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # Fused experts are parameters, to which it applies the pattern nevertheless.
        warnings.filterwarnings("ignore", ".*_pattern keys did not match", RuntimeWarning)
        yield
