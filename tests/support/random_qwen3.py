"""A random Qwen3 of two narrow layers, and a tokenizer that is trained on the texts of a checkout.

The chat template is Qwen3's own, so that prompts have policies and schemas of tools in full.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import chat_template_utils

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def write(folder: Path, checkout: Path) -> Path:
    """Write the model into `folder`; return `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [*checkout.glob("data/**/domains/**/*.md"), *checkout.glob("src/**/domains/**/*.py")]
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(sorted(map(str, texts)), trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(TAGS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[2]
    )
    fast.chat_template = chat_template_utils.qwen3_chat_template
    fast.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
