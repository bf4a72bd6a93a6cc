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

// Literals, then a match at the one offset of the frame: the codes of both lengths, and the bits
// that follow the codes, those of the literal length lowest.
struct ZstdSequence {
  std::uint32_t extra_bits;
  std::uint8_t num_extra_bits;
  std::uint8_t literal_code;
  std::uint8_t match_code;
};

// Of n bytes: a sequence has a literal and a match of three or more.
constexpr std::size_t zstd_max_sequences(std::size_t n) { return n / 4; }

struct ZstdCounts {
  std::uint32_t literals[256];
  std::uint32_t literal_codes[kZstdNumLiteralCodes];
  std::uint32_t match_codes[kZstdNumMatchCodes];
};

struct ZstdBlock {
  std::size_t num_bytes = 0;
  const std::uint8_t* literals = nullptr;
  std::size_t num_literals = 0;  // 0: the block is all zeros
  const ZstdSequence* sequences = nullptr;
  std::size_t num_sequences = 0;
  std::size_t num_changed = 0;  // bytes that differ, of an xor
};

// Writable bytes that the kernels need behind what they write.
constexpr std::size_t kZstdSpareBytes = 128;

constexpr std::size_t kZstdChunk = 8192;  // of two buffers: stays in the L1 cache between passes

// The longest sequence: two states, two lengths, an offset.
constexpr std::size_t kZstdMaxSequenceBytes = (2 * kZstdMaxTableBits + 2 * 16 + 2 + 7) / 8;

struct ZstdKernels {
  // Position and xor of each byte that differs, of at most a chunk; returns how many. Behind both
  // lists is room for kZstdSpareBytes entries.
  std::size_t (*list)(const std::uint8_t* a, const std::uint8_t* b, std::size_t n,
                      std::uint16_t* positions, std::uint8_t* values);
  // Splits the xor of block->num_bytes bytes into literals and sequences with offset 1, which go
  // where the block says, and adds to the counts.
  void (*split)(const std::uint8_t* old_bytes, const std::uint8_t* new_bytes, ZstdBlock* block,
                std::uint8_t* literals, ZstdSequence* sequences, ZstdCounts* counts);
  // Splits ascending u32 words into literals and sequences with offset 4: a match is the upper
  // three bytes, where they are those of the word before. `has_previous`: one stands before
  // `words`.
  void (*split_words)(const std::uint8_t* words, bool has_previous, ZstdBlock* block,
                      std::uint8_t* literals, ZstdSequence* sequences, ZstdCounts* counts);
  // Both return the end of what they wrote.
  std::uint8_t* (*write_literals)(const std::uint8_t* literals, std::size_t num_literals,
                                  const ZstdHuffmanCode* codes, std::uint8_t* out);
  // The codes of offsets have no bits: all are the same. Only the one that names offset 4 is
  // followed by two ones.
  std::uint8_t* (*write_sequences)(const ZstdSequence* sequences, std::size_t num_sequences,
                                   const ZstdStateTable& literal_table,
                                   const ZstdStateTable& match_table, bool names_offset_four,
                                   std::uint8_t* out);
};

}  // namespace gymfast

#endif  // GYMFAST_CPU_ZSTD_BLOCK_H_
