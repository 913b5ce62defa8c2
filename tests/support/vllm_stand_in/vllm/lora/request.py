"""As in vLLM."""

from typing import NamedTuple


class LoRARequest(NamedTuple):
    name: str
    lora_int_id: int
    path: str
