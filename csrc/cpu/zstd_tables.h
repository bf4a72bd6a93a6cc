// Entropy tables of the zstd format (RFC 8878 sections 4.1 and 4.2): built from counts, written as
// headers, kept in the form that the kernels encode with. Integers only, so that every machine
// builds the same tables.
#ifndef GYMFAST_CPU_ZSTD_TABLES_H_
#define GYMFAST_CPU_ZSTD_TABLES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gymfast {

constexpr unsigned kZstdMaxCodeBits = 11;  // of a Huffman code of literals
constexpr unsigned kZstdMaxTableBits = 9;  // of a table of literal or match lengths
constexpr std::size_t kZstdNumLiteralCodes = 36;
constexpr std::size_t kZstdNumMatchCodes = 53;

struct ZstdHuffmanCode {
  std::uint16_t bits = 0;
  std::uint16_t length = 0;  // 0: the symbol does not occur
};

struct ZstdHuffmanTable {
  ZstdHuffmanCode codes[256];
  std::vector<std::uint8_t> header;  // empty: no table pays, literals stay raw
};

// A table for literals of these counts.
void build_huffman_table(std::span<const std::uint32_t, 256> counts, ZstdHuffmanTable* table);

// A state is in [2^table_bits, 2^(table_bits + 1)). To encode a symbol, (state + delta_bits) >> 16
// bits leave the state, and next_states[(state >> those) + delta_state] follows.
struct ZstdStateTable {
  struct Symbol {
    std::int64_t delta_state;
    std::uint32_t delta_bits;
    std::uint32_t first_state;  // of the symbol that is encoded first; it costs no bits
  };
  unsigned table_bits = 0;
  std::uint16_t next_states[1u << kZstdMaxTableBits];
  Symbol symbols[64];
};

enum class ZstdTableMode : std::uint8_t {
  kPredefined = 0,
  kSame = 1,
  kCompressed = 2,
  kRepeat = 3
};

struct ZstdLengthTable {
  ZstdTableMode mode = ZstdTableMode::kPredefined;
  std::vector<std::uint8_t> header;
  ZstdStateTable states;
};

// The smallest of the three kinds of table for codes of these counts, of which one is not zero.
void build_literal_length_table(std::span<const std::uint32_t, kZstdNumLiteralCodes> counts,
                                ZstdLengthTable* table);
void build_match_length_table(std::span<const std::uint32_t, kZstdNumMatchCodes> counts,
                              ZstdLengthTable* table);

}  // namespace gymfast

#endif  // GYMFAST_CPU_ZSTD_TABLES_H_
