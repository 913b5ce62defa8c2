"""The default model, a tiny Qwen3, and the model's tokenizer, made without a download.

The tokenizer has one token for each word of the domains (`Domain.words`), and splits all other text
into bytes (byte-level BPE without merges). The chat template is a short form of Qwen's template,
and keeps only the first line of a system prompt and the names of the tools. A model of half a
million parameters cannot read prose, so demonstrations and rewards must teach the policy's rules.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from pipeline.config.settings import Config
from pipeline.environments.domains import Domain, load_domains

CHAT_TEMPLATE = """
{%- macro names() -%}
{%- if tools %}{{ '\ntools:' }}{% for tool in tools %} {{ tool.function.name }}{% endfor %}{% endif
-%} {%- endmacro -%}
{%- if messages[0].role != 'system' and tools -%}
<|im_start|>system{{ names() }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}{{ '\n' }}
{%- if message.role == 'system' -%}
{{ message.content.split('\n')[0] }}{{ names() }}
{%- else -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ '\n' }}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments |
tojson }}} {{- '\n' }}</tool_call>
{%- endfor -%}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}
""".strip()
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROLES = ("system\n", "user\n", "assistant\n", "tool\n")
TAGS = ("<tool_call>", "</tool_call>")
SYNTAX = ("system", "\ntools:", '\n{"name": "', '"}}\n', '"}', '": "', '", "', '{"error": "')
ERRORS = ("unknown tool ", "wrong arguments: ", " takes ", "malformed call: ", ", ", "no ")


def tiny_tokenizer(domains: Iterable[Domain] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word of `domains` and of the default domains."""
    always = load_domains(Config())
    every = {**always, **{domain.name: domain for domain in domains}}.values()
    texts = {*ROLES, *SYNTAX, *ERRORS, *(word for domain in every for word in domain.words())}
    chunks = sorted(texts, key=lambda chunk: (-len(chunk), chunk))
    pattern = "|".join([*(re.escape(c) for c in chunks), r"[A-Za-z_]+", r"[0-9]", r"[^A-Za-z0-9_]"])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["".join(piece for piece, _ in byte_level.pre_tokenize_str(chunk)) for chunk in chunks]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*alphabet, *words]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.response_template = RESPONSE_TEMPLATE
    return fast


def tiny_model(tokenizer: Any, seed: int, attention: str = "sdpa") -> Qwen3ForCausalLM:
    """Return a Qwen3 of 0.56 M parameters, whose random initial weights depend only on `seed`."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # scales residual projections down, as in GPT-2
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.div_((2 * config.num_hidden_layers) ** 0.5)
    return model
