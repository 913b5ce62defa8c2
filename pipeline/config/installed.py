"""Domains of installed packages, which are entry points of the group `three_domain_grpo.domains`.

An entry point names an environment as the setting `environments` does. It becomes an entry of
`environments` before anything else reads the settings, so that the rest of the pipeline, the run
folder and a resumed run treat the domain as one that the user has named.
"""

from contextlib import suppress
from importlib.metadata import EntryPoint, EntryPoints, entry_points

from pipeline.common.errors import UserError
from pipeline.config.settings import Config


def installed_domains() -> EntryPoints:
    """Return the entry points of all installed packages' domains. No package is imported."""
    return entry_points(group="three_domain_grpo.domains")


def package_of(name: str, factory: str) -> str:
    """Return the installed package whose domain `name` is `factory`, or ""."""
    points = installed_domains().select(name=name)
    return next((_package(point) for point in points if _factory(point) == factory), "")


def _package(point: EntryPoint) -> str:
    """Return the name of an entry point's package, or the entry's value if METADATA is missing."""
    with suppress(Exception):  # Python's versions differ in what they raise
        if point.dist and point.dist.metadata["Name"]:
            return str(point.dist.metadata["Name"])
    return point.value


def _factory(point: EntryPoint) -> str:
    """Return an entry point's value without `[extras]` and spaces."""
    return "".join(point.value.partition("[")[0].split())


def with_installed(config: Config) -> Config:
    """Return the settings with the installed domains among `domains` as entries of `environments`.

    The user's own entry of `environments` is kept. Raises UserError if one of `domains` is claimed
    by several packages, or is an embedded domain that a package claims.
    """
    data = config.data
    installed = installed_domains()
    embedded = config.factories.keys() - data.own_domains
    environments = dict(data.environments)
    for name in data.domains:
        found = installed.select(name=name)
        claims = {_package(point): _factory(point) for point in found}
        if not claims or name in data.environments:
            continue
        packages = " and ".join(sorted(claims))
        if name in embedded:
            raise UserError(
                f"domains: got {name}, embedded here and claimed by {packages}; uninstall "
                f"{packages}, or rename its entry point"
            )
        if len(claims) > 1:
            raise UserError(
                f"domains: got {name}, claimed by {packages}; uninstall one, or give environments "
                f"{{{name}: module:Class}}"
            )
        (environments[name],) = claims.values()
    return config.changed("data", environments=environments)
