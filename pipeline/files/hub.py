"""A test whether the Hugging Face hub can be reached."""

import socket
from functools import cache
from urllib.parse import urlparse
from urllib.request import getproxies

from huggingface_hub.constants import ENDPOINT


@cache
def hub_reachable() -> bool:
    """Return whether DNS knows the hub; if not, transformers would retry a download for 30 s."""
    if getproxies().keys() & {"https", "all"}:
        return True  # the proxy resolves the hub's name
    try:
        return bool(socket.getaddrinfo(urlparse(ENDPOINT).hostname, 443))
    except OSError:
        return False
