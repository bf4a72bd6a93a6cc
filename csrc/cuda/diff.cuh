// diff: one streaming pass over base and next that emits the changed units and updates the base.
#ifndef GYMFAST_CUDA_DIFF_CUH_
#define GYMFAST_CUDA_DIFF_CUH_

#include "cuda/digest.cuh"

namespace gymfast::cuda {

// A warp takes a chunk of a block: positions inside it have 16 bits.
constexpr std::uint32_t kChunkUnits = 2048;
constexpr std::uint32_t kDiffThreads = 256;
constexpr std::uint32_t kDiffWarps = kDiffThreads / kWarp;

// Lists of changes. A block owns as many slots as a whole block has units, from
// `block * block_units` on; the records of a chunk stand at the front of the chunk's slots.
template <class T>
struct Changes {
  std::uint16_t* chunk_position = nullptr;  // by chunk
  T* chunk_before = nullptr;
  T* chunk_after = nullptr;
  std::uint16_t* chunk_rank = nullptr;  // among the units of its class in the chunk
  std::uint32_t* index = nullptr;       // by block, ascending: position in the block
  T* before = nullptr;
  T* after = nullptr;
  std::uint32_t* rank = nullptr;   // among the units of its class in the block
  std::uint32_t* order = nullptr;  // numbers of the changes by class, then position
};

template <class T>
struct DiffArgs {
  Geometry geometry;
  std::uint64_t first_block = 0;
  std::uint64_t num_chunks = 0;
  std::uint64_t chunks_per_block = 0;
  std::uint64_t block_units = 0;
  std::uint8_t* base = nullptr;
  const std::uint8_t* next = nullptr;
  bool update = false;
  int class_shift = 0;
  int class_base = 0;
  Changes<T> changes;
  std::uint32_t* counts = nullptr;         // [num_chunks] changes, then changes before
  std::uint32_t* class_units = nullptr;    // [num_chunks, 16] units of each class in base
  std::uint32_t* class_changes = nullptr;  // [num_chunks, 16] changes of each class
  std::uint64_t* deltas = nullptr;         // [blocks, 2] change of the partial digests
};

// 16 bytes of units of base and next. Units at or behind `num_units` read as equal.
template <class T>
struct Units {
  static constexpr std::uint32_t kCount = 16 / sizeof(T);
  static constexpr std::uint32_t kPerWord = 4 / sizeof(T);
  std::uint32_t words[4];

  __device__ T get(std::uint32_t i) const {
    // Selects instead of an index, so that the words stay in registers.
    const std::uint32_t w = i / kPerWord;
    const std::uint32_t low = (w & 1) != 0 ? words[1] : words[0];
    const std::uint32_t high = (w & 1) != 0 ? words[3] : words[2];
    const std::uint32_t word = (w & 2) != 0 ? high : low;
    return static_cast<T>(word >> (8 * sizeof(T) * (i % kPerWord)));
  }
  __device__ void set(std::uint32_t i, T value) {  // i is known at compile time where it matters
    words[i / kPerWord] |= std::uint32_t{value} << (8 * sizeof(T) * (i % kPerWord));
  }
};

template <class T>
__device__ inline std::uint32_t changed_units(const Units<T>& a, const Units<T>& b) {
  std::uint32_t mask = 0;
#pragma unroll
  for (std::uint32_t w = 0; w < 4; ++w) {
    const std::uint32_t x = a.words[w] ^ b.words[w];
#pragma unroll
    for (std::uint32_t j = 0; j < Units<T>::kPerWord; ++j) {
      const bool differs = static_cast<T>(x >> (8 * sizeof(T) * j)) != 0;
      mask |= static_cast<std::uint32_t>(differs) << (w * Units<T>::kPerWord + j);
    }
  }
  return mask;
}

// Where 16 bytes of units lie, and whether one vector access reaches them in both tensors.
template <class T>
struct Slice {
  std::uint64_t offset = 0;
  std::uint32_t first = 0;
  std::uint32_t count = 0;  // units inside the chunk
  bool is_vector = false;
};

template <class T>
__device__ inline Slice<T> slice_at(const DiffArgs<T>& args, const Placement& place,
                                    std::uint32_t first, std::uint32_t end) {
  Slice<T> slice;
  slice.first = first;
  slice.count =
      first < end ? static_cast<std::uint32_t>(smaller(Units<T>::kCount, end - first)) : 0;
  slice.offset = slice.count == 0 ? 0 : byte_of<T>(place, first);
  const bool is_line =
      place.stride_bytes == 0 || first % place.row_units + Units<T>::kCount <= place.row_units;
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(args.base + slice.offset) |
                                 reinterpret_cast<std::uintptr_t>(args.next + slice.offset);
  slice.is_vector = slice.count == Units<T>::kCount && is_line && address % 16 == 0;
  return slice;
}

template <class T>
__device__ inline Units<T> load_units(const std::uint8_t* tensor, const Placement& place,
                                      const Slice<T>& slice) {
  Units<T> units;
  if (slice.is_vector) {
    const uint4 words = *reinterpret_cast<const uint4*>(tensor + slice.offset);
    units.words[0] = words.x;
    units.words[1] = words.y;
    units.words[2] = words.z;
    units.words[3] = words.w;
    return units;
  }
  for (std::uint32_t w = 0; w < 4; ++w) units.words[w] = 0;
#pragma unroll
  for (std::uint32_t i = 0; i < Units<T>::kCount; ++i) {
    if (i < slice.count) units.set(i, load_unit<T>(tensor, place, slice.first + i));
  }
  return units;
}

template <class T>
__device__ inline void store_changed(std::uint8_t* tensor, const Placement& place,
                                     const Slice<T>& slice, const Units<T>& units,
                                     std::uint32_t changed) {
  if (slice.is_vector) {
    *reinterpret_cast<uint4*>(tensor + slice.offset) =
        uint4{units.words[0], units.words[1], units.words[2], units.words[3]};
    return;
  }
  for (; changed != 0; changed &= changed - 1) {
    const auto i = static_cast<std::uint32_t>(__ffs(static_cast<int>(changed))) - 1;
    store_unit<T>(tensor, place, slice.first + i, units.get(i));
  }
}

template <class T>
__device__ inline void emit_changes(const Changes<T>& changes, std::uint64_t slot,
                                    std::uint32_t position, const Units<T>& before,
                                    const Units<T>& after, std::uint32_t changed) {
  for (; changed != 0; changed &= changed - 1, ++slot) {
    const auto i = static_cast<std::uint32_t>(__ffs(static_cast<int>(changed))) - 1;
    changes.chunk_position[slot] = static_cast<std::uint16_t>(position + i);
    changes.chunk_before[slot] = before.get(i);
    changes.chunk_after[slot] = after.get(i);
  }
}

// One warp a chunk; quiet steps (512 bytes without a change) cost two loads and a vote.
template <class T>
__global__ __launch_bounds__(kDiffThreads, 5) void diff_kernel(DiffArgs<T> args) {
  const std::uint64_t chunk = std::uint64_t{blockIdx.x} * kDiffWarps + warp_id();
  if (chunk >= args.num_chunks) return;
  const std::uint64_t block = chunk / args.chunks_per_block;
  const Placement place = placement_of(args.geometry, args.first_block + block);
  const auto begin = static_cast<std::uint32_t>(chunk % args.chunks_per_block) * kChunkUnits;
  const auto end = static_cast<std::uint32_t>(smaller(begin + kChunkUnits, place.num_units));
  const std::uint64_t slots = block * args.block_units + begin;
  std::uint32_t count = 0;
  for (std::uint32_t at = begin; at < end; at += kWarp * Units<T>::kCount) {
    const Slice<T> slice = slice_at(args, place, at + lane_id() * Units<T>::kCount, end);
    const Units<T> before = load_units<T>(args.base, place, slice);
    const Units<T> after = load_units<T>(args.next, place, slice);
    const std::uint32_t changed = changed_units(before, after);
    if (__ballot_sync(kFullMask, changed != 0) == 0) continue;
    const auto mine = static_cast<std::uint32_t>(__popc(changed));
    const std::uint32_t inclusive = warp_scan(mine);
    emit_changes(args.changes, slots + count + inclusive - mine, slice.first - begin, before, after,
                 changed);
    if (args.update && changed != 0) store_changed(args.base, place, slice, after, changed);
    count += __shfl_sync(kFullMask, inclusive, kWarp - 1);
  }
  if (lane_id() == 0) args.counts[chunk] = count;
}

// Exclusive prefix sums of the counts of a block's chunks, in place; the sum goes to totals[block].
[[maybe_unused]] static __global__ __launch_bounds__(kThreads) void scan_counts_kernel(
    std::uint32_t* counts, std::uint64_t chunks_per_block, std::uint32_t* totals,
    std::uint64_t* deltas) {
  GYMFAST_SHARED(GroupShared, shared);
  std::uint32_t* row = counts + blockIdx.x * chunks_per_block;
  std::uint32_t sum = 0;
  for (std::uint64_t first = 0; first < chunks_per_block; first += kThreads) {
    const std::uint64_t i = first + threadIdx.x;
    const std::uint32_t value = i < chunks_per_block ? row[i] : 0;
    std::uint32_t total;
    const std::uint32_t below = group_scan(value, &total, shared);
    if (i < chunks_per_block) row[i] = sum + below;
    sum += total;
  }
  if (threadIdx.x != 0) return;
  totals[blockIdx.x] = sum;
  deltas[2 * blockIdx.x] = 0;
  deltas[2 * blockIdx.x + 1] = 0;
}

// Moves the records of a chunk (one warp) to their places in the block and adds up their digest.
template <class T>
__global__ __launch_bounds__(kDiffThreads) void compact_kernel(DiffArgs<T> args,
                                                               const std::uint32_t* totals) {
  const std::uint64_t chunk = std::uint64_t{blockIdx.x} * kDiffWarps + warp_id();
  if (chunk >= args.num_chunks) return;
  const std::uint64_t block = chunk / args.chunks_per_block;
  const std::uint64_t number = chunk % args.chunks_per_block;
  const std::uint32_t start = args.counts[chunk];
  const bool is_last = number + 1 == args.chunks_per_block;
  const std::uint32_t count = (is_last ? totals[block] : args.counts[chunk + 1]) - start;
  if (count == 0) return;
  const Placement place = placement_of(args.geometry, args.first_block + block);
  const std::uint64_t first = block * args.block_units;
  const std::uint64_t from = first + number * kChunkUnits;
  const Changes<T>& lists = args.changes;
  RowDigest digest;
  for (std::uint32_t i = lane_id(); i < count; i += kWarp) {
    const auto position =
        static_cast<std::uint32_t>(number * kChunkUnits) + lists.chunk_position[from + i];
    const T before = lists.chunk_before[from + i], after = lists.chunk_after[from + i];
    lists.index[first + start + i] = position;
    lists.before[first + start + i] = before;
    lists.after[first + start + i] = after;
    digest.add(std::uint64_t{after} - std::uint64_t{before}, byte_of<T>(place, position));
  }
  for (unsigned lane = 0; lane < 2; ++lane) {
    const std::uint64_t total = warp_sum(digest.finish(lane));
    if (lane_id() == 0) atomic_add(&args.deltas[2 * block + lane], total);
  }
}

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_DIFF_CUH_
