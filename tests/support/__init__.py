"""What tests of several rooms share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the repository
