"""Makes a Hugging Face folder, for the setting `model`, of a GGUF file.

The weights become float32: what quantization rounded stays rounded. Needs the package `gguf`.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

from pipeline.config.cli import Parser
from pipeline.errors import UserError
from pipeline.export.folder import written_whole
from pipeline.files.console import command
from pipeline.files.imports import importing
from pipeline.files.untrusted import reason_of


def main(argv: list[str]) -> int:
    """Run `convert FILE OUT`; raises UserError for a mistake of the user."""
    options = _parser().parse_args(argv)
    file = options.file
    if not file.is_file():
        raise UserError(f"convert: got {str(file)!r}, which is no file; give a GGUF file")
    if find_spec("gguf") is None:
        raise UserError("convert: needs the package gguf; pip install gguf")
    with importing():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from pipeline.models.lora import quiet

    with written_whole(options.out) as writing, quiet():
        try:
            source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
            tokenizer = AutoTokenizer.from_pretrained(**source)
            quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        except Exception as error:  # transformers raises all kinds of errors for other files
            raise UserError(f"convert: {file} cannot be read ({reason_of(error)})") from None
        # transformers refuses to save a model that was quantized, so a new one takes its weights.
        vars(quantized.config).pop("quantization_config", None)
        model = type(quantized)(quantized.config)
        model.load_state_dict(quantized.state_dict())
        model.tie_weights()
        model.save_pretrained(writing)
        tokenizer.save_pretrained(writing)
    print(f"{options.out}: {model.num_parameters() / 1e6:,.0f} M weights of {file}")
    print(f"train it: {command('train')} --model {options.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    about, _, rest = str(__doc__).partition("\n\n")
    parser = Parser(prog=command("convert"), description=about, epilog=rest, allow_abbrev=False)
    parser.add_argument("file", type=Path, metavar="FILE", help="a GGUF file")
    parser.add_argument("out", type=Path, metavar="OUT", help="new or empty folder")
    return parser
