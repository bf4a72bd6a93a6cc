// Positions that differ to literals and sequences, in the lanes of AVX-512.

namespace gymfast {
namespace GYMFAST_NAMESPACE {

#if GYMFAST_LEVEL == 2
// Sums of lanes 0 to i.
inline __m512i running_sum(__m512i x) {
  const __m512i zero = _mm512_setzero_si512();
  x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 15));
  x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 14));
  x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 12));
  return _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 8));
}

inline __m512i low_bits_of(__m512i x, __m512i num_bits) {
  const __m512i rest = _mm512_sub_epi32(_mm512_set1_epi32(32), num_bits);
  return _mm512_and_si512(x, _mm512_srlv_epi32(_mm512_set1_epi32(-1), rest));
}

// What length_code and the tables of bits say, 16 lengths under 2^24 at a time. Bytes of lanes but
// the lowest are 0, for which all tables have 0.
struct LengthCodes {
  __m512i codes, bits;
};

inline LengthCodes length_codes(__m512i lengths, __mmask16 large, __m512i small_codes,
                                __m512i large_code, __m512i bits_of_codes) {
  const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(lengths)), 23);
  const __m512i log2 = _mm512_sub_epi32(exponent, _mm512_set1_epi32(127));
  const __m512i codes = _mm512_mask_add_epi32(small_codes, large, log2, large_code);
  const __m512i bits = _mm512_permutexvar_epi8(codes, bits_of_codes);
  return {codes, bits};
}

// As ZstdSplitter::add and make_sequences, 16 positions at a time.
class ZstdWideSplitter {
 public:
  ZstdWideSplitter() {
    literal_codes_ = _mm512_loadu_si512(kLiteralCodes);
    match_codes_[0] = _mm512_loadu_si512(kMatchCodes);
    match_codes_[1] = _mm512_loadu_si512(kMatchCodes + 64);
    literal_bits_ = _mm512_maskz_loadu_epi8(low_bits(kZstdNumLiteralCodes), kLiteralCodeBits);
    match_bits_ = _mm512_maskz_loadu_epi8(low_bits(kZstdNumMatchCodes), kMatchCodeBits);
  }

  // Up to 16 positions of a block. `run` and `expected` are those of ZstdSplitter; returns how many
  // sequences that made.
  std::size_t add(__m512i positions, const std::uint8_t* values, unsigned n, ZstdState& state,
                  ZstdSequence* sequences) const {
    const __mmask16 valid = static_cast<__mmask16>((1u << n) - 1);
    const __m512i one = _mm512_set1_epi32(1);
    const __m512i last = _mm512_set1_epi32(static_cast<int>(n - 1));
    const __m512i expected = _mm512_set1_epi32(static_cast<int>(state.expected) - 1);
    const __m512i before = _mm512_alignr_epi32(positions, expected, 15);
    const __m512i zeros = _mm512_sub_epi32(_mm512_sub_epi32(positions, before), one);
    const __mmask16 is_long = _mm512_mask_cmpge_epi32_mask(
        valid, zeros, _mm512_set1_epi32(static_cast<int>(kZstdMinZeros)));
    const __m512i num_zeros = _mm512_mask_mov_epi32(zeros, is_long, one);
    const __m512i ends = running_sum(_mm512_maskz_add_epi32(valid, num_zeros, one));
    const __m512i places = _mm512_sub_epi32(ends, one);  // of the values among the literals
    const auto total =
        static_cast<std::size_t>(_mm512_cvtsi512_si32(_mm512_permutexvar_epi32(last, ends)));
    write_literals(places, values, n, total, state.literals);
    const unsigned count = popcount64(is_long);
    const __m512i cuts = _mm512_maskz_compress_epi32(is_long, places);
    const __m512i first = _mm512_set1_epi32(-static_cast<int>(state.run));
    const __m512i runs = _mm512_sub_epi32(cuts, _mm512_alignr_epi32(cuts, first, 15));
    const __m512i matches = _mm512_sub_epi32(_mm512_maskz_compress_epi32(is_long, zeros),
                                             _mm512_set1_epi32(1 + kZstdMatchBias));
    write_sequences(runs, matches, sequences);
    state.literals += total;
    state.expected = 1 + static_cast<std::size_t>(
                             _mm512_cvtsi512_si32(_mm512_permutexvar_epi32(last, positions)));
    state.run += total;
    if (count != 0) {
      const __m512i cut =
          _mm512_permutexvar_epi32(_mm512_set1_epi32(static_cast<int>(count) - 1), cuts);
      state.run = total - static_cast<std::size_t>(_mm512_cvtsi512_si32(cut));
    }
    return count;
  }

 private:
  // Zeros, but values at their places.
  static void write_literals(__m512i places, const std::uint8_t* values, unsigned n,
                             std::size_t total, std::uint8_t* out) {
    if (total <= 64) [[likely]] {
      const __m512i one = _mm512_set1_epi64(1);
      const __m512i low = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(places));
      const __m512i high = _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(places, 1));
      const __m512i bits =
          _mm512_or_si512(_mm512_sllv_epi64(one, low), _mm512_sllv_epi64(one, high));
      const auto mask = static_cast<std::uint64_t>(_mm512_reduce_or_epi64(bits)) &
                        low_bits(static_cast<unsigned>(total));
      const __m512i some =
          _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
      _mm512_storeu_si512(out, _mm512_maskz_expand_epi8(mask, some));
      return;
    }
    alignas(64) std::uint32_t at[16];
    _mm512_store_si512(at, places);
    std::memset(out, 0, total);
    for (unsigned i = 0; i < n; ++i) out[at[i]] = values[i];
  }

  void write_sequences(__m512i runs, __m512i matches, ZstdSequence* sequences) const {
    const LengthCodes literal =
        length_codes(runs, _mm512_cmpge_epi32_mask(runs, _mm512_set1_epi32(64)),
                     _mm512_maskz_permutexvar_epi8(0x1111111111111111, runs, literal_codes_),
                     _mm512_set1_epi32(25 - 6), literal_bits_);
    const LengthCodes match =
        length_codes(matches, _mm512_cmpge_epi32_mask(matches, _mm512_set1_epi32(128)),
                     _mm512_maskz_permutex2var_epi8(0x1111111111111111, match_codes_[0], matches,
                                                    match_codes_[1]),
                     _mm512_set1_epi32(43 - 7), match_bits_);
    const __m512i extra =
        _mm512_or_si512(low_bits_of(runs, literal.bits),
                        _mm512_sllv_epi32(low_bits_of(matches, match.bits), literal.bits));
    const __m512i fields = _mm512_or_si512(
        _mm512_add_epi32(literal.bits, match.bits),
        _mm512_or_si512(_mm512_slli_epi32(literal.codes, 8), _mm512_slli_epi32(match.codes, 16)));
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    _mm512_storeu_si512(sequences, _mm512_permutex2var_epi32(extra, low, fields));
    _mm512_storeu_si512(sequences + 8, _mm512_permutex2var_epi32(extra, high, fields));
  }

  __m512i literal_codes_, match_codes_[2], literal_bits_, match_bits_;
};
#endif

}  // namespace GYMFAST_NAMESPACE
}  // namespace gymfast
