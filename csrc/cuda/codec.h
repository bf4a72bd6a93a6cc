// gymfast::cuda: digest, encode and apply of runs of blocks of one tensor on one CUDA stream, with
// the bytes of csrc/cpu. Nothing here allocates or waits; results arrive in device memory, in
// stream order. Tensors, bodies, digests, results and scratch are device memory; a snapshot may
// also be pinned host memory that the device can reach.
#ifndef GYMFAST_CUDA_CODEC_H_
#define GYMFAST_CUDA_CODEC_H_

#include <cstddef>
#include <cstdint>

#ifdef GYMFAST_CUDA_SHIM
#include "cuda/host_shim.h"
#else
#include <cuda_runtime.h>
#endif
#include "format/digest.h"
#include "format/status.h"

namespace gymfast::cuda {

constexpr std::uint64_t kMaxBlockUnits = std::uint64_t{1} << 20;

// The block grid of a tensor (docs/wire-format.md section 4).
struct Geometry {
  std::uint64_t num_units = 0;
  std::uint64_t unit_bytes = 1;
  std::uint64_t cols = 0;
  std::uint64_t tile_rows = 0;
  std::uint64_t tile_cols = 0;

  Error check() const;
  __host__ __device__ std::uint64_t blocks_per_row() const {
    return cols == 0 ? 0 : (cols - 1) / tile_cols + 1;
  }
  std::uint64_t num_blocks() const;
  std::uint64_t num_bytes() const { return num_units * unit_bytes; }
  std::uint64_t block_units() const { return tile_rows * tile_cols; }
};

enum class Profile : std::uint8_t { kAuto = 0, kFast = 1, kSmall = 2 };

struct BlockParams {
  Profile profile = Profile::kAuto;
  int class_shift = 0;
  int class_base = 0;
  bool has_base = true;
};

// Blocks of one call. `digests` has a row for every block of the tensor.
struct Run {
  Geometry geometry;
  BlockParams params;
  std::uint64_t first_block = 0;
  std::uint64_t num_blocks = 0;
  Digest* digests = nullptr;
};

// What the host knows when a call returns. A problem with the arguments comes before any launch.
struct CallStatus {
  Error error = Error::kOk;
  cudaError_t cuda = cudaSuccess;
  const char* problem = nullptr;  // one sentence, or null
  bool is_ok() const { return problem == nullptr; }
};

// One BLOCKS section inside a body buffer.
struct Section {
  std::uint64_t first_block = 0;
  std::uint64_t num_blocks = 0;
  std::uint64_t offset = 0;  // of its block table in the body buffer
  std::uint64_t size = 0;    // table and payloads; 0: nothing changed, no section
  std::uint64_t num_changed = 0;
};

struct ApplyResult {
  std::uint64_t first_error = 0;  // all ones: none; otherwise block << 8 | number of the error
  std::uint64_t num_changed = 0;
};
constexpr std::uint64_t kNoError = ~std::uint64_t{0};

// Partial digests of the blocks of `run` into their rows of run.digests: a full pass.
CallStatus digest_blocks(const Run& run, const std::uint8_t* data, cudaStream_t stream);

struct EncodeBuffers {
  std::uint8_t* body = nullptr;  // 16-byte aligned; sections one behind the other
  std::uint64_t body_capacity = 0;
  Section* sections = nullptr;  // one for each blocks_per_section blocks
  void* scratch = nullptr;      // 256-byte aligned
  std::uint64_t scratch_bytes = 0;
};
std::uint64_t encode_body_capacity(const Run& run);
std::uint64_t encode_scratch_bytes(const Run& run);

// Codes the step from `base` to `next` as sections of `blocks_per_section` blocks each. With
// `update` the blocks of base become those of next; digests of base become digests of next always.
CallStatus encode_blocks(const Run& run, std::uint8_t* base, const std::uint8_t* next, bool update,
                         std::uint64_t blocks_per_section, const EncodeBuffers& buffers,
                         cudaStream_t stream);

// Where gather_undo leaves the old values of the changed units: bytes from the start of the
// scratch.
struct UndoOffsets {
  std::uint64_t counts = 0;  // u32 for each block: its changed units
  std::uint64_t index = 0;   // u32 for each changed unit, block by block: its place in the block
  std::uint64_t before = 0;  // unit for each of them
};
UndoOffsets undo_offsets(const Run& run);

// Gathers the old values of all changed units in the scratch of the encode_blocks just done.
CallStatus gather_undo(const Run& run, void* scratch, std::uint64_t scratch_bytes,
                       cudaStream_t stream);

struct UndoLists {
  const std::uint32_t* counts = nullptr;  // of the blocks of the run
  const std::uint32_t* index = nullptr;
  const void* before = nullptr;
  std::uint64_t num_records = 0;  // of index and before
};
// Puts gathered values back. Never writes outside of the blocks of the run, whatever the lists say.
CallStatus rollback_blocks(const Run& run, std::uint8_t* data, const UndoLists& undo,
                           cudaStream_t stream);

// Class fields of num_class_samples(num_units) units, evenly spread, into `out`.
std::uint64_t num_class_samples(std::uint64_t num_units);
CallStatus sample_classes(const std::uint8_t* data, std::uint64_t num_units,
                          std::uint64_t unit_bytes, std::uint8_t* out, cudaStream_t stream);

struct ApplyBuffers {
  const std::uint8_t* body = nullptr;
  std::uint64_t body_bytes = 0;
  const Section* sections = nullptr;  // consecutive from run.first_block on, covering the run
  std::uint64_t num_sections = 0;
  ApplyResult* result = nullptr;
  void* scratch = nullptr;  // 256-byte aligned
  std::uint64_t scratch_bytes = 0;
};
std::uint64_t apply_scratch_bytes(const Run& run);

// Applies sections in place. A block is written after its check matched; on an error other blocks
// of the run may have been written, a section with a bad block table changes nothing.
CallStatus apply_blocks(const Run& run, std::uint8_t* data, const ApplyBuffers& buffers,
                        cudaStream_t stream);

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_CODEC_H_
