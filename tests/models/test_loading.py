"""The policy: what is sampled, its log-probabilities, and the weights that both come from."""

import json

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pipeline.common import children
from pipeline.config.settings import Config, ModelSettings
from pipeline.models.loading import empty_model, load_folder, load_model, load_tokenizer
from pipeline.models.tiny import tiny_model
from pipeline.rollout.samplers.own import RowSampler
from scripts.proofs.grid import small_model
from tests.rollout.samplers.test_generate import play, recomputed
from tests.support.helpers import tokenizer
from tests.support.messages import refusal, says

END = 0  # the end of turn of the small models


def with_max_length(folder, most) -> ModelSettings:
    """The settings of a model in a folder whose tokenizer has this `model_max_length`."""
    tokenizer().save_pretrained(folder)
    tiny_model(tokenizer(), 0).config.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": most}))
    return ModelSettings(model=str(folder))


@pytest.mark.parametrize("most", ["abc", "512", -1, True, [1], {"a": 1}, float("nan")])
def test_a_wrong_model_max_length_is_refused_by_name(tmp_path, most):
    says(
        refusal(load_tokenizer, with_max_length(tmp_path, most)),
        "model_max_length ",
        " in its tokenizer_config.json; give",
    )


@pytest.mark.parametrize("most", [None, 512, 1e30, 10**40])
def test_a_model_max_length_may_be_any_number_or_null(tmp_path, most):
    assert load_tokenizer(with_max_length(tmp_path, most))("a")["input_ids"]


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECES = [*ALPHABET, "ĠĠ", "ĠĠĠĠ", "10", "tt"]
MERGES = [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("1", "0"), ("t", "t")]


def own_split(**parts) -> Tokenizer:
    """A byte-level tokenizer; `parts` replace its pre-tokenizer or its normalizer."""
    model = models.BPE(vocab={piece: n for n, piece in enumerate(PIECES)}, merges=MERGES)
    made = Tokenizer(model)
    made.decoder = decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(made, name, part)
    made.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    return made


DIGITS = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
)
LINES = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"\n|[^\n]+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


@pytest.mark.parametrize(
    ("parts", "tokens"),
    [
        ({"pre_tokenizer": DIGITS}, ["tt", "Ċ", "ĠĠĠĠ", "1", "0"]),
        ({"pre_tokenizer": LINES}, ["tt", "Ċ", "ĠĠĠĠ", "10"]),
        ({"normalizer": normalizers.Replace("t", "1")}, ["1", "1", "Ċ", "ĠĠ", "Ġ", "Ġ", "10"]),
        ({}, ["tt", "Ċ", "ĠĠ", "Ġ", "Ġ", "10"]),
    ],
)
@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("GPT2Tokenizer", "gpt2"),
        ("GPT2TokenizerFast", "llama"),
        ("LlamaTokenizer", "llama"),
        ("LlamaTokenizerFast", "mistral"),
        ("Qwen2Tokenizer", "qwen2"),
        ("GPTNeoXTokenizerFast", "gpt_neox"),
        ("CohereTokenizer", "cohere"),
        (None, "qwen3"),
    ],
)
def test_a_folder_keeps_the_split_of_its_own_tokenizer(tmp_path, name, model_type, parts, tokens):
    own_split(**parts).save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": name, "chat_template": "{{ messages }}"} if name else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = load_tokenizer(ModelSettings(model=str(tmp_path)))
    assert loaded.tokenize("tt\n    10") == tokens
    assert len(loaded) == len(PIECES) + 2  # no tokens of a class of transformers
    assert loaded.chat_template == config.get("chat_template")


def test_a_tokenizer_keeps_what_its_configuration_and_its_class_add(tmp_path):
    own_split(pre_tokenizer=DIGITS).save(str(tmp_path / "tokenizer.json"))
    added = {str(len(PIECES) + 2): {"content": "<think>", "special": False}}
    added[str(len(PIECES) + 2)] |= dict.fromkeys(("lstrip", "rstrip", "normalized"), False)
    config = {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    loaded = load_tokenizer(ModelSettings(model=str(tmp_path)))
    assert loaded.tokenize("    1<think>10") == ["ĠĠĠĠ", "1", "<think>", "1", "0"]
    assert loaded.eos_token == loaded.unk_token == "<|endoftext|>"  # the class's own


# Sampling


def test_with_eager_attention_sampled_logprobs_are_those_that_training_recomputes():
    model = small_model()
    model.set_attn_implementation("eager")
    ours, theirs = recomputed(
        model, play(RowSampler(model, END, 1.0, torch.float32), range(24), vocabulary=16)
    )
    assert len(ours) > 200
    assert float((ours - theirs).abs().max()) < 1e-5


# Loading


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_attn_implementation", "eager"),
        ("_attn_implementation", "kernels-community/flash-attn2"),
        ("_experts_implementation", "kernels-community/experts"),
        ("output_attentions", True),
        ("return_dict", False),
    ],
)
def test_the_settings_choose_the_kernels_and_not_the_folder(tmp_path, name, value):
    small_model(1).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    settings = ModelSettings(model=str(tmp_path))
    for model in (load_folder(tmp_path, settings), empty_model(Config(model=settings))):
        assert model.config._attn_implementation == "sdpa"
        assert getattr(model.config, "_experts_implementation", None) in (None, "eager")
        assert (model.config.output_attentions, model.config.return_dict) == (False, True)


def test_a_number_in_the_configuration_cannot_take_all_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "MAX_BYTES", 64 << 20)
    small_model(1).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_labels": 50_000_000}))
    settings = ModelSettings(model=str(tmp_path))
    says(
        refusal(empty_model, Config(model=settings)),
        "model: its config.json takes more than ",
        " mend it, or",
    )


def test_the_tiny_model_has_the_attention_that_is_set():
    settings = ModelSettings(attn_implementation="eager")
    assert load_model(settings, tokenizer(), 0).config._attn_implementation == "eager"
    assert load_model(ModelSettings(), tokenizer(), 0).config._attn_implementation == "sdpa"
