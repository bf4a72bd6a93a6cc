// Includes GYMFAST_TARGET_INCLUDE once per instruction set, each time in a namespace of its own.
// Level 0: what the compiler assumes anyway (SSE2 on x86-64, NEON on aarch64); 1: AVX2; 2: AVX-512.
// No include guard on purpose.

#define GYMFAST_LEVEL 0
#define GYMFAST_NAMESPACE target_baseline
#include GYMFAST_TARGET_INCLUDE
#undef GYMFAST_LEVEL
#undef GYMFAST_NAMESPACE

#if defined(__x86_64__)

#define GYMFAST_LEVEL 1
#define GYMFAST_NAMESPACE target_avx2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,lzcnt,popcnt")
#endif
#include GYMFAST_TARGET_INCLUDE
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef GYMFAST_LEVEL
#undef GYMFAST_NAMESPACE

#define GYMFAST_AVX512_FEATURES                                                                  \
  "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512vpopcntdq,avx512bitalg,avx2," \
  "bmi,bmi2,lzcnt,popcnt"
#define GYMFAST_LEVEL 2
#define GYMFAST_NAMESPACE target_avx512
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target(GYMFAST_AVX512_FEATURES))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512vpopcntdq,avx512bitalg,avx2,bmi,bmi2,lzcnt,popcnt")
#endif
#include GYMFAST_TARGET_INCLUDE
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef GYMFAST_LEVEL
#undef GYMFAST_NAMESPACE

#endif  // __x86_64__
