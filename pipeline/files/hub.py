"""Whether the Hugging Face hub can be reached."""

from __future__ import annotations

import os
import socket
from functools import cache
from urllib.parse import urlparse

from huggingface_hub.constants import ENDPOINT


@cache
def hub_reachable() -> bool:
    """Whether the hub's name resolves.

    Without it, transformers would retry for half a minute per file.
    """
    if any(
        os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    ):
        return True  # a proxy resolves the name itself
    try:
        socket.getaddrinfo(urlparse(ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True
