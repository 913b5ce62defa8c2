"""How the tokenizer of a GGUF file splits text into pieces, which it then makes tokens of.

For byte-level tokenizers, the file has only the name of the split, `tokenizer.ggml.pre`. Names and
expressions are facts from llama.cpp (src/llama-vocab.cpp) and the models' own tokenizer.json.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, pre_tokenizers

from pipeline.common.errors import UserError
from pipeline.common.untrusted import shown

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_START = r"[^\r\n\p{L}\p{N}]?"
_QWEN2 = rf"{_ENDINGS}|{_START}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_MARKS = (r"?\p{L}+", r"?[\p{L}\p{M}]+"), (r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_QWEN35 = _QWEN2.replace(*_MARKS[0]).replace(*_MARKS[1])


def _cased(ending: str, numbers: str) -> str:
    """Return an expression in which a word begins where a capital follows a small letter."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = f"{_START}{upper}*{lower}+{ending}|{_START}{upper}+{lower}*{ending}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_DEEPSEEK_CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"]
_LLAMA3_NAMES = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"
# In these, a piece that is a token stays whole, even if no merges lead to it.
WHOLE_FIRST = f"{_LLAMA3_NAMES} tekken".split()
SPLITS = {  # names -> expressions, one after the other
    "gpt-2 phi-2 mpt olmo jais exaone4 mellum trillion granite-docling": [_GPT2],
    "smollm starcoder refact command-r codeshell exaone minerva-7b": [r"\p{N}", _GPT2],
    f"{_LLAMA3_NAMES} dbrx smaug-bpe glm4 chatglm-bpe": [_LLAMA3],
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": [_QWEN2],
    "qwen35": [_QWEN35],
    "tekken": [_cased("", r"\p{N}")],
    "gpt-4o llama4 kanana2 talkie minimax-m2": [_cased(f"{_ENDINGS}?", r"\p{N}{1,3}")],
    "falcon": [r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"],
    "deepseek-coder": _DEEPSEEK_CODER,
}
SPLIT_OF = {name: split for names, split in SPLITS.items() for name in names.split()}


def set_split(tokenizer: Any, file: Path) -> None:
    """Let a tokenizer that was read from a GGUF file split text as the file says.

    Raises UserError for a byte-level tokenizer with the name of an unknown split, or without one.
    """
    read = import_module("gguf").GGUFReader(file).fields.get
    fields = [read(f"tokenizer.ggml.{key}") for key in ("model", "pre", "add_space_prefix")]
    kind, name, has_space = (field and field.contents() for field in fields)
    backend = tokenizer.backend_tokenizer
    if kind == "gpt2":
        if name not in SPLIT_OF:
            raise UserError(
                f"convert: {file} has the tokenizer.ggml.pre {shown(name)}, and how this splits "
                "text is not known here; give --model a folder of the model with a tokenizer.json"
            )
        splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in SPLIT_OF[name]]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        backend.model.ignore_merges = name in WHOLE_FIRST
    elif has_space is False and isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(steps)
