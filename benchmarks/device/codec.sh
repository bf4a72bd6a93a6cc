#!/usr/bin/env bash
# The codec on one GPU: builds gymfast with its CUDA module, compares it with the CPU byte by byte,
# times it, and ends within a budget. No network is used. Results: $OUT/codec.{csv,json,log}.
#
#   OUT=folder bash benchmarks/device/codec.sh [options of python -m benchmarks.device.codec]
#
#   GYMFAST_BUDGET_S  seconds for everything, build included (330)
#   GYMFAST_WHEEL     a wheel with gymfast._cuda: nothing is built, no nvcc is needed
#   GYMFAST_WHEELS    a folder of wheels to install first: nanobind, nvCOMP, whatever is missing
#   GYMFAST_COMMIT    the commit, where the sources come without their history
#   PYTHON            an interpreter that has torch with CUDA (python3)
#
# Exit status: 0 all equal, 1 a byte differed or a phase failed, 3 it never ran, 4 no time for all.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
readonly never_ran=3
readonly python=${PYTHON:-python3} budget_s=${GYMFAST_BUDGET_S:-330}
export OUT=${OUT:-build/device}
mkdir -p "$OUT"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT

install() {
  "$python" -m pip --disable-pip-version-check install -q --no-index --no-deps --no-compile \
    --upgrade --target "$site" "$@"
}

stop() {
  echo "$1: this never ran" >&2
  exit "$never_ran"
}

main() {
  PYTHONPATH=$PWD "$python" -P -m benchmarks.device.facts || exit
  # The installed package lies before the sources, which have no compiled modules.
  export PYTHONPATH=$site:$PWD PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
  if [[ -n ${GYMFAST_WHEELS:-} ]]; then
    install "$GYMFAST_WHEELS"/*.whl || stop "the wheels of $GYMFAST_WHEELS do not install"
  fi
  if [[ -n ${GYMFAST_WHEEL:-} ]]; then
    install "$GYMFAST_WHEEL" || stop "$GYMFAST_WHEEL does not install"
  else
    command -v nvcc >/dev/null || stop "no nvcc here, and GYMFAST_WHEEL names no wheel"
    # Code for several architectures at a time.
    CUDAFLAGS="${CUDAFLAGS:-} --threads 4" install . --no-build-isolation \
      --config-settings=cmake.define.GYMFAST_CUDA=ON \
      --config-settings="cmake.define.nanobind_DIR=$("$python" -P -m nanobind --cmake_dir)" || stop "gymfast does not build here"
  fi
  echo "installed after $SECONDS s"
  local left_s=$((budget_s - SECONDS))
  ((left_s > 0)) || stop "the budget of $budget_s s went into the build"
  # A kernel that hangs must not take the results with it: they are written after every phase.
  timeout --kill-after=5 $((left_s + 15)) \
    "$python" -m benchmarks.device.codec --budget-s "$left_s" "$@"
}

main "$@" 2>&1 | tee "$OUT/codec.log"
