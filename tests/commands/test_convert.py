"""`convert` makes a model folder of a GGUF file, or says why not."""

import pytest

from pipeline.commands import folders
from pipeline.config.cli import parse
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
