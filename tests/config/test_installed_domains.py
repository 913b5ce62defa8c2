"""Domains of installed packages: one road with `environments`, and one line for each mistake."""

import sys
from pathlib import Path

import pytest

from pipeline.config.cli import parse
from pipeline.environments import faults
from pipeline.run import main
from tests.support.messages import refusal, says

CODE = """
class Mine:
    def reset(self, **row):
        return "go"

    def get_reward(self):
        return 1.0
"""
FAILING = f"{CODE}\n\ndef generate_tasks(seed, n, split, difficulty):\n    return [{{}}['shelf']]\n"
CHECK = ("--warm-start-steps", "0", "--report-to", "none", "--check")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Writes a package with an entry point as pip would, into a folder of libraries."""
    monkeypatch.setattr(faults, "_LIBRARIES", (*faults._LIBRARIES, str(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {*sys.modules}

    def write(module: str, point: str, code: str = CODE) -> None:
        (tmp_path / f"{module}.py").write_text(code)
        folder = tmp_path / f"{module}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[three_domain_grpo.domains]\n{point}\n")

    yield write
    for name in {*sys.modules} - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == tmp_path:
            del sys.modules[name]


def environments(*argv: str) -> dict[str, object]:
    return parse(["--domains", *argv]).data.environments


def test_an_installed_domain_is_an_entry_of_environments_and_is_not_imported(install):
    install("mine_pkg", "mine = mine_pkg : Mine [extra]")
    install("broken_pkg", "broken = broken_pkg:Mine", "1 / 0")
    assert environments("airline,mine") == {"mine": "mine_pkg:Mine"}
    assert environments("airline") == {}
    assert not {"mine_pkg", "broken_pkg"} & {*sys.modules}


def test_an_entry_of_environments_wins(install):
    install("mine_pkg", "mine = mine_pkg:Mine")
    install("other_pkg", "mine = other_pkg:Mine")
    given = {"mine": "my_module:Own"}
    assert environments("mine", "--environments", "{mine: my_module:Own}") == given


@pytest.mark.parametrize(
    ("typed", "meant"), [("cloakrom", "cloakroom"), ("airlin", "airline"), ("cellar", "")]
)
def test_an_unknown_domain_is_told_with_the_nearest_of_all(install, typed, meant):
    install("cloak_pkg", "cloakroom = cloak_pkg:Mine")
    line = refusal(parse, ["--domains", typed])
    known = "name known domains (airline, retail, telecom, cloakroom), install its package"
    says(line, f"domains: got '{typed}'; {known}, or give its class in `environments`")
    assert line.endswith(f"; did you mean {meant}?" if meant else "with `reward_funcs` or `agents`")


def test_two_packages_that_claim_one_name_are_refused_if_it_is_asked_for(install):
    install("mine_pkg", "mine = mine_pkg:Mine")
    install("other_pkg", "mine = other_pkg:Mine")
    assert environments("airline") == {}
    assert refusal(parse, ["--domains", "mine"]) == (
        "domains: got mine, claimed by mine_pkg and other_pkg; uninstall one, or give "
        "environments {mine: module:Class}"
    )


def test_a_package_that_claims_an_embedded_name_is_refused_if_it_is_asked_for(install):
    install("mine_pkg", "airline = mine_pkg:Mine")
    assert environments("retail") == {}
    assert refusal(parse, ["--domains", "airline"]) == (
        "domains: got airline, embedded here and claimed by mine_pkg; uninstall mine_pkg, or "
        "rename its entry point"
    )


@pytest.mark.parametrize(
    ("point", "code", "words"),
    [
        ("mixed = bad_pkg:Mine", CODE, ("environments: got mixed, which is taken; choose",)),
        ("mine = bad_pkg", CODE, ("environments: got mine: 'bad_pkg'; write module:Class",)),
        (
            "mine = no_pkg:Mine",
            CODE,
            ("mine of the installed package bad_pkg: got 'no_pkg:Mine' (No module named 'no_pkg'",),
        ),
        ("mine = bad_pkg:Other", CODE, ("bad_pkg.py has no attribute 'Other'); give an",)),
        ("mine = bad_pkg:Mine", "Mine = 7", ("got 'bad_pkg:Mine', which is 7; name a class or",)),
        ("mine = bad_pkg:Mine", "class Mine: ...", ("got 'bad_pkg:Mine', which has no reset();",)),
        (
            "mine = bad_pkg:Mine",
            "shelf = {}\nshelf['tea']",
            (
                "environments: mine of the installed package bad_pkg: got ",
                "fails on import (KeyError: 'tea' (bad_pkg.py, line 2: shelf['tea'])); mend it",
            ),
        ),
        (
            "mine = bad_pkg:Mine",
            FAILING,
            ("bad_pkg.generate_tasks(0, ", "KeyError: 'shelf' (bad_pkg.py, line 11: return [{}["),
        ),
    ],
    ids=["reserved", "no name", "no module", "no attribute", "number", "no reset", "import", "own"],
)
def test_a_package_that_cannot_be_used_is_one_line(install, capfd, point, code, words):
    install("bad_pkg", point, code)
    assert main(["--domains", point.partition(" ")[0], *CHECK]) == 2
    said = capfd.readouterr().err
    says(said, "error: ", *words)
    assert said.count("\n") == 1
    parse(["--domains", "retail"])  # which does not ask for it
