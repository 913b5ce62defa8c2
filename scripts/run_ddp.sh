#!/usr/bin/env bash
# Train on every GPU of this machine, or on two CPU ranks where it has none.
#
#   bash scripts/run_ddp.sh [FLAGS OF pipeline/run.py]
#
# The variables below can be edited here or set in the environment; those left empty keep the
# recipe's value. The first run makes .venv. The exit code is that of pipeline/run.py: 0 done,
# 1 fault, 2 a mistake in the settings, 75 interrupted with a checkpoint to resume from.
set -euo pipefail

RECIPE=${RECIPE:-}                      # recipes/three_domain_tiny.yaml where empty
MODEL=${MODEL:-}                        # tiny, a folder, or a hub id
NUM_GPUS=${NUM_GPUS:-}                  # ranks of all machines; empty: one per GPU, or 2 on a CPU
TASKS_PER_DOMAIN=${TASKS_PER_DOMAIN:-}  # training tasks of each domain
GROUP_SIZE=${GROUP_SIZE:-}              # episodes of one task
MAX_STEPS=${MAX_STEPS:-}                # optimizer steps in total
SEED=${SEED:-}
OUTPUT_DIR=${OUTPUT_DIR:-}              # runs/<recipe>-<time> where empty
PYTHON=${PYTHON:-}                      # the Python that makes .venv; 3.11 or newer
TORCH_INDEX_URL=${TORCH_INDEX_URL:-}    # the index of torch alone; pip's own where empty

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

num_ranks() {
    local gpus=0 cores
    if has_gpu; then
        # Asked of PyTorch, which knows what CUDA_VISIBLE_DEVICES and its own build leave of them.
        gpus=$("$VENV/bin/python" -c 'import torch; print(torch.cuda.device_count())')
    fi
    # nproc alone would answer with OMP_NUM_THREADS where that is set.
    cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    if [ "$gpus" -gt 0 ]; then
        echo "$gpus"
    elif [ "$cores" -ge 2 ]; then
        echo 2
    else
        echo 1
    fi
}

flags=()
flag_if_set() {
    if [ -n "$2" ]; then
        flags+=("$1" "$2")
    fi
}

case " $* " in
    *" --tau2"* | *tau2_*) setup_env tau2 ;; # the packages that a checkout of tau2-bench imports
    *) setup_env ;;
esac
flag_if_set --num-gpus "${NUM_GPUS:-$(($(num_ranks) * ${PET_NNODES:-1}))}" # of all machines
flag_if_set --config "$RECIPE"
flag_if_set --model "$MODEL"
flag_if_set --tasks-per-domain "$TASKS_PER_DOMAIN"
flag_if_set --group-size "$GROUP_SIZE"
flag_if_set --max-steps "$MAX_STEPS"
flag_if_set --seed "$SEED"
flag_if_set --output-dir "$OUTPUT_DIR"

# Another terminal, in which .venv is not active, can copy the commands that the run prints.
PIPELINE_STARTED_AS="$(printf %q "$VENV")/bin/three-domain-grpo"
export PIPELINE_STARTED_AS
say "pipeline/run.py ${flags[*]} $*"
exec "$VENV/bin/python" "$ROOT/pipeline/run.py" "${flags[@]}" "$@"
