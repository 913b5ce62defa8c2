"""The domains by name: those of this package, of installed packages, and of the settings.

Each names a class or function as `module:name`, as the setting `environments` does, or an
environment of a library as `library:name`. A package brings a library as an entry point of the
group `three_domain_grpo.libraries`, and a domain as one of `three_domain_grpo.domains`. Domains of
packages become entries of `environments` before anything else reads the settings, so that the rest
of the pipeline, the run folder and a resumed run treat them as domains that the user has named.
"""

import re
from contextlib import suppress
from importlib.metadata import EntryPoint, EntryPoints, entry_points

from pipeline.common.errors import UserError
from pipeline.config.settings import Config, DataSettings, EnvironmentFactory

DOMAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
EMBEDDED_DOMAINS = {  # the domains of this package
    "airline": "pipeline.environments.embedded.airline:AirlineEnvironment",
    "retail": "pipeline.environments.embedded.retail:RetailEnvironment",
    "telecom": "pipeline.environments.embedded.telecom:TelecomEnvironment",
}
# The domains of a checkout of tau2-bench, which replace those of the same names.
TAU2_DOMAINS = dict.fromkeys(
    ("airline", "retail", "telecom"), "pipeline.environments.tau2.domain:tau2_domain"
)
# Libraries of environments: `reasoning_gym:chain_sum` is what the function makes of `chain_sum`.
LIBRARIES = {
    name: f"pipeline.environments.libraries.{name}:{name}"
    for name in ("mcp", "openenv", "reasoning_gym", "textarena", "verifiers")
}
SINGLE_TURN = "pipeline.environments.single_turn:SingleTurnEnvironment"


def known_domains(config: Config) -> dict[str, EnvironmentFactory]:
    """Return what makes the environments of each known domain."""
    known = {name: EnvironmentFactory(factory=target) for name, target in EMBEDDED_DOMAINS.items()}
    if config.data.tau2 is not None:
        for name, target in TAU2_DOMAINS.items():
            arguments = {
                **config.data.tau2_arguments,
                "played_by": config.customer.in_words,
                "judged_by": config.judge.in_words,
                "path": str(config.data.tau2),
                "domain": name,
            }
            known[name] = EnvironmentFactory(factory=target, arguments=arguments)
    return known | domains_of_user(config.data)


def domains_of_user(data: DataSettings) -> dict[str, EnvironmentFactory]:
    """Return what makes the environments of the domains that are not this package's.

    With reward functions or an agent, a domain in `tasks` without an environment gets a single-turn
    one. What `tools` names is an environment, too.
    """
    named = data.tasks.keys() if data.reward_funcs else data.tasks.keys() & data.agents
    names = named - EMBEDDED_DOMAINS.keys()
    targets = {**dict.fromkeys(sorted(names), SINGLE_TURN), **data.tools, **data.environments}
    return {
        name: EnvironmentFactory(factory=value) if isinstance(value, str) else value
        for name, value in targets.items()
    }


def generated_domains(config: Config) -> list[str]:
    """Return the embedded domains of the run whose tasks are generated."""
    known = known_domains(config)
    return [
        name
        for name, target in EMBEDDED_DOMAINS.items()
        if name in config.data.domains
        and known[name].factory == target
        and name not in config.data.tasks
    ]


def installed_domains() -> EntryPoints:
    """Return the entry points of all installed packages' domains. No package is imported."""
    return entry_points(group="three_domain_grpo.domains")


def library_of(factory: str) -> tuple[str, str] | None:
    """Return the import string of a library's function, and the name that stands behind its prefix.

    None for what names no library. Raises UserError if several packages claim the prefix.
    """
    prefix, colon, name = factory.partition(":")
    points = entry_points(group="three_domain_grpo.libraries").select(name=prefix)
    claims = {_package(point): _factory(point) for point in points}
    if prefix in LIBRARIES:
        claims = {"": LIBRARIES[prefix]}
    if len(claims) > 1:
        packages = " and ".join(sorted(claims))
        raise UserError(f"environments: got {factory}, claimed by {packages}; uninstall one")
    return (*claims.values(), name) if claims and colon else None  # type: ignore[return-value]


def domain_name_of(factory: str) -> str:
    """Return the name of a domain that has none but its environment, such as chain_sum."""
    prefix, _, name = factory.partition(":")
    last = name.rpartition("/")[2]
    return last if DOMAIN_NAME.fullmatch(last) else prefix


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
    embedded = EMBEDDED_DOMAINS.keys() - domains_of_user(data)
    environments = dict(data.environments)
    for name in data.domains:
        claims = {_package(point): _factory(point) for point in installed.select(name=name)}
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
