// diff: compare two blocks, list what changed, store the new units over the base in the same pass.

namespace gymfast {
namespace GYMFAST_NAMESPACE {

template <class T>
struct Changes {
  std::uint32_t* index;
  T* before;
  T* after;
  std::uint32_t* rank;  // only with ranks
  std::size_t count = 0;
  std::uint32_t class_units[kNumClasses] = {};  // only with ranks: units of the block per class

  explicit Changes(Scratch& s)
      : index(s.index),
        before(reinterpret_cast<T*>(s.before)),
        after(reinterpret_cast<T*>(s.after)),
        rank(s.rank) {}
};

// Calls visit(word_start, num_units, base64, next64): 64 readable units each, padded at the end
// with equal units.
template <class T, class Visit>
inline void for_each_word(const T* base, const T* next, std::size_t n, Visit&& visit) {
  std::size_t i = 0;
  for (; i + 64 <= n; i += 64) visit(i, 64u, base + i, next + i);
  if (i < n) {
    T a[64] = {}, b[64] = {};
    std::memcpy(a, base + i, (n - i) * sizeof(T));
    std::memcpy(b, next + i, (n - i) * sizeof(T));
    visit(i, static_cast<unsigned>(n - i), a, b);
  }
}

template <class T>
inline void diff_portable(T* base, const T* next, std::size_t n, bool update, Changes<T>& out) {
  std::size_t k = out.count;
  for_each_word(base, next, n, [&](std::size_t start, unsigned count, const T* a, const T* b) {
    std::uint64_t mask = changed64(a, b);
    if (mask == 0) return;
    for (; mask != 0; mask &= mask - 1) {
      const unsigned t = static_cast<unsigned>(std::countr_zero(mask));
      out.index[k] = static_cast<std::uint32_t>(start + t);
      out.before[k] = a[t];
      out.after[k] = b[t];
      ++k;
    }
    if (update) std::memcpy(base + start, b, count * sizeof(T));
  });
  out.count = k;
}

#if GYMFAST_LEVEL == 2
// Units of one chunk: both sides of it lie in the first-level cache between the two passes over it,
// and its positions fit the 16-bit lanes of one compress.
constexpr std::size_t kDiffChunk = 4096;

// Stores the compressed lanes of `mask`. A store of 64 bytes that crosses a cache line is slow and
// nearly every one would, so few lanes are stored as 16 bytes. 64 bytes are writable at `out`.
inline void store_lanes_u16(std::uint16_t* out, __m512i lanes, unsigned count) {
  if (count <= 8) [[likely]] {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_castsi512_si128(lanes));
  } else {
    _mm512_storeu_si512(out, lanes);
  }
}

// Second pass over the units [begin, end) of a chunk: old and new values of the `count` changed
// units listed in `index`, and the update of the base.
template <bool kUpdate>
inline void take_units(std::uint16_t* base, const std::uint16_t* next, std::size_t begin,
                       std::size_t end, const std::uint32_t* index, std::size_t count,
                       std::uint16_t* before, std::uint16_t* after) {
  if (count < kDiffChunk / 16) {
    for (std::size_t j = 0; j < count; ++j) {
      const std::size_t i = index[j];
      before[j] = base[i];
      after[j] = next[i];
      if constexpr (kUpdate) base[i] = next[i];
    }
    return;
  }
  for (std::size_t i = begin; i < end; i += 32) {
    const __m512i a = _mm512_loadu_si512(base + i), b = _mm512_loadu_si512(next + i);
    const __mmask32 mask = _mm512_cmpneq_epi16_mask(a, b);
    const unsigned changed = static_cast<unsigned>(_mm_popcnt_u32(mask));
    store_lanes_u16(before, _mm512_maskz_compress_epi16(mask, a), changed);
    store_lanes_u16(after, _mm512_maskz_compress_epi16(mask, b), changed);
    if constexpr (kUpdate) _mm512_storeu_si512(base + i, b);
    before += changed;
    after += changed;
  }
}

template <bool kUpdate>
inline void diff_u16_avx512(std::uint16_t* base, const std::uint16_t* next, std::size_t n,
                            Changes<std::uint16_t>& out) {
  alignas(64) std::uint16_t local[kDiffChunk + 64];
  alignas(64) std::uint16_t iota[32];
  for (std::uint16_t j = 0; j < 32; ++j) iota[j] = j;
  const __m512i first = _mm512_load_si512(iota), step = _mm512_set1_epi16(32);
  // Locals: a vector store may alias the fields of `out`.
  std::uint32_t* const index = out.index;
  std::uint16_t* const before = out.before;
  std::uint16_t* const after = out.after;
  std::size_t k = out.count;
  const std::size_t whole = n & ~std::size_t{31};
  for (std::size_t start = 0; start < whole; start += kDiffChunk) {
    const std::size_t end = std::min(start + kDiffChunk, whole);
    std::size_t m = 0;
    __m512i position = first;
    for (std::size_t i = start; i < end; i += 32) {
      const __m512i a = _mm512_loadu_si512(base + i), b = _mm512_loadu_si512(next + i);
      const __mmask32 mask = _mm512_cmpneq_epi16_mask(a, b);
      const unsigned count = static_cast<unsigned>(_mm_popcnt_u32(mask));
      store_lanes_u16(local + m, _mm512_maskz_compress_epi16(mask, position), count);
      position = _mm512_add_epi16(position, step);
      m += count;
    }
    const __m512i offset = _mm512_set1_epi32(static_cast<int>(start));
    for (std::size_t j = 0; j < m; j += 16) {
      const __m256i narrow = _mm256_load_si256(reinterpret_cast<const __m256i*>(local + j));
      _mm512_storeu_si512(index + k + j, _mm512_add_epi32(_mm512_cvtepu16_epi32(narrow), offset));
    }
    take_units<kUpdate>(base, next, start, end, index + k, m, before + k, after + k);
    k += m;
  }
  for (std::size_t i = whole; i < n; ++i) {
    if (base[i] == next[i]) continue;
    index[k] = static_cast<std::uint32_t>(i);
    before[k] = base[i];
    after[k] = next[i];
    ++k;
    if constexpr (kUpdate) base[i] = next[i];
  }
  out.count = k;
}
#endif

// Numbers and new values of the units that differ, of `n`; returns how many. Both lists have room
// for n.
template <class T>
inline std::size_t list_units(const std::uint8_t* before, const std::uint8_t* after, std::size_t n,
                              std::uint32_t* positions, std::uint8_t* values) {
  std::size_t k = 0;
  for_each_word(reinterpret_cast<const T*>(before), reinterpret_cast<const T*>(after), n,
                [&](std::size_t start, unsigned, const T* a, const T* b) {
                  for (std::uint64_t mask = changed64(a, b); mask != 0; mask &= mask - 1) {
                    const unsigned t = static_cast<unsigned>(std::countr_zero(mask));
                    positions[k] = static_cast<std::uint32_t>(start + t);
                    std::memcpy(values + sizeof(T) * k++, b + t, sizeof(T));
                  }
                });
  return k;
}

template <class T>
inline void diff(T* base, const T* next, std::size_t n, bool update, Changes<T>& out) {
#if GYMFAST_LEVEL == 2
  if constexpr (sizeof(T) == 2) {
    if (update) return diff_u16_avx512<true>(base, next, n, out);
    return diff_u16_avx512<false>(base, next, n, out);
  }
#endif
  diff_portable(base, next, n, update, out);
}

// As diff, and also the rank of each changed unit among the units of its class.
template <class T>
inline void diff_ranks_portable(T* base, const T* next, std::size_t first, std::size_t n,
                                bool update, const BlockParams& p, Changes<T>& out) {
  std::size_t k = out.count;
  std::uint8_t classes[64];
  std::uint64_t masks[kNumClasses];
  for_each_word(base + first, next + first, n - first,
                [&](std::size_t start, unsigned count, const T* a, const T* b) {
                  class_bytes64(a, p.class_shift, p.class_base, classes);
                  class_masks64(classes, masks);
                  const std::uint64_t valid = low_bits(count);
                  std::uint64_t changed = changed64(a, b);
                  for (std::uint64_t rest = changed; rest != 0; rest &= rest - 1) {
                    const unsigned t = static_cast<unsigned>(std::countr_zero(rest));
                    const unsigned c = classes[t];
                    out.index[k] = static_cast<std::uint32_t>(first + start + t);
                    out.before[k] = a[t];
                    out.after[k] = b[t];
                    out.rank[k] = out.class_units[c] + popcount64(masks[c] & low_bits(t));
                    ++k;
                  }
                  for (int c = 0; c < kNumClasses; ++c)
                    out.class_units[c] += popcount64(masks[c] & valid);
                  if (update && changed != 0)
                    std::memcpy(base + first + start, b, count * sizeof(T));
                });
  out.count = k;
}

#if GYMFAST_LEVEL == 2
// Branch-free per word: up to eight changed units are ranked at once by permuting masks and counts.
template <bool kUpdate>
inline std::size_t diff_ranks_u16_avx512(std::uint16_t* base, const std::uint16_t* next,
                                         std::size_t n, const BlockParams& p,
                                         Changes<std::uint16_t>& out) {
  const ClassVectors vectors(p.class_shift, p.class_base);
  alignas(64) std::uint8_t iota[64];
  for (int j = 0; j < 64; ++j) iota[j] = static_cast<std::uint8_t>(j);
  const __m512i lanes = _mm512_load_si512(iota), one = _mm512_set1_epi64(1);
  __m512i units0 = _mm512_setzero_si512(), units1 = units0;
  std::uint32_t* const index = out.index;
  std::uint32_t* const ranks = out.rank;
  std::uint16_t* const before = out.before;
  std::uint16_t* const after = out.after;
  std::size_t k = out.count;
  const std::size_t whole = n & ~std::size_t{63};
  for (std::size_t begin = 0; begin < whole; begin += kDiffChunk) {
    const std::size_t end = std::min(begin + kDiffChunk, whole);
    const std::size_t k_begin = k;
    for (std::size_t i = begin; i < end; i += 64) {
      const __m512i a0 = _mm512_loadu_si512(base + i), a1 = _mm512_loadu_si512(base + i + 32);
      const __m512i b0 = _mm512_loadu_si512(next + i), b1 = _mm512_loadu_si512(next + i + 32);
      const std::uint64_t changed = std::uint64_t{_mm512_cmpneq_epi16_mask(a0, b0)} |
                                    std::uint64_t{_mm512_cmpneq_epi16_mask(a1, b1)} << 32;
      const unsigned count = static_cast<unsigned>(_mm_popcnt_u64(changed));
      const __m512i classes = vectors.classes(a0, a1);
      __m512i mask0, mask1;
      vectors.masks(classes, &mask0, &mask1);
      __m512i where = _mm512_maskz_compress_epi8(changed, lanes);
      __m512i which = _mm512_maskz_compress_epi8(changed, classes);
      const __m256i start = _mm256_set1_epi32(static_cast<int>(i));
      for (unsigned done = 0;;) {
        const __m512i t = _mm512_cvtepu8_epi64(_mm512_castsi512_si128(where));
        const __m512i c = _mm512_cvtepu8_epi64(_mm512_castsi512_si128(which));
        const __m512i mask = _mm512_permutex2var_epi64(mask0, c, mask1);
        const __m512i units = _mm512_permutex2var_epi64(units0, c, units1);
        const __m512i below = _mm512_sub_epi64(_mm512_sllv_epi64(one, t), one);
        const __m512i rank =
            _mm512_add_epi64(units, _mm512_popcnt_epi64(_mm512_and_si512(mask, below)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(ranks + k + done),
                            _mm512_cvtepi64_epi32(rank));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(index + k + done),
                            _mm256_add_epi32(start, _mm512_cvtepi64_epi32(t)));
        done += 8;
        if (done >= count) break;
        where = _mm512_alignr_epi64(_mm512_setzero_si512(), where, 1);
        which = _mm512_alignr_epi64(_mm512_setzero_si512(), which, 1);
      }
      units0 = _mm512_add_epi64(units0, _mm512_popcnt_epi64(mask0));
      units1 = _mm512_add_epi64(units1, _mm512_popcnt_epi64(mask1));
      k += count;
    }
    take_units<kUpdate>(base, next, begin, end, index + k_begin, k - k_begin, before + k_begin,
                        after + k_begin);
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.class_units), _mm512_cvtepi64_epi32(units0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.class_units + 8),
                      _mm512_cvtepi64_epi32(units1));
  out.count = k;
  return whole;
}
#endif

template <class T>
inline void diff_ranks(T* base, const T* next, std::size_t n, bool update, const BlockParams& p,
                       Changes<T>& out) {
  std::size_t done = 0;
#if GYMFAST_LEVEL == 2
  if constexpr (sizeof(T) == 2) {
    done = update ? diff_ranks_u16_avx512<true>(base, next, n, p, out)
                  : diff_ranks_u16_avx512<false>(base, next, n, p, out);
  }
#endif
  diff_ranks_portable(base, next, done, n, update, p, out);
}

template <class T>
inline unsigned class_of(T unit, const BlockParams& p) {
  unsigned field;
  if constexpr (sizeof(T) == 1) {
    field = unit & 0x7Fu;
  } else {
    field = (unit >> (8 * sizeof(T) - 9)) & 0xFFu;
  }
  const int c = static_cast<int>(field >> p.class_shift) - p.class_base;
  return static_cast<unsigned>(c < 0 ? 0 : (c > 15 ? 15 : c));
}

}  // namespace GYMFAST_NAMESPACE
}  // namespace gymfast
