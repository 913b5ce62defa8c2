"""Tests whether the Hugging Face hub can be reached, and whether an upload can be tried."""

import socket
from functools import cache
from urllib.parse import urlparse
from urllib.request import getproxies

from huggingface_hub import get_token
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from pipeline.common.errors import UserError
from pipeline.common.untrusted import shown


@cache
def hub_reachable() -> bool:
    """Return whether DNS knows the hub; if not, transformers would retry a download for 30 s."""
    if getproxies().keys() & {"https", "all"}:
        return True  # the proxy resolves the hub's name
    try:
        return bool(socket.getaddrinfo(urlparse(ENDPOINT).hostname, 443))
    except OSError:
        return False


def check_upload(repo_id: str) -> None:
    """Raise UserError unless `repo_id` can name a repository and there is a token for the hub."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise UserError(
            f"hub_model_id: got {shown(repo_id)}; write NAME or ORGANISATION/NAME, with letters, "
            "digits, -, _ and ."
        ) from None
    if not get_token():
        raise UserError(
            "push_to_hub: there is no token for the hub; set HF_TOKEN, or log in with "
            "`hf auth login`"
        )
