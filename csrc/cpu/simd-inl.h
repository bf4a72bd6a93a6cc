// The few vector primitives that compilers do not find by themselves; words are 64 units.

namespace gymfast {
namespace GYMFAST_NAMESPACE {

#if GYMFAST_LEVEL >= 1
inline unsigned popcount64(std::uint64_t x) { return static_cast<unsigned>(_mm_popcnt_u64(x)); }
inline unsigned select64(std::uint64_t mask, unsigned rank) {
  return static_cast<unsigned>(_tzcnt_u64(_pdep_u64(std::uint64_t{1} << rank, mask)));
}
#else
inline unsigned popcount64(std::uint64_t x) { return static_cast<unsigned>(std::popcount(x)); }
inline unsigned select64(std::uint64_t mask, unsigned rank) {
  for (; rank != 0; --rank) mask &= mask - 1;
  return static_cast<unsigned>(std::countr_zero(mask));
}
#endif

inline std::uint64_t low_bits(unsigned count) {
  return count >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
}

// Bit i is set where byte i of 64 equals `value`.
inline std::uint64_t equal_bytes64(const std::uint8_t* bytes, std::uint8_t value) {
#if GYMFAST_LEVEL == 2
  return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(bytes),
                                _mm512_set1_epi8(static_cast<char>(value)));
#elif GYMFAST_LEVEL == 1
  const __m256i v = _mm256_set1_epi8(static_cast<char>(value));
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + 32));
  const std::uint32_t low =
      static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, v)));
  const std::uint32_t high =
      static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(b, v)));
  return low | std::uint64_t{high} << 32;
#elif defined(__SSE2__)
  const __m128i v = _mm_set1_epi8(static_cast<char>(value));
  std::uint64_t mask = 0;
  for (int i = 0; i < 4; ++i) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 16 * i));
    const unsigned bits = static_cast<unsigned>(_mm_movemask_epi8(_mm_cmpeq_epi8(a, v)));
    mask |= std::uint64_t{bits} << (16 * i);
  }
  return mask;
#else
  std::uint64_t mask = 0;
  for (unsigned i = 0; i < 64; ++i) mask |= std::uint64_t{bytes[i] == value} << i;
  return mask;
#endif
}

// Bit i is set where unit i of 64 differs.
template <class T>
inline std::uint64_t changed64(const T* a, const T* b) {
#if GYMFAST_LEVEL == 2
  if constexpr (sizeof(T) == 1) {
    return _mm512_cmpneq_epi8_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
  } else if constexpr (sizeof(T) == 2) {
    const std::uint64_t low =
        _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
    const std::uint64_t high =
        _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(a + 32), _mm512_loadu_si512(b + 32));
    return low | high << 32;
  } else {
    std::uint64_t mask = 0;
    for (int i = 0; i < 4; ++i) {
      const std::uint64_t part =
          _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(a + 16 * i), _mm512_loadu_si512(b + 16 * i));
      mask |= part << (16 * i);
    }
    return mask;
  }
#elif GYMFAST_LEVEL == 1
  if constexpr (sizeof(T) == 2) {
    std::uint64_t equal = 0;
    for (int i = 0; i < 2; ++i) {
      const __m256i* x = reinterpret_cast<const __m256i*>(a + 32 * i);
      const __m256i* y = reinterpret_cast<const __m256i*>(b + 32 * i);
      const __m256i e0 = _mm256_cmpeq_epi16(_mm256_loadu_si256(x), _mm256_loadu_si256(y));
      const __m256i e1 = _mm256_cmpeq_epi16(_mm256_loadu_si256(x + 1), _mm256_loadu_si256(y + 1));
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(e0, e1), 0xd8);
      const std::uint32_t part = static_cast<std::uint32_t>(_mm256_movemask_epi8(packed));
      equal |= std::uint64_t{part} << (32 * i);
    }
    return ~equal;
  } else if constexpr (sizeof(T) == 1) {
    std::uint64_t equal = 0;
    for (int i = 0; i < 2; ++i) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + 32 * i));
      const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 32 * i));
      const std::uint32_t part =
          static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, y)));
      equal |= std::uint64_t{part} << (32 * i);
    }
    return ~equal;
  } else {
    std::uint64_t equal = 0;
    for (int i = 0; i < 8; ++i) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + 8 * i));
      const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 8 * i));
      const std::uint32_t part = static_cast<std::uint32_t>(
          _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x, y))));
      equal |= std::uint64_t{part} << (8 * i);
    }
    return ~equal;
  }
#else
  if (std::memcmp(a, b, 64 * sizeof(T)) == 0) return 0;
  std::uint8_t differs[64];
  for (int i = 0; i < 64; ++i) differs[i] = a[i] != b[i];
  return equal_bytes64(differs, 1);
#endif
}

// Classes of 64 units, one byte each (docs/wire-format.md section 5.2).
template <class T>
inline void class_bytes64(const T* units, int shift, int base, std::uint8_t* classes) {
  for (int i = 0; i < 64; ++i) {
    unsigned field;
    if constexpr (sizeof(T) == 1) {
      field = units[i] & 0x7Fu;
    } else {
      field = (units[i] >> (8 * sizeof(T) - 9)) & 0xFFu;
    }
    const int c = static_cast<int>(field >> shift) - base;
    classes[i] = static_cast<std::uint8_t>(c < 0 ? 0 : (c > 15 ? 15 : c));
  }
}

inline void class_masks64(const std::uint8_t* classes, std::uint64_t* masks) {
  for (int c = 0; c < kNumClasses; ++c) {
    masks[c] = equal_bytes64(classes, static_cast<std::uint8_t>(c));
  }
}

#if GYMFAST_LEVEL == 2
// 64 class bytes of 64 BF16-wide units, and the 16 class masks as two vectors of eight.
struct ClassVectors {
  __m512i odd, base, fifteen, shift_mask;
  __m512i bit[4], sel0[4], sel1[4];
  unsigned shift;

  explicit ClassVectors(int class_shift, int class_base) {
    alignas(64) std::uint8_t bytes[64];
    for (int i = 0; i < 64; ++i) bytes[i] = static_cast<std::uint8_t>(2 * i + 1);
    odd = _mm512_load_si512(bytes);
    base = _mm512_set1_epi8(static_cast<char>(class_base));
    fifteen = _mm512_set1_epi8(15);
    shift = static_cast<unsigned>(class_shift);
    shift_mask = _mm512_set1_epi8(static_cast<char>(0xFFu >> shift));
    alignas(64) std::uint64_t lanes[8];
    for (int j = 0; j < 4; ++j) {
      bit[j] = _mm512_set1_epi8(static_cast<char>(1 << j));
      for (int c = 0; c < 8; ++c) lanes[c] = (c >> j & 1) ? 0 : ~std::uint64_t{0};
      sel0[j] = _mm512_load_si512(lanes);
      for (int c = 0; c < 8; ++c) lanes[c] = ((c + 8) >> j & 1) ? 0 : ~std::uint64_t{0};
      sel1[j] = _mm512_load_si512(lanes);
    }
  }

  __m512i classes(__m512i low, __m512i high) const {
    __m512i field =
        _mm512_permutex2var_epi8(_mm512_add_epi16(low, low), odd, _mm512_add_epi16(high, high));
    if (shift != 0) {
      field = _mm512_and_si512(_mm512_srl_epi16(field, _mm_cvtsi32_si128(static_cast<int>(shift))),
                               shift_mask);
    }
    return _mm512_min_epu8(_mm512_subs_epu8(field, base), fifteen);
  }

  // 0x28 is (a ^ b) & c.
  void masks(__m512i classes, __m512i* low8, __m512i* high8) const {
    __m512i p[4];
    for (int j = 0; j < 4; ++j) {
      p[j] = _mm512_set1_epi64(static_cast<long long>(_mm512_test_epi8_mask(classes, bit[j])));
    }
    __m512i u = _mm512_xor_si512(p[0], sel0[0]);
    __m512i v = _mm512_xor_si512(p[0], sel1[0]);
    for (int j = 1; j < 4; ++j) {
      u = _mm512_ternarylogic_epi64(p[j], sel0[j], u, 0x28);
      v = _mm512_ternarylogic_epi64(p[j], sel1[j], v, 0x28);
    }
    *low8 = u;
    *high8 = v;
  }
};
#endif

}  // namespace GYMFAST_NAMESPACE
}  // namespace gymfast
