// Codes of the lengths in a zstd sequence, and what a block knows between its chunks.

namespace gymfast {
namespace GYMFAST_NAMESPACE {

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

// Where a block has got to.
struct ZstdState {
  std::uint8_t* literals;
  std::size_t run = 0;       // literals since the last match
  std::size_t expected = 0;  // position behind the last literal
};

}  // namespace GYMFAST_NAMESPACE
}  // namespace gymfast
