// The block functions of one instruction set, chosen at run time.
#ifndef GYMFAST_CPU_DISPATCH_H_
#define GYMFAST_CPU_DISPATCH_H_

#include <span>

#include "cpu/block.h"
#include "cpu/zstd_block.h"

namespace gymfast {

struct Kernels {
  const char* name;
  DigestFunction digest;
  // Indexed by log2(unit_bytes). `digest` is the partial digest of the block, updated in place.
  Status (*encode[3])(const EncodeJob& job, Scratch& scratch, Digest& digest, EncodedBlock* out);
  Status (*apply[3])(const ApplyJob& job, Scratch& scratch, Digest& digest,
                     std::uint64_t* num_changed);
  // Numbers and new values of the units that differ, of n, n at most 2^32; returns how many. Both
  // lists have room for n; both buffers are aligned to the unit.
  std::size_t (*list_units[3])(const std::uint8_t* before, const std::uint8_t* after, std::size_t n,
                               std::uint32_t* positions, std::uint8_t* values);
  ZstdKernels zstd;
};

// All instruction sets this build has and this CPU runs, slowest first; never empty.
std::span<const Kernels* const> available_kernels();

// The set named by GYMFAST_CPU, else the fastest. Null if GYMFAST_CPU names none that runs here.
const Kernels* active_kernels();

// Forces a set by name for this process (tests); null name returns to the default.
bool force_kernels(const char* name);

}  // namespace gymfast

#endif  // GYMFAST_CPU_DISPATCH_H_
