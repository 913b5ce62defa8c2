"""The embedded model: its tokenizer keeps words and ids whole, and both are the same everywhere."""

import hashlib
import json
from random import Random

import pytest
import torch

from pipeline.environments.domains import Domain
from pipeline.environments.embedded.cases import IDS
from pipeline.models.tiny import tiny_model, tiny_tokenizer
from tests.support.helpers import Desk, embedded, tokenizer

ALL_WORDS = tiny_tokenizer(embedded().values())


def encode(text, made=None):
    return (made or tokenizer())(text, add_special_tokens=False)["input_ids"]


def tokens(text, made=None):
    """The texts of the tokens."""
    return [(made or tokenizer()).decode([token]) for token in encode(text, made)]


# Tokenizer


@pytest.mark.parametrize("word", IDS)
def test_an_id_is_the_same_single_token_wherever_it_stands(word):
    (token,) = encode(word)
    call = {"name": "get_order", "arguments": {"order": word}}
    for text in (
        f"cancel {word}",
        f"please call off {word}",
        f"swap {word} for blue",
        f"refund the one of {word}",
        f"<tool_call>\n{json.dumps(call)}\n</tool_call>",
        json.dumps({"order": word}),
        json.dumps({"free": word, "full": "x"}),
        json.dumps({"error": f"no {word}"}),
    ):
        assert encode(text).count(token) == 1, text


def test_a_call_and_its_result_are_a_few_tokens():
    assert tokens('<tool_call>\n{"name": "find_flights", "arguments": {"day": "mon"}}\n') == [
        "<tool_call>",
        '\n{"name": "',
        "find_flights",
        '", "arguments": {"day": "',
        "mon",
        '"}}\n',
    ]
    assert tokens('{"status": "open", "fare": "flex"}') == [
        '{"status": "',
        "open",
        '", "fare": "',
        "flex",
        '"}',
    ]
    assert tokens("The fee is 40.") == ["The fee is ", "40", "."]


def test_the_default_domains_have_the_same_tokens_whatever_they_are_called():
    """A run of them does not change because there are further domains."""
    vocabulary = tokenizer().get_vocab()
    silent = Domain(name="bank", environment=Desk)
    assert tiny_tokenizer(embedded("retail").values()).get_vocab() == vocabulary
    assert tiny_tokenizer([silent]).get_vocab() == vocabulary
    assert tiny_tokenizer([silent, *embedded("airline").values()]).get_vocab() == vocabulary
    assert digest_of(vocabulary) == "e07cfa2c8417f97b"
    assert digest_of(ALL_WORDS.get_vocab()) == "b6a80bf4c9a27903"


def digest_of(vocabulary):
    return hashlib.sha256(str(sorted(vocabulary.items())).encode()).hexdigest()[:16]


def test_any_unicode_text_survives():
    random = Random(0)
    texts = [
        "",
        " ",
        "\n",
        "\x00\x1f\x7f",
        "é e\u0301 ß",
        "日本語",
        "\U0001f600\u200d",
        "\ue000\uffff",
    ]
    for _ in range(300):
        codes = [random.randrange(0x110000) for _ in range(20)]
        texts.append("".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000))
    texts += ["".join(random.choices("K0123 <|>_tolcaim\n", k=40)) for _ in range(300)]
    for text in texts:
        assert tokenizer().decode(encode(text)) == text


# Model


def hash_of(model):
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def test_the_seed_makes_the_model_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = tiny_model(tokenizer(), 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert hash_of(tiny_model(tokenizer(), 1)) == hash_of(first)
    assert hash_of(tiny_model(tokenizer(), 2)) != hash_of(first)
