"""The distribution: what it needs is declared, and it works in an empty environment."""

import ast
import sys
import tomllib
import venv
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import ROOT
from tests.support.installed import built, checked, installed_wheel, said_by

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TINY = "--max-steps 2 --warm-start-steps 2 --eval-tasks-per-domain 1 --report-to none"


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def imported() -> set[str]:
    """The top-level modules that the package imports, anywhere in its code.

    `verifiers_worker.py` runs in another environment, which has what it imports.
    """
    found: set[str] = set()
    files = {*(ROOT / "pipeline").rglob("*.py")}
    for path in files - {*(ROOT / "pipeline").rglob("verifiers_worker.py")}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).partition(".")[0])
    return found - sys.stdlib_module_names - {"pipeline"}


def test_every_import_is_declared_and_every_dependency_is_imported():
    of_modules = packages_distributions()
    needed = {canonicalize_name(of_modules[module][0]) for module in imported()}
    # The server of agents is imported by runs that have some.
    assert needed == names(PROJECT["dependencies"]) | {"aiohttp"}


def test_the_lowest_versions_are_the_lower_bounds():
    """The set that was tested together is the set that pyproject.toml admits."""
    lines = (ROOT / "scripts" / "lowest.txt").read_text(encoding="utf-8").splitlines()
    tested = {line.replace("==", ">=") for line in lines if line and not line.startswith("#")}
    declared = {text.partition(",")[0] for text in PROJECT["dependencies"]}
    assert tested == declared


def test_an_installed_wheel_has_its_recipes_and_checks_one(tmp_path: Path) -> None:
    few = ["--tasks-per-domain", "40", "--eval-tasks-per-domain", "6"]
    check = ["train", "--check", "--config", "mixed", *few]
    said = said_by(installed_wheel(tmp_path), *check, cwd=tmp_path)
    assert said.startswith("recipe mixed: ")


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_two_ranks_train_in_an_environment_that_pip_has_filled(kind: str, tmp_path: Path) -> None:
    """The wheel has the libraries of this environment, the sdist downloads its dependencies."""
    if kind == "wheel":
        command = installed_wheel(tmp_path)
    else:
        home = tmp_path / "environment"
        venv.create(home, symlinks=True, with_pip=True)
        (tmp_path / "source").mkdir()
        pip = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
        limits = ["--constraint", ROOT / "constraints.txt"]
        said_by(*pip, *limits, built("sdist", tmp_path / "source"), cwd=tmp_path)
        command = checked(home)
    folder = tmp_path / "empty"
    folder.mkdir()
    said = said_by(command, "train", "--num-gpus", "2", *TINY.split(), cwd=folder)
    (run,) = (folder / "runs").iterdir()
    assert run.name.startswith("three_domain_tiny-") and (run / "report.html").is_file()
    assert f"report, plots and checkpoints: runs/{run.name}" in said
