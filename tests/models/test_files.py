"""What can name a model, before any file is read, and what its folder holds."""

import json

import pytest
from transformers import AutoConfig, AutoTokenizer, LlamaConfig

from pipeline.models.model_files import check_name, problem_of_name, write_for_transformers_4
from pipeline.models.tiny import tiny_tokenizer
from tests.support.messages import refusal, says


def test_a_run_that_is_not_there_is_not_asked_for_at_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert problem_of_name("runs/TYPO") == ""  # may be a hub id
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").write_text("recipe: tiny\n")
    says(refusal(check_name, "runs/TYPO"), "got 'runs/TYPO'", "there is no such run")
    assert problem_of_name("Qwen/Qwen3-4B") == problem_of_name("gpt2") == ""


SCALED = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_type="llama3")
SCALED["original_max_position_embeddings"] = 512


@pytest.mark.parametrize(
    ("rope", "wanted"),
    [
        ({"rope_type": "default"}, {"rope_theta": 5e5, "rope_scaling": None}),
        (SCALED, {"rope_theta": 5e5, "rope_scaling": SCALED}),
    ],
)
def test_a_written_folder_has_the_names_of_transformers_4(tmp_path, rope, wanted):
    config = LlamaConfig(rope_parameters={**rope, "rope_theta": 5e5})
    config.save_pretrained(tmp_path)
    made = tiny_tokenizer()
    made.add_special_tokens({"extra_special_tokens": ["<extra>"]})
    made.save_pretrained(tmp_path)
    write_for_transformers_4(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {name: written.get(name) for name in wanted} == wanted
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["<extra>"]
    assert "extra_special_tokens" not in written
    # Transformers 5 reads the same as before.
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters
    assert AutoTokenizer.from_pretrained(tmp_path).extra_special_tokens == ["<extra>"]
