"""The losses in Python's own numbers, from the papers' formulas: what the tests compare with."""

import math
from typing import NamedTuple


def clipped(ratio, stopped_ratio, advantage, now, settings):
    upper = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    inside = min(max(ratio, 1 - settings.epsilon), 1 + upper)
    bounded = ratio if settings.delta is None else min(ratio, settings.delta)
    return -min(bounded * advantage, inside * advantage)


def limited(ratio, stopped_ratio, advantage, now, settings):
    upper = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    return -min(stopped_ratio, upper) * advantage * now


class Plain(NamedTuple):
    """A loss: its term of a token, and by what that is divided.

    The divisor depends on the sampled tokens of the token's sequence, the numbers of all sequences
    and of all tokens, and `max_tokens`.
    """

    term: object
    divisor: object
    is_in_trl: bool = True


PLAIN_LOSSES = {
    "grpo": Plain(clipped, lambda own, sequences, tokens, most: own * sequences),
    "bnpo": Plain(clipped, lambda own, sequences, tokens, most: tokens),
    "dr_grpo": Plain(clipped, lambda own, sequences, tokens, most: most * sequences),
    "dapo": Plain(clipped, lambda own, sequences, tokens, most: tokens),
    "cispo": Plain(limited, lambda own, sequences, tokens, most: tokens),
}


def plain_loss(sequences, settings, max_tokens, stopped):
    """The loss, token by token.

    `sequences` holds for each its advantage and its tokens: log-probability, that of sampling, of
    the reference, and entropy. `stopped` are the same where no gradient is taken.
    """
    loss = PLAIN_LOSSES[settings.loss_type]
    total, num_tokens = 0.0, sum(len(tokens) for _, tokens in sequences)
    for (advantage, tokens), (_, fixed) in zip(sequences, stopped, strict=True):
        for token, still in zip(tokens, fixed, strict=True):
            if settings.importance_sampling_level == "token":
                ratio, stopped_ratio = (math.exp(t[0]) / math.exp(t[1]) for t in (token, still))
            else:
                ratio, stopped_ratio = (
                    math.prod(math.exp(t[0]) / math.exp(t[1]) for t in ts) ** (1 / len(ts))
                    for ts in (tokens, fixed)
                )
            now, _, reference, entropy = token
            apart = math.exp(reference) / math.exp(now)
            term = loss.term(ratio, stopped_ratio, advantage, now, settings)
            term += settings.beta * (apart - math.log(apart) - 1)
            total += term / loss.divisor(len(tokens), len(sequences), num_tokens, max_tokens)
            total -= settings.entropy_coef * entropy / num_tokens
    return total
