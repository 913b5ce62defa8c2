#!/usr/bin/env bash
# Run the tests: bash scripts/test.sh [ARGUMENTS OF pytest]. The first run makes .venv.
set -euo pipefail

PYTHON=${PYTHON:-}  # the Python that makes .venv; 3.11 or newer

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env dev
cd "$ROOT"
export PYTHONDONTWRITEBYTECODE=  # compile once, not in every process of a test
exec "$VENV/bin/python" -m pytest "$@"
