// Standard zstd frames (RFC 8878) of the xor of two buffers that are mostly equal, without a match
// search: the zeros between two differing bytes are one match at offset 1.
#ifndef GYMFAST_CPU_ZSTD_SPARSE_H_
#define GYMFAST_CPU_ZSTD_SPARSE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/dispatch.h"

namespace gymfast {

// A frame in parts, joined by the caller into memory of its own.
struct ZstdFrame {
  std::vector<std::vector<std::uint8_t>> parts;

  std::size_t num_bytes() const;
  void write(std::uint8_t* out) const;
};

// A frame with content size whose content is the xor of `num_bytes` bytes of both. The same bytes
// for any number of threads (0: one per CPU) and any kernels. Its window is 128 KiB, or the content
// where that is less, so that every decoder takes it.
// Memory: at most 6 MiB a thread, kept for later calls, and the frame.
ZstdFrame zstd_xor_frame(const Kernels& kernels, const std::uint8_t* old_bytes,
                         const std::uint8_t* new_bytes, std::size_t num_bytes,
                         std::size_t num_threads);

}  // namespace gymfast

#endif  // GYMFAST_CPU_ZSTD_SPARSE_H_
