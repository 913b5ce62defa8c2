#!/usr/bin/env bash
# Run tests: bash scripts/test.sh [ARGUMENTS OF pytest]. The first run makes .venv.
# Without arguments: those of parts, and the promises of the README on one run, on two cores;
# about three minutes.
# All but the proofs: bash .ci/run. The proofs, which take long: bash scripts/test.sh -m proof.
set -euo pipefail

PYTHON=${PYTHON:-}  # the Python that makes .venv; 3.11 or newer

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env dev
cd "$ROOT"
export PYTHONDONTWRITEBYTECODE=  # compile once, not in every process of a test
if [ $# = 0 ]; then # a process for each of two cores; a file's tests in one, as they share runs
    set -- -n 2 --dist loadfile --no-loadscope-reorder -m "not proof and not whole_run"
fi
exec "$VENV/bin/python" -m pytest "$@"
