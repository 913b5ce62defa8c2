"""Domains of installed packages, which are entry points of the group `three_domain_grpo.domains`.

An entry point names an environment as the setting `environments` does. It becomes an entry of
`environments` before anything else reads the settings, so that the rest of the pipeline, the run
folder and a resumed run treat the domain as one that the user has named.
"""

from importlib.metadata import EntryPoints, entry_points

from pipeline.config.settings import Config
from pipeline.errors import UserError


def installed_domains() -> EntryPoints:
    """Return the entry points of all installed packages' domains. No package is imported."""
    return entry_points(group="three_domain_grpo.domains")


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
        claims = {point.dist.name: point.value for point in found if point.dist}
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
        (value,) = claims.values()
        # Without `[extras]` and spaces, which the value of an entry point may have.
        environments[name] = "".join(value.partition("[")[0].split())
    return config.changed("data", environments=environments)
