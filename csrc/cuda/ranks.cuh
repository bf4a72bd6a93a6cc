// diff with ranks: what modes balanced and small need besides the changes, in the same pass.
#ifndef GYMFAST_CUDA_RANKS_CUH_
#define GYMFAST_CUDA_RANKS_CUH_

#include "cuda/diff.cuh"

namespace gymfast::cuda {

// Counts of 16 classes, 8 bits each: a lane sees at most 64 units of a chunk.
struct ClassCounts {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  __device__ void add(unsigned c) {
    const std::uint64_t one = std::uint64_t{1} << (8 * (c & 7));
    if (c < 8) {
      low += one;
    } else {
      high += one;
    }
  }
  __device__ std::uint32_t get(unsigned c) const {
    return static_cast<std::uint32_t>((c < 8 ? low : high) >> (8 * (c & 7))) & 0xFFu;
  }
};
static_assert(kChunkUnits / kWarp <= 255);

// The classes of up to 16 units, 4 bits each.
struct Classes {
  std::uint64_t nibbles = 0;

  __device__ unsigned get(std::uint32_t i) const {
    return static_cast<unsigned>(nibbles >> (4 * i)) & 15u;
  }
  // How many of the first `count` units are of class c.
  __device__ std::uint32_t count(unsigned c, std::uint32_t first_units) const {
    constexpr std::uint64_t kOnes = 0x1111111111111111u;
    std::uint64_t differs = nibbles ^ (kOnes * c);
    differs |= differs >> 2;
    differs |= differs >> 1;
    const std::uint64_t valid =
        first_units >= 16 ? ~std::uint64_t{0} : (std::uint64_t{1} << (4 * first_units)) - 1;
    const std::uint64_t same = ~differs & kOnes & valid;
    return static_cast<std::uint32_t>(__popc(static_cast<unsigned>(same)) +
                                      __popc(static_cast<unsigned>(same >> 32)));
  }
};

template <class T>
__device__ inline Classes classes_of(const Units<T>& units, int class_shift, int class_base) {
  Classes classes;
#pragma unroll
  for (std::uint32_t i = 0; i < Units<T>::kCount; ++i) {
    const std::uint64_t c = class_of(units.get(i), class_shift, class_base);
    classes.nibbles |= c << (4 * i);
  }
  return classes;
}

// Ranks of the changed units of a step within the chunk: the warp takes one changed unit after the
// other, for they are few.
template <class T>
__device__ inline void rank_changes(const Changes<T>& changes, std::uint64_t slot,
                                    const Classes& classes, std::uint32_t num_units,
                                    std::uint32_t changed, const ClassCounts& before) {
  std::uint32_t lanes = __ballot_sync(kFullMask, changed != 0);
  for (; lanes != 0; lanes &= lanes - 1) {
    const auto owner = static_cast<unsigned>(__ffs(static_cast<int>(lanes))) - 1;
    std::uint32_t rest = __shfl_sync(kFullMask, changed, owner);
    for (; rest != 0; rest &= rest - 1) {
      const auto i = static_cast<std::uint32_t>(__ffs(static_cast<int>(rest))) - 1;
      const unsigned c = __shfl_sync(kFullMask, classes.get(i), owner);
      const std::uint32_t seen = lane_id() < owner ? num_units : lane_id() == owner ? i : 0;
      const std::uint32_t rank =
          __reduce_add_sync(kFullMask, before.get(c) + classes.count(c, seen));
      if (lane_id() == owner) changes.chunk_rank[slot++] = static_cast<std::uint16_t>(rank);
    }
  }
}

__device__ inline void store_class_counts(const ClassCounts& counts, std::uint32_t* out) {
  for (unsigned c = 0; c < kNumClasses; ++c) {
    const std::uint32_t sum = __reduce_add_sync(kFullMask, counts.get(c));
    if (lane_id() == 0) out[c] = sum;
  }
}

// As diff_kernel, and also ranks of changed units and counts of classes within each chunk.
template <class T>
__global__ __launch_bounds__(kDiffThreads, 3) void diff_ranks_kernel(DiffArgs<T> args) {
  const std::uint64_t chunk = std::uint64_t{blockIdx.x} * kDiffWarps + warp_id();
  if (chunk >= args.num_chunks) return;
  const std::uint64_t block = chunk / args.chunks_per_block;
  const Placement place = placement_of(args.geometry, args.first_block + block);
  const auto begin = static_cast<std::uint32_t>(chunk % args.chunks_per_block) * kChunkUnits;
  const auto end = static_cast<std::uint32_t>(smaller(begin + kChunkUnits, place.num_units));
  const std::uint64_t slots = block * args.block_units + begin;
  std::uint32_t count = 0;
  ClassCounts units, changes;
  for (std::uint32_t at = begin; at < end; at += kWarp * Units<T>::kCount) {
    const Slice<T> slice = slice_at(args, place, at + lane_id() * Units<T>::kCount, end);
    const Units<T> before = load_units<T>(args.base, place, slice);
    const Units<T> after = load_units<T>(args.next, place, slice);
    const std::uint32_t changed = changed_units(before, after);
    const Classes classes = classes_of(before, args.class_shift, args.class_base);
    if (__ballot_sync(kFullMask, changed != 0) != 0) {
      const auto mine = static_cast<std::uint32_t>(__popc(changed));
      const std::uint32_t inclusive = warp_scan(mine);
      const std::uint64_t slot = slots + count + inclusive - mine;
      emit_changes(args.changes, slot, slice.first - begin, before, after, changed);
      if (args.update && changed != 0) store_changed(args.base, place, slice, after, changed);
      rank_changes(args.changes, slot, classes, slice.count, changed, units);
      for (std::uint32_t rest = changed; rest != 0; rest &= rest - 1) {
        changes.add(classes.get(static_cast<std::uint32_t>(__ffs(static_cast<int>(rest))) - 1));
      }
      count += __shfl_sync(kFullMask, inclusive, kWarp - 1);
    }
    for (std::uint32_t i = 0; i < Units<T>::kCount; ++i) {
      if (i < slice.count) units.add(classes.get(i));
    }
  }
  if (lane_id() == 0) args.counts[chunk] = count;
  store_class_counts(units, args.class_units + chunk * kNumClasses);
  store_class_counts(changes, args.class_changes + chunk * kNumClasses);
}

// Exclusive prefix sums over the chunks of a block of one column of a [chunks, 16] table, in place,
// from `start` on. Returns the end.
__device__ inline std::uint32_t scan_column(std::uint32_t* column, std::uint64_t num_chunks,
                                            std::uint32_t start, GroupShared& shared) {
  for (std::uint64_t first = 0; first < num_chunks; first += kThreads) {
    const std::uint64_t i = first + threadIdx.x;
    const std::uint32_t value = i < num_chunks ? column[i * kNumClasses] : 0;
    std::uint32_t total;
    const std::uint32_t below = group_scan(value, &total, shared);
    if (i < num_chunks) column[i * kNumClasses] = start + below;
    start += total;
  }
  return start;
}

// Units of a class before each chunk, and where the changes of a class and chunk begin in the order
// by class. Totals and ends are [blocks, 16].
[[maybe_unused]] static __global__ __launch_bounds__(kThreads) void scan_classes_kernel(
    std::uint32_t* class_units, std::uint32_t* class_changes, std::uint64_t chunks_per_block,
    std::uint32_t* class_totals, std::uint32_t* class_ends) {
  GYMFAST_SHARED(GroupShared, shared);
  const std::uint64_t row = blockIdx.x * chunks_per_block * kNumClasses;
  std::uint32_t end = 0;
  for (std::uint32_t c = 0; c < kNumClasses; ++c) {
    const std::uint32_t total = scan_column(class_units + row + c, chunks_per_block, 0, shared);
    end = scan_column(class_changes + row + c, chunks_per_block, end, shared);
    if (threadIdx.x != 0) continue;
    class_totals[blockIdx.x * kNumClasses + c] = total;
    class_ends[blockIdx.x * kNumClasses + c] = end;
  }
}

struct OrderShared {
  std::uint32_t next[kDiffWarps][kNumClasses];
};

// Ranks within the block, and the order of changes by class; one warp a chunk.
template <class T>
__global__ __launch_bounds__(kDiffThreads) void order_kernel(DiffArgs<T> args,
                                                             const std::uint32_t* totals) {
  GYMFAST_SHARED(OrderShared, shared);
  const std::uint64_t chunk = std::uint64_t{blockIdx.x} * kDiffWarps + warp_id();
  if (chunk >= args.num_chunks) return;
  const std::uint64_t block = chunk / args.chunks_per_block;
  const std::uint64_t number = chunk % args.chunks_per_block;
  const std::uint32_t start = args.counts[chunk];
  const bool is_last = number + 1 == args.chunks_per_block;
  const std::uint32_t count = (is_last ? totals[block] : args.counts[chunk + 1]) - start;
  const std::uint64_t first = block * args.block_units;
  const std::uint64_t from = first + number * kChunkUnits;
  const Changes<T>& lists = args.changes;
  std::uint32_t* next = shared.next[warp_id()];
  if (lane_id() < kNumClasses)
    next[lane_id()] = args.class_changes[chunk * kNumClasses + lane_id()];
  __syncwarp();
  for (std::uint32_t at = 0; at < count; at += kWarp) {
    const std::uint32_t i = at + lane_id();
    const bool is_change = i < count;
    const unsigned c =
        is_change ? class_of(lists.chunk_before[from + i], args.class_shift, args.class_base)
                  : kNumClasses;
    const unsigned peers = __match_any_sync(kFullMask, c);
    const auto below = static_cast<std::uint32_t>(__popc(peers & ((1u << lane_id()) - 1)));
    const std::uint32_t place = is_change ? next[c] + below : 0;
    __syncwarp();
    if (is_change) {
      lists.order[first + place] = start + i;
      lists.rank[first + start + i] =
          args.class_units[chunk * kNumClasses + c] + lists.chunk_rank[from + i];
      if (below == 0) next[c] = place + static_cast<std::uint32_t>(__popc(peers));
    }
    __syncwarp();
  }
}

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_RANKS_CUH_
