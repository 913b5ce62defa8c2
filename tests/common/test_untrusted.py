"""Secrets do not come into messages; words that only look a little like secrets do."""

import pytest

from pipeline.common import untrusted
from pipeline.common.untrusted import keep_secret, masked, reason_of


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("key sk-proj-Ab12Cd34Ef56Gh78 refused", "key *** refused"),
        ("Authorization: Bearer abc123def456ghi", "Authorization: Bearer ***"),
        ("https://me:pw@host/v1", "https://***@host/v1"),
        ("token hf_" + "a" * 30, "token ***"),
        ("get?api_key=12", "get?***"),
        ("http://me:it's+secret@host/v1", "http://***@host/v1"),
        ("key sk-proj-" + "ab" * 12, "key ***"),
        ("Bearer  tok_" + "a1" * 8, "Bearer ***"),
        ("Authorization: Basic bWU6aHVudGVyMg==", "Authorization: Basic ***"),
        ('"api_key": "Ab3dEf9Kq", "x": 1', '"***", "x": 1'),
        ("x-api-key: Ab3dEf9Kq now", "*** now"),
        ("OPENAI_API_KEY=Ab3dEf9Kq", "***"),
        ("ghp_" + "a1" * 12, "***"),
        ("basic understanding of it", "basic understanding of it"),
        ("customer_key: OPENAI_API_KEY", "customer_key: OPENAI_API_KEY"),
        ("sk-learn-based-pipelines", "sk-learn-based-pipelines"),
        ("the bearer certificates", "the bearer certificates"),
        ("task-1234567890123456789", "task-1234567890123456789"),
    ],
)
def test_a_secret_is_masked(text, after):
    assert masked(text) == after


SECRET = "my-secret-key-12345abcDEF"


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("key " + "".join(f"\\u{ord(c):04x}" for c in SECRET) + " is wrong", "key *** is wrong"),
        ("key " + "".join(f"%{ord(c):02X}" for c in SECRET) + " is wrong", "key *** is wrong"),
        (f"key {SECRET[:16]}... is wrong", "key *** is wrong"),
        (f'"{SECRET[:20]}" and more', '"***" and more'),
        ("the price is 10%20off \\u0041", "the price is 10%20off \\u0041"),
        ("my-secret-", "***"),
    ],
)
def test_a_kept_secret_is_masked_escaped_or_cut_off(text, after, monkeypatch):
    monkeypatch.setattr(untrusted, "_secrets", set())
    keep_secret(SECRET)
    assert masked(text) == after


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "It needs one of:\n(1) a file,\n\n (2) a class.\n",
            "It needs one of: (1) a file, (2) a class",
        ),
        ("It broke.\nTraceback: line 1", "It broke"),
        ("\n  \nlate", "late"),
        ("", "ValueError"),
    ],
)
def test_the_reason_of_an_error_is_its_first_line_with_what_that_announces(text, reason):
    assert reason_of(ValueError(text)) == reason
