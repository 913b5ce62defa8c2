"""The embedded domains, one file each, and their base."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pipeline.config.settings import EMBEDDED_DOMAINS
from pipeline.errors import UserError


def environment_classes(domains: list[str], own: dict[str, str]) -> dict[str, type[Any]]:
    """The environment class of each domain: embedded, or named by an import string `module:Class`.

    Raises UserError where a module or class cannot be imported.
    """
    classes: dict[str, type[Any]] = {}
    for domain in domains:
        embedded = f"pipeline.embedded.{domain}:{domain.title().replace('_', '')}Environment"
        name = embedded if domain in EMBEDDED_DOMAINS else own[domain]
        module, _, attribute = name.partition(":")
        try:
            classes[domain] = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"environments: {domain}: got {name!r} ({error}); give an importable module:Class"
            ) from None
    return classes
