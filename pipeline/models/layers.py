"""The repeated layers of a model, and recomputing them in the backward pass to save memory."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.errors import UserError


def outer_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that a forward pass computes one after another; none lies inside another."""
    layers: list[nn.Module] = []
    for child in model.children():
        layers += [child] if isinstance(child, GradientCheckpointingLayer) else outer_layers(child)
    return list(dict.fromkeys(layers))  # a layer may be used twice


def widest(shape: Any, name: str) -> int:
    """The largest size of this name among the layers of a configuration; 0 if it has none."""
    differ = name in (getattr(shape, "per_layer_attributes", None) or ())
    layers = shape.per_layer_config if differ else [shape]
    return max(getattr(layer, name, None) or 0 for layer in layers)


def refuse_unlayered(model: Any) -> None:
    """UserError if a model has no layers that `recompute_layers` could compute again."""
    if not outer_layers(model):
        raise UserError(
            f"gradient_checkpointing: got true, but {type(model).__name__} has no layers that can "
            "be computed again; set it false"
        )


def recompute_layers(model: Any) -> None:
    """Keep only the inputs of layers for the backward pass, which computes the layers again.

    The results stay equal to the bit. transformers' own switch works only in training mode, which
    turns on dropout and the noise of routers as well.
    """
    refuse_unlayered(model)
    for layer in outer_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
