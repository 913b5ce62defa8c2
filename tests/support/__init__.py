"""What tests of several rooms share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the repository
# A run with one step of a very small model. No other file of the tests writes into it.
SMALL_RUN = ROOT / "tests" / "support" / "small_run"
