"""The embedded model: its tokenizer keeps words and ids whole, and both are the same everywhere."""

import hashlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.environments.domains import Domain
from pipeline.environments.embedded.cases import IDS
from pipeline.models.tiny import tiny_model, tiny_tokenizer
from tests.support.helpers import Desk, embedded, tokenizer

ALL_WORDS = tiny_tokenizer(embedded().values())


def encode(text):
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


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


@given(st.one_of(st.text(), st.text("K0123 <|>_tolcaim\n")))
def test_any_unicode_text_survives(text):
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
