#!/usr/bin/env bash
# Fuzzes each target for SECONDS with ASan and UBSan (clang 19 and its libclang-rt from Debian):
#   tests/fuzz/run.sh SECONDS [TARGET...]      new inputs go to build/fuzz/corpus, crashes to build/fuzz/crashes
#   tests/fuzz/run.sh 0                        only replays tests/fuzz/corpus
#   CXX=... BUILD=... GYMFAST_FUZZ_JOBS=...    compiler, build folder, parallel compilations
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
seconds=${1:?usage: run.sh SECONDS [TARGET...]}
shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(fuzz_parse fuzz_apply fuzz_round_trip fuzz_targets_agree fuzz_zstd_sparse)
build=${BUILD:-$here/../../build/fuzz}
mkdir -p "$build/crashes"

cmake -S "$here" -B "$build" -DFUZZER=ON -DCMAKE_CXX_COMPILER="${CXX:-clang++-19}" >"$build/cmake.log" 2>&1
cmake --build "$build" --parallel "${GYMFAST_FUZZ_JOBS:-2}" --target "${targets[@]}" >>"$build/cmake.log" 2>&1 ||
  { tail -n 40 "$build/cmake.log" >&2; exit 1; }

for target in "${targets[@]}"; do
  mkdir -p "$build/corpus/$target" "$here/corpus/$target"
  limit=(-max_total_time="$seconds")
  [ "$seconds" -gt 0 ] || limit=(-runs=0)
  printf '=== %s, %s s\n' "$target" "$seconds"
  "$build/$target" "${limit[@]}" -timeout=20 -rss_limit_mb=2048 -max_len=4096 -print_final_stats=1 \
    -artifact_prefix="$build/crashes/$target-" "$build/corpus/$target" "$here/corpus/$target" \
    >"$build/$target.log" 2>&1 || { tail -n 60 "$build/$target.log"; exit 1; }
  grep -E 'stat::(number_of_executed_units|peak_rss_mb)|cov: [0-9]+ ' "$build/$target.log" | tail -n 3
done
