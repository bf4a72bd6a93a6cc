// encode, apply, digest and rollback of runs of blocks of one tensor, on any number of threads.
#ifndef GYMFAST_CPU_CODEC_H_
#define GYMFAST_CPU_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu/block.h"
#include "cpu/dispatch.h"
#include "format/status.h"

namespace gymfast {

// The block grid of a tensor (docs/wire-format.md section 4).
struct Geometry {
  std::uint64_t num_units = 0;
  std::uint64_t unit_bytes = 1;
  std::uint64_t cols = 0;
  std::uint64_t tile_rows = 0;
  std::uint64_t tile_cols = 0;

  Status check() const;
  std::uint64_t num_bytes() const { return num_units * unit_bytes; }
  std::uint64_t blocks_per_row() const { return cols == 0 ? 0 : (cols - 1) / tile_cols + 1; }
  std::uint64_t num_blocks() const;
};

// Blocks of one call; `digests` has an entry for every block of the tensor and is updated in place.
struct BlockRun {
  Geometry geometry;
  BlockParams params;
  std::uint64_t first_block = 0;
  std::uint64_t num_blocks = 0;
  Digest* digests = nullptr;
  Digest* found = nullptr;  // apply_run: if not null, one for each block of the run
  std::size_t num_threads = 1;
};

// Coded blocks in order. Joined by the caller, into memory of its own, so that bytes move once.
struct EncodedRun {
  std::vector<EncodedBlock> blocks;
  std::uint64_t first_block = 0;
  std::uint64_t num_changed = 0;

  // Block table and payloads: what follows num_blocks in a BLOCKS section. 0 if nothing changed.
  std::size_t body_bytes() const;
  void write_body(std::uint8_t* out) const;
  // For each changed block: u64 block, u64 size, what write_undo left.
  std::size_t undo_bytes() const;
  void write_undo(std::uint8_t* out) const;

  std::vector<std::uint8_t> body() const;
  std::vector<std::uint8_t> undo() const;
};

// `base` and `next` are whole tensors. With `update` the base becomes `next` in the same pass.
// Memory: one Scratch (at most 72 MiB) a thread, kept for later calls, and the coded bytes.
Status encode_run(const BlockRun& run, std::uint8_t* base, const std::uint8_t* next, bool update,
                  bool undo, EncodedRun* out);

// Gives a base back that encode_run updated.
Status rollback_run(const Geometry& geometry, std::span<const std::uint8_t> undo,
                    std::uint8_t* base);

// `body` is what follows num_blocks in a BLOCKS section. Every block is written only after its
// check matched; on an error other blocks of the run may have been written. `found` gets the
// digests of all blocks of the run as they lie in memory then, each read while it is in the cache.
Status apply_run(const BlockRun& run, std::span<const std::uint8_t> body, std::uint8_t* data,
                 std::uint64_t* num_changed);

// Partial digests of all blocks of a tensor: a full pass.
Status digest_run(const BlockRun& run, const std::uint8_t* data);

struct ClassParams {
  int shift = 0;
  int base = 0;
};
// Section 10: from a sample of the base.
ClassParams choose_classes(const std::uint8_t* base, std::uint64_t num_units,
                           std::uint64_t unit_bytes);

}  // namespace gymfast

#endif  // GYMFAST_CPU_CODEC_H_
