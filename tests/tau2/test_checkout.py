"""What a checkout must have; the faulty ones are damaged miniatures."""

import json
import subprocess

import pytest

from pipeline.errors import UserError
from pipeline.tau2.checkout import TESTED_COMMIT, Checkout
from tests.tau2.conftest import SOURCE

DATA = "data/tau2/domains/airline"


def checked(path):
    checkout = Checkout(path, "airline")
    assert checkout.tasks and checkout.splits
    return checkout


def test_a_folder_of_another_project_is_refused_by_name(tmp_path):
    (tmp_path / "src").mkdir()
    with pytest.raises(UserError, match=r"tau2/domains/airline is no folder; give a checkout of"):
        Checkout(tmp_path, "airline")


def test_an_unknown_domain_is_refused(miniature):
    with pytest.raises(UserError, match=r"got the domain 'bank'; give airline, retail, telecom"):
        Checkout(miniature, "bank")


@pytest.mark.parametrize("file", ["db.json", "policy.md", "tasks.json", "split_tasks.json"])
@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_a_missing_or_empty_file_is_named(miniature, file, damage):
    path = miniature / DATA / file
    path.unlink()
    if damage == "empty":
        path.touch()
    with pytest.raises(UserError, match=rf"{DATA}/{file} is missing or empty"):
        Checkout(miniature, "airline")


@pytest.mark.parametrize("file", ["tasks.json", "split_tasks.json"])
def test_a_truncated_file_is_named(miniature, file):
    path = miniature / DATA / file
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=rf"{DATA}/{file} is cut off or no JSON"):
        checked(miniature)


def test_a_split_with_an_unknown_task_is_refused(miniature):
    path = miniature / DATA / "split_tasks.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"test": ["77"]}))
    with pytest.raises(UserError, match=r"lacks the task '77' of the split test"):
        checked(miniature)


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
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "another"]):
        subprocess.run([*git, *command], check=True)
    commit = Checkout(miniature, "airline").commit
    assert len(commit) == 40
    assert commit != TESTED_COMMIT


def test_the_hash_of_the_data_changes_with_a_file(miniature):
    before = Checkout(miniature, "airline").data_hash
    (miniature / DATA / "policy.md").write_text("Another policy.")
    assert Checkout(miniature, "airline").data_hash != before


def test_results_say_commit_data_and_reward(domain):
    about = domain.about()
    assert TESTED_COMMIT in about["commit"]
    assert about["reward"] == "verifiable"
    assert {"commit", "data_sha256", "num_tasks"} <= about.keys()
