"""As in vLLM: loaders by the name of their format."""

from collections.abc import Callable
from typing import Any

LOADERS: dict[str, Any] = {}


def register_model_loader(name: str) -> Callable[[Any], Any]:
    def register(kind: Any) -> Any:
        LOADERS[name] = kind
        return kind

    return register
