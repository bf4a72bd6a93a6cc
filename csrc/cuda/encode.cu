// Encode and its undo lists: checks, division of the scratch memory, launches.
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/ranks.cuh"
#include "cuda/undo.cuh"

namespace gymfast::cuda {
namespace {

// The pieces of the scratch memory of an encode.
template <class T>
struct EncodeScratch {
  EncodeArgs<T> args;
  std::uint32_t* totals = nullptr;
  std::uint32_t* class_totals = nullptr;
  std::uint32_t* class_ends = nullptr;
  UndoOffsets undo;
  std::uint64_t bytes = 0;
};

// Sizes and offsets do not depend on `scratch`, which may be null for them.
template <class T>
EncodeScratch<T> divide_encode_scratch(const Run& run, void* scratch) {
  const std::uint64_t slots = run.num_blocks * run.geometry.block_units();
  const std::uint64_t chunks = run.num_blocks * chunks_per_block(run.geometry);
  EncodeScratch<T> parts;
  Arena arena(scratch);
  DiffArgs<T>& diff = parts.args.diff;
  arena.take(&diff.changes.chunk_position, slots);
  // Nobody reads the lists by chunk and the exceptions once the body is written.
  parts.undo.before = arena.take(&diff.changes.chunk_before, slots);
  arena.take(&diff.changes.chunk_after, slots);
  arena.take(&diff.changes.index, slots);
  arena.take(&diff.changes.before, slots);
  arena.take(&diff.changes.after, slots);
  parts.undo.index = arena.take(&parts.args.exceptions, slots);
  arena.take(&parts.args.flips, slots);
  arena.take(&diff.counts, chunks);
  arena.take(&diff.deltas, 2 * run.num_blocks);
  parts.undo.counts = arena.take(&parts.totals, run.num_blocks);
  arena.take(&parts.args.plans, run.num_blocks);
  if (run.params.profile != Profile::kFast) {
    arena.take(&diff.changes.chunk_rank, slots);
    arena.take(&diff.changes.rank, slots);
    arena.take(&diff.changes.order, slots);
    arena.take(&diff.class_units, chunks * kNumClasses);
    arena.take(&diff.class_changes, chunks * kNumClasses);
    arena.take(&parts.class_totals, run.num_blocks * kNumClasses);
    arena.take(&parts.class_ends, run.num_blocks * kNumClasses);
  }
  parts.args.totals = parts.totals;
  parts.args.class_totals = parts.class_totals;
  parts.args.class_ends = parts.class_ends;
  parts.bytes = arena.used();
  return parts;
}

template <class T>
CallStatus launch_encode(const Run& run, std::uint8_t* base, const std::uint8_t* next, bool update,
                         std::uint64_t blocks_per_section, const EncodeBuffers& buffers,
                         cudaStream_t stream) {
  EncodeScratch<T> parts = divide_encode_scratch<T>(run, buffers.scratch);
  EncodeArgs<T>& args = parts.args;
  DiffArgs<T>& diff = args.diff;
  diff.geometry = run.geometry;
  diff.first_block = run.first_block;
  diff.chunks_per_block = chunks_per_block(run.geometry);
  diff.num_chunks = run.num_blocks * diff.chunks_per_block;
  diff.block_units = run.geometry.block_units();
  diff.base = base;
  diff.next = next;
  diff.update = update;
  diff.class_shift = run.params.class_shift;
  diff.class_base = run.params.class_base;
  args.params = run.params;
  args.digests = run.digests;
  args.num_blocks = run.num_blocks;
  args.blocks_per_section = blocks_per_section;
  args.sections = buffers.sections;
  args.num_sections = groups(run.num_blocks, blocks_per_section);
  args.body = buffers.body;
  const std::uint64_t diff_groups = groups(diff.num_chunks, kDiffWarps);
  if (diff_groups > kMaxGroups) return refuse("too many blocks for one call: take fewer");
  Launcher run_kernel(stream);
  const bool by_class = run.params.profile != Profile::kFast;
  if (by_class) run_kernel.load(scan_classes_kernel, order_kernel<T>);
  run_kernel.load(by_class ? diff_ranks_kernel<T> : diff_kernel<T>, scan_counts_kernel,
                  compact_kernel<T>, plan_kernel<T>, size_sections_kernel<T>,
                  place_sections_kernel<T>, clear_body_kernel<T>, pack_kernel<T>);
  run_kernel(by_class ? diff_ranks_kernel<T> : diff_kernel<T>, diff_groups, kDiffThreads, diff);
  run_kernel(scan_counts_kernel, run.num_blocks, kThreads, diff.counts, diff.chunks_per_block,
             parts.totals, diff.deltas);
  run_kernel(compact_kernel<T>, diff_groups, kDiffThreads, diff, args.totals);
  if (by_class) {
    run_kernel(scan_classes_kernel, run.num_blocks, kThreads, diff.class_units, diff.class_changes,
               diff.chunks_per_block, parts.class_totals, parts.class_ends);
    run_kernel(order_kernel<T>, diff_groups, kDiffThreads, diff, args.totals);
  }
  run_kernel(plan_kernel<T>, run.num_blocks, kThreads, args);
  run_kernel(size_sections_kernel<T>, args.num_sections, kThreads, args);
  run_kernel(place_sections_kernel<T>, args.num_sections, kThreads, args);
  const std::uint64_t clear_groups =
      smaller(1024, groups(encode_body_capacity(run), std::uint64_t{64} * kThreads));
  run_kernel(clear_body_kernel<T>, clear_groups, kThreads, args, clear_groups);
  run_kernel(pack_kernel<T>, run.num_blocks, kThreads, args);
  return run_kernel.status();
}

}  // namespace

std::uint64_t encode_body_capacity(const Run& run) {
  // Raw is the largest payload; a table entry has a mode, at most 4 bytes of size and a check.
  const Geometry& g = run.geometry;
  const std::uint64_t units = smaller(g.num_units, run.num_blocks * g.block_units());
  return (units * g.unit_bytes + 9 * run.num_blocks + 15) / 16 * 16;
}

std::uint64_t encode_scratch_bytes(const Run& run) {
  return with_unit(run.geometry.unit_bytes, [&](auto unit) {
    return divide_encode_scratch<decltype(unit)>(run, nullptr).bytes;
  });
}

CallStatus encode_blocks(const Run& run, std::uint8_t* base, const std::uint8_t* next, bool update,
                         std::uint64_t blocks_per_section, const EncodeBuffers& buffers,
                         cudaStream_t stream) {
  CallStatus status = check_run(run);
  if (status.is_ok()) status = check_tensor(run, base);
  if (status.is_ok()) status = check_tensor(run, next);
  if (!status.is_ok() || run.num_blocks == 0) return status;
  if (blocks_per_section == 0) return refuse("a section has at least one block");
  if (buffers.sections == nullptr) return refuse("sections are missing");
  if (buffers.body == nullptr || !is_aligned(buffers.body, 16)) {
    return refuse("body is missing or not 16-byte aligned");
  }
  if (buffers.body_capacity < encode_body_capacity(run)) {
    return refuse("body is smaller than encode_body_capacity says");
  }
  const std::uint64_t size = run.geometry.num_bytes();
  if (base < next + size && next < base + size) return refuse("base and next overlap");
  status = check_scratch(buffers.scratch, buffers.scratch_bytes, encode_scratch_bytes(run));
  if (!status.is_ok()) return status;
  return with_unit(run.geometry.unit_bytes, [&](auto unit) {
    return launch_encode<decltype(unit)>(run, base, next, update, blocks_per_section, buffers,
                                         stream);
  });
}

UndoOffsets undo_offsets(const Run& run) {
  return with_unit(run.geometry.unit_bytes, [&](auto unit) {
    return divide_encode_scratch<decltype(unit)>(run, nullptr).undo;
  });
}

CallStatus gather_undo(const Run& run, void* scratch, std::uint64_t scratch_bytes,
                       cudaStream_t stream) {
  CallStatus status = check_blocks(run);
  if (!status.is_ok() || run.num_blocks == 0) return status;
  status = check_scratch(scratch, scratch_bytes, encode_scratch_bytes(run));
  if (!status.is_ok()) return status;
  Launcher run_kernel(stream);
  with_unit(run.geometry.unit_bytes, [&](auto unit) {
    using T = decltype(unit);
    const EncodeScratch<T> parts = divide_encode_scratch<T>(run, scratch);
    auto* start = static_cast<std::uint8_t*>(scratch);
    GatherArgs<T> args;
    args.block_units = run.geometry.block_units();
    args.counts = parts.args.totals;
    args.block_index = parts.args.diff.changes.index;
    args.block_before = parts.args.diff.changes.before;
    args.index = reinterpret_cast<std::uint32_t*>(start + parts.undo.index);
    args.before = reinterpret_cast<T*>(start + parts.undo.before);
    run_kernel(gather_undo_kernel<T>, run.num_blocks, kThreads, args);
  });
  return run_kernel.status();
}

}  // namespace gymfast::cuda
