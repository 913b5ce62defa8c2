"""What a checkout must have; the faulty ones are damaged miniatures."""

import subprocess

import pytest

from pipeline.common.errors import UserError
from pipeline.environments.tau2.checkout import Checkout
from pipeline.environments.tau2.domain import _refuse_incomplete, tau2_domain
from tests.environments.tau2.conftest import SOURCE
from tests.support.messages import refusal, says

DATA = "data/tau2/domains/airline"


def checked(path):
    checkout = Checkout(path, "airline")
    assert checkout.tasks and checkout.splits
    return checkout


def test_another_project_or_domain_is_refused_by_name(tmp_path, miniature):
    says(
        refusal(Checkout, tmp_path, "airline"),
        "airline/db.json is missing or empty; give a whole check",
    )
    says(
        refusal(Checkout, miniature, "bank"), "got the domain 'bank'; give airline, retail, telecom"
    )


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        *((file, "", "is missing or empty") for file in ("db.json", "policy.md", "tasks.json")),
        ("tasks.json", "[", "is cut off or no JSON"),
        ("tasks.json", "{}", "holds no list"),
        ("split_tasks.json", '{"train": [', "is cut off or no JSON"),
        ("split_tasks.json", '{"train": [], "test": ["77"]}', "lacks the task '77' of the split"),
    ],
)
def test_a_faulty_file_is_named(miniature, file, content, why):
    (miniature / DATA / file).write_text(content)
    says(refusal(checked, miniature), f"{DATA}/{'' if why[0] == 'l' else file}", f" {why}")


@pytest.mark.skipif(SOURCE != "miniature", reason="a process imports one checkout: TAU2_PATH's")
def test_a_truncated_database_is_named(checkout_path):
    path = checkout_path / DATA / "db.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    try:
        with pytest.raises(UserError, match=rf"{DATA}/db.json is cut off or of another version"):
            Checkout(checkout_path, "airline").make_environment()
    finally:
        path.write_bytes(whole)


def test_the_commit_is_noted(miniature):
    assert Checkout(miniature, "airline").commit == "unknown"
    git = ["git", "-C", str(miniature), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "src"], ["commit", "-q", "-m", "another"]):
        subprocess.run([*git, *command], check=True)
    commit = Checkout(miniature, "airline").commit
    assert len(commit) == 40
    next(miniature.glob("src/**/shop.py")).write_text("# other rules")
    assert Checkout(miniature, "airline").commit == f"{commit} with local changes"


def test_databases_on_which_gold_calls_fail_are_refused(checkout_path):
    """Such as a file that was cut off at the end of a row, and loads."""
    airline = tau2_domain(str(checkout_path), "airline")

    class Without(airline.environment):
        def call(self, name, arguments):
            return super().call(name, dict.fromkeys(arguments, "lost"))

    says(
        refusal(_refuse_incomplete, airline.generate_tasks, Without, []),
        "airline: db.json or tasks.json are cut off or changed",
    )
