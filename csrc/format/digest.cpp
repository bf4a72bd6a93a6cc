#include "format/digest.h"

namespace gymfast {
namespace {

constexpr ColumnKeys make_column_keys() {
  ColumnKeys keys{};
  for (unsigned lane = 0; lane < 2; ++lane) {
    for (std::uint64_t j = 0; j < kDigestColumns; ++j) {
      keys.lane[lane][j] =
          static_cast<std::uint32_t>(splitmix64(kDigestColumns * lane + j) >> 32) | 1u;
    }
  }
  return keys;
}

}  // namespace

constexpr ColumnKeys kColumnKeys = make_column_keys();

}  // namespace gymfast
