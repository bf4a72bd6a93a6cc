// Ranks within a class back to positions: class masks of 64 words at a time, then a search by rank.

namespace gymfast {
namespace GYMFAST_NAMESPACE {

// Masks and running counts of up to 64 words (4096 units).
struct ClassWindow {
  alignas(64) std::uint64_t masks[64][kNumClasses];
  alignas(64) std::uint16_t before[65][kNumClasses];  // units of the class before the word

  template <class T>
  void fill(const T* units, std::size_t count, const BlockParams& p) {
    std::size_t words = fill_whole_words(units, count, p);
    for (std::size_t start = 64 * words; start < count; start += 64, ++words) {
      T padded[64] = {};
      std::uint8_t classes[64];
      const std::size_t valid = std::min<std::size_t>(64, count - start);
      std::memcpy(padded, units + start, valid * sizeof(T));
      class_bytes64(padded, p.class_shift, p.class_base, classes);
      class_masks64(classes, masks[words]);
      for (int c = 0; c < kNumClasses; ++c) {
        masks[words][c] &= low_bits(static_cast<unsigned>(valid));
        before[words + 1][c] =
            static_cast<std::uint16_t>(before[words][c] + popcount64(masks[words][c]));
      }
    }
    // Words past the end are never chosen: no rank reaches their count.
    std::memcpy(before[64], before[words], sizeof(before[64]));
    for (; words < 64; ++words) std::memset(before[words], 0xFF, sizeof(before[words]));
#if GYMFAST_LEVEL == 2
    transpose_before();
#endif
  }

  std::uint32_t total(int c) const { return before[64][c]; }

  // Position of the unit of class c with this rank in the window; rank < total(c).
  std::uint32_t select(int c, std::uint32_t rank) const {
    std::uint32_t word = 0;
#if GYMFAST_LEVEL == 2
    const __m512i r = _mm512_set1_epi16(static_cast<short>(rank));
    const __mmask32 low = _mm512_cmple_epu16_mask(_mm512_load_si512(by_class[c]), r);
    const __mmask32 high = _mm512_cmple_epu16_mask(_mm512_load_si512(by_class[c] + 32), r);
    word = popcount64(std::uint64_t{low} | std::uint64_t{high} << 32) - 1;
#else
    for (std::uint32_t step = 32; step != 0; step >>= 1) {
      word += before[word + step][c] <= rank ? step : 0;
    }
#endif
    return 64 * word + select64(masks[word][c], rank - before[word][c]);
  }

 private:
#if GYMFAST_LEVEL == 2
  alignas(64) std::uint16_t by_class[kNumClasses][64];  // `before`, transposed

  // Pairs of words become 32-bit lanes, one lane a class; then two 16x16 transposes of lanes.
  void transpose_before() {
    alignas(64) std::uint16_t order[32];
    for (std::uint16_t c = 0; c < 16; ++c) {
      order[2 * c] = c;
      order[2 * c + 1] = static_cast<std::uint16_t>(c + 16);
    }
    const __m512i pairs = _mm512_load_si512(order);
    for (int half = 0; half < 2; ++half) {
      __m512i a[16], b[16];
      for (int i = 0; i < 16; ++i) {
        a[i] = _mm512_permutexvar_epi16(pairs, _mm512_load_si512(before[32 * half + 2 * i]));
      }
      for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
      }
      for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
      }
      // a[4 * g + j] holds, in its 128-bit lane m, class 4 * m + j of word pairs 4 * g .. 4 * g
      // + 3.
      for (int j = 0; j < 4; ++j) {
        const __m512i x0 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x44);
        const __m512i x1 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xEE);
        const __m512i y0 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x44);
        const __m512i y1 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xEE);
        _mm512_store_si512(by_class[j] + 32 * half, _mm512_shuffle_i32x4(x0, y0, 0x88));
        _mm512_store_si512(by_class[4 + j] + 32 * half, _mm512_shuffle_i32x4(x0, y0, 0xDD));
        _mm512_store_si512(by_class[8 + j] + 32 * half, _mm512_shuffle_i32x4(x1, y1, 0x88));
        _mm512_store_si512(by_class[12 + j] + 32 * half, _mm512_shuffle_i32x4(x1, y1, 0xDD));
      }
    }
  }
#endif

  template <class T>
  std::size_t fill_whole_words(const T* units, std::size_t count, const BlockParams& p) {
    std::size_t words = 0;
    std::memset(before[0], 0, sizeof(before[0]));
#if GYMFAST_LEVEL == 2
    if constexpr (sizeof(T) == 2) {
      const ClassVectors vectors(p.class_shift, p.class_base);
      __m512i sum0 = _mm512_setzero_si512(), sum1 = sum0;
      alignas(64) std::uint16_t lowest[32] = {};  // low 16 bits of eight lanes of each sum
      for (std::uint16_t c = 0; c < 16; ++c) lowest[c] = static_cast<std::uint16_t>(4 * c);
      const __m512i narrow = _mm512_load_si512(lowest);
      for (; 64 * words + 64 <= count; ++words) {
        const __m512i classes = vectors.classes(_mm512_loadu_si512(units + 64 * words),
                                                _mm512_loadu_si512(units + 64 * words + 32));
        __m512i mask0, mask1;
        vectors.masks(classes, &mask0, &mask1);
        _mm512_store_si512(masks[words], mask0);
        _mm512_store_si512(masks[words] + 8, mask1);
        sum0 = _mm512_add_epi64(sum0, _mm512_popcnt_epi64(mask0));
        sum1 = _mm512_add_epi64(sum1, _mm512_popcnt_epi64(mask1));
        _mm256_store_si256(reinterpret_cast<__m256i*>(before[words + 1]),
                           _mm512_castsi512_si256(_mm512_permutex2var_epi16(sum0, narrow, sum1)));
      }
      return words;
    }
#endif
    std::uint8_t classes[64];
    for (; 64 * words + 64 <= count; ++words) {
      class_bytes64(units + 64 * words, p.class_shift, p.class_base, classes);
      class_masks64(classes, masks[words]);
      for (int c = 0; c < kNumClasses; ++c) {
        before[words + 1][c] =
            static_cast<std::uint16_t>(before[words][c] + popcount64(masks[words][c]));
      }
    }
    return words;
  }
};

// Units of each class in a block.
template <class T>
inline void count_classes(const T* units, std::size_t n, const BlockParams& p,
                          std::uint32_t counts[kNumClasses]) {
  std::memset(counts, 0, kNumClasses * sizeof(std::uint32_t));
  std::size_t i = 0;
#if GYMFAST_LEVEL == 2
  if constexpr (sizeof(T) == 2) {
    const ClassVectors vectors(p.class_shift, p.class_base);
    __m512i sum0 = _mm512_setzero_si512(), sum1 = sum0;
    for (; i + 64 <= n; i += 64) {
      __m512i mask0, mask1;
      vectors.masks(
          vectors.classes(_mm512_loadu_si512(units + i), _mm512_loadu_si512(units + i + 32)),
          &mask0, &mask1);
      sum0 = _mm512_add_epi64(sum0, _mm512_popcnt_epi64(mask0));
      sum1 = _mm512_add_epi64(sum1, _mm512_popcnt_epi64(mask1));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(counts), _mm512_cvtepi64_epi32(sum0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(counts + 8), _mm512_cvtepi64_epi32(sum1));
  }
#endif
  ClassWindow window;
  for (; i < n; i += 4096) {
    window.fill(units + i, std::min<std::size_t>(4096, n - i), p);
    for (int c = 0; c < kNumClasses; ++c) counts[c] += window.total(c);
  }
}

}  // namespace GYMFAST_NAMESPACE
}  // namespace gymfast
