#!/usr/bin/env bash
# Send a run that was kept offline to W&B: bash scripts/wandb_sync.sh RUN_FOLDER
#
# Each start of the run, the first one and every resume, made one part in RUN_FOLDER/wandb. They are
# sent in order of time under the run's one id, each appended to those before. Parts that were sent
# are skipped, and the first that cannot be sent ends it: repeat the command then. The last part of
# a run that is still alive is left for later. Needs `wandb login` or WANDB_API_KEY.
#
# Exit codes: 0 sent, 1 a part could not be sent, 2 a mistake (one line says which).
#
# This was tried with wandb 0.31.0 against a stand-in for its server on one machine, never against
# W&B's own servers. A run that was online before it went offline may have a few rows of its last
# online seconds twice or not at all on W&B; metrics.jsonl is right.
set -euo pipefail

PYTHON=${PYTHON:-}  # the Python that makes .venv; 3.11 or newer

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env

parts=$("$VENV/bin/python" -m pipeline.tracking.wandb_sync "$@")
if [ -z "$parts" ]; then
    say "nothing is left to be sent"
    exit 0
fi
id=$(cat "$1/wandb/run-id")
while IFS= read -r part; do
    say "sending $part"
    # wandb exits with 0 where nobody is logged in or the server refused; its marker does not lie.
    WANDB_DIR=$1 "$VENV/bin/wandb" sync --id "$id" "$part" </dev/null || true
    if [ ! -e "$part/run-$id.wandb.synced" ]; then
        say "$part was not sent; see above, then repeat"
        exit 1
    fi
done <<<"$parts"
say "all parts are sent"
