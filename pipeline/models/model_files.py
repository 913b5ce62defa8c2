"""A model's name and JSON files. This module imports no torch."""

import json
import os
import re
from pathlib import Path
from typing import Any

from pipeline.common.console import command
from pipeline.common.errors import UserError
from pipeline.common.layout import ADAPTER_CONFIG, RUN_SETTINGS
from pipeline.common.untrusted import link_out_of, one_line, parse_json, read_file, shown

MAX_JSON_BYTES = 64 << 20
HUB_ID = re.compile(r"[\w-][\w.-]{0,95}(/[\w.-]{1,96})?")


def problem_of_name(name: str) -> str:
    """Return why `name` cannot name a model; "" for a model's folder or a hub id."""
    if os.path.isdir(name):
        has_config = any(Path(name, part).is_file() for part in ("config.json", ADAPTER_CONFIG))
        if not has_config:
            return "a folder without config.json"
        link = link_out_of(name, ("", "additional_chat_templates"))
        rule = "links may lead only inside of it, so copy what they lead to: cp -rL FOLDER COPY"
        return f"{shown(link)} is a link that leads out of it; {rule}" if link else ""
    if name.endswith(".gguf") and os.path.isfile(name):
        return "a GGUF file"
    if os.path.lexists(name):
        return "which is no folder"
    if not HUB_ID.fullmatch(name):
        return "there is no such folder"
    # A folder of runs is no user of the hub.
    beside_runs = "/" in name and any(Path(name).parent.glob(f"*/{RUN_SETTINGS}"))
    return "there is no such run" if beside_runs else ""


def remedy_of(name: str) -> str:
    """Return what to do if `name` cannot be loaded as a model."""
    is_gguf = name.endswith(".gguf")
    converted = f"that `{command('convert')} {name if is_gguf else 'FILE.gguf'} FOLDER` makes"
    if is_gguf:
        return f"give the folder {converted}"
    return f"give a folder made by save_pretrained, or one {converted}"


def check_name(name: str) -> None:
    """Raise UserError unless the name is `tiny`, a model's folder or a hub id; reads no file."""
    if name != "tiny" and (problem := problem_of_name(name)):
        raise UserError(
            f"model: got {name!r}, but it cannot be loaded ({problem}); {remedy_of(name)}, or the "
            "id of a model on the hub"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a model's file; raises UserError for an unreadable file."""
    try:
        value = parse_json(read_file(path, MAX_JSON_BYTES).decode())
        if isinstance(value, dict):
            return value
        reason = "no object"
    except (OSError, ValueError) as error:
        reason = one_line(str(error))
    raise UserError(f"model: {path} cannot be read as JSON ({reason}); copy it again")


def write_for_transformers_4(folder: Path) -> None:
    """Add to a folder of `save_pretrained` what transformers 4 reads there instead of other names.

    Without it, version 4 refuses the tokenizer, and takes a default as the base of rotary
    embeddings.
    """
    path = folder / "tokenizer_config.json"
    content = read_json(path)
    if content.get("tokenizer_class") == "TokenizersBackend":
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    _write_json(path, content)
    path = folder / "config.json"  # a folder of adapters has none
    rope = path.is_file() and (content := read_json(path)).get("rope_parameters")
    if rope and "rope_theta" in rope:  # else each kind of layer has its own
        names = rope.keys() & {"rope_theta", "partial_rotary_factor"}
        content |= {name: rope[name] for name in names}
        if rope.get("rope_type", "default") != "default":
            content["rope_scaling"] = {n: rope[n] for n in rope if n not in names}
        _write_json(path, content)


def _write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
