// The first half of an encode alone: compare, list what changed, update snapshot and digests, but
// pack nothing. The kernels are those of csrc/cpu, compiled for the newest instruction set that
// -march=native names. Compiled by bounds.py.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/dispatch.h"

#if defined(__GNUC__) && !defined(__clang__)  // as in csrc/cpu/kernels.cpp
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wunused-function"
#endif

#define GYMFAST_TARGET_INCLUDE "fused-inl.h"
#include "cpu/foreach_target.h"

#if defined(__AVX512VBMI2__)
namespace newest = gymfast::target_avx512;
#elif defined(__AVX2__)
namespace newest = gymfast::target_avx2;
#else
namespace newest = gymfast::target_baseline;
#endif

extern "C" {

// Units that differ; base becomes next. Sums of the digest steps go to `digest` (2 words).
std::uint64_t bounds_fused(std::uint16_t* base, const std::uint16_t* next, std::size_t num_units,
                           std::size_t block_units, std::uint64_t* digest) {
  // Kept from call to call, as the codec keeps its scratch memory.
  static thread_local std::vector<std::uint32_t> index;
  static thread_local std::vector<std::uint16_t> before, after;
  index.resize(std::max(index.size(), block_units + 128));
  before.resize(index.size());
  after.resize(index.size());
  gymfast::Scratch scratch;
  scratch.index = index.data();
  scratch.before = reinterpret_cast<std::uint8_t*>(before.data());
  scratch.after = reinterpret_cast<std::uint8_t*>(after.data());
  gymfast::Digest sum;
  std::uint64_t num_changed = 0;
  for (std::size_t i = 0; i < num_units; i += block_units) {
    const std::size_t count = std::min(block_units, num_units - i);
    num_changed += newest::fused_block(base + i, next + i, count, 2 * i, scratch, &sum);
  }
  digest[0] = sum.lane[0];
  digest[1] = sum.lane[1];
  return num_changed;
}

}  // extern "C"
