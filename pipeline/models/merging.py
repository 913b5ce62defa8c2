"""Merging: one model of experts that were trained from the same start, each on its own domain.

A task vector is the weights of an expert minus those of the start. `task_arithmetic` adds the task
vectors up (Ilharco et al. 2023, arXiv 2212.04089, section 2). `ties` (Yadav et al. 2023, arXiv
2306.01708, algorithm 1) keeps the largest values of each task vector, elects a sign for each weight
by the sum of what was kept, and takes the mean of the kept values that have this sign.
"""

from collections.abc import Iterator, Sequence

import torch

Weights = Sequence[torch.Tensor]  # all parameters of a model, in the same order


def merged(
    start: Weights,
    experts: Sequence[Weights],
    method: str,
    weight: float | None = None,
    density: float = 0.2,
) -> Iterator[torch.Tensor]:
    """Yield each parameter of the merged model: start + `weight` * merged task vectors.

    Without `weight`, `task_arithmetic` takes 1 / number of experts (the mean of the experts), and
    `ties` takes 1, as its paper does without validation. `ties` keeps the share `density` of a
    whole task vector, and all values as large as the smallest kept one.
    """
    is_ties = method == "ties"
    bounds = [_least_kept(start, expert, density) if is_ties else 0.0 for expert in experts]
    weight = weight or (1.0 if is_ties else 1 / len(experts))
    for first, *others in zip(start, *experts, strict=True):
        vectors = torch.stack([other - first for other in others])
        if is_ties:
            from peft.utils.merge_utils import calculate_majority_sign_mask, disjoint_merge

            for vector, bound in zip(vectors, bounds, strict=True):
                vector[vector.abs() < bound] = 0
            combined = disjoint_merge(vectors, calculate_majority_sign_mask(vectors))
        else:
            combined = vectors.sum(0)
        yield first + weight * combined


def _least_kept(start: Weights, expert: Weights, density: float) -> float:
    """Return the smallest magnitude that stays if a share of a task vector's values is kept."""
    sizes = [(b - a).abs().flatten() for a, b in zip(start, expert, strict=True)]
    values = torch.cat(sizes)
    count = max(1, round(density * len(values)))
    return float(values.kthvalue(len(values) - count + 1).values)
