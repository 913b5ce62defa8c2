#!/usr/bin/env bash
# Send a run to W&B that was made without a key, or of which W&B lacks something:
#     bash scripts/wandb_sync.sh RUN_FOLDER
#
# The lines of metrics.jsonl that W&B's server lacks are sent under the run's one id; it may be
# repeated. Needs `wandb login` or WANDB_API_KEY. Exit codes: 0 sent, 1 it could not be sent, 2 a
# mistake (one line says which).
#
# This was tried with wandb 0.31.0 against a stand-in for its server on one machine, never against
# W&B's own servers.
set -euo pipefail

PYTHON=${PYTHON:-}  # the Python that makes .venv; 3.11 or newer

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env
export PYTHONPATH=$ROOT
exec "$VENV/bin/python" "$ROOT/scripts/wandb_sync.py" "$@"
