"""The files of a model's folder, looked at before any of them is loaded.

Weights come from safetensors files alone: a pickle can run code as it is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pipeline.errors import UserError
from pipeline.files.untrusted import one_line, parse_json, read_file, reason_of, shown

ADAPTER_CONFIG = "adapter_config.json"
MAX_JSON_BYTES = 64 << 20  # of a file of settings, or of an index of weights
Shape = tuple[int, ...]

_HUB_ID = re.compile(r"[\w-][\w.-]{0,95}(/[\w.-]{1,96})?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def problem_of_name(name: str) -> str:
    """Why a name is neither a model's folder nor a hub id; empty if it is one of them."""
    if os.path.isdir(name):
        made = any(os.path.isfile(Path(name, part)) for part in ("config.json", ADAPTER_CONFIG))
        return "" if made else "a folder without config.json"
    if os.path.lexists(name):
        return "which is no folder"
    return "" if _HUB_ID.fullmatch(name) else "there is no such folder"


def check_name(name: str) -> None:
    """UserError for a model that is neither `tiny` nor a folder nor a hub id; reads no file."""
    if name != "tiny" and (problem := problem_of_name(name)):
        raise UserError(
            f"model: got {name!r}, but it cannot be loaded ({problem}); give a folder made by "
            "save_pretrained, or the id of a model on the hub"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model; UserError names the file."""
    try:
        value = parse_json(read_file(path, MAX_JSON_BYTES).decode())
        if not isinstance(value, dict):
            raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise UserError(
            f"model: {path} cannot be read as JSON ({one_line(str(error))}); copy it again"
        ) from None
    return value


def weights_in(folder: str | Path, stem: str = "model") -> dict[str, Shape]:
    """The names and shapes of the weights in a folder's safetensors files.

    UserError where there are none, where a file is missing or cut short, and where an index names
    files elsewhere.
    """
    folder = Path(folder)
    shapes: dict[str, Shape] = {}
    for path in _files_of_weights(folder, stem):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118  # it is no dict
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"model: {path} cannot be read as safetensors ({reason_of(error)}); copy it again"
            ) from None
    return shapes


def _files_of_weights(folder: Path, stem: str) -> list[Path]:
    config = folder / "config.json"
    if config.is_file() and (other := read_json(config).get("transformers_weights")) is not None:
        raise UserError(
            f"model: {config} names {shown(other)} as its weights; call them model.safetensors, "
            "and take transformers_weights out"
        )
    whole, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        files = read_json(index).get("weight_map")
        names = list(files.values()) if isinstance(files, dict) else []
        for name in names or [None]:
            inside = isinstance(name, str) and Path(name).name == name
            if not inside or not name.endswith(".safetensors"):
                raise UserError(
                    f"model: {index} names the file {shown(name)}; it must name safetensors files "
                    "of its own folder"
                )
        return [folder / name for name in sorted(set(names))]
    pickles = sorted(path.name for kind in _PICKLES for path in folder.glob(kind))
    if pickles:
        raise UserError(
            f"model: {folder} holds its weights as a pickle only ({pickles[0]}), which could run "
            "code; load and save it once with save_pretrained, which writes safetensors"
        )
    raise UserError(f"model: {folder} holds no {whole.name}; give a folder made by save_pretrained")


def refuse_misfits(folder: str, found: Mapping[str, Shape], model: Any) -> None:
    """UserError where a folder's weights are not those of the model that its config.json tells of.

    Weights under other names than the model's are left to what converts them as they are loaded.
    """
    wanted = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in wanted.items():
        if name in found and found[name] != tuple(parameter.shape):
            raise UserError(
                f"model: {folder} holds {name} as {list(found[name])}, but its config.json asks "
                f"for {list(parameter.shape)}; take both from one model"
            )
    held = {id(parameter) for name, parameter in wanted.items() if name in found}
    missing = [name for name, parameter in wanted.items() if id(parameter) not in held]
    if missing and found.keys() <= wanted.keys():
        raise missing_weights(folder, missing)


def missing_weights(folder: str | Path, names: Sequence[str]) -> UserError:
    more = f" and {len(names) - 1} more weights" if len(names) > 1 else ""
    return UserError(
        f"model: {folder} lacks {names[0]}{more} that its config.json asks for; take both from "
        "one model"
    )


def refuse_other_vocabulary(tokenizer: Any, model: Any) -> None:
    """UserError where the tokenizer has ids that the model has no embedding for."""
    last, size = max(tokenizer.get_vocab().values()), model.get_input_embeddings().num_embeddings
    if last >= size:
        raise UserError(
            f"model: its tokenizer has ids up to {last}, but the model {size} embeddings; use the "
            "tokenizer that the model was trained with"
        )
