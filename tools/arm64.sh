#!/bin/sh
# Runs Python for arm64 on a Debian machine with x86-64, by QEMU's user emulation, with this tree on its path:
#
#     apt-get install qemu-user-static g++-aarch64-linux-gnu mmdebstrap
#     tools/arm64.sh FOLDER -m pytest tests/backends/cpu/test_native_ops.py
#
# FOLDER keeps the root (20 MB), the wheels for arm64 (torch among them) and the kernels. PIP names another pip.
# The compiler is the host's. Loading the embedded model takes half a minute, the tests of the kernels an hour or more.
set -eu

folder=$(realpath -m "$1")
tree=$(realpath "$(dirname "$0")/..")
shift
mkdir -p "$folder/wheels"

if [ ! -d "$folder/root" ]; then
    mmdebstrap --variant=extract --architectures=arm64 \
        --include=python3,libpython3-stdlib,libstdc++6,libgomp1 bookworm "$folder/root"
fi

if [ ! -d "$folder/packages" ]; then
    # torch 2.10 is the last one whose wheel for arm64 is without CUDA's libraries
    ${PIP:-python3 -m pip} download --quiet --dest "$folder/wheels" --no-deps --only-binary=:all: --python-version 3.11 \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 \
        --platform any \
        torch==2.10.0 numpy safetensors tokenizers huggingface-hub jinja2 markupsafe pluggy psutil attrs structlog \
        click rich typing_extensions hypothesis pytest sortedcontainers iniconfig packaging pygments filelock \
        sympy mpmath networkx fsspec tqdm pyyaml requests markdown-it-py mdurl gguf
    for wheel in "$folder"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$folder/packages"; done
    # that torch does not say what the processor has; the one that is emulated has everything
    cat > "$folder/packages/sitecustomize.py" <<'PYTHON'
import torch

if not hasattr(torch.cpu, "get_capabilities"):
    torch.cpu.get_capabilities = lambda: dict.fromkeys(("fp16_arith", "dot", "bf16", "i8mm"), True)
PYTHON
fi

export PYTHONPATH="$folder/packages:$tree" PYTHONDONTWRITEBYTECODE=1 SPECDEC_CACHE_DIR="$folder/cache"
export CXX="${CXX:-aarch64-linux-gnu-g++}"
exec qemu-aarch64-static -cpu max -L "$folder/root" "$folder/root/usr/bin/python3.11" "$@"
