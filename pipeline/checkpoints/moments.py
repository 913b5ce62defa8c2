"""Weights and moments that are spread over the ranks, in a checkpoint.

torch.distributed.checkpoint writes a sharded model and its moments as safetensors, each rank its
own parts. The parts of a weight are then joined, so that `from_pretrained` reads the checkpoint.
Moments that rank 0 has whole are one file. Any number of ranks, sharded or not, reads both forms.
"""

import shutil
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints.run_folder import read_state
from pipeline.common.errors import UserError
from pipeline.distributed.sharding import ShardedAdamW, placed, read_parts, whole, write_parts
from pipeline.models import lora
from pipeline.models.sampling_copy import has_adapters

NUM_MOMENTS = "num_moments"  # in state.json: the number of parameters with moments
WHOLE = "optimizer.pt"
PARTS = "moments"  # folder with a file of each rank
MOMENTS = ("exp_avg", "exp_avg_sq")
NUM_FILES = 16  # about the number of files, unless these are smaller or larger than:
LEAST_BYTES = 64 << 20
MOST_BYTES = 5 << 30


def write_sharded(
    folder: Path, model: Any, optimizer: torch.optim.Optimizer | None, is_main: bool
) -> None:
    """Write a sharded model, with its moments; all ranks must call this function.

    Weights are never whole on a rank. With LoRA, only the adapters are written, by the main rank.
    """
    if has_adapters(model):
        adapters = ((name, p.detach()) for name, p in model.named_parameters() if p.requires_grad)
        trained = {name: whole(adapter).cpu() for name, adapter in adapters}
        if is_main:
            lora.save(model, folder, trained)
    else:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        write_parts(folder, weights, _files_of(weights), joins=True)
        if is_main:
            shutil.rmtree(folder / "sharded")  # the parts, which were joined
            model.config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
    if optimizer is not None and optimizer.state:
        _write_moments(folder / PARTS, optimizer)


def _write_moments(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    moments = dict[str, torch.Tensor]()
    for number, parameter in enumerate(_parameters(optimizer)):
        state = optimizer.state[parameter]
        moments |= {f"{number}.{name}": state[name] for name in MOMENTS}
        moments["step"] = state["step"].reshape(1)
    write_parts(folder, moments, _files_of(moments), joins=False)


def _files_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the number of each tensor's file, from 1 on. A rank holds its part of a file twice."""
    sizes = {name: tensor.numel() * tensor.itemsize for name, tensor in tensors.items()}
    most = min(max(sum(sizes.values()) // NUM_FILES, LEAST_BYTES), MOST_BYTES)
    places = [end // most for end in accumulate(sizes.values(), initial=0)]
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places), 1)}
    return {name: numbers[place] for name, place in zip(sizes, places, strict=False)}


def whole_moments(optimizer: torch.optim.Optimizer, is_main: bool) -> dict[str, Any] | None:
    """Return the optimizer's state on the main rank, else None; all ranks must call this."""
    if isinstance(optimizer, ShardedAdamW):
        return optimizer.whole_state_dict(is_main)
    return optimizer.state_dict() if is_main else None


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """Restore the state of the optimizer from the checkpoint `path`.

    Raises UserError if the checkpoint has lost moments with which it was written.
    """
    cut = optimizer if isinstance(optimizer, ShardedAdamW) else None
    parameters = _parameters(optimizer) if cut is None else cut.whole_parameters
    saved = optimizer.state_dict()
    num_moments = read_state(path).get(NUM_MOMENTS, 0)
    if (path / PARTS).is_dir():
        saved["state"] = _read_parts(path / PARTS, parameters)
        is_whole = bool(saved["state"])
    elif (path / WHOLE).is_file():
        saved |= torch.load(path / WHOLE, map_location="cpu", weights_only=True)
        is_whole = len(saved["state"]) >= num_moments
    else:
        is_whole = not num_moments
    if not is_whole:
        raise UserError(
            f"resume_from_checkpoint: {path.name} has lost moments of its optimizer ({WHOLE} or "
            f"{PARTS}); copy it again, or give an earlier one"
        )
    for number, moments in saved["state"].items():
        for name in MOMENTS:
            moments[name] = placed(moments[name], parameters[number])
            if cut is not None:
                moments[name] = cut.part(moments[name])
    optimizer.load_state_dict(saved)


def _read_parts(
    folder: Path, parameters: Sequence[torch.Tensor]
) -> dict[int, dict[str, torch.Tensor]]:
    """Return the moments of each parameter, sharded as the parameter is; {} if some are lost."""
    tensors = {
        f"{number}.{name}": torch.empty_like(parameter)
        for number, parameter in enumerate(parameters)
        for name in MOMENTS
    }
    tensors["step"] = torch.zeros(1)
    if not read_parts(folder, tensors):
        return {}
    return {
        number: {
            "step": tensors["step"][0].clone(),
            **{name: tensors[f"{number}.{name}"] for name in MOMENTS},
        }
        for number in range(len(parameters))
    }


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
