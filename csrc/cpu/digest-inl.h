// digest: the linear digest over whole byte ranges and over lists of changed units.

namespace gymfast {
namespace GYMFAST_NAMESPACE {

// Sums k * w over `count` words of one row; inner[l] is not yet multiplied with the row key.
inline void digest_row_words(const std::uint8_t* data, std::size_t count, std::size_t column,
                             std::uint64_t inner[2]) {
  const std::uint32_t* k0 = kColumnKeys.lane[0] + column;
  const std::uint32_t* k1 = kColumnKeys.lane[1] + column;
  std::uint64_t sum0 = inner[0], sum1 = inner[1];
  std::size_t i = 0;
#if GYMFAST_LEVEL == 2
  __m512i a0 = _mm512_setzero_si512(), a1 = a0, b0 = a0, b1 = a0;
  for (; i + 16 <= count; i += 16) {
    const __m512i w = _mm512_loadu_si512(data + 4 * i);
    const __m512i x = _mm512_loadu_si512(k0 + i), y = _mm512_loadu_si512(k1 + i);
    const __m512i high = _mm512_srli_epi64(w, 32);
    a0 = _mm512_add_epi64(a0, _mm512_mul_epu32(w, x));
    b0 = _mm512_add_epi64(b0, _mm512_mul_epu32(w, y));
    a1 = _mm512_add_epi64(a1, _mm512_mul_epu32(high, _mm512_srli_epi64(x, 32)));
    b1 = _mm512_add_epi64(b1, _mm512_mul_epu32(high, _mm512_srli_epi64(y, 32)));
  }
  std::uint64_t parts[8];
  _mm512_storeu_si512(parts, _mm512_add_epi64(a0, a1));
  for (const std::uint64_t part : parts) sum0 += part;
  _mm512_storeu_si512(parts, _mm512_add_epi64(b0, b1));
  for (const std::uint64_t part : parts) sum1 += part;
#elif GYMFAST_LEVEL == 1
  __m256i a0 = _mm256_setzero_si256(), a1 = a0, b0 = a0, b1 = a0;
  for (; i + 8 <= count; i += 8) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 4 * i));
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(k0 + i));
    const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(k1 + i));
    const __m256i high = _mm256_srli_epi64(w, 32);
    a0 = _mm256_add_epi64(a0, _mm256_mul_epu32(w, x));
    b0 = _mm256_add_epi64(b0, _mm256_mul_epu32(w, y));
    a1 = _mm256_add_epi64(a1, _mm256_mul_epu32(high, _mm256_srli_epi64(x, 32)));
    b1 = _mm256_add_epi64(b1, _mm256_mul_epu32(high, _mm256_srli_epi64(y, 32)));
  }
  std::uint64_t parts[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts), _mm256_add_epi64(a0, a1));
  sum0 += parts[0] + parts[1] + parts[2] + parts[3];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts), _mm256_add_epi64(b0, b1));
  sum1 += parts[0] + parts[1] + parts[2] + parts[3];
#endif
  for (; i < count; ++i) {
    std::uint32_t w;
    std::memcpy(&w, data + 4 * i, 4);
    sum0 += std::uint64_t{w} * k0[i];
    sum1 += std::uint64_t{w} * k1[i];
  }
  inner[0] = sum0;
  inner[1] = sum1;
}

inline void digest_add_value(std::uint64_t value, std::uint64_t offset, Digest* sum) {
  const std::uint64_t shifted = value << (8 * (offset & 3));
  const std::size_t column = (offset >> 2) & (kDigestColumns - 1);
  const std::uint64_t row = offset / kDigestRowBytes;
  for (unsigned lane = 0; lane < 2; ++lane) {
    sum->lane[lane] += row_key(row, lane) * (kColumnKeys.lane[lane][column] * shifted);
  }
}

inline void digest(const std::uint8_t* data, std::size_t size, std::uint64_t offset, Digest* sum) {
  for (; size != 0 && (offset & 3) != 0; --size, ++data, ++offset) {
    digest_add_value(*data, offset, sum);
  }
  while (size >= 4) {
    const std::size_t column = (offset >> 2) & (kDigestColumns - 1);
    const std::size_t count = std::min(size / 4, kDigestColumns - column);
    std::uint64_t inner[2] = {0, 0};
    digest_row_words(data, count, column, inner);
    const std::uint64_t row = offset / kDigestRowBytes;
    sum->lane[0] += row_key(row, 0) * inner[0];
    sum->lane[1] += row_key(row, 1) * inner[1];
    data += 4 * count;
    offset += 4 * count;
    size -= 4 * count;
  }
  for (; size != 0; --size, ++data, ++offset) digest_add_value(*data, offset, sum);
}

// Partial digest of a whole block held in contiguous memory.
template <class T>
inline void digest_block(const std::uint8_t* data, std::size_t num_units, const Placement& place,
                         Digest* sum) {
  std::uint64_t offset = place.offset;
  const std::size_t row_units = static_cast<std::size_t>(place.row_units);
  for (std::size_t i = 0; i < num_units; i += row_units, offset += place.stride_bytes) {
    const std::size_t count = std::min(row_units, num_units - i);
    digest(data + i * sizeof(T), count * sizeof(T), offset, sum);
  }
}

// Adds digest(after) - digest(before) of changed units at the given offsets. They need no order,
// but runs within one digest row are cheaper.
template <class T, class OffsetOf>
inline void digest_steps(const T* before, const T* after, std::size_t count, OffsetOf&& offset_of,
                         Digest* sum) {
  for (std::size_t i = 0; i < count;) {
    const std::uint64_t row = offset_of(i) / kDigestRowBytes;
    std::uint64_t inner0 = 0, inner1 = 0;
    for (; i < count; ++i) {
      const std::uint64_t offset = offset_of(i);
      if (offset / kDigestRowBytes != row) break;
      const std::uint64_t step = (std::uint64_t{after[i]} - std::uint64_t{before[i]})
                                 << (8 * (offset & 3));
      const std::size_t column = (offset >> 2) & (kDigestColumns - 1);
      inner0 += step * kColumnKeys.lane[0][column];
      inner1 += step * kColumnKeys.lane[1][column];
    }
    sum->lane[0] += row_key(row, 0) * inner0;
    sum->lane[1] += row_key(row, 1) * inner1;
  }
}

// The same for changes whose row is often that of one of the changes just before: up to four rows
// are summed at once.
template <class T, class OffsetOf>
inline void digest_near_steps(const T* before, const T* after, std::size_t count,
                              OffsetOf&& offset_of, Digest* sum) {
  constexpr std::size_t kRows = 4;
  std::uint64_t rows[kRows] = {}, inner[kRows][2] = {};
  const auto flush = [&](std::size_t at) {
    for (unsigned lane = 0; lane < 2; ++lane) {
      sum->lane[lane] += row_key(rows[at], lane) * inner[at][lane];
      inner[at][lane] = 0;
    }
  };
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t offset = offset_of(i), row = offset / kDigestRowBytes;
    const std::size_t at = row % kRows;
    if (rows[at] != row) {
      flush(at);
      rows[at] = row;
    }
    const std::uint64_t step = (std::uint64_t{after[i]} - std::uint64_t{before[i]})
                               << (8 * (offset & 3));
    const std::size_t column = (offset >> 2) & (kDigestColumns - 1);
    inner[at][0] += step * kColumnKeys.lane[0][column];
    inner[at][1] += step * kColumnKeys.lane[1][column];
  }
  for (std::size_t at = 0; at < kRows; ++at) flush(at);
}

// `is_ascending` says that the positions are, which is faster.
template <class T>
inline void digest_changes(const std::uint32_t* index, const T* before, const T* after,
                           std::size_t count, const Placement& place, bool is_ascending,
                           Digest* sum) {
  const auto offset_of = [&](std::size_t i) {
    return place.offset + std::uint64_t{index[i]} * sizeof(T);
  };
  if (place.stride_bytes == 0 && is_ascending) {
    digest_steps(before, after, count, offset_of, sum);
    return;
  }
  if (place.stride_bytes == 0) {
    digest_near_steps(before, after, count, offset_of, sum);
    return;
  }
  const auto row_units = static_cast<std::uint32_t>(place.row_units);
  digest_steps(
      before, after, count,
      [&](std::size_t i) {
        const std::uint32_t line = index[i] / row_units;
        return place.offset + line * place.stride_bytes +
               std::uint64_t{index[i] - line * row_units} * sizeof(T);
      },
      sum);
}

}  // namespace GYMFAST_NAMESPACE
}  // namespace gymfast
