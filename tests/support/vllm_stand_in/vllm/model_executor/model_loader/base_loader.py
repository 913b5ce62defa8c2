"""As in vLLM."""


class BaseModelLoader:
    """What loads weights."""
