#include "cpu/zstd_sparse.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu/parallel.h"
#include "cpu/zstd_segment.h"

namespace gymfast {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::uint32_t kMagic = 0xFD2FB528;
constexpr unsigned kWindowLog = 17;  // a block: matches reach back by an offset of 1 or 4 only
static_assert(std::size_t{1} << kWindowLog == kZstdBlockBytes);
static_assert(kZstdPartBytes % kZstdSegmentBytes == 0);

ZstdMemory& thread_memory() {
  thread_local ZstdMemory memory;
  return memory;
}

std::size_t num_segments_of(std::size_t num_bytes) {
  return (num_bytes + kZstdSegmentBytes - 1) / kZstdSegmentBytes;
}

void append(std::uint64_t value, unsigned num_bytes, Bytes* out) {
  for (unsigned i = 0; i < num_bytes; ++i) {
    out->push_back(static_cast<std::uint8_t>(value >> 8 * i));
  }
}

Bytes frame_header(std::uint64_t num_bytes) {
  Bytes header;
  append(kMagic, 4, &header);
  // Small content is one segment: the window is the content and has no field.
  const bool is_single = num_bytes <= kZstdBlockBytes;
  const std::uint64_t single = is_single ? 1u << 5 : 0u;
  if (is_single && num_bytes < 256) {
    append(single, 1, &header);
    append(num_bytes, 1, &header);
  } else if (is_single && num_bytes < 256 + 65536) {
    append(single | 1u << 6, 1, &header);
    append(num_bytes - 256, 2, &header);
  } else {
    const bool is_large = num_bytes > UINT32_MAX;
    append(single | (is_large ? 3u : 2u) << 6, 1, &header);
    if (!is_single) append((kWindowLog - 10) << 3, 1, &header);
    append(num_bytes, is_large ? 8 : 4, &header);
  }
  return header;
}

// Calls add(start, num_bytes) for each block of a segment.
template <class Add>
void for_each_block(std::size_t num_bytes, Add&& add) {
  for (std::size_t start = 0; start < num_bytes; start += kZstdBlockBytes) {
    add(start, std::min(kZstdBlockBytes, num_bytes - start));
  }
}

Bytes xor_segment(const ZstdKernels& kernels, const std::uint8_t* a, const std::uint8_t* b,
                  std::size_t num_bytes, bool is_last, std::atomic<std::size_t>* num_changed) {
  ZstdSegment segment(kernels, thread_memory(), 1);
  for_each_block(num_bytes, [&](std::size_t start, std::size_t size) {
    segment.add_block(size, [&](ZstdBlock* block, auto* literals, auto* sequences, auto* counts) {
      kernels.split(a + start, b + start, block, literals, sequences, counts);
      *num_changed += block->num_changed;
    });
  });
  return segment.write(is_last, [&](std::size_t index, std::uint8_t* to) {
    const std::size_t start = index * kZstdBlockBytes;
    const std::size_t size = std::min(kZstdBlockBytes, num_bytes - start);
    for (std::size_t i = 0; i < size; ++i) {
      to[i] = static_cast<std::uint8_t>(a[start + i] ^ b[start + i]);
    }
  });
}

// Bytes as they are: positions with matches at offset 4, values without any.
Bytes dense_segment(const ZstdKernels& kernels, const std::uint8_t* bytes, std::size_t num_bytes,
                    bool are_words, bool is_first, bool is_last) {
  ZstdSegment segment(kernels, thread_memory(), 4);
  for_each_block(num_bytes, [&](std::size_t start, std::size_t size) {
    segment.add_block(size, [&](ZstdBlock* block, auto* literals, auto* sequences, auto* counts) {
      if (are_words) {
        kernels.split_words(bytes + start, !is_first || start != 0, block, literals, sequences,
                            counts);
        return;
      }
      block->literals = bytes + start;
      block->num_literals = size;
      for (std::size_t i = 0; i < size; ++i) ++counts->literals[bytes[start + i]];
    });
  });
  return segment.write(is_last, [&](std::size_t index, std::uint8_t* to) {
    const std::size_t start = index * kZstdBlockBytes;
    std::memcpy(to, bytes + start, std::min(kZstdBlockBytes, num_bytes - start));
  });
}

// Of the overwrite encoding: the number of changes and their positions as u32; the new bytes.
struct ChangeList {
  Bytes words;
  Bytes values;
};

ChangeList list_changes(const ZstdKernels& kernels, const std::uint8_t* old_bytes,
                        const std::uint8_t* new_bytes, std::size_t num_bytes) {
  std::uint16_t positions[kZstdChunk + kZstdSpareBytes];
  std::uint8_t xored[kZstdChunk + kZstdSpareBytes];
  ChangeList changes;
  changes.words.resize(4);
  for (std::size_t start = 0; start < num_bytes; start += kZstdChunk) {
    const std::size_t n = std::min(kZstdChunk, num_bytes - start);
    const std::size_t found =
        kernels.list(old_bytes + start, new_bytes + start, n, positions, xored);
    for (std::size_t i = 0; i < found; ++i) {
      append(start + positions[i], 4, &changes.words);
      changes.values.push_back(new_bytes[start + positions[i]]);
    }
  }
  const auto count = static_cast<std::uint32_t>(changes.values.size());
  std::memcpy(changes.words.data(), &count, 4);
  return changes;
}

}  // namespace

std::size_t ZstdFrame::num_bytes() const {
  std::size_t sum = 0;
  for (const Bytes& part : parts) sum += part.size();
  return sum;
}

void ZstdFrame::write(std::uint8_t* out) const {
  for (const Bytes& part : parts) out = std::copy(part.begin(), part.end(), out);
}

ZstdFrame zstd_xor_frame(const Kernels& kernels, const std::uint8_t* old_bytes,
                         const std::uint8_t* new_bytes, std::size_t num_bytes,
                         std::size_t num_threads) {
  return zstd_xor_part(kernels, old_bytes, new_bytes, num_bytes, 0, num_bytes, num_threads);
}

ZstdFrame zstd_xor_part(const Kernels& kernels, const std::uint8_t* old_bytes,
                        const std::uint8_t* new_bytes, std::size_t num_bytes, std::size_t start,
                        std::size_t end, std::size_t num_threads) {
  ZstdFrame frame;
  const std::size_t num_segments = num_segments_of(end - start);
  frame.parts.resize(1 + std::max<std::size_t>(num_segments, 1));
  if (start == 0) frame.parts[0] = frame_header(num_bytes);
  if (num_bytes == 0) append_zstd_block_header(ZstdBlockType::kRaw, 0, true, &frame.parts[1]);
  std::atomic<std::size_t> num_changed{0};
  parallel_for(num_segments, num_threads, [&](std::size_t i) {
    const std::size_t at = start + i * kZstdSegmentBytes;
    const std::size_t size = std::min(kZstdSegmentBytes, end - at);
    frame.parts[1 + i] = xor_segment(kernels.zstd, old_bytes + at, new_bytes + at, size,
                                     at + size == num_bytes, &num_changed);
  });
  frame.num_changed = num_changed;
  return frame;
}

ZstdFrame zstd_overwrite_frame(const Kernels& kernels, const std::uint8_t* old_bytes,
                               const std::uint8_t* new_bytes, std::size_t num_bytes,
                               std::size_t num_threads) {
  const ChangeList changes = list_changes(kernels.zstd, old_bytes, new_bytes, num_bytes);
  const std::size_t num_words = num_segments_of(changes.words.size());
  const std::size_t num_segments = num_words + num_segments_of(changes.values.size());
  ZstdFrame frame;
  frame.parts.resize(1 + num_segments);
  frame.parts[0] = frame_header(changes.words.size() + changes.values.size());
  parallel_for(num_segments, num_threads, [&](std::size_t i) {
    const bool are_words = i < num_words;
    const Bytes& bytes = are_words ? changes.words : changes.values;
    const std::size_t start = (are_words ? i : i - num_words) * kZstdSegmentBytes;
    frame.parts[1 + i] = dense_segment(kernels.zstd, bytes.data() + start,
                                       std::min(kZstdSegmentBytes, bytes.size() - start), are_words,
                                       start == 0, i + 1 == num_segments);
  });
  return frame;
}

}  // namespace gymfast
