#!/usr/bin/env bash
# Real NCCL on one GPU with 2 and 4 ranks: right bytes, speed beside a device copy in registered memory
# and other, buckets packed and unpacked by the kernel and by torch, abort, shrink, within a budget. No network but loopback is used. Results: $OUT/nccl.{json,log}.
#
#   OUT=folder bash benchmarks/device/nccl_smoke.sh [options of python -m benchmarks.device.nccl]
#
#   GYMFAST_BUDGET_S  seconds for everything (270)
#   GYMFAST_WHEEL     a wheel of gymfast to install first, where it is not installed
#   PYTHON            an interpreter that has torch with CUDA (python3)
#
# Exit status: 0 all is well, 1 a byte differed or a phase failed, 3 it never ran, 4 no time for all.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
readonly never_ran=3
readonly python=${PYTHON:-python3} budget_s=${GYMFAST_BUDGET_S:-270}
export OUT=${OUT:-build/device}
mkdir -p "$OUT"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT

main() {
  PYTHONPATH=$PWD "$python" -P -m benchmarks.device.facts || exit
  if [[ -n ${GYMFAST_WHEEL:-} ]]; then
    "$python" -m pip --disable-pip-version-check install -q --no-index --no-deps --no-compile \
      --target "$site" "$GYMFAST_WHEEL" || {
      echo "$GYMFAST_WHEEL does not install: this never ran" >&2
      exit "$never_ran"
    }
  fi
  # The installed package lies before the sources, which have no compiled modules.
  export PYTHONPATH=$site:$PWD PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
  # Several ranks on one device: an experiment of NCCL 2.30 and later, with few thread blocks each.
  export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-4}
  # A rank that hangs must not take the results with it: they are written after every phase.
  timeout --kill-after=5 "$budget_s" \
    "$python" -m benchmarks.device.nccl --budget-s "$((budget_s - 30))" "$@"
}

main "$@" 2>&1 | tee "$OUT/nccl.log"
