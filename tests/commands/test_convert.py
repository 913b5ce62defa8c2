"""`convert` makes a model folder of a GGUF file, or says why not."""

import json

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from pipeline.commands import folders
from pipeline.config.cli import parse
from pipeline.config.settings import ModelSettings
from pipeline.models.loading import load_tokenizer
from pipeline.models.model_files import check_name
from tests.support.messages import refusal, says


def test_a_gguf_file_as_the_model_is_one_line_that_says_how_to_convert_it(tmp_path):
    file = tmp_path / "small.gguf"
    file.write_bytes(b"GGUF")
    assert parse(["--model", str(file)]).recipe == "pretrained"
    says(refusal(check_name, str(file)), "a GGUF file", f"convert {file} FOLDER")


def test_what_cannot_be_converted_is_one_line(tmp_path, monkeypatch):
    says(refusal(folders.convert, [str(tmp_path / "no.gguf"), "out"]), "which is no file")
    file = tmp_path / "no.gguf"
    file.write_bytes(b"no GGUF file at all")
    monkeypatch.setattr(folders, "find_spec", lambda name: None)
    says(refusal(folders.convert, [str(file), "out"]), "pip install gguf")


def test_another_file_is_refused_and_leaves_nothing(tmp_path):
    pytest.importorskip("gguf")
    file, out = tmp_path / "no.gguf", tmp_path / "out"
    file.write_bytes(b"no GGUF file at all")
    message = refusal(folders.convert, [str(file), str(out)])
    says(message, f"{file} cannot be read", "GGUF")
    assert [path.name for path in tmp_path.iterdir()] == ["no.gguf"]


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gguf(
    path, model="gpt2", words=(*BYTES, "ĠĠ", "10", "<end>"), merges=("Ġ Ġ", "1 0"), **keys
):
    """A Llama of one layer; `keys` are further fields of its tokenizer."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    last = len(words) - 1
    fields = {
        **{"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8},
        **{"head_count": 1, "head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 5e4},
        **{"rope_dimension_count": 8, "vocab_size": len(words), "tokenizer_model": model},
        "token_list": list(words),
        "token_scores": [float(-n) for n in range(len(words))],
        "token_types": [1] * last + [3],
        "token_merges": list(merges),
        **{"bos_token_id": last, "eos_token_id": last, "unk_token_id": 0, "pad_token_id": last},
    }
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    for name, value in keys.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_string
        add(f"tokenizer.ggml.{name}", value)
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", np.zeros((len(words), 8), np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((8, 8), np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["Ġ", "Ġ", "10"]),
        ("smollm", ["ĠĠ", "1", "0"]),
        ("starcoder", ["ĠĠ", "1", "0"]),
        ("llama-bpe", ["Ġ", "Ġ", "10"]),
        ("qwen2", ["Ġ", "Ġ", "1", "0"]),
        ("falcon", ["Ġ", "Ġ", "10"]),
        ("deepseek-coder", ["ĠĠ", "1", "0"]),
    ],
)
def test_a_gguf_file_keeps_its_split(tmp_path, pre, tokens):
    write_gguf(tmp_path / "small.gguf", pre=pre)
    assert folders.convert([str(tmp_path / "small.gguf"), str(tmp_path / "out")]) == 0
    tokenizer = load_tokenizer(ModelSettings(model=str(tmp_path / "out")))
    assert tokenizer.tokenize("  10") == tokens
    assert tokenizer.eos_token == "<end>"
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_theta"] == 5e4  # where transformers 4 looks for it


@pytest.mark.parametrize("keys", [{"pre": "made-up"}, {"pre": "default"}, {}])
def test_a_gguf_file_with_an_unknown_split_is_refused(tmp_path, keys):
    write_gguf(tmp_path / "small.gguf", **keys)
    argv = [str(tmp_path / "small.gguf"), str(tmp_path / "out")]
    says(
        refusal(folders.convert, argv), "tokenizer.ggml.pre", str(keys.get("pre")), "tokenizer.json"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("space", "tokens"), [(True, ["▁", "a", "▁", "a"]), (False, ["a", "▁", "a"])]
)
def test_a_sentencepiece_file_says_whether_a_space_begins_a_text(tmp_path, space, tokens):
    words = ("<unk>", "<s>", "</s>", "▁", "a", "<end>")
    keys = {"model": "llama", "words": words, "merges": (), "add_space_prefix": space}
    write_gguf(tmp_path / "small.gguf", **keys)
    assert folders.convert([str(tmp_path / "small.gguf"), str(tmp_path / "out")]) == 0
    tokenizer = load_tokenizer(ModelSettings(model=str(tmp_path / "out")))
    assert tokenizer.tokenize("a a") == tokens
    ids = tokenizer("a a", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "a a"
