"""The checkout of the tests in this folder: the one in TAU2_PATH, or the miniature."""

import os
from pathlib import Path

import pytest

from pipeline.config.settings import Config
from pipeline.environments.domains import load_domains
from scripts.proofs.tau2_cases import DOMAINS, Maker
from tests.support.tau2_miniature import write

TAU2_PATH = os.environ.get("TAU2_PATH")
SOURCE = "tau2-bench" if TAU2_PATH else "miniature"


@pytest.fixture(scope="session", params=[SOURCE])
def checkout_path(tmp_path_factory):
    """One folder for all tests of a process, because a process imports one checkout."""
    return Path(TAU2_PATH) if TAU2_PATH else write(tmp_path_factory.mktemp("tau2") / "checkout")


@pytest.fixture(scope="session", params=DOMAINS)
def domain(request, checkout_path):
    config = Config(data={"tau2": str(checkout_path), "domains": [request.param]})
    return load_domains(config)[request.param]


@pytest.fixture
def maker(checkout_path, domain):
    """The maker of a domain's cases, with the same draws in each test."""
    found = Maker(checkout_path, domain.name, domain.tools)
    found.rng.seed(1)
    return found


@pytest.fixture
def miniature(tmp_path):
    """A miniature checkout that a test may damage; no code of it is imported."""
    return write(tmp_path / "checkout")
