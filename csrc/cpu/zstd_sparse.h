// Standard zstd frames (RFC 8878) of what changed between two buffers, without a match search. In
// an xor the zeros between two differing bytes are one match at offset 1; in a list of positions
// the upper bytes that repeat are one at offset 4.
#ifndef GYMFAST_CPU_ZSTD_SPARSE_H_
#define GYMFAST_CPU_ZSTD_SPARSE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/dispatch.h"

namespace gymfast {

constexpr std::size_t kZstdPartBytes = 2 << 20;

// A frame in parts, joined by the caller into memory of its own.
struct ZstdFrame {
  std::vector<std::vector<std::uint8_t>> parts;
  std::size_t num_changed = 0;  // bytes that differ; counted for an xor

  std::size_t num_bytes() const;
  void write(std::uint8_t* out) const;
};

// A frame with content size whose content is the xor of `num_bytes` bytes of both. The same bytes
// for any number of threads (0: one per CPU) and any kernels. Its window is 128 KiB, or the content
// where that is less, so that every decoder takes it.
// Memory: at most 7 MiB a thread, kept for later calls, and the frame.
ZstdFrame zstd_xor_frame(const Kernels& kernels, const std::uint8_t* old_bytes,
                         const std::uint8_t* new_bytes, std::size_t num_bytes,
                         std::size_t num_threads);

// Of a frame by zstd_xor_frame what stands for the bytes from `start` to `end` of `num_bytes`: who
// joins all of them in order has the frame. Both are a multiple of kZstdPartBytes, or the end. So
// the caller can look at the bytes while they are in the cache.
ZstdFrame zstd_xor_part(const Kernels& kernels, const std::uint8_t* old_bytes,
                        const std::uint8_t* new_bytes, std::size_t num_bytes, std::size_t start,
                        std::size_t end, std::size_t num_threads);

// As zstd_xor_frame, with other content: u32 number of differing bytes, their u32 positions, the
// new bytes. `num_bytes` is at most 2^32 - 1. Memory: also five bytes for each that differs.
ZstdFrame zstd_overwrite_frame(const Kernels& kernels, const std::uint8_t* old_bytes,
                               const std::uint8_t* new_bytes, std::size_t num_bytes,
                               std::size_t num_threads);

}  // namespace gymfast

#endif  // GYMFAST_CPU_ZSTD_SPARSE_H_
