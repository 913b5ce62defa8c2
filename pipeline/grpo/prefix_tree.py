"""Sequences that begin alike: what they have in common is computed once, and exactly.

The episodes of a group begin with one prompt, and often with the same first calls. What a model
computes at a token depends on the tokens before it alone, so the common beginning of two sequences
is one computation, whose gradients add up. Prefix Grouper (Liu et al. 2025, arXiv 2506.05433)
shares prompts so, AReaL's tree training every common beginning, as is done here: the tokens of all
sequences, each beginning once and without padding, stand in one row. Only attention looks beyond
its own token. There each sequence gathers the keys and values on its path through the row, and
asks for the outputs that no sequence before it has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pipeline.errors import UserError
from pipeline.models.capabilities import unserved
from pipeline.rollout.sequences import num_common

NAME = "sdpa_prefixes"  # among transformers' attention implementations
NO_MASK = torch.empty((1, 1, 1, 0), dtype=torch.bool)  # transformers shall make none
# Paths whose lengths differ by less than this factor share an attention call.
SIMILAR = 1.5


@dataclass(frozen=True, kw_only=True)
class Row:
    """Sequences in one row, in which their common beginnings stand once."""

    ids: list[int]
    positions: list[int]  # of each token in its sequences
    paths: list[list[int]]  # of each sequence, the places of its tokens
    tree: PrefixTree


def shared_row(sequences: Sequence[list[int]]) -> Row:
    """The row of sequences that come in lexicographic order.

    In that order a sequence has with the one before it all in common that it has with any.
    """
    row: list[int] = []
    positions: list[int] = []
    paths: list[list[int]] = []
    leaves: list[tuple[int, list[int]]] = []  # paths, and from where on their outputs are new
    for number, ids in enumerate(sequences):
        before, path = (sequences[number - 1], paths[-1]) if number else ([], [])
        assert before <= ids, "sequences are not in lexicographic order"
        common = num_common(before, ids)
        first = common
        if leaves and common == len(before):  # the one before is all of it a beginning
            first = leaves.pop()[0]
        paths.append([*path[:common], *range(len(row), len(row) + len(ids) - common)])
        leaves.append((first, paths[-1]))
        row += ids[common:]
        positions += range(common, len(ids))
    return Row(ids=row, positions=positions, paths=paths, tree=_tree(leaves, len(row)))


def _tree(leaves: Sequence[tuple[int, list[int]]], num_tokens: int) -> PrefixTree:
    """Blocks of paths that are alike in length, and in how much of them is new."""
    alike: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}
    for first, path in leaves:
        lengths = int(math.log(len(path), SIMILAR)), int(math.log(len(path) - first, SIMILAR))
        alike.setdefault(lengths, []).append((first, path))
    keys: list[int] = []
    queries: list[int] = []
    blocks = []
    outputs = [0] * num_tokens
    for block in alike.values():
        start = min(first for first, _ in block)
        longest = max(len(path) for _, path in block)
        for first, path in block:
            begin = len(queries) + first - start
            # New tokens of a path stand one after the other in the row.
            outputs[path[first] : path[-1] + 1] = range(begin, begin + len(path) - first)
            padded = path + [0] * (longest - len(path))
            keys += padded
            queries += padded[start:]
        blocks.append((len(block), longest - start, longest))
    return PrefixTree(
        keys=torch.tensor(keys),
        queries=torch.tensor(queries),
        blocks=tuple(blocks),
        outputs=torch.tensor(outputs),
    )


def follow_prefixes(model: Any) -> bool:
    """Let the model's attention follow prefix trees; False where it cannot.

    It can where transformers' scaled_dot_product_attention computes full attention in all layers.
    """
    config = model.config
    if unserved(config.get_text_config()) is not None or not getattr(
        model, "_supports_attention_backend", False
    ):
        return False
    if config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
    return bool(config._attn_implementation == NAME)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' interface, [B, heads, T, size] to [B, T, heads, size].

    Along the paths of `settings["tree"]`; without one it is `sdpa_attention_forward`.
    """
    tree: PrefixTree | None = settings.pop("tree", None)
    if tree is None and attention_mask is not None and attention_mask.numel() == 0:
        raise UserError("share_prefixes: this model does not tell its layers of it; set it false")
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    special = ("softcap", "position_bias", "s_aux", "sliding_window")
    found = [name for name in special if settings.get(name) is not None]
    if found:
        raise UserError(f"share_prefixes: this model's attention has {found[0]}; set it false")
    # Under autocast rotary positions leave queries and keys in fp32.
    places = ((tree.queries, query), (tree.keys, key), (tree.keys, value))
    gathered = [
        embedding(at, states[0].transpose(0, 1).flatten(1).to(value.dtype)).unflatten(
            1, (-1, states.shape[-1])
        )
        for at, states in places
    ]
    query_sizes = [count * queries for count, queries, _ in tree.blocks]
    key_sizes = [count * keys for count, _, keys in tree.blocks]
    pieces = (
        states.split(sizes)
        for states, sizes in zip(gathered, (query_sizes, key_sizes, key_sizes), strict=True)
    )
    outputs = []
    for (count, num_queries, num_keys), *block in zip(tree.blocks, *pieces, strict=True):
        q, k, v = (states.unflatten(0, (count, -1)).transpose(1, 2) for states in block)
        found_by_block = scaled_dot_product_attention(
            q,
            k,
            v,
            # Queries are the last of the keys, so causal from the lower right.
            attn_mask=causal_lower_right(num_queries, num_keys),
            dropout_p=settings.get("dropout", 0.0),
            scale=settings.get("scaling"),
            enable_gqa=True,
        )
        outputs.append(found_by_block.transpose(1, 2).flatten(0, 1).flatten(1))
    row = embedding(tree.outputs, torch.cat(outputs))
    return row.view(1, len(row), query.shape[1], -1), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """The paths of sequences through a row in which their common beginnings stand once.

    Attention computes block after block of paths, padded on the right to one length. A sequence
    that is the beginning of another needs no path.
    """

    keys: torch.Tensor  # [K] int64, for each token of each path in all blocks its place in the row
    queries: torch.Tensor  # [Q] int64, the same without what all paths of the block begin with
    blocks: tuple[tuple[int, int, int], ...]  # paths, queries of a path, keys of a path
    outputs: torch.Tensor  # [T] int64, for each token of the row its place among the Q outputs

    def to(self, device: torch.device) -> PrefixTree:
        return PrefixTree(
            keys=self.keys.to(device),
            queries=self.queries.to(device),
            blocks=self.blocks,
            outputs=self.outputs.to(device),
        )
