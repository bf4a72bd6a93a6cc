// One block: where its units lie, how it is coded, and the scratch memory a worker needs for it.
#ifndef GYMFAST_CPU_BLOCK_H_
#define GYMFAST_CPU_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "format/digest.h"
#include "format/status.h"

namespace gymfast {

constexpr std::size_t kMaxBlockUnits = std::size_t{1} << 20;
constexpr int kNumClasses = 16;
constexpr std::size_t kUndoPageUnits = 65536;  // of an undo list: its positions have 16 bits

enum class Mode : std::uint8_t {
  kUnchanged = 0,
  kFast = 1,
  kBalanced = 2,
  kSmall = 3,
  kDense = 4,
  kRaw = 5,
};

enum class Profile : std::uint8_t { kAuto = 0, kFast = 1, kSmall = 2 };

struct BlockParams {
  Profile profile = Profile::kAuto;
  int class_shift = 0;
  int class_base = 0;
  bool has_base = true;
};

// Unit i of a block lies at byte `offset + (i / row_units) * stride_bytes + (i % row_units) *
// unit`.
struct Placement {
  std::uint64_t offset = 0;
  std::uint64_t row_units = 0;
  std::uint64_t stride_bytes = 0;
};

// Buffers of one worker; grown once to the block size in use, then reused without allocation.
class Scratch {
 public:
  // Throws std::bad_alloc. `unit_bytes` sizes the value buffers.
  void reserve(std::size_t num_units, std::size_t unit_bytes);

  std::uint32_t* index = nullptr;   // positions of changed units, ascending
  std::uint8_t* before = nullptr;   // their base values (unit type)
  std::uint8_t* after = nullptr;    // their new values (unit type)
  std::uint8_t* classes = nullptr;  // their classes
  std::uint32_t* rank = nullptr;    // their ranks within the class
  std::uint8_t* before_sorted = nullptr;
  std::uint8_t* after_sorted = nullptr;
  std::uint32_t* rank_sorted = nullptr;
  std::uint32_t* gaps = nullptr;    // position gaps of all groups (inverted lists: up to n)
  std::uint32_t* values = nullptr;  // v of all changes
  std::uint32_t* exception_gaps = nullptr;
  std::uint32_t* exception_values = nullptr;
  std::uint32_t* flip_gaps = nullptr;
  std::uint8_t* negative = nullptr;   // S bits
  std::uint8_t* block_a = nullptr;    // whole blocks: results, dense symbols
  std::uint8_t* block_b = nullptr;    // gathered tiles of the base or of the live tensor
  std::uint8_t* block_c = nullptr;    // gathered tiles of the new tensor
  std::vector<std::uint8_t> payload;  // copy of a payload with zeros behind it
  bool expects_ranks = false;         // what the last block needed: a guess for the next one

 private:
  std::unique_ptr<std::uint8_t[]> arena_;  // not initialised: only pages in use count
  std::size_t num_units_ = 0;
  std::size_t unit_bytes_ = 0;
};

// A coded block. `undo` gives the base back: see codec.h.
struct EncodedBlock {
  Mode mode = Mode::kUnchanged;
  std::uint32_t check = 0;
  std::uint64_t num_changed = 0;
  std::vector<std::uint8_t> payload;
  std::vector<std::uint8_t> undo;
};

struct EncodeJob {
  std::uint8_t* base = nullptr;        // contiguous units; written only if `update`
  const std::uint8_t* next = nullptr;  // contiguous units
  std::size_t num_units = 0;
  Placement placement;
  BlockParams params;
  bool update = false;
  bool undo = false;
};

struct ApplyJob {
  std::uint8_t* data = nullptr;  // contiguous units: base in, result out
  std::size_t num_units = 0;
  Placement placement;
  BlockParams params;
  Mode mode = Mode::kRaw;
  const std::uint8_t* payload = nullptr;  // at least kPayloadPadding readable bytes follow
  std::size_t payload_bytes = 0;
  std::uint32_t check = 0;
};

constexpr std::size_t kPayloadPadding = 64;

}  // namespace gymfast

#endif  // GYMFAST_CPU_BLOCK_H_
