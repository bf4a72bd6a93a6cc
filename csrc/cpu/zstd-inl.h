// Sparse zstd frames: the xor of two buffers as literals and sequences, and their bit streams.

namespace gymfast {
namespace GYMFAST_NAMESPACE {

constexpr std::size_t kZstdChunk = 16384;  // its positions and values stay in the L1 cache

// Position and xor of every byte that differs. Room for 64 more than that is needed behind both.
inline std::size_t list_nonzero(const std::uint8_t* a, const std::uint8_t* b, std::size_t n,
                                std::uint16_t* positions, std::uint8_t* values) {
  std::size_t k = 0;
#if GYMFAST_LEVEL == 2
  alignas(64) std::uint8_t iota[64];
  for (int i = 0; i < 64; ++i) iota[i] = static_cast<std::uint8_t>(i);
  const __m512i lanes = _mm512_load_si512(iota);
  for_each_word(a, b, n, [&](std::size_t start, unsigned, const auto* x, const auto* y) {
    const __m512i xored = _mm512_xor_si512(_mm512_loadu_si512(x), _mm512_loadu_si512(y));
    const __mmask64 mask = _mm512_test_epi8_mask(xored, xored);
    const unsigned count = popcount64(mask);
    const __m512i where = _mm512_maskz_compress_epi8(mask, lanes);
    const __m512i what = _mm512_maskz_compress_epi8(mask, xored);
    const __m512i first = _mm512_set1_epi16(static_cast<short>(start));
    std::uint16_t* to = positions + k;
    if (count <= 16) [[likely]] {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(values + k), _mm512_castsi512_si128(what));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                          _mm256_add_epi16(_mm256_cvtepu8_epi16(_mm512_castsi512_si128(where)),
                                           _mm512_castsi512_si256(first)));
    } else {
      const __m512i low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(where));
      const __m512i high = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(where, 1));
      _mm512_storeu_si512(values + k, what);
      _mm512_storeu_si512(to, _mm512_add_epi16(low, first));
      _mm512_storeu_si512(to + 32, _mm512_add_epi16(high, first));
    }
    k += count;
  });
#else
  for_each_word(a, b, n, [&](std::size_t start, unsigned, const auto* x, const auto* y) {
    for (std::uint64_t mask = changed64(x, y); mask != 0; mask &= mask - 1) {
      const unsigned t = static_cast<unsigned>(std::countr_zero(mask));
      positions[k] = static_cast<std::uint16_t>(start + t);
      values[k++] = static_cast<std::uint8_t>(x[t] ^ y[t]);
    }
  });
#endif
  return k;
}

// Code of a length, RFC 8878 section 3.1.1.3.2.1.1. `small` holds those under 2^small_bits; each
// power of two above has one code.
inline std::uint32_t length_code(std::uint32_t length, const std::uint8_t* small,
                                 unsigned small_bits, std::uint32_t first_code) {
  if (length < 1u << small_bits) return small[length];
  return first_code + static_cast<std::uint32_t>(std::bit_width(length)) - 1 - small_bits;
}

constexpr std::uint8_t kLiteralCodes[64] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 16, 17, 17, 18, 18,
    19, 19, 20, 20, 20, 20, 21, 21, 21, 21, 22, 22, 22, 22, 22, 22, 22, 22, 23, 23, 23, 23,
    23, 23, 23, 23, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24};
constexpr std::uint8_t kMatchCodes[128] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 32, 33, 33, 34, 34, 35, 35, 36, 36, 36, 36,
    37, 37, 37, 37, 38, 38, 38, 38, 38, 38, 38, 38, 39, 39, 39, 39, 39, 39, 39, 39, 40, 40,
    40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 41, 41, 41, 41, 41, 41, 41, 41,
    41, 41, 41, 41, 41, 41, 41, 41, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42,
    42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42, 42};
// Bits that follow a code; the value itself has them as its lowest.
constexpr std::uint8_t kLiteralCodeBits[kZstdNumLiteralCodes] = {
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  0,  1,  1,
    1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
constexpr std::uint8_t kMatchCodeBits[kZstdNumMatchCodes] = {
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  0,  0,  0, 0,
    0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

// Follows the differing bytes of a block in order.
class ZstdSplitter {
 public:
  ZstdSplitter(std::uint8_t* literals, ZstdSequence* sequences)
      : literals_(literals), run_(literals), sequences_(sequences) {}

  // Free of branches: whether a gap is long cannot be foreseen.
  void add_zeros(std::size_t count) {
    const bool is_long = count >= kZstdMinZeros;
    std::memset(literals_, 0, kZstdMinZeros);
    literals_ += is_long ? 1 : count;
    *sequences_ = {static_cast<std::uint32_t>(literals_ - run_),
                   static_cast<std::uint32_t>(count - 1 - kZstdMinMatch)};
    sequences_ += is_long;
    run_ = is_long ? literals_ : run_;
  }
  void add_literal(std::uint8_t value) { *literals_++ = value; }

  const std::uint8_t* literals_end() const { return literals_; }
  ZstdSequence* sequences_end() const { return sequences_; }

 private:
  std::uint8_t* literals_;
  std::uint8_t* run_;  // literals since the last match
  ZstdSequence* sequences_;
};

// Adds the codes to the lengths. Two counters each: the same code often comes twice in a row, and
// the second addition would wait for the first.
inline void add_codes(ZstdSequence* begin, ZstdSequence* end, ZstdCounts* counts) {
  std::uint32_t literal_codes[2][kZstdNumLiteralCodes] = {};
  std::uint32_t match_codes[2][kZstdNumMatchCodes] = {};
  unsigned turn = 0;
  for (ZstdSequence* sequence = begin; sequence != end; ++sequence, turn ^= 1) {
    const std::uint32_t literals = sequence->literals, match = sequence->match;
    const std::uint32_t literal_code = length_code(literals, kLiteralCodes, 6, 25);
    const std::uint32_t match_code = length_code(match, kMatchCodes, 7, 43);
    ++literal_codes[turn][literal_code];
    ++match_codes[turn][match_code];
    *sequence = {literals << 8 | literal_code, match << 8 | match_code};
  }
  for (std::size_t i = 0; i < kZstdNumLiteralCodes; ++i) {
    counts->literal_codes[i] += literal_codes[0][i] + literal_codes[1][i];
  }
  for (std::size_t i = 0; i < kZstdNumMatchCodes; ++i) {
    counts->match_codes[i] += match_codes[0][i] + match_codes[1][i];
  }
}

inline void zstd_split(const std::uint8_t* old_bytes, const std::uint8_t* new_bytes,
                       ZstdBlock* block, std::uint8_t* literals, ZstdSequence* sequences,
                       ZstdCounts* counts) {
  std::uint16_t positions[kZstdChunk + 64];
  std::uint8_t values[kZstdChunk + 64];
  ZstdSplitter splitter(literals, sequences);
  std::size_t expected = 0;  // position behind the last literal
  std::size_t num_nonzero = 0;
  for (std::size_t start = 0; start < block->num_bytes; start += kZstdChunk) {
    const std::size_t n = std::min(kZstdChunk, block->num_bytes - start);
    const std::size_t found =
        list_nonzero(old_bytes + start, new_bytes + start, n, positions, values);
    for (std::size_t j = 0; j < found; ++j) {
      const std::size_t position = start + positions[j];
      splitter.add_zeros(position - expected);
      splitter.add_literal(values[j]);
      ++counts->literals[values[j]];
      expected = position + 1;
    }
    num_nonzero += found;
  }
  block->num_nonzero = num_nonzero;
  if (num_nonzero == 0) return;
  splitter.add_zeros(block->num_bytes - expected);
  block->literals = literals;
  block->num_literals = static_cast<std::size_t>(splitter.literals_end() - literals);
  block->sequences = sequences;
  block->num_sequences = static_cast<std::size_t>(splitter.sequences_end() - sequences);
  counts->literals[0] += static_cast<std::uint32_t>(block->num_literals - num_nonzero);
  add_codes(sequences, splitter.sequences_end(), counts);
}

// Bits for a decoder that starts at the end. 8 bytes are writable behind all that is written.
class ZstdBitStream {
 public:
  explicit ZstdBitStream(std::uint8_t* out) : out_(out) {}

  // `bits` has no more than `length` bits; 56 fit between two calls of flush.
  void add(std::uint64_t bits, unsigned length) {
    pending_ |= bits << count_;
    count_ += length;
  }
  void flush() {
    std::memcpy(out_, &pending_, sizeof(pending_));
    out_ += count_ >> 3;
    pending_ >>= count_ & ~7u;
    count_ &= 7;
  }
  std::uint8_t* end() {
    add(1, 1);
    flush();
    return out_ + (count_ != 0 ? 1 : 0);
  }

 private:
  std::uint8_t* out_;
  std::uint64_t pending_ = 0;
  unsigned count_ = 0;
};

inline std::uint8_t* zstd_write_literals(const std::uint8_t* literals, std::size_t num_literals,
                                         const ZstdHuffmanCode* codes, std::uint8_t* out) {
  ZstdBitStream stream(out);
  std::size_t i = num_literals;
  for (; i % 4 != 0; --i) stream.add(codes[literals[i - 1]].bits, codes[literals[i - 1]].length);
  stream.flush();
  for (; i != 0; i -= 4) {
    for (std::size_t j = 1; j <= 4; ++j) {
      const ZstdHuffmanCode code = codes[literals[i - j]];
      stream.add(code.bits, code.length);
    }
    stream.flush();
  }
  return stream.end();
}

inline void add_length(ZstdBitStream& stream, std::uint32_t length, const std::uint8_t* code_bits) {
  const unsigned num_bits = code_bits[length & 0xFF];
  stream.add(length >> 8 & low_bits(num_bits), num_bits);
}

// The next state; the bits that leave the old one go to the stream.
inline std::uint32_t add_state(ZstdBitStream& stream, std::uint32_t state, std::uint32_t code,
                               const ZstdStateTable& table) {
  const ZstdStateTable::Symbol& symbol = table.symbols[code];
  const unsigned num_bits = (state + symbol.delta_bits) >> 16;
  stream.add(state & low_bits(num_bits), num_bits);
  return table.next_states[static_cast<std::int32_t>(state >> num_bits) + symbol.delta_state];
}

// RFC 8878 section 3.1.1.3.2.1.2, from the last sequence to the first. Offsets have no bits: all
// are the same.
inline std::uint8_t* zstd_write_sequences(const ZstdSequence* sequences, std::size_t num_sequences,
                                          const ZstdStateTable& literal_table,
                                          const ZstdStateTable& match_table, std::uint8_t* out) {
  ZstdBitStream stream(out);
  ZstdSequence sequence = sequences[num_sequences - 1];
  std::uint32_t literal_state = literal_table.symbols[sequence.literals & 0xFF].first_state;
  std::uint32_t match_state = match_table.symbols[sequence.match & 0xFF].first_state;
  for (std::size_t i = num_sequences - 1;;) {
    add_length(stream, sequence.literals, kLiteralCodeBits);
    add_length(stream, sequence.match, kMatchCodeBits);
    stream.flush();
    if (i == 0) break;
    sequence = sequences[--i];
    match_state = add_state(stream, match_state, sequence.match & 0xFF, match_table);
    literal_state = add_state(stream, literal_state, sequence.literals & 0xFF, literal_table);
  }
  stream.add(match_state & low_bits(match_table.table_bits), match_table.table_bits);
  stream.add(literal_state & low_bits(literal_table.table_bits), literal_table.table_bits);
  return stream.end();
}

}  // namespace GYMFAST_NAMESPACE
}  // namespace gymfast
