"""What samplers that compute in this process share: their copy of the model, and their settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipeline.models.weights import SamplingCopy, Weights


class ModelSampler:
    """Samples from a copy of the model whose parameters have the type `dtype`.

    The model may be a plain one or one with LoRA adapters; `load_weights` then takes what is
    trained of it. A message ends at the end of turn, at one of `other_stops` (ids, too), or at its
    limit. Without limits, `top_k` 0 and `top_p` 1.0, every token can be drawn.
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
    ) -> None:
        self._copy = SamplingCopy(model)
        self.model = self._copy.model
        self.device = next(self.model.parameters()).device
        self.end_of_turn_id, self.temperature = end_of_turn_id, temperature
        self.top_k, self.top_p = top_k, top_p
        self.stop_ids = frozenset((end_of_turn_id, *other_stops))
        self.stops = np.array(sorted(self.stop_ids))
        self.num_tokens = self.num_padded_tokens = 0
        self._prepare()
        self._copy.cast(dtype)

    def _prepare(self) -> None:
        """Set up what this kind of sampler has, while the copy's parameters are the model's own."""
        raise NotImplementedError

    def load_weights(self, weights: Weights) -> None:
        """See `Sampler`. Weights that have the type already are shared, not copied."""
        self._copy.load(weights)
