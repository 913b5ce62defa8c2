"""Whether the Hugging Face hub can be reached."""

import socket
from functools import cache
from urllib.parse import urlparse
from urllib.request import getproxies

from huggingface_hub.constants import ENDPOINT


@cache
def hub_reachable() -> bool:
    """Whether the hub's name resolves. Otherwise transformers would retry for 30 s per file."""
    if getproxies().keys() & {"https", "all"}:
        return True  # the proxy resolves the name
    try:
        return bool(socket.getaddrinfo(urlparse(ENDPOINT).hostname, 443))
    except OSError:
        return False
