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


def recompute_layers(model: Any) -> None:
    """Keep only the inputs of layers for the backward pass, which computes the layers again.

    The results stay equal to the bit. The switch of transformers works only in training mode, with
    dropout and noise in routers. UserError if the model has no such layers.
    """
    layers = outer_layers(model)
    if not layers:
        raise UserError(
            f"gradient_checkpointing: got true, but {type(model).__name__} has no layers that can "
            "be computed again; set it false"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
