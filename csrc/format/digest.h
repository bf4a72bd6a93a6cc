// The linear digest of docs/wire-format.md section 2: keys, folds and a portable whole-string form.
#ifndef GYMFAST_FORMAT_DIGEST_H_
#define GYMFAST_FORMAT_DIGEST_H_

#include <cstddef>
#include <cstdint>

namespace gymfast {

constexpr std::size_t kDigestRowBytes = 4096;
constexpr std::size_t kDigestColumns = 1024;

struct Digest {
  std::uint64_t lane[2] = {0, 0};
};

constexpr std::uint64_t splitmix64(std::uint64_t x) {
  std::uint64_t z = x + 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// K[lane](row) of the specification.
constexpr std::uint64_t row_key(std::uint64_t row, unsigned lane) {
  return splitmix64((std::uint64_t{1} << 63) + 2 * row + lane) | 1;
}

// k[lane][column]; 32 bits each, split by lane so that vectors load them straight.
struct ColumnKeys {
  alignas(64) std::uint32_t lane[2][kDigestColumns];
};
extern const ColumnKeys kColumnKeys;

constexpr std::uint64_t fold64(const Digest& d) {
  return d.lane[0] ^ ((d.lane[1] << 32) | (d.lane[1] >> 32));
}
constexpr std::uint32_t fold32(const Digest& d) {
  return static_cast<std::uint32_t>(fold64(d) ^ (fold64(d) >> 32));
}

// Adds the digest of `size` bytes that stand at byte `offset` of their tensor.
using DigestFunction = void (*)(const std::uint8_t* data, std::size_t size, std::uint64_t offset,
                                Digest* sum);

}  // namespace gymfast

#endif  // GYMFAST_FORMAT_DIGEST_H_
