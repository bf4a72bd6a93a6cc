// Wire structs of docs/wire-format.md section 3 and the only C++ parser: bytes -> view or Status.
// Every limit of section 9 is checked here, before anything is allocated from a length in the
// bytes.
#ifndef GYMFAST_FORMAT_FRAME_H_
#define GYMFAST_FORMAT_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "format/digest.h"
#include "format/status.h"

namespace gymfast {

constexpr std::uint8_t kMagic[8] = {0x47, 0x46, 0x44, 0x46, 0x0D, 0x0A, 0x1A, 0x01};
constexpr std::size_t kSectionHeaderBytes = 16;
constexpr std::uint64_t kMaxTensors = 4'194'304;
constexpr std::uint64_t kMaxNameBytes = 1024;
constexpr std::uint64_t kMaxDims = 32;
constexpr std::uint64_t kMaxSectionBytes = std::uint64_t{1} << 40;
constexpr std::uint64_t kMaxTensorBytes = std::uint64_t{1} << 62;
constexpr std::uint64_t kMaxBlocksOfSmall = 4096;  // of any tensor, and one more for each
constexpr std::uint64_t kUnitsPerBlock = 1024;     // so many of its units

enum class SectionType : std::uint8_t { kHeader = 1, kTensor = 2, kBlocks = 3, kEnd = 4 };
enum class Kind : std::uint8_t { kDelta = 0, kAdded = 1, kReplaced = 2, kRemoved = 3, kAlias = 4 };
enum class TensorStatus : std::uint8_t {
  kUnchanged = 0,
  kChanged = 1,
  kAdded = 2,
  kReplaced = 3,
  kRemoved = 4,
  kAlias = 5,
};

struct BlocksView {
  std::uint64_t offset = 0;  // of the section in the frame
  std::uint64_t tensor = 0;
  std::uint64_t first_block = 0;
  std::uint64_t num_blocks = 0;
  std::span<const std::uint8_t> table_and_payloads;
};

struct TensorView {
  std::uint64_t offset = 0;  // of the section in the frame
  Kind kind = Kind::kDelta;
  unsigned unit_bytes = 1;
  unsigned class_shift = 0;
  unsigned class_base = 0;
  std::string_view name;
  std::string_view dtype;
  std::vector<std::uint64_t> dims;
  std::uint64_t num_bytes = 0;
  std::uint64_t cols = 0;
  std::uint64_t tile_rows = 0;
  std::uint64_t tile_cols = 0;
  std::string_view target;
  std::vector<BlocksView> blocks;
  TensorStatus status = TensorStatus::kUnchanged;
  Digest base_digest;
  Digest new_digest;

  std::uint64_t num_units() const { return num_bytes / unit_bytes; }
  std::uint64_t num_blocks() const;
};

struct FrameView {
  unsigned profile = 0;
  std::vector<TensorView> tensors;
  std::span<const std::uint8_t> base_root;  // 32 bytes
  std::span<const std::uint8_t> new_root;   // 32 bytes
};

// Checks R1..R22. The view points into `bytes`. `digest` is any target's digest function.
Status parse_frame(std::span<const std::uint8_t> bytes, DigestFunction digest, FrameView* view);

// fold64 of the digest of two byte strings taken as one.
std::uint64_t check64(std::span<const std::uint8_t> first, std::span<const std::uint8_t> second,
                      DigestFunction digest);

}  // namespace gymfast

#endif  // GYMFAST_FORMAT_FRAME_H_
