#!/usr/bin/env bash
# Check and measure the CUDA backend in three calls of at most ten minutes each.
#
#   bash benchmarks/cuda_session.sh first|second|third OUT [EARLIER]
#
# OUT takes the figures (cuda.json, cuda.png) and the log of this call; EARLIER is the cuda.json of the call before.
#
#   first   device tests, passes and generations of the 0.8B shape, gates of all shapes
#   second  passes and generations of the 4B and 9B shapes, then the kernels
#   third   transformers, the embedded model, what the first two had no time for, and other tiles of the products
#
# Where a machine lacks Python packages, WHEELS names a folder of wheels to install first, into a folder of their own.
# Beside torch, triton, transformers and what those bring, specdec and its tests need these (all are pure Python):
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels \
#       attrs cattrs click execnet iniconfig pluggy pytest pytest-xdist structlog
#
# (and hypothesis, rich, jinja2, safetensors, tokenizers, huggingface-hub, matplotlib where they are not there). Kernels
# are compiled at their first launch, on all cores: the tests are mostly that. A second call that finds triton's cache
# of the first one (~/.triton, on the same machine) is the faster for it.
#
# PYTHON names the interpreter. The status is that of the first step that failed; later steps run all the same.
set -uo pipefail

call=${1:?first, second or third}
out=${2:?a folder for the figures}
earlier=${3:-}
python=${PYTHON:-python3}
status=0

step() { # seconds, command...
  local limit=$1 code
  shift
  echo "--- $*"
  timeout --signal=INT --kill-after=15 "$limit" "$@"
  code=$?
  if ((status == 0)); then status=$code; fi
  echo "--- ended with $code, ${SECONDS} s into the call"
}

measure() { # seconds, arguments of benchmarks.cuda...
  local limit=$1
  shift
  step "$limit" "$python" -m benchmarks.cuda --out "$out" ${earlier:+--earlier "$earlier"} --plot "$@"
}

run() {
  if [[ -n ${WHEELS:-} ]]; then
    local site
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl ||
      return 2
    PYTHONPATH=$site:${PYTHONPATH:-}
  fi
  export PYTHONPATH=$PWD:${PYTHONPATH:-} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
  case $call in
  first)
    step 220 "$python" -m pytest -q -n 14 -m gpu -p no:cacheprovider tests/backends/cuda
    measure 110 --stage models --shapes 0.8b --total 1.6
    measure 230 --stage check --shapes 0.8b,4b,9b --total 3.3
    ;;
  second)
    measure 310 --stage models --shapes 4b,9b --total 4.5
    measure 260 --stage kernels --shapes 9b,0.8b,4b --total 4
    ;;
  third)
    measure 330 --stage transformers --shapes 9b,4b,0.8b --total 5
    # without its record the embedded model would not claim equal bits
    step 60 "$python" -m specdec doctor demo -s target.backend=cuda
    measure 60 --stage demo --total 0.9
    measure 120 --stage check,models,kernels,tiles --total 1.6
    ;;
  *)
    echo "first, second or third, not $call" >&2
    return 2
    ;;
  esac
  return "$status"
}

mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
if [[ -n $earlier ]]; then earlier=$(realpath "$earlier") || exit 2; fi
if [[ -n ${WHEELS:-} ]]; then WHEELS=$(realpath "$WHEELS") || exit 2; fi
cd "$(dirname "$0")/.." || exit 2
run 2>&1 | tee -a "$out/$call.log"
exit "${PIPESTATUS[0]}"
