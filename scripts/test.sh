#!/usr/bin/env bash
# Run the tests: bash scripts/test.sh [ARGUMENTS OF pytest]. The first run makes .venv.
# All tests take 8 to 12 minutes on 2 cores; those of a folder, such as tests/data, a minute or two.
set -euo pipefail

PYTHON=${PYTHON:-}  # the Python that makes .venv; 3.11 or newer

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env dev
cd "$ROOT"
export PYTHONDONTWRITEBYTECODE=  # compile once, not in every process of a test
[ $# -gt 0 ] || say "all tests take 8 to 12 minutes on 2 cores; name a folder for some of them"
exec "$VENV/bin/python" -m pytest "$@"
