// Compiles the kernels for every instruction set and chooses one at run time.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/dispatch.h"

// GCC 12 warns of its own _mm512_undefined_* inside immintrin.h (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define GYMFAST_TARGET_INCLUDE "cpu/kernels-inl.h"
#include "cpu/foreach_target.h"

namespace gymfast {

std::span<const Kernels* const> available_kernels() {
  static const std::vector<const Kernels*> list = [] {
    std::vector<const Kernels*> found = {&target_baseline::kKernels};
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                          __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    if (has_avx2) found.push_back(&target_avx2::kKernels);
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
        __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("avx512bitalg")) {
      found.push_back(&target_avx512::kKernels);
    }
#endif
    return found;
  }();
  return list;
}

}  // namespace gymfast
