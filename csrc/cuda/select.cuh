// select: from classes of the base to positions, for modes balanced and small; and what the decoder
// of a block works with.
#ifndef GYMFAST_CUDA_SELECT_CUH_
#define GYMFAST_CUDA_SELECT_CUH_

#include "cuda/ranks.cuh"
#include "cuda/unpack.cuh"

namespace gymfast::cuda {

struct BlockEntry {
  std::uint64_t offset;
  std::uint64_t size;
  std::uint32_t check;
  Mode mode;
};

template <class T>
struct ApplyArgs {
  Geometry geometry;
  BlockParams params;
  std::uint64_t first_block = 0;
  std::uint64_t num_blocks = 0;
  std::uint64_t block_units = 0;
  std::uint64_t chunks_per_block = 0;
  Digest* digests = nullptr;
  std::uint8_t* data = nullptr;
  const std::uint8_t* body = nullptr;
  std::uint64_t body_bytes = 0;
  const Section* sections = nullptr;
  std::uint64_t num_sections = 0;
  ApplyResult* result = nullptr;
  BlockEntry* entries = nullptr;         // [blocks]
  std::uint64_t* ones = nullptr;         // [slots] places in U; later bits of changed ranks
  std::uint32_t* index = nullptr;        // [slots] positions of the changes
  std::uint32_t* list = nullptr;         // [slots] positions in a group, or left out by it
  std::uint32_t* values = nullptr;       // [slots]
  std::uint32_t* ranks = nullptr;        // [slots]
  std::uint32_t* class_units = nullptr;  // [blocks, chunks, 16]
  T* codes = nullptr;                    // [slots]
  T* sorted = nullptr;                   // [slots] codes by class
};

template <class T>
struct BlockScratch {
  std::uint64_t* ones;
  std::uint32_t* index;
  std::uint32_t* list;
  std::uint32_t* values;
  std::uint32_t* ranks;
  std::uint32_t* class_units;
  T* codes;
  T* sorted;
};

// Kept in shared memory: every thread needs it, and registers are short.
template <class T>
struct BlockJob {
  std::uint64_t block;  // of the tensor
  Placement place;
  Mode mode;
  std::uint32_t check;
  const std::uint8_t* payload;
  std::uint64_t payload_bytes;
  const std::uint8_t* data;
  int class_shift;
  int class_base;
  std::uint32_t num_chunks;
  BlockScratch<T> scratch;

  __device__ void fill(const ApplyArgs<T>& args, const BlockEntry& entry, std::uint64_t i) {
    block = args.first_block + i;
    place = placement_of(args.geometry, block);
    mode = entry.mode;
    check = entry.check;
    payload = args.body + entry.offset;
    payload_bytes = entry.size;
    data = args.data;
    class_shift = args.params.class_shift;
    class_base = args.params.class_base;
    num_chunks = (place.num_units - 1) / kChunkUnits + 1;
    const std::uint64_t first = i * args.block_units;
    scratch = {args.ones + first,  args.index + first,
               args.list + first,  args.values + first,
               args.ranks + first, args.class_units + i * args.chunks_per_block * kNumClasses,
               args.codes + first, args.sorted + first};
  }
  __device__ unsigned class_at(std::uint32_t unit) const {
    return class_of(load_unit<T>(data, place, unit), class_shift, class_base);
  }
};

struct DecodeShared {
  UnpackShared unpack;
  PositionGroup positions[kNumClasses];
  ValueGroup values[kNumClasses];
  std::uint32_t starts[kNumClasses + 1];    // first change of each class
  std::uint32_t units[kNumClasses];         // units of each class
  std::uint32_t next[kWarps][kNumClasses];  // counters of each warp
  std::uint32_t num_groups;
  std::uint32_t num_changes;
  std::uint64_t header_bytes;
  std::uint64_t low_bits;
  Error error;
  bool use_base;
  std::uint32_t num_symbols;
  std::uint32_t dense_low_bits;
  std::uint8_t symbols[256];
};

// Walks the units of a chunk with one warp, 32 at a time: visit(unit, class, rank) for each, where
// rank counts on from `next`, a row of 16 counters of this warp. Lanes without a unit are left out.
template <class T, class Visit>
__device__ void walk_classes(const BlockJob<T>& job, std::uint32_t chunk, std::uint32_t* next,
                             const Visit& visit) {
  const std::uint32_t begin = chunk * kChunkUnits;
  const auto end = static_cast<std::uint32_t>(smaller(begin + kChunkUnits, job.place.num_units));
  for (std::uint32_t at = begin; at < end; at += kWarp) {
    const std::uint32_t unit = at + lane_id();
    const unsigned c = unit < end ? job.class_at(unit) : kNumClasses;
    const unsigned peers = __match_any_sync(kFullMask, c);
    const auto below = static_cast<std::uint32_t>(__popc(peers & ((1u << lane_id()) - 1)));
    const std::uint32_t first = unit < end ? next[c] : 0;
    __syncwarp();
    if (unit < end) {
      visit(unit, c, first + below);
      if (below == 0) next[c] = first + static_cast<std::uint32_t>(__popc(peers));
    }
    __syncwarp();
  }
}

// Units of each class before each chunk into scratch.class_units, totals into shared.units.
template <class T>
__device__ void count_classes(const BlockJob<T>& job, DecodeShared& shared) {
  std::uint32_t* next = shared.next[warp_id()];
  for (std::uint32_t chunk = warp_id(); chunk < job.num_chunks; chunk += kWarps) {
    if (lane_id() < kNumClasses) next[lane_id()] = 0;
    __syncwarp();
    walk_classes(job, chunk, next, [](std::uint32_t, unsigned, std::uint32_t) {});
    if (lane_id() < kNumClasses) {
      job.scratch.class_units[chunk * kNumClasses + lane_id()] = next[lane_id()];
    }
    __syncwarp();
  }
  __syncthreads();
  for (std::uint32_t c = 0; c < kNumClasses; ++c) {
    const std::uint32_t total =
        scan_column(job.scratch.class_units + c, job.num_chunks, 0, shared.unpack.group);
    if (threadIdx.x == 0) shared.units[c] = total;
  }
  __syncthreads();
}

// Index in list[0 .. count) of a value that is there.
__device__ inline std::uint32_t find(const std::uint32_t* list, std::uint32_t count,
                                     std::uint32_t value) {
  std::uint32_t low = 0, high = count;
  while (low + 1 < high) {
    const std::uint32_t middle = (low + high) / 2;
    if (list[middle] > value) {
      high = middle;
    } else {
      low = middle;
    }
  }
  return low;
}

// Mode small: scratch.ranks (by class) to scratch.index, in the same order. A bit for each changed
// rank, then one pass over the units, each of which looks its own rank up.
template <class T>
__device__ Error select_positions(const BlockJob<T>& job, DecodeShared& shared) {
  const std::uint32_t* ranks = job.scratch.ranks;
  bool has_too_many = false, has_too_far = false;
  for (std::uint32_t c = 0; c < kNumClasses; ++c) {
    const std::uint32_t first = shared.starts[c], end = shared.starts[c + 1];
    if (first == end) continue;
    has_too_many = has_too_many || end - first > shared.units[c];
    has_too_far = has_too_far || ranks[end - 1] >= shared.units[c];
  }
  if (has_too_far) return has_too_many ? Error::kCountRange : Error::kPositionRange;
  auto* bits = reinterpret_cast<std::uint32_t*>(job.scratch.ones);
  for (std::uint32_t i = threadIdx.x; i < (job.place.num_units + 31u) / 32; i += kThreads) {
    bits[i] = 0;
  }
  __syncthreads();
  std::uint32_t units_below = 0;
  for (std::uint32_t c = 0; c < kNumClasses; ++c) {
    for (std::uint32_t i = shared.starts[c] + threadIdx.x; i < shared.starts[c + 1];
         i += kThreads) {
      const std::uint32_t bit = units_below + ranks[i];
      atomicOr(bits + bit / 32, 1u << (bit % 32));
    }
    units_below += shared.units[c];
  }
  __syncthreads();
  std::uint32_t* next = shared.next[warp_id()];
  for (std::uint32_t chunk = warp_id(); chunk < job.num_chunks; chunk += kWarps) {
    if (lane_id() < kNumClasses) {
      std::uint32_t below = 0;
      for (std::uint32_t c = 0; c < lane_id(); ++c) below += shared.units[c];
      next[lane_id()] = below + job.scratch.class_units[chunk * kNumClasses + lane_id()];
    }
    __syncwarp();
    walk_classes(job, chunk, next, [&](std::uint32_t unit, unsigned c, std::uint32_t bit) {
      if ((bits[bit / 32] >> (bit % 32) & 1u) == 0) return;
      std::uint32_t below = 0;
      for (unsigned other = 0; other < c; ++other) below += shared.units[other];
      const std::uint32_t first = shared.starts[c];
      job.scratch.index[first + find(ranks + first, shared.starts[c + 1] - first, bit - below)] =
          unit;
    });
  }
  __syncthreads();
  return Error::kOk;
}

// Mode balanced: scratch.sorted (by class, then position) to scratch.codes (by position).
template <class T>
__device__ Error order_codes(const BlockJob<T>& job, DecodeShared& shared) {
  std::uint32_t seen[kNumClasses];  // of each class in earlier rounds
#pragma unroll
  for (std::uint32_t c = 0; c < kNumClasses; ++c) seen[c] = shared.starts[c];
  const std::uint32_t k = shared.num_changes;
  for (std::uint32_t at = 0; at < k; at += kThreads) {
    const std::uint32_t i = at + threadIdx.x;
    const unsigned c = i < k ? job.class_at(job.scratch.index[i]) : kNumClasses;
    const unsigned peers = __match_any_sync(kFullMask, c);
    const auto below = static_cast<std::uint32_t>(__popc(peers & ((1u << lane_id()) - 1)));
    if (lane_id() < kNumClasses) shared.next[warp_id()][lane_id()] = 0;
    __syncwarp();
    if (i < k && below == 0) {
      shared.next[warp_id()][c] = static_cast<std::uint32_t>(__popc(peers));
    }
    __syncthreads();
#pragma unroll
    for (std::uint32_t other = 0; other < kNumClasses; ++other) {
      std::uint32_t slot = seen[other] + below;
      for (std::uint32_t w = 0; w < kWarps; ++w) {
        const std::uint32_t count = shared.next[w][other];
        if (w < warp_id()) slot += count;
        seen[other] += count;
      }
      // A wrong base can send more units to a class than it has codes: clamp, then refuse below.
      if (other == c) job.scratch.codes[i] = job.scratch.sorted[smaller(slot, k - 1)];
    }
    __syncthreads();
  }
  for (std::uint32_t c = 0; c < kNumClasses; ++c) {
    if (seen[c] != shared.starts[c + 1]) return Error::kCountRange;
  }
  return Error::kOk;
}

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_SELECT_CUH_
