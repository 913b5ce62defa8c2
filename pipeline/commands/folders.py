"""The commands that write a model's folder: `export`, `convert` and `make-tiny`."""

import argparse
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from pipeline.checkpoints.trained import open_checkpoint
from pipeline.common.console import command
from pipeline.common.errors import UserError
from pipeline.common.hub import check_upload
from pipeline.common.untrusted import printable, reason_of
from pipeline.config.cli import Parser, seed_of
from pipeline.environments.demonstrations import (
    Demonstration,
    fields_of,
    names_of,
    read_demonstrations,
    words_of,
)
from pipeline.environments.domains import Domain
from pipeline.environments.single_turn import SingleTurnEnvironment
from pipeline.models.chat.template import Chat
from pipeline.models.gguf import set_split
from pipeline.models.lora import quiet
from pipeline.models.model_files import write_for_transformers_4
from pipeline.models.tiny import tiny_model, tiny_tokenizer
from pipeline.report.export import (
    adapter_base,
    export,
    is_portable,
    upload_exported,
    written_whole,
)
from pipeline.training.sft import encode


def export_checkpoint(argv: list[str]) -> int:
    """Run `export RUN OUT`; raises UserError for a mistake of the user."""
    parser = _parser(
        "export",
        "Writes a checkpoint of a run as a plain Hugging Face folder with a model card.",
        run="folder of a run",
    )
    parser.add_argument("--merge", action="store_true", help="merge LoRA adapters into the model")
    parser.add_argument(
        "--checkpoint",
        default="latest",
        metavar="NAME",
        help="name of a checkpoint, latest, or best (of --keep-best) [latest]",
    )
    parser.add_argument(
        "--push-to-hub", metavar="REPO_ID", help="also upload OUT; needs a token (HF_TOKEN)"
    )
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    options = parser.parse_args(argv)
    checkpoint = open_checkpoint(options.run, options.checkpoint)
    repo_id = options.push_to_hub
    if repo_id is not None:
        check_upload(repo_id)
        if not options.merge and not is_portable(checkpoint):
            raise UserError(
                "--push-to-hub: the adapters' base model is only here, in "
                f"{adapter_base(checkpoint)}; add --merge"
            )
    export(checkpoint, options.out, options.merge, repo_id)
    files = [path for path in options.out.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"{options.out}: {checkpoint}, {len(files)} files, {size:.1f} MB")
    if not checkpoint.is_adapter and options.merge:
        print("note: the checkpoint has no LoRA adapters, so --merge changes nothing")
    elif not options.merge and not is_portable(checkpoint):
        print(
            f"note: the adapters need their base model, {adapter_base(checkpoint)}; --merge "
            "writes a whole model"
        )
    print("README.md there is the model card", flush=True)
    if repo_id is not None:
        address = upload_exported(checkpoint, options.out, repo_id, options.private)
        print(f"uploaded: {address}")
    return 0


def convert(argv: list[str]) -> int:
    """Run `convert FILE OUT`; raises UserError for a mistake of the user."""
    parser = _parser(
        "convert",
        "Makes a Hugging Face folder, for the setting `model`, of a GGUF file.",
        "The weights become float32: what quantization rounded stays rounded. Needs `gguf`.",
        file="a GGUF file",
    )
    options = parser.parse_args(argv)
    file = options.file
    if not file.is_file():
        raise UserError(f"convert: got {str(file)!r}, which is no file; give a GGUF file")
    if find_spec("gguf") is None:
        raise UserError("convert: needs the package gguf; pip install gguf")
    with written_whole(options.out) as writing, quiet():
        try:
            source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
            tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(**source)
            set_split(tokenizer, file)
            quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        except UserError:
            raise
        except Exception as error:  # transformers raises all kinds of errors for other files
            raise UserError(f"convert: {file} cannot be read ({reason_of(error)})") from None
        # transformers refuses to save a model that was quantized, so a new one takes its weights.
        vars(quantized.config).pop("quantization_config", None)
        model = type(quantized)(quantized.config)
        model.load_state_dict(quantized.state_dict())
        model.tie_weights()
        model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)
        write_for_transformers_4(writing)
    print(f"{options.out}: {model.num_parameters() / 1e6:,.0f} M weights of {file}")
    print(f"train it: {command('train')} --model {options.out}")
    return 0


def make_tiny(argv: list[str]) -> int:
    """Run `make-tiny DEMONSTRATIONS OUT`; raises UserError for a mistake of the user."""
    parser = _parser(
        "make-tiny",
        "Makes a tiny model and its tokenizer, with tokens for the words of demonstrations.",
        "OUT is a folder for the setting `model`. The weights are random.",
        demonstrations="JSON Lines of conversations, as the setting `demonstrations` takes them",
    )
    parser.add_argument(
        "--fields",
        action="store_true",
        help="a token for each frequent piece up to ', ', ' | ' or a line break, digits included",
    )
    parser.add_argument(
        "--seed", type=seed_of, default=1, metavar="N", help="seed of the random weights [1]"
    )
    options = parser.parse_args(argv)
    demonstrations = read_demonstrations(options.demonstrations)
    tools = _tools(demonstrations)
    names = names_of(tools)
    if options.fields:
        words = [*names, *fields_of(demonstrations)]
    else:
        words = words_of(demonstrations, names)
    domain = Domain(
        name="demonstrations", environment=SingleTurnEnvironment, words=partial(list, words)
    )
    tokenizer = tiny_tokenizer([domain])
    model = tiny_model(tokenizer, options.seed)
    chat = Chat(tokenizer)
    lengths = [len(encode(chat, d.messages, d.tools or [])["input_ids"]) for d in demonstrations]
    if max(lengths) > (most := model.config.max_position_embeddings):
        where = demonstrations[lengths.index(max(lengths))].where
        raise UserError(f"{where}: has {max(lengths)} tokens, the tiny model {most}; shorten it")
    with written_whole(options.out) as writing, quiet():
        model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)
        write_for_transformers_4(writing)
    print(f"{options.out}: {model.num_parameters() / 1e6:.2f} M random parameters")
    listed = ", ".join(tool["function"]["name"] for tool in tools) or "none"
    print(printable(f"tools: {listed}; {len(words) - len(names)} frequent texts are tokens"))
    size = f"{sorted(lengths)[len(lengths) // 2]} tokens in the median, {max(lengths)} at most"
    print(f"{len(demonstrations)} demonstrations have {size} (max_tokens counts them)")
    model_name = "./tiny" if str(options.out) == "tiny" else options.out  # tiny is another model
    taken = f"--model {model_name} --demonstrations '{{DOMAIN: {options.demonstrations}}}'"
    print(f"train it: {command('train')} --domains DOMAIN {taken}")
    return 0


def _tools(demonstrations: list[Demonstration]) -> list[dict[str, Any]]:
    """Return {"function": {"name": ...}} for each tool that demonstrations list or call."""
    listed = [tool.get("function") for d in demonstrations for tool in d.tools or ()]
    calls = [c for d in demonstrations for m in d.messages for c in m.get("tool_calls") or ()]
    functions = [f for f in listed if isinstance(f, dict)] + [call["function"] for call in calls]
    names = dict.fromkeys(f["name"] for f in functions if isinstance(f.get("name"), str))
    return [{"function": {"name": name}} for name in names]


def _parser(
    name: str, about: str, more: str | None = None, **source: str
) -> argparse.ArgumentParser:
    """Return the parser of a command that makes the folder OUT from a path, `source`."""
    parser = Parser(prog=command(name), description=about, epilog=more, allow_abbrev=False)
    for argument, about in {**source, "out": "new or empty folder"}.items():
        parser.add_argument(argument, type=Path, metavar=argument.upper(), help=about)
    return parser
