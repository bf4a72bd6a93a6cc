// Geometry, digests, class samples and rollback: what needs no scratch.
#include "cuda/codec.h"

#include "cuda/classes.cuh"
#include "cuda/digest.cuh"
#include "cuda/launch.cuh"
#include "cuda/undo.cuh"

namespace gymfast::cuda {

std::uint64_t Geometry::num_blocks() const {
  if (num_units == 0) return 0;
  return ((num_units / cols - 1) / tile_rows + 1) * blocks_per_row();
}

Error Geometry::check() const {
  if (unit_bytes != 1 && unit_bytes != 2 && unit_bytes != 4) return Error::kBadShape;
  if (num_units > (std::uint64_t{1} << 62) / unit_bytes) return Error::kLimitExceeded;
  if (num_units == 0) {
    return cols == 0 && tile_rows == 0 && tile_cols == 0 ? Error::kOk : Error::kBadGeometry;
  }
  if (cols == 0 || num_units % cols != 0 || tile_rows == 0 || tile_cols == 0 ||
      tile_rows > num_units / cols || tile_cols > cols) {
    return Error::kBadGeometry;
  }
  const bool is_small = tile_rows <= kMaxBlockUnits && tile_cols <= kMaxBlockUnits &&
                        tile_rows * tile_cols <= kMaxBlockUnits;
  return is_small ? Error::kOk : Error::kLimitExceeded;
}

CallStatus digest_blocks(const Run& run, const std::uint8_t* data, cudaStream_t stream) {
  CallStatus status = check_run(run);
  if (status.is_ok()) status = check_tensor(run, data);
  if (!status.is_ok() || run.num_blocks == 0) return status;
  const Geometry& g = run.geometry;
  // A block is at most tile_rows lines of tile_cols units, or one line of all of them.
  const std::uint64_t pieces = g.tile_rows * pieces_per_line(g.tile_cols * g.unit_bytes);
  DigestArgs args;
  args.geometry = g;
  args.first_block = run.first_block;
  args.groups_per_block = groups(pieces, std::uint64_t{kWarps} * kPiecesPerWarp);
  args.data = data;
  args.digests = run.digests;
  const std::uint64_t num_groups = run.num_blocks * args.groups_per_block;
  if (num_groups > kMaxGroups) return refuse("too many blocks for one call: take fewer");
  Launcher run_kernel(stream);
  run_kernel(clear_digests_kernel, groups(run.num_blocks, kThreads), kThreads,
             run.digests + run.first_block, run.num_blocks);
  run_kernel(digest_kernel, num_groups, kThreads, args);
  return run_kernel.status();
}

std::uint64_t num_class_samples(std::uint64_t num_units) { return smaller(num_units, kMaxSamples); }

CallStatus sample_classes(const std::uint8_t* data, std::uint64_t num_units,
                          std::uint64_t unit_bytes, std::uint8_t* out, cudaStream_t stream) {
  const std::uint64_t num_samples = num_class_samples(num_units);
  if (unit_bytes != 1 && unit_bytes != 2 && unit_bytes != 4) {
    return refuse("unit_bytes is 1, 2 or 4", Error::kBadShape);
  }
  if (num_samples == 0) return {};
  const CallStatus status = check_units(data, unit_bytes);
  if (!status.is_ok()) return status;
  if (out == nullptr) return refuse("the place of the samples is missing");
  Launcher run_kernel(stream);
  with_unit(unit_bytes, [&](auto unit) {
    using T = decltype(unit);
    run_kernel(sample_classes_kernel<T>, groups(num_samples, kThreads), kThreads,
               reinterpret_cast<const T*>(data), num_units, num_samples, out);
  });
  return run_kernel.status();
}

CallStatus rollback_blocks(const Run& run, std::uint8_t* data, const UndoLists& undo,
                           cudaStream_t stream) {
  CallStatus status = check_blocks(run);
  if (status.is_ok()) status = check_tensor(run, data);
  if (!status.is_ok() || run.num_blocks == 0 || undo.num_records == 0) return status;
  if (undo.counts == nullptr || undo.index == nullptr || undo.before == nullptr ||
      !is_aligned(undo.counts, 4) || !is_aligned(undo.index, 4) ||
      !is_aligned(undo.before, run.geometry.unit_bytes)) {
    return refuse("counts, index or before are missing or not aligned to their elements");
  }
  Launcher run_kernel(stream);
  with_unit(run.geometry.unit_bytes, [&](auto unit) {
    using T = decltype(unit);
    RollbackArgs<T> args;
    args.geometry = run.geometry;
    args.first_block = run.first_block;
    args.data = data;
    args.counts = undo.counts;
    args.index = undo.index;
    args.before = static_cast<const T*>(undo.before);
    args.num_records = undo.num_records;
    run_kernel(rollback_kernel<T>, run.num_blocks, kThreads, args);
  });
  return run_kernel.status();
}

}  // namespace gymfast::cuda
