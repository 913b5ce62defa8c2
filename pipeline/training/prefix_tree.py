"""Prefix sharing: compute a common prefix of several sequences once, without approximation.

All episodes of a task begin with the same prompt, and often with the same tool calls. The output of
the model at a token does not depend on later tokens, so one computation of a common prefix serves
all sequences. Prefix Grouper (Liu et al. 2025, arXiv 2506.05433) shares prompts only. Here every
common prefix is computed once, as in the tree training of AReaL. One row contains the tokens of all
sequences of a micro-batch, but each common prefix only once. Each sequence has a path: the indices
of its tokens in the row. For each path, attention gathers the keys and values of the path, and
computes the outputs of those tokens that no earlier path contains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pipeline.common.errors import UserError
from pipeline.distributed.devices import on_gpu
from pipeline.models.capabilities import unserved
from pipeline.rollout.samplers.drawing import num_common

NAME = "sdpa_prefixes"  # name of the attention implementation in transformers
NO_MASK = 1, 1, 1, 0  # shape of a mask that prevents transformers from making one
CHUNK = 512  # maximum number of queries that need a mask of their own
SIMILAR = 1.5  # maximum ratio of the lengths of any two paths in one attention call
# On a GPU, padding costs less than more calls, unless it multiplies the queries.
SIMILAR_GPU = 4.0
MOST_PADDED = 2


Leaf = tuple[int, list[int]]  # index of a path's first new token, and the path


class SharedRow(NamedTuple):
    """One row that contains the tokens of several sequences, but each common prefix only once."""

    ids: list[int]
    positions: list[int]  # position of each token within its sequence
    paths: list[list[int]]  # for each sequence, the indices of its tokens in the row
    tree: PrefixTree


def shared_row(sequences: Sequence[list[int]]) -> SharedRow:
    """Return the row of `sequences`, which must be in lexicographic order.

    Among the sequences before sequence i, sequence i - 1 shares the longest prefix with sequence i.
    """
    row: list[int] = []
    positions: list[int] = []
    paths: list[list[int]] = []
    leaves: list[Leaf] = []
    for number, ids in enumerate(sequences):
        before, path = (sequences[number - 1], paths[-1]) if number else ([], [])
        assert before <= ids, "sequences are not in lexicographic order"
        first = common = num_common(before, ids)
        if leaves and common == len(before):  # the previous sequence is a prefix of this sequence
            first = leaves.pop()[0]
        paths.append([*path[:common], *range(len(row), len(row) + len(ids) - common)])
        leaves.append((first, paths[-1]))
        row += ids[common:]
        positions += range(common, len(ids))
    return SharedRow(row, positions, paths, _tree(leaves, len(row)))


def _tree(leaves: Sequence[Leaf], num_tokens: int) -> PrefixTree:
    """Return a PrefixTree; paths with similar lengths and numbers of new tokens form a block."""
    alike = _similar(leaves, SIMILAR)
    if on_gpu():
        larger = _similar(leaves, SIMILAR_GPU)
        parts = [[block] if _is_full(block) else _similar(block, SIMILAR) for block in larger]
        alike = [block for part in parts for block in part]
    keys: list[int] = []
    queries: list[int] = []
    blocks = []
    outputs = [0] * num_tokens
    for block in alike:
        start = min(first for first, _ in block)
        longest = max(len(path) for _, path in block)
        for first, path in block:
            begin = len(queries) + first - start
            outputs[path[first] : path[-1] + 1] = range(begin, begin + len(path) - first)
            padded = path + [0] * (longest - len(path))
            keys += padded
            queries += padded[start:]
        blocks.append((len(block), longest - start, longest))
    return PrefixTree(
        torch.tensor(keys), torch.tensor(queries), torch.tensor(outputs), tuple(blocks)
    )


def _similar(leaves: Sequence[Leaf], ratio: float) -> list[list[Leaf]]:
    """Group leaves by the lengths of their paths, and by their numbers of new tokens."""
    alike: dict[tuple[int, int], list[Leaf]] = {}
    for first, path in leaves:
        lengths = int(math.log(len(path), ratio)), int(math.log(len(path) - first, ratio))
        alike.setdefault(lengths, []).append((first, path))
    return [*alike.values()]


def _is_full(block: Sequence[Leaf]) -> bool:
    """Return True if padding multiplies the block's queries by at most MOST_PADDED."""
    longest = max(len(path) for _, path in block) - min(first for first, _ in block)
    return longest * len(block) <= MOST_PADDED * sum(len(path) - first for first, path in block)


def follow_prefixes(model: Any, max_tokens: int = 0) -> bool:
    """Make the model's attention use prefix trees; return False if the model cannot use trees.

    All layers of the model must have full attention, computed by scaled_dot_product_attention.
    Windows of at least `max_tokens` tokens, the length of the longest sequence, are full attention.
    """
    config = model.config
    can_switch = getattr(model, "_supports_attention_backend", False)
    if unserved(config.get_text_config(), max_tokens) is not None or not can_switch:
        return False
    if config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
    return bool(config._attn_implementation == NAME)


def attend_to_tree(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention outputs [B, T, heads, size] along the paths of `settings["tree"]`.

    If `settings` has no tree, this function calls `sdpa_attention_forward`.
    """
    tree: PrefixTree | None = settings.pop("tree", None)
    if tree is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise UserError("share_prefixes: the layers of this model get no tree; set it false")
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    special = ("softcap", "position_bias", "s_aux")
    used = [name for name in special if settings.get(name) is not None]
    window = settings.get("sliding_window")
    if window is not None and window < max(keys for _, _, keys in tree.blocks):
        used.append("sliding_window")
    if used:
        raise UserError(f"share_prefixes: this model's attention has {used[0]}; set it false")
    queries = tree.queries, [count * queries for count, queries, _ in tree.blocks]
    keys = tree.keys, [count * keys for count, _, keys in tree.blocks]
    pieces = []
    for states, (indices, sizes) in ((query, queries), (key, keys), (value, keys)):
        # Under autocast, values are bf16, but the rotary embedding makes queries and keys fp32.
        rows = embedding(indices, states[0].transpose(0, 1).flatten(1).to(value.dtype))
        pieces.append(rows.unflatten(1, (-1, states.shape[-1])).split(sizes))
    outputs = []
    for (count, _, _), *block in zip(tree.blocks, *pieces, strict=True):
        q, k, v = (states.unflatten(0, (count, -1)).transpose(1, 2) for states in block)
        options = {"dropout_p": settings.get("dropout", 0.0), "scale": settings.get("scaling")}
        outputs.append(_causal(q, k, v, **options).transpose(1, 2).flatten(0, 1).flatten(1))
    row = embedding(tree.outputs, torch.cat(outputs))
    return row.view(1, len(row), query.shape[1], -1), None


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return attention outputs of queries that belong to the last keys, [paths, heads, Q, size].

    No mask has Q x K entries: on a GPU no kernel needs one, and on CPU the queries come in chunks,
    whose masks are parts of one mask.
    """
    num_queries = q.shape[2]
    num_keys = k.shape[2]
    if q.is_cuda and q.dtype.itemsize > 2:  # otherwise all pairs of each head would be kept
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    if q.is_cuda or num_queries in (num_keys, *range(CHUNK + 1)):
        return scaled_dot_product_attention(
            q, k, v, causal_lower_right(num_queries, num_keys), **options
        )
    mask = torch.full((CHUNK, num_keys), -math.inf, dtype=q.dtype).triu(num_keys - CHUNK + 1)
    outputs = list[torch.Tensor]()
    for chunk in q.split(CHUNK, 2):
        end = num_keys - num_queries + sum(x.shape[2] for x in outputs) + chunk.shape[2]
        part = mask[CHUNK - chunk.shape[2] :, num_keys - end :]
        outputs.append(
            scaled_dot_product_attention(chunk, k[:, :, :end], v[:, :, :end], part, **options)
        )
    return torch.cat(outputs, 2)


AttentionInterface.register(NAME, attend_to_tree)
AttentionMaskInterface.register(NAME, sdpa_mask)


@dataclass(frozen=True)
class PrefixTree:
    """The paths of sequences through a `SharedRow`, in blocks of paths with similar lengths.

    The paths of a block are padded on the right to equal lengths. A sequence that is a prefix of
    another sequence has no path in a block.
    """

    keys: torch.Tensor  # [K] int64, for each token of the padded paths: its index in the row
    queries: torch.Tensor  # [Q] int64, for each token with a computed output: its index in the row
    outputs: torch.Tensor  # [T] int64, for each token of the row: its index among the Q outputs
    blocks: tuple[tuple[int, int, int], ...]  # per block: (paths, queries per path, keys per path)

    def to(self, device: torch.device) -> PrefixTree:
        return PrefixTree(
            self.keys.to(device), self.queries.to(device), self.outputs.to(device), self.blocks
        )
