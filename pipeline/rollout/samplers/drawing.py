"""Code that all samplers share: common prefixes, sampling of one token, a copy of the model.

Letters in shapes: B sequences, T tokens, V entries of the vocabulary.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pipeline.config.settings import RolloutSettings
from pipeline.data.rng import uniforms
from pipeline.models.sampling_copy import SamplingCopy, Weights
from pipeline.rollout.trajectory import Sampled

# Cost of starting a forward pass, as a number of tokens with equal cost. On a GPU, that is what the
# GPU computes in the time (30 ms) in which Python starts the operations of a pass.
PASS_TOKENS = 128
FLOPS_OF_A_START = 10**13
PASS_TOKENS_GPU = 1 << 14  # at most
BLOCK = 256  # tokens of a block of a large vocabulary
LARGE_VOCABULARY = 1 << 14  # minimum number of tokens from which on the sampling is by blocks
Ids = tuple[int, ...]
Keys = NDArray[np.uint64]  # keys of streams of random numbers
Positions = NDArray[np.int64]  # positions in streams of random numbers


def streams_of(conversations: Sequence[Any]) -> tuple[Keys, Positions]:
    """Return each conversation's key, and the number of random numbers that it has used."""
    keys = np.array([conversation.key for conversation in conversations], dtype=np.uint64)
    return keys, np.array([conversation.num_sampled for conversation in conversations])


def forward_passes(lengths: Sequence[int], pass_tokens: int) -> list[tuple[int, int]]:
    """Split sequences into forward passes; return the (start, end) indices of each pass.

    `lengths` must be in descending order. A split must save more than `pass_tokens` padding tokens.
    """
    cut = max(range(len(lengths)), key=lambda j: (len(lengths) - j) * (lengths[0] - lengths[j]))
    if (len(lengths) - cut) * (lengths[0] - lengths[cut]) <= pass_tokens:
        return [(0, len(lengths))]
    rest = forward_passes(lengths[cut:], pass_tokens)
    return forward_passes(lengths[:cut], pass_tokens) + [
        (cut + first, cut + last) for first, last in rest
    ]


def shared_prefixes(prompts: Sequence[Ids], at_least: int) -> list[Ids]:
    """Group prompts; return the groups' common prefixes of `at_least` or more tokens.

    A group consists of neighbours in the sorted list of prompts. A prompt that shares less than
    half of a group's prefix begins a new group, because prompts of two domains share few words.
    """
    prefixes: list[Ids] = []
    prefix: Ids = ()
    for before, prompt in pairwise([(), *sorted(prompts)]):
        if prefix and 2 * (shared := num_common(prefix, prompt)) >= len(prefix):
            prefixes[-1] = prefix = prefix[:shared]
        elif (shared := num_common(before, prompt)) >= at_least:
            prefix = prompt[:shared]
            prefixes.append(prefix)
        else:
            prefix = ()
    return [prefix for prefix in prefixes if len(prefix) >= at_least]


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    known = 0
    most = min(len(a), len(b))
    while known < most:  # bisection, because Python compares slices faster than single tokens
        middle = (known + most + 1) // 2
        if a[known:middle] == b[known:middle]:
            known = middle
        else:
            most = middle - 1
    return known


def logprobs_of(logits_BV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probability of each possible next token, [B, V] float32."""
    logits_BV = logits_BV.float()
    return (logits_BV if temperature == 1 else logits_BV / temperature).log_softmax(-1)


def sample_tokens(
    logprobs_BV: torch.Tensor,
    keys: Keys,
    positions: Positions,
    greedy: bool,
    top_k: int = 0,
    top_p: float = 1.0,
) -> torch.Tensor:
    """Sample the next token of each row, [B] int64.

    Row i uses the random number at index `positions[i]` of the stream with key `keys[i]`. `greedy`
    selects the most likely token. `top_k` (0: no limit) and then `top_p` (1.0: no limit) exclude
    unlikely tokens. Training ignores `top_k` and `top_p`: both make training slightly off-policy.
    """
    if greedy:
        return logprobs_BV.argmax(-1)
    numbers = torch.from_numpy(uniforms(keys, positions))
    if logprobs_BV.is_cuda:  # a copy from pinned memory does not synchronize with the GPU
        numbers = numbers.pin_memory().to(logprobs_BV.device, non_blocking=True)
    return draw(logprobs_BV, numbers, top_k, top_p)


def draw(
    logprobs_BV: torch.Tensor, numbers_B: torch.Tensor, top_k: int, top_p: float
) -> torch.Tensor:
    """Return each row's token at its random number, [B] int64; see `sample_tokens`."""
    if top_k == 0 and top_p == 1.0:
        if logprobs_BV.shape[-1] >= LARGE_VOCABULARY:
            return inverse_cdf_by_blocks(logprobs_BV, numbers_B)
        return inverse_cdf(cumulative(logprobs_BV), numbers_B)
    logprobs_BV = logprobs_BV.masked_fill(~kept(logprobs_BV, top_k, top_p), float("-inf"))
    # Excluded tokens get the cumulative value 0, so that rounding cannot select an excluded token.
    line = cumulative(logprobs_BV).masked_fill(logprobs_BV == float("-inf"), 0.0)
    return (line > numbers_B[:, None] * line.amax(-1, keepdim=True)).int().argmax(-1)


def kept(logprobs_BV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return True for the tokens that `top_k` and `top_p` allow, [B, V] bool.

    `top_k` allows the `top_k` most likely tokens (0: all); among equally likely tokens, lower ids
    come first. Of the tokens that `top_k` allows, `top_p` allows the nucleus, at least one token
    (Holtzman et al. 2020, arXiv 1904.09751, 3.1).
    """
    likely, best = (x[:, : top_k or None] for x in logprobs_BV.sort(descending=True, stable=True))
    kept_BV = torch.zeros_like(logprobs_BV, dtype=torch.bool)
    if top_p == 1.0:
        return kept_BV.scatter_(-1, best, True)
    line = cumulative(likely)
    before = nn.functional.pad(line[:, :-1], (1, 0))  # total probability of likelier tokens
    return kept_BV.scatter_(-1, best, before < top_p * line[:, -1:])


def cumulative(logprobs_BV: torch.Tensor) -> torch.Tensor:
    """Return cumulative probabilities of each row, [B, V] float64; the last value is near 1."""
    return logprobs_BV.double().exp().cumsum(-1)


def inverse_cdf(cumulative_BV: torch.Tensor, numbers_B: torch.Tensor) -> torch.Tensor:
    """Return each row's first token with a cumulative probability above the row's random number."""
    targets = numbers_B[:, None] * cumulative_BV[:, -1:]
    tokens = torch.searchsorted(cumulative_BV, targets, right=True)[:, 0]
    return tokens.clamp_(max=cumulative_BV.shape[-1] - 1)


def inverse_cdf_by_blocks(logprobs_BV: torch.Tensor, numbers_B: torch.Tensor) -> torch.Tensor:
    """Do the same as `inverse_cdf` of `cumulative`, with float64 numbers for few tokens only.

    The first search finds the block of BLOCK tokens, and the second search the token in the block.
    Probabilities are float32, so the token may differ where a random number is as near as a
    rounding error to the boundary of two tokens.
    """
    size = logprobs_BV.shape[-1]
    shares_BV = logprobs_BV.new_empty(len(logprobs_BV), -(-size // BLOCK) * BLOCK)
    shares_BV[:, size:].zero_()  # "= 0" would copy a number from the host
    torch.exp(logprobs_BV, out=shares_BV[:, :size])
    blocks = shares_BV.unflatten(-1, (-1, BLOCK))
    line = blocks.sum(-1).double().cumsum(-1)
    block_B = inverse_cdf(line, numbers_B)[:, None]
    before = nn.functional.pad(line, (1, 0)).gather(-1, block_B)
    rows = torch.arange(len(blocks), device=blocks.device)[:, None]
    inside = blocks[rows, block_B][:, 0].double().cumsum(-1)
    # A block has two sums, which differ by rounding; a number above both selects the last token.
    most = torch.nextafter(inside[:, -1:], torch.zeros_like(before))
    rest = torch.minimum(numbers_B[:, None] * line[:, -1:] - before, most)
    return (block_B * BLOCK + torch.searchsorted(inside, rest, right=True))[:, 0]


class ModelSampler:
    """Base class of samplers that have a copy of the model, with parameters of the type `dtype`.

    A message ends at the id `end_of_turn_id`, at an id of `other_stops`, or at its maximum length.
    No conversation gets more than `max_tokens` tokens; 0 means that the number is not known.
    """

    def __init__(
        self,
        model: Any,
        end_of_turn_id: int,
        temperature: float,
        dtype: torch.dtype,
        top_k: int = 0,
        top_p: float = 1.0,
        *,
        other_stops: Sequence[int] = (),
        max_tokens: int = 0,
    ) -> None:
        self.max_tokens = max_tokens
        self._copy = SamplingCopy(model)
        self.model = self._copy.model
        self.device = next(self.model.parameters()).device
        self.end_of_turn_id = end_of_turn_id
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.stop_ids = frozenset((end_of_turn_id, *other_stops))
        self.stops = np.array(sorted(self.stop_ids))
        self.num_tokens = self.num_padded_tokens = 0
        self._prepare()
        self._copy.cast(dtype)

    @classmethod
    def of_settings(
        cls, model: Any, settings: RolloutSettings, dtype: torch.dtype, stops: Sequence[int]
    ) -> Self:
        """Return a sampler with the settings of a run. The first of `stops` ends a turn."""
        return cls(
            model,
            stops[0],
            settings.temperature,
            dtype,
            settings.top_k,
            settings.top_p,
            other_stops=stops[1:],
            max_tokens=settings.max_tokens,
        )

    def _prepare(self) -> None:
        """Set up the subclass before the parameters of the model's copy get the type `dtype`."""

    def message(self, ids: list[int], logprobs: list[float]) -> Sampled:
        return Sampled(ids=ids, logprobs=logprobs, finished=ids[-1] in self.stop_ids)

    def load_weights(self, weights: Weights) -> None:
        """See `Sampler.load_weights`. Weights of the type `dtype` are used without a copy."""
        self._copy.load(weights)

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """See `Sampler.logprobs`."""
        ids_T = torch.tensor(ids, device=self.device)
        logits_TV = self.model.get_output_embeddings()(self._hidden(ids_T)[:-1])
        logprobs_TV = logprobs_of(logits_TV, 1.0)
        return logprobs_TV.gather(-1, ids_T[1:, None])[:, 0].cpu()

    def rest(self) -> None:
        """See `Sampler.rest`. With the last conversation, all but a small cache is already free."""

    def end(self) -> None:
        """See `Sampler.end`."""

    def _logprobs(self, hidden: torch.Tensor) -> torch.Tensor:
        return logprobs_of(self.model.get_output_embeddings()(hidden), self.temperature)

    def _hidden(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [T, H] of one sequence."""
        hidden_BT: torch.Tensor = self.model.get_decoder()(ids_T[None], use_cache=False)[0]
        return hidden_BT[0]

    def sample_tokens(
        self, logprobs_BV: torch.Tensor, keys: Keys, positions: Positions, greedy: bool
    ) -> torch.Tensor:
        return sample_tokens(logprobs_BV, keys, positions, greedy, self.top_k, self.top_p)
