# Sourced by the other scripts: the virtual environment with the tested versions.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
# The package index that torch alone is installed from, such as PyTorch's; empty: pip's own index.
TORCH_INDEX_URL=${TORCH_INDEX_URL:-}

# setup_env [EXTRA]: make .venv where it is missing or broken, and install the package with EXTRA
# (such as dev) where pyproject.toml or constraints.txt changed since. Runs started at the same
# time wait for one another.
setup_env() {
    if command -v flock >/dev/null; then
        (
            flock --nonblock 9 || { say "waiting for another installation"; flock 9; }
            _install "${1:-}"
        ) 9>"$VENV.lock"
    else
        (_install "${1:-}")
    fi
}

say() {
    echo "$(basename "$0"): $*" >&2
}

has_gpu() {
    command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'
}

_install() {
    local extra=$1 stamp=$VENV/installed${1:+-$1} unfinished=$VENV/unfinished wanted python
    local torch=$VENV/torch torch_wanted
    torch_wanted="$(grep '^torch==' "$ROOT/constraints.txt") $TORCH_INDEX_URL"
    # The folder is part of it: a checkout that was copied or moved installs itself anew.
    wanted=$(cd "$ROOT" && { pwd; cat pyproject.toml constraints.txt; } | cksum)
    if [ -e "$unfinished" ] || ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
        python=$(_find_python)
        say "creating $VENV"
        if [ -e "$unfinished" ]; then
            rm -r "$VENV"
        fi
        "$python" -m venv "$VENV"
        rm -f "$VENV"/installed*
        touch "$unfinished"
        # The pip that comes with Python 3.11 takes half as long again.
        "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --upgrade pip
    elif [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && _has_torch; then
        return
    fi
    say "installing the package and its tested versions into $VENV (minutes, the first time)"
    touch "$unfinished"
    if ! _has_torch; then
        # Without dependencies: an index of PyTorch may lack the tested versions of other packages.
        "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --no-compile --no-deps \
            --force-reinstall --index-url "$TORCH_INDEX_URL" "${torch_wanted% *}"
        echo "$torch_wanted" >"$torch"
    elif [ ! -e "$torch" ] && ! has_gpu; then
        say "no GPU: TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu gives torch without CUDA"
    fi
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --no-compile \
        -c "$ROOT/constraints.txt" -e "$ROOT${extra:+[$extra]}"
    # Compiles what a run imports, which is a small part of what pip would compile.
    (cd "$ROOT" && PYTHONDONTWRITEBYTECODE='' "$VENV/bin/python" -c \
        "import pipeline.train, trl.trainer.sft_trainer, wandb, matplotlib.pyplot") >/dev/null
    echo "$wanted" >"$VENV/installed" # an extra comes on top of the plain package
    echo "$wanted" >"$stamp"
    rm "$unfinished"
}

# Whether torch comes from the wanted index, or from any index if none is wanted.
_has_torch() {
    [ -z "$TORCH_INDEX_URL" ] || [ "$(cat "$torch" 2>/dev/null)" = "$torch_wanted" ]
}

_find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: PYTHON: found no Python 3.11 or newer; set PYTHON to one" >&2
    exit 2
}
