"""Models as others publish them train: templates without tools, none, thinking, several ends."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline.config.settings import Config
from pipeline.environments.discovery import tool_schemas
from pipeline.environments.domains import load_domains
from pipeline.models.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from tests.support.messages import says
from tests.support.warm import play

# In the style of models that were tuned to chat before tools were common.
WITHOUT_TOOLS = """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
OPENING = "<|im_start|>assistant{{ '\\n' }}"
TEMPLATES = {
    "without tools": WITHOUT_TOOLS,
    "without a template": None,
    "thinking begun": CHAT_TEMPLATE.replace(OPENING, OPENING + "<think>{{ '\\n' }}"),
}
SHORT = [
    *("--max-steps", "1", "--tasks-per-step", "2", "--num-generations", "2", "--eval-trials", "1"),
    *("--eval-tasks-per-domain", "1", "--validation-steps", "0", "--report-to", "none"),
    *("--max-tokens", "1600", "--max-tokens-per-turn", "6", "--max-turns", "2"),
    *("--max-tool-result-tokens", "400", "--config", "pretrained", "--kl-probe-tasks", "0"),
    *("--tasks-per-domain", "4", "--validation-tasks", "1", "--no-drop-zero-std-groups"),
]
SUMS = ["--domains", "sums", "--tasks", "{sums: sums.jsonl}", "--reward-funcs", "sums_reward:right"]
ASKED = [{"role": "user", "content": "0 + 0 ="}]
REWARD = """
def right(completions, answer, **columns):
    assert all(isinstance(text, str) for text in completions)
    return [float(text.strip() == right) for text, right in zip(completions, answer)]
"""


def made(folder: Path, name: str) -> None:
    """A tiny model with one of TEMPLATES, and rows of a dataset beside it."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.response_template = TEMPLATES[name], None
    model = tiny_model(tokenizer, seed=1)
    if name == "without a template":
        ends = ["<|im_end|>", "<|endoftext|>"]
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(ends)
    if name == "without tools":  # as a base model ends texts
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums_reward.py").write_text(REWARD)


def test_a_model_without_a_template_and_with_several_ends_answers_texts(tmp_path):
    made(tmp_path, "without a template")
    argv = ["--model", "model", "--system-prompt", "Be brief.", *SUMS, "--output-dir", "sums"]
    said = play(*SHORT, *argv, cwd=tmp_path, num_ranks=1).stdout
    folder = tmp_path / "sums" / "checkpoints" / "stage-1-sums"
    assert folder.is_dir(), said
    says(said, "--chat-template text", "by the model's files at '<|endoftext|>'")
    whole = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        ASKED, tokenize=False, add_generation_prompt=True
    )
    assert "Be brief.\n\n0 + 0 =" in whole  # the system prompt stays with the checkpoint


@pytest.mark.parametrize("name", ["without tools", "thinking begun"])
def test_a_model_of_others_serves_airline(name, tmp_path):
    made(tmp_path, name)
    argv = ["--model", "model", "--domains", "airline", "--output-dir", "airline"]
    said = play(*SHORT, *argv, cwd=tmp_path, num_ranks=1).stdout
    folder = tmp_path / "airline" / "checkpoints" / "stage-1-airline"
    assert folder.is_dir(), said
    assert ("block of tools" in said) == (name == "without tools")
    if name == "without tools":
        serving = AutoTokenizer.from_pretrained(folder)
        ends = serving.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
        for file in ("config.json", "generation_config.json"):
            assert json.loads((folder / file).read_text())["eos_token_id"] == ends
        tools = tool_schemas(load_domains(Config())["airline"].environment)
        served = serving.apply_chat_template(ASKED, tools=tools, tokenize=False)
        assert "\nget_reservation(reservation)" in served
