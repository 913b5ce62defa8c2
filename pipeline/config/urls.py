"""The base URLs of endpoints."""

import re
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import urlsplit

IN_BRACKETS = re.compile(r"([^\[\]]*@)?\[[^\[\]]*\](:\d*)?")  # an address of IPv6
LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.IGNORECASE)


def mistake_of(url: str) -> str:
    """Return what is wrong with the base URL of an endpoint, or an empty text."""
    if any(c.isspace() or not c.isprintable() for c in url):
        return "it has a space or a character that cannot be printed"
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname or ""
    except ValueError:
        return "its server or its port cannot be read"
    if parts.scheme not in ("http", "https"):
        return "it does not begin with http:// or https://"
    if not host:
        return "it names no server"
    try:
        is_host = _is_host(host, parts.netloc)
    except ValueError:
        is_host = False
    if not is_host:
        return f"{host!r} is no name of a server"
    if port == 0 or parts.netloc.endswith(":"):
        return "its port is no number from 1 to 65535"
    return "? and # do not belong into it" if {"?", "#"} & {*url} else ""


def _is_host(host: str, netloc: str) -> bool:
    """Return whether the host of `netloc` is a name or an address; may raise ValueError."""
    if "[" in netloc:
        return bool(IPv6Address(host) and IN_BRACKETS.fullmatch(netloc))
    if not host.strip("0123456789."):
        return bool(IPv4Address(host))
    labels = host.encode("idna").decode().removesuffix(".").split(".")
    return all(map(LABEL.fullmatch, labels))
