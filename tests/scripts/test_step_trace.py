"""A warm optimizer step opens few rooms and few files: who reads one need not read the house."""

import pytest

from scripts.bench.step_trace import traced

pytestmark = pytest.mark.whole_run

# What a step of commit 5571d6b opened, before there were rooms, by the same script.
FILES_BEFORE = 34


def test_a_warm_step_opens_few_rooms_and_files():
    found = traced()
    assert {"rollout", "models", "environments", "training", "distributed"} <= set(found["rooms"])
    assert found["num_rooms"] <= 11, found["rooms"]
    assert found["num_files"] <= 0.83 * FILES_BEFORE, list(found["files"])
