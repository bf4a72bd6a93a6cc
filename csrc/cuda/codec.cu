// Host side: checks of arguments, division of the scratch memory, and the launches.
#include "cuda/codec.h"

#include "cuda/apply.cuh"
#include "cuda/pack.cuh"
#include "cuda/ranks.cuh"

namespace gymfast::cuda {
namespace {

constexpr std::uint64_t kMaxGroups = (std::uint64_t{1} << 31) - 1;
constexpr std::uint64_t kAlignment = 256;

CallStatus refuse(const char* problem, Error error = Error::kBadArgument) {
  return {error, cudaSuccess, problem};
}

std::uint64_t groups(std::uint64_t items, std::uint64_t per_group) {
  return items / per_group + (items % per_group != 0);
}

// Hands out pieces of the scratch memory; with a null base it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<std::uint8_t*>(base)) {}
  template <class T>
  void take(T** piece, std::uint64_t count) {
    used_ = (used_ + kAlignment - 1) / kAlignment * kAlignment;
    *piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += count * sizeof(T);
  }
  std::uint64_t used() const { return used_; }

 private:
  std::uint8_t* base_;
  std::uint64_t used_ = 0;
};

// Launches one kernel after the other until one fails.
class Launcher {
 public:
  explicit Launcher(cudaStream_t stream) : stream_(stream) {}
  template <class... Params, class... Args>
  void operator()(void (*kernel)(Params...), std::uint64_t num_groups, unsigned num_threads,
                  Args... args) {
    if (error_ == cudaSuccess && num_groups != 0) {
      error_ = launch(kernel, num_groups, num_threads, stream_, args...);
    }
  }
  CallStatus status() const {
    if (error_ == cudaSuccess) return {};
    return {Error::kBadArgument, error_, "CUDA refused a launch: see the CUDA error"};
  }

 private:
  cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

bool is_aligned(const void* pointer, std::uint64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

CallStatus check_run(const Run& run) {
  const Error error = run.geometry.check();
  if (error != Error::kOk) return refuse("the geometry is none that the format allows", error);
  const std::uint64_t total = run.geometry.num_blocks();
  if (run.first_block > total || run.num_blocks > total - run.first_block) {
    return refuse("the tensor does not have all of these blocks", Error::kBadBlockIndex);
  }
  const BlockParams& p = run.params;
  if (p.class_shift < 0 || p.class_shift > 7 || p.class_base < 0 || p.class_base > 255 ||
      static_cast<unsigned>(p.profile) > 2) {
    return refuse("profile is 0..2, class_shift 0..7, class_base 0..255");
  }
  if (run.num_blocks != 0 && (run.digests == nullptr || !is_aligned(run.digests, 8))) {
    return refuse("digests are missing or not 8-byte aligned");
  }
  return {};
}

CallStatus check_tensor(const Run& run, const std::uint8_t* tensor) {
  if (run.num_blocks == 0) return {};
  if (tensor == nullptr) return refuse("a tensor is missing");
  if (is_aligned(tensor, run.geometry.unit_bytes)) return {};
  return refuse("a tensor is not aligned to its units: copy it to memory that is");
}

CallStatus check_scratch(const void* scratch, std::uint64_t found, std::uint64_t needed) {
  if (found < needed) return refuse("scratch is smaller than .._scratch_bytes says");
  if (is_aligned(scratch, kAlignment) && scratch != nullptr) return {};
  return refuse("scratch is missing or not 256-byte aligned");
}

std::uint64_t chunks_per_block(const Geometry& g) { return groups(g.block_units(), kChunkUnits); }

// Fills the arguments of the encode kernels; the returned size does not depend on the base.
template <class T>
std::uint64_t divide_encode_scratch(const Run& run, void* scratch, EncodeArgs<T>* args,
                                    std::uint32_t** totals, std::uint32_t** class_totals,
                                    std::uint32_t** class_ends) {
  const std::uint64_t slots = run.num_blocks * run.geometry.block_units();
  const std::uint64_t chunks = run.num_blocks * chunks_per_block(run.geometry);
  const bool by_class = run.params.profile != Profile::kFast;
  Arena arena(scratch);
  DiffArgs<T>& diff = args->diff;
  arena.take(&diff.changes.chunk_position, slots);
  arena.take(&diff.changes.chunk_before, slots);
  arena.take(&diff.changes.chunk_after, slots);
  arena.take(&diff.changes.index, slots);
  arena.take(&diff.changes.before, slots);
  arena.take(&diff.changes.after, slots);
  arena.take(&args->exceptions, slots);
  arena.take(&args->flips, slots);
  arena.take(&diff.counts, chunks);
  arena.take(&diff.deltas, 2 * run.num_blocks);
  arena.take(totals, run.num_blocks);
  arena.take(&args->plans, run.num_blocks);
  if (!by_class) return arena.used();
  arena.take(&diff.changes.chunk_rank, slots);
  arena.take(&diff.changes.rank, slots);
  arena.take(&diff.changes.order, slots);
  arena.take(&diff.class_units, chunks * kNumClasses);
  arena.take(&diff.class_changes, chunks * kNumClasses);
  arena.take(class_totals, run.num_blocks * kNumClasses);
  arena.take(class_ends, run.num_blocks * kNumClasses);
  return arena.used();
}

template <class T>
std::uint64_t encode_scratch(const Run& run) {
  EncodeArgs<T> args;
  std::uint32_t *totals, *class_totals, *class_ends;
  return divide_encode_scratch(run, nullptr, &args, &totals, &class_totals, &class_ends);
}

template <class T>
CallStatus launch_encode(const Run& run, std::uint8_t* base, const std::uint8_t* next, bool update,
                         std::uint64_t blocks_per_section, const EncodeBuffers& buffers,
                         cudaStream_t stream) {
  EncodeArgs<T> args;
  std::uint32_t *totals = nullptr, *class_totals = nullptr, *class_ends = nullptr;
  divide_encode_scratch(run, buffers.scratch, &args, &totals, &class_totals, &class_ends);
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
  args.totals = totals;
  args.class_totals = class_totals;
  args.class_ends = class_ends;
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
  run_kernel(by_class ? diff_ranks_kernel<T> : diff_kernel<T>, diff_groups, kDiffThreads, diff);
  run_kernel(scan_counts_kernel, run.num_blocks, kThreads, diff.counts, diff.chunks_per_block,
             totals, diff.deltas);
  run_kernel(compact_kernel<T>, diff_groups, kDiffThreads, diff, args.totals);
  if (by_class) {
    run_kernel(scan_classes_kernel, run.num_blocks, kThreads, diff.class_units, diff.class_changes,
               diff.chunks_per_block, class_totals, class_ends);
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

template <class T>
std::uint64_t divide_apply_scratch(const Run& run, void* scratch, ApplyArgs<T>* args) {
  const std::uint64_t slots = run.num_blocks * run.geometry.block_units();
  Arena arena(scratch);
  arena.take(&args->entries, run.num_blocks);
  arena.take(&args->ones, slots);
  arena.take(&args->index, slots);
  arena.take(&args->list, slots);
  arena.take(&args->values, slots);
  arena.take(&args->ranks, slots);
  arena.take(&args->class_units, run.num_blocks * chunks_per_block(run.geometry) * kNumClasses);
  arena.take(&args->codes, slots);
  arena.take(&args->sorted, slots);
  return arena.used();
}

template <class T>
std::uint64_t apply_scratch(const Run& run) {
  ApplyArgs<T> args;
  return divide_apply_scratch(run, nullptr, &args);
}

template <class T>
CallStatus launch_apply(const Run& run, std::uint8_t* data, const ApplyBuffers& buffers,
                        cudaStream_t stream) {
  ApplyArgs<T> args;
  divide_apply_scratch(run, buffers.scratch, &args);
  args.geometry = run.geometry;
  args.params = run.params;
  args.first_block = run.first_block;
  args.num_blocks = run.num_blocks;
  args.block_units = run.geometry.block_units();
  args.chunks_per_block = chunks_per_block(run.geometry);
  args.digests = run.digests;
  args.data = data;
  args.body = buffers.body;
  args.body_bytes = buffers.body_bytes;
  args.sections = buffers.sections;
  args.num_sections = buffers.num_sections;
  args.result = buffers.result;
  if (run.num_blocks > kMaxGroups) return refuse("too many blocks for one call: take fewer");
  Launcher run_kernel(stream);
  run_kernel(begin_apply_kernel<T>, groups(run.num_blocks, kThreads), kThreads, args);
  run_kernel(parse_tables_kernel<T>, groups(args.num_sections, kThreads), kThreads, args);
  run_kernel(apply_kernel<T>, run.num_blocks, kThreads, args);
  return run_kernel.status();
}

}  // namespace

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

std::uint64_t encode_body_capacity(const Run& run) {
  // Raw is the largest payload; a table entry has a mode, at most 4 bytes of size and a check.
  const Geometry& g = run.geometry;
  const std::uint64_t units = smaller(g.num_units, run.num_blocks * g.block_units());
  return (units * g.unit_bytes + 9 * run.num_blocks + 15) / 16 * 16;
}

std::uint64_t encode_scratch_bytes(const Run& run) {
  switch (run.geometry.unit_bytes) {
    case 1: return encode_scratch<std::uint8_t>(run);
    case 2: return encode_scratch<std::uint16_t>(run);
    default: return encode_scratch<std::uint32_t>(run);
  }
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
  const auto launch_width = [&](auto unit) {
    return launch_encode<decltype(unit)>(run, base, next, update, blocks_per_section, buffers,
                                         stream);
  };
  switch (run.geometry.unit_bytes) {
    case 1: return launch_width(std::uint8_t{});
    case 2: return launch_width(std::uint16_t{});
    default: return launch_width(std::uint32_t{});
  }
}

std::uint64_t apply_scratch_bytes(const Run& run) {
  switch (run.geometry.unit_bytes) {
    case 1: return apply_scratch<std::uint8_t>(run);
    case 2: return apply_scratch<std::uint16_t>(run);
    default: return apply_scratch<std::uint32_t>(run);
  }
}

CallStatus apply_blocks(const Run& run, std::uint8_t* data, const ApplyBuffers& buffers,
                        cudaStream_t stream) {
  CallStatus status = check_run(run);
  if (status.is_ok()) status = check_tensor(run, data);
  if (!status.is_ok()) return status;
  if (run.num_blocks == 0) return refuse("a section has at least one block", Error::kBadBlockIndex);
  if (buffers.result == nullptr || buffers.num_sections == 0 || buffers.sections == nullptr ||
      (buffers.body == nullptr && buffers.body_bytes != 0)) {
    return refuse("result, sections or body are missing");
  }
  status = check_scratch(buffers.scratch, buffers.scratch_bytes, apply_scratch_bytes(run));
  if (!status.is_ok()) return status;
  switch (run.geometry.unit_bytes) {
    case 1: return launch_apply<std::uint8_t>(run, data, buffers, stream);
    case 2: return launch_apply<std::uint16_t>(run, data, buffers, stream);
    default: return launch_apply<std::uint32_t>(run, data, buffers, stream);
  }
}

}  // namespace gymfast::cuda
