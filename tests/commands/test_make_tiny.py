"""`make-tiny`: a model's folder whose tokenizer has the words of a file of demonstrations."""

import json
import random
from pathlib import Path

import pytest

from examples.trl_environment import demonstration
from pipeline.commands.folders import make_tiny as main
from pipeline.config.cli import parse
from pipeline.models.loading import load_folder, load_tokenizer
from pipeline.models.model_files import check_name
from tests.support.messages import refusal, says

ASKED = {"role": "user", "content": "hi"}
LONG = {"role": "assistant", "content": "9" * 4200}


@pytest.fixture
def tickets(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    random.seed(1)
    lines = [json.dumps(demonstration()) + "\n" for _ in range(60)]
    Path("tickets.jsonl").write_text("".join(lines))
    return Path("tickets.jsonl")


def test_the_folder_is_a_model_whose_tokens_are_the_words_of_the_file(tickets, capsys):
    assert main([str(tickets), "tiny"]) == 0
    shown = capsys.readouterr().out
    says(
        shown,
        "tools: read_ticket, assign;",
        "60 demonstrations have ",
        " at most",
        "--model ./tiny --demonstrations '{DOMAIN: tickets.jsonl}'",
    )
    settings = parse(["--model", "./tiny"]).model
    check_name(settings.model)
    tokenizer = load_tokenizer(settings)
    for text in ("read_ticket", "finance", "A question about: parcel", " to a team."):
        assert len(tokenizer(text)["input_ids"]) == 1
    assert len(tokenizer("T1")["input_ids"]) == 2  # digits stay apart
    model = load_folder(settings.model, settings)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    assert main([str(tickets), "other", "--seed", "2"]) == 0
    assert not load_folder("other", settings).lm_head.weight.equal(model.lm_head.weight)


def test_fields_are_tokens_with_their_digits(tickets, capsys):
    lines = "SIM: ok, 5G\nSpeed: 12 Mbps | Battery: 80%"
    answers = [ASKED, {"role": "assistant", "content": "I look, now"}]
    answers.append({"role": "tool", "content": lines})
    tickets.write_text(f"{json.dumps({'messages': answers})}\n" * 3)
    assert main([str(tickets), "tiny", "--fields"]) == 0
    tokenizer = load_tokenizer(parse(["--model", "./tiny"]).model)
    fields = [tokenizer.decode([number]) for number in tokenizer(lines)["input_ids"]]
    assert fields == ["SIM: ok, ", "5G\n", "Speed: 12 Mbps | ", "Battery: 80%"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["tickets.jsonl, line 61", "not JSON"]),
        ('{"messages": []}', ["tickets.jsonl, line 61", "messages"]),
        ('{"messages": [{"role": "user", "content": "hi"}]}', ["line 61", "an assistant message"]),
        (json.dumps({"messages": [ASKED, LONG], "tools": 1}), ["line 61"]),
        (json.dumps({"messages": [ASKED, LONG]}), ["line 61", "tokens, the tiny model 4096"]),
    ],
)
def test_a_bad_line_is_told_by_its_number(tickets, line, words):
    with tickets.open("a") as file:
        file.write(line + "\n")
    says(refusal(main, ["tickets.jsonl", "out"]), *words)
    assert list(Path().iterdir()) == [tickets]
