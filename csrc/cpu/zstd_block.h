// A block of a sparse zstd frame between the two passes over it: its literals and its sequences.
#ifndef GYMFAST_CPU_ZSTD_BLOCK_H_
#define GYMFAST_CPU_ZSTD_BLOCK_H_

#include <cstddef>
#include <cstdint>

#include "cpu/zstd_tables.h"

namespace gymfast {

// RFC 8878 section 3.1.1.2.4: no block has more content.
constexpr std::size_t kZstdBlockBytes = 128 << 10;

// Zeros between two bytes that differ: fewer stay literals, more become one literal and a match at
// offset 1, which repeats it. Of 4 to 12 this made the smallest frames and none made faster ones,
// at 1, 3 and 10 % changed BF16.
constexpr std::size_t kZstdMinZeros = 5;
constexpr std::size_t kZstdMatchBias = 3;  // RFC 8878 section 3.1.1.3.2.1.1: the shortest match

// Literals, then a match at offset 1, which repeats the zero that ends them: the codes of both
// lengths, and the bits that follow the codes, those of the literal length lowest.
struct ZstdSequence {
  std::uint32_t extra_bits;
  std::uint8_t num_extra_bits;
  std::uint8_t literal_code;
  std::uint8_t match_code;
};

// Of n bytes: between two sequences is a byte that differs.
constexpr std::size_t zstd_max_sequences(std::size_t n) { return n / (kZstdMinZeros + 1) + 1; }

struct ZstdCounts {
  std::uint32_t literals[256];
  std::uint32_t literal_codes[kZstdNumLiteralCodes];
  std::uint32_t match_codes[kZstdNumMatchCodes];
};

struct ZstdBlock {
  std::size_t num_bytes = 0;
  std::size_t num_nonzero = 0;  // bytes of the xor
  const std::uint8_t* literals = nullptr;
  std::size_t num_literals = 0;
  const ZstdSequence* sequences = nullptr;
  std::size_t num_sequences = 0;
};

// Writable bytes that the kernels need behind what they write.
constexpr std::size_t kZstdSpareBytes = 64;

// Bits of the longest sequence: two states and two lengths.
constexpr std::size_t kZstdMaxSequenceBytes = (2 * kZstdMaxTableBits + 2 * 16 + 7) / 8;

struct ZstdKernels {
  // Splits the xor of num_bytes (at most a block) bytes into literals and sequences, which go where
  // the block says, and adds to the counts.
  void (*split)(const std::uint8_t* old_bytes, const std::uint8_t* new_bytes, ZstdBlock* block,
                std::uint8_t* literals, ZstdSequence* sequences, ZstdCounts* counts);
  // Both return the end of what they wrote.
  std::uint8_t* (*write_literals)(const std::uint8_t* literals, std::size_t num_literals,
                                  const ZstdHuffmanCode* codes, std::uint8_t* out);
  std::uint8_t* (*write_sequences)(const ZstdSequence* sequences, std::size_t num_sequences,
                                   const ZstdStateTable& literal_table,
                                   const ZstdStateTable& match_table, std::uint8_t* out);
};

}  // namespace gymfast

#endif  // GYMFAST_CPU_ZSTD_BLOCK_H_
