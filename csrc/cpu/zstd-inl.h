// Sparse zstd frames: the xor of two buffers as literals and sequences, and their bit streams.

namespace gymfast {
namespace GYMFAST_NAMESPACE {

#if GYMFAST_LEVEL == 2
constexpr std::size_t kPrefetchBytes = 4096;  // of each buffer, ahead of the scan

inline void prefetch(const std::uint8_t* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
}

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
// The memory is slower than the scan and idle in all other passes: so it is asked ahead.
inline std::size_t list_words(const std::uint8_t* a, const std::uint8_t* b, std::size_t num_words,
                              std::uint16_t* positions, std::uint8_t* values) {
  alignas(64) std::uint8_t iota[64];
  std::uint64_t masks[kZstdChunk / 64 + 1];
  std::uint32_t starts[kZstdChunk / 64 + 1];
  for (std::size_t i = 0; i < 64; ++i) iota[i] = static_cast<std::uint8_t>(i);
  const __m512i lanes = _mm512_load_si512(iota);
  std::size_t num_changed = 0, k = 0;
  for (std::size_t start = 0; start < 64 * num_words; start += 64) {
    prefetch(a + start + kPrefetchBytes);
    prefetch(b + start + kPrefetchBytes);
    masks[num_changed] = changed64(a + start, b + start);
    starts[num_changed] = static_cast<std::uint32_t>(start);
    num_changed += masks[num_changed] != 0;
  }
  for (std::size_t j = 0; j < num_changed; ++j) {
    const std::size_t start = starts[j];
    k += list_word(a + start, b + start, masks[j], start, lanes, positions + k, values + k);
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

struct ZstdLengths {
  std::uint32_t literals;
  std::uint32_t match;  // less kZstdMatchBias
};

// Zeros up to each of `n` positions and the byte there; returns how many sequences that makes.
inline std::size_t add_positions(const std::uint16_t* positions, const std::uint8_t* values,
                                 std::size_t n, std::size_t start, ZstdState& state,
                                 ZstdLengths* lengths) {
  std::uint8_t* literals = state.literals;
  std::size_t run = state.run, expected = state.expected, num_lengths = 0;
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
  state = {literals, run, expected};
  return num_lengths;
}

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

// Appends the sequences of the positions of a chunk.
inline ZstdSequence* split_chunk(const std::uint16_t* positions, const std::uint8_t* values,
                                 std::size_t n, std::size_t start, ZstdState& state,
                                 ZstdSequence* sequences, ZstdCounters& counters) {
#if GYMFAST_LEVEL == 2
  const ZstdWideSplitter splitter;
  const ZstdSequence* begin = sequences;
  const __m512i first = _mm512_set1_epi32(static_cast<int>(start));
  for (std::size_t i = 0; i < n; i += 16) {
    const __m512i wide =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(positions + i)));
    const unsigned count = static_cast<unsigned>(std::min<std::size_t>(n - i, 16));
    sequences += splitter.add(_mm512_add_epi32(wide, first), values + i, count, state, sequences);
  }
  for (std::size_t i = 0; begin + i < sequences; ++i) {
    ++counters.literal_codes[i & 1][begin[i].literal_code];
    ++counters.match_codes[i & 1][begin[i].match_code];
  }
#else
  ZstdLengths lengths[zstd_max_sequences(kZstdChunk) + 1];
  const std::size_t num_lengths = add_positions(positions, values, n, start, state, lengths);
  make_sequences(lengths, num_lengths, sequences, counters);
  sequences += num_lengths;
#endif
  count_values(values, n, counters);
  return sequences;
}

inline void zstd_split(const std::uint8_t* old_bytes, const std::uint8_t* new_bytes,
                       ZstdBlock* block, std::uint8_t* literals, ZstdSequence* sequences,
                       ZstdCounts* counts) {
  std::uint16_t positions[kZstdChunk + kZstdSpareBytes];
  std::uint8_t values[kZstdChunk + kZstdSpareBytes];
  ZstdState state{literals};
  ZstdCounters counters;
  ZstdSequence* next = sequences;
  for (std::size_t start = 0; start < block->num_bytes; start += kZstdChunk) {
    const std::size_t n = std::min(kZstdChunk, block->num_bytes - start);
    const std::size_t found = zstd_list(old_bytes + start, new_bytes + start, n, positions, values);
    next = split_chunk(positions, values, found, start, state, next, counters);
    block->num_changed += found;
  }
  if (block->num_changed == 0) return;
  // The zeros behind the last position, as if a byte followed them.
  const std::uint16_t end = 0;
  const std::uint8_t none = 0;
  ZstdLengths length;
  const std::size_t num_lengths = add_positions(&end, &none, 1, block->num_bytes, state, &length);
  make_sequences(&length, num_lengths, next, counters);
  next += num_lengths;
  block->literals = literals;
  block->num_literals = static_cast<std::size_t>(state.literals - 1 - literals);
  block->sequences = sequences;
  block->num_sequences = static_cast<std::size_t>(next - sequences);
  counters.add_to(counts);
  counts->literals[0] += static_cast<std::uint32_t>(block->num_literals - block->num_changed);
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
