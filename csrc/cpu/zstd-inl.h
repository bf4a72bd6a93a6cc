// Sparse zstd frames: the xor of two buffers as literals and sequences, and their bit streams.

namespace gymfast {
namespace GYMFAST_NAMESPACE {

#if GYMFAST_LEVEL == 2
// Positions and values of the bytes that differ in one word; returns how many.
inline unsigned list_word(const std::uint8_t* a, const std::uint8_t* b, std::uint64_t mask,
                          std::size_t start, __m512i lanes, std::uint16_t* positions,
                          std::uint8_t* values) {
  const unsigned count = popcount64(mask);
  const __m512i xored = _mm512_xor_si512(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
  const __m512i what = _mm512_maskz_compress_epi8(mask, xored);
  const __m512i where = _mm512_maskz_compress_epi8(mask, lanes);
  const __m512i first = _mm512_set1_epi16(static_cast<short>(start));
  if (count <= 16) [[likely]] {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values), _mm512_castsi512_si128(what));
    const __m256i low = _mm256_cvtepu8_epi16(_mm512_castsi512_si128(where));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions),
                        _mm256_add_epi16(low, _mm512_castsi512_si256(first)));
    return count;
  }
  const __m512i low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(where));
  const __m512i high = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(where, 1));
  _mm512_storeu_si512(values, what);
  _mm512_storeu_si512(positions, _mm512_add_epi16(low, first));
  _mm512_storeu_si512(positions + 32, _mm512_add_epi16(high, first));
  return count;
}

// Whole words of a chunk. A branch on each mask would often be missed at 1 % changed, and a
// compress for each is slow where nothing changed: so masks first, then only the words with any.
inline std::size_t list_words(const std::uint8_t* a, const std::uint8_t* b, std::size_t num_words,
                              std::uint16_t* positions, std::uint8_t* values) {
  alignas(64) std::uint64_t masks[kZstdChunk / 64 + 8];
  alignas(64) std::uint8_t iota[64];
  std::uint64_t words[kZstdChunk / 64 + 8];
  for (std::size_t i = 0; i < 64; ++i) iota[i] = static_cast<std::uint8_t>(i);
  for (std::size_t i = 0; i < num_words; ++i) {
    masks[i] =
        _mm512_cmpneq_epi8_mask(_mm512_loadu_si512(a + 64 * i), _mm512_loadu_si512(b + 64 * i));
  }
  for (std::size_t i = num_words; i % 8 != 0; ++i) masks[i] = 0;
  const __m512i lanes = _mm512_load_si512(iota);
  __m512i index = _mm512_cvtepu8_epi64(_mm512_castsi512_si128(lanes));
  std::size_t num_changed = 0, k = 0;
  for (std::size_t i = 0; i < num_words; i += 8) {
    const __m512i eight = _mm512_load_si512(masks + i);
    const __mmask8 changed = _mm512_test_epi64_mask(eight, eight);
    _mm512_storeu_si512(words + num_changed, _mm512_maskz_compress_epi64(changed, index));
    num_changed += popcount64(changed);
    index = _mm512_add_epi64(index, _mm512_set1_epi64(8));
  }
  for (std::size_t j = 0; j < num_changed; ++j) {
    const std::size_t i = words[j];
    k += list_word(a + 64 * i, b + 64 * i, masks[i], 64 * i, lanes, positions + k, values + k);
  }
  return k;
}
#endif

inline std::size_t zstd_list(const std::uint8_t* a, const std::uint8_t* b, std::size_t n,
                             std::uint16_t* positions, std::uint8_t* values) {
  std::size_t done = 0, k = 0;
#if GYMFAST_LEVEL == 2
  done = n & ~std::size_t{63};
  k = list_words(a, b, n / 64, positions, values);
#endif
  for_each_word(a + done, b + done, n - done,
                [&](std::size_t start, unsigned, const std::uint8_t* x, const std::uint8_t* y) {
                  for (std::uint64_t mask = changed64(x, y); mask != 0; mask &= mask - 1) {
                    const unsigned t = static_cast<unsigned>(std::countr_zero(mask));
                    positions[k] = static_cast<std::uint16_t>(done + start + t);
                    values[k++] = static_cast<std::uint8_t>(x[t] ^ y[t]);
                  }
                });
  return k;
}

// Code of a length, RFC 8878 section 3.1.1.3.2.1.1. `small` holds those under 2^small_bits; each
// power of two above has one code. No branch: which of both cannot be foreseen.
inline std::uint32_t length_code(std::uint32_t length, const std::uint8_t* small,
                                 unsigned small_bits, std::uint32_t first_code) {
  const std::uint32_t limit = 1u << small_bits;
  const std::uint32_t if_small = 0u - std::uint32_t{length < limit};
  const std::uint32_t large_code =
      first_code + static_cast<std::uint32_t>(std::bit_width(length | 1)) - 1 - small_bits;
  return (small[length & if_small] & if_small) | (large_code & ~if_small);
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

inline std::uint64_t keep_low_bits(std::uint64_t value, unsigned count) {
#if GYMFAST_LEVEL >= 1
  return _bzhi_u64(value, count);
#else
  return value & ((std::uint64_t{1} << count) - 1);
#endif
}

struct ZstdLengths {
  std::uint32_t literals;
  std::uint32_t match;  // less kZstdMatchBias
};

// Follows the differing bytes of a block in order.
class ZstdSplitter {
 public:
  explicit ZstdSplitter(std::uint8_t* literals) : literals_(literals) {}

  // Zeros up to each of `n` positions and the byte there; returns how many sequences that made.
  std::size_t add(const std::uint16_t* positions, const std::uint8_t* values, std::size_t n,
                  std::size_t start, ZstdLengths* lengths) {
    std::uint8_t* literals = literals_;
    std::size_t run = run_, expected = expected_, num_lengths = 0;
    for (std::size_t j = 0; j < n; ++j) {
      const std::size_t zeros = start + positions[j] - expected;
      expected = start + positions[j] + 1;
      // All ones or none instead of a branch: whether a gap is long cannot be foreseen.
      const std::size_t if_long = std::size_t{0} - std::size_t{zeros >= kZstdMinZeros};
      std::memset(literals, 0, sizeof(std::uint64_t));  // at least kZstdMinZeros, one store
      const std::size_t num_literals = (zeros & ~if_long) + (1 & if_long);
      literals += num_literals;
      run += num_literals;
      lengths[num_lengths] = {static_cast<std::uint32_t>(run),
                              static_cast<std::uint32_t>(zeros - 1 - kZstdMatchBias)};
      num_lengths += 1 & if_long;
      run = (run & ~if_long) + 1;
      *literals++ = values[j];
    }
    literals_ = literals;
    run_ = run;
    expected_ = expected;
    return num_lengths;
  }

  // The zeros behind the last position; returns as `add`.
  std::size_t end(std::size_t num_bytes, ZstdLengths* lengths) {
    const std::uint16_t position = 0;
    const std::uint8_t value = 0;
    const std::size_t num_lengths = add(&position, &value, 1, num_bytes, lengths);
    --literals_;
    return num_lengths;
  }

  const std::uint8_t* literals_end() const { return literals_; }

 private:
  std::uint8_t* literals_;
  std::size_t run_ = 0;       // literals since the last match
  std::size_t expected_ = 0;  // position behind the last literal
};

// Counters of a block. Some for each value: one that is used twice in a row would wait for itself.
struct ZstdCounters {
  std::uint32_t values[4][256] = {};
  std::uint32_t literal_codes[2][kZstdNumLiteralCodes] = {};
  std::uint32_t match_codes[2][kZstdNumMatchCodes] = {};

  void add_to(ZstdCounts* counts) const {
    for (const auto& part : values) {
      for (std::size_t i = 0; i < 256; ++i) counts->literals[i] += part[i];
    }
    for (int part = 0; part < 2; ++part) {
      for (std::size_t i = 0; i < kZstdNumLiteralCodes; ++i) {
        counts->literal_codes[i] += literal_codes[part][i];
      }
      for (std::size_t i = 0; i < kZstdNumMatchCodes; ++i) {
        counts->match_codes[i] += match_codes[part][i];
      }
    }
  }
};

inline void count_values(const std::uint8_t* values, std::size_t n, ZstdCounters& counters) {
  for (std::size_t i = 0; i < n; ++i) ++counters.values[i & 3][values[i]];
}

inline void make_sequences(const ZstdLengths* lengths, std::size_t n, ZstdSequence* sequences,
                           ZstdCounters& counters) {
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t literal_code = length_code(lengths[i].literals, kLiteralCodes, 6, 25);
    const std::uint32_t match_code = length_code(lengths[i].match, kMatchCodes, 7, 43);
    ++counters.literal_codes[i & 1][literal_code];
    ++counters.match_codes[i & 1][match_code];
    const unsigned literal_bits = kLiteralCodeBits[literal_code];
    const unsigned match_bits = kMatchCodeBits[match_code];
    const std::uint64_t extra = keep_low_bits(lengths[i].literals, literal_bits) |
                                keep_low_bits(lengths[i].match, match_bits) << literal_bits;
    sequences[i] = {static_cast<std::uint32_t>(extra),
                    static_cast<std::uint8_t>(literal_bits + match_bits),
                    static_cast<std::uint8_t>(literal_code), static_cast<std::uint8_t>(match_code)};
  }
}

static_assert(kZstdMinZeros > kZstdMatchBias && kZstdMinZeros <= sizeof(std::uint64_t));

inline void zstd_split(const std::uint8_t* old_bytes, const std::uint8_t* new_bytes,
                       ZstdBlock* block, std::uint8_t* literals, ZstdSequence* sequences,
                       ZstdCounts* counts) {
  std::uint16_t positions[kZstdChunk + kZstdSpareBytes];
  std::uint8_t values[kZstdChunk + kZstdSpareBytes];
  ZstdLengths lengths[zstd_max_sequences(kZstdChunk) + 2];
  ZstdSplitter splitter(literals);
  ZstdCounters counters;
  std::size_t num_nonzero = 0;
  ZstdSequence* next = sequences;
  for (std::size_t start = 0; start < block->num_bytes; start += kZstdChunk) {
    const std::size_t n = std::min(kZstdChunk, block->num_bytes - start);
    const std::size_t found = zstd_list(old_bytes + start, new_bytes + start, n, positions, values);
    const std::size_t num_lengths = splitter.add(positions, values, found, start, lengths);
    make_sequences(lengths, num_lengths, next, counters);
    count_values(values, found, counters);
    next += num_lengths;
    num_nonzero += found;
  }
  if (num_nonzero == 0) return;
  const std::size_t num_lengths = splitter.end(block->num_bytes, lengths);
  make_sequences(lengths, num_lengths, next, counters);
  next += num_lengths;
  block->literals = literals;
  block->num_literals = static_cast<std::size_t>(splitter.literals_end() - literals);
  block->sequences = sequences;
  block->num_sequences = static_cast<std::size_t>(next - sequences);
  counters.add_to(counts);
  counts->literals[0] += static_cast<std::uint32_t>(block->num_literals - num_nonzero);
}

inline void zstd_split_words(const std::uint8_t* words, bool has_previous, ZstdBlock* block,
                             std::uint8_t* literals, ZstdSequence* sequences, ZstdCounts* counts) {
  ZstdLengths lengths[kZstdChunk + 1];
  ZstdCounters counters;
  std::uint8_t* at = literals;
  std::uint8_t* run = literals;  // literals since the last match
  ZstdSequence* next = sequences;
  std::uint32_t previous = 0;
  if (has_previous) std::memcpy(&previous, words - 4, 4);
  const std::size_t num_words = block->num_bytes / 4;
  for (std::size_t start = 0; start < num_words; start += kZstdChunk) {
    std::size_t num_lengths = 0;
    for (std::size_t i = start; i < std::min(num_words, start + kZstdChunk); ++i) {
      std::uint32_t word;
      std::memcpy(&word, words + 4 * i, 4);
      std::memcpy(at, &word, 4);
      const bool is_match = (word ^ previous) < 256 && (has_previous || i != 0);
      at += is_match ? 1 : 4;
      lengths[num_lengths] = {static_cast<std::uint32_t>(at - run), 0};
      num_lengths += is_match;
      run = is_match ? at : run;
      previous = word;
    }
    make_sequences(lengths, num_lengths, next, counters);
    next += num_lengths;
  }
  block->literals = literals;
  block->num_literals = static_cast<std::size_t>(at - literals);
  block->sequences = sequences;
  block->num_sequences = static_cast<std::size_t>(next - sequences);
  count_values(literals, block->num_literals, counters);
  counters.add_to(counts);
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

// The next state; the bits that leave the old one go to the stream.
inline std::uint32_t add_state(ZstdBitStream& stream, std::uint32_t state, std::uint32_t code,
                               const ZstdStateTable& table) {
  const ZstdStateTable::Symbol& symbol = table.symbols[code];
  const unsigned num_bits = (state + symbol.delta_bits) >> 16;
  stream.add(keep_low_bits(state, num_bits), num_bits);
  return table.next_states[static_cast<std::int64_t>(state >> num_bits) + symbol.delta_state];
}

// RFC 8878 section 3.1.1.3.2.1.2, from the last sequence to the first. The codes of offsets
// have no bits: all are the same.
template <unsigned kNumOffsetOnes>
inline std::uint8_t* write_sequences(const ZstdSequence* sequences, std::size_t num_sequences,
                                     const ZstdStateTable& literal_table,
                                     const ZstdStateTable& match_table, std::uint8_t* out) {
  ZstdBitStream stream(out);
  ZstdSequence sequence = sequences[num_sequences - 1];
  std::uint32_t literal_state = literal_table.symbols[sequence.literal_code].first_state;
  std::uint32_t match_state = match_table.symbols[sequence.match_code].first_state;
  for (std::size_t i = num_sequences - 1;;) {
    stream.add(sequence.extra_bits, sequence.num_extra_bits);
    if constexpr (kNumOffsetOnes != 0) stream.add((1u << kNumOffsetOnes) - 1, kNumOffsetOnes);
    stream.flush();
    if (i == 0) break;
    sequence = sequences[--i];
    match_state = add_state(stream, match_state, sequence.match_code, match_table);
    literal_state = add_state(stream, literal_state, sequence.literal_code, literal_table);
  }
  stream.add(keep_low_bits(match_state, match_table.table_bits), match_table.table_bits);
  stream.add(keep_low_bits(literal_state, literal_table.table_bits), literal_table.table_bits);
  return stream.end();
}

inline std::uint8_t* zstd_write_sequences(const ZstdSequence* sequences, std::size_t num_sequences,
                                          const ZstdStateTable& literal_table,
                                          const ZstdStateTable& match_table, bool names_offset_four,
                                          std::uint8_t* out) {
  const auto write = names_offset_four ? write_sequences<2> : write_sequences<0>;
  return write(sequences, num_sequences, literal_table, match_table, out);
}

}  // namespace GYMFAST_NAMESPACE
}  // namespace gymfast
