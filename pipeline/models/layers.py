"""The repeated layers of a model, and computing them again instead of keeping what is inside."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.errors import UserError


def outer_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that a forward pass goes through one after another; none lies inside another."""
    found: list[nn.Module] = []
    for child in model.children():
        found += [child] if isinstance(child, GradientCheckpointingLayer) else outer_layers(child)
    return list(dict.fromkeys(found))  # a layer may be used twice


def widest(shape: Any, name: str) -> int:
    """A size in a model's configuration, 0 where it has none; where layers differ, the largest."""
    differ = name in (getattr(shape, "per_layer_attributes", None) or ())
    layers = shape.per_layer_config if differ else [shape]
    return max(getattr(layer, name, None) or 0 for layer in layers)


def refuse_unlayered(model: Any) -> None:
    """UserError where there are no layers that `recompute_layers` could compute again."""
    if not outer_layers(model):
        raise UserError(
            f"gradient_checkpointing: got true, but {type(model).__name__} has no layers that can "
            "be computed again; set it false"
        )


def recompute_layers(model: Any) -> None:
    """Keep the inputs of layers for the backward pass, which computes what is inside again.

    What the model computes stays the same to the bit. transformers' own switch works in training
    mode only, which turns on dropout and the noise of routers as well.
    """
    refuse_unlayered(model)
    for layer in outer_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
