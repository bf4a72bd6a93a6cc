// undo: the old values of changed units as one list, and their way back into a tensor.
#ifndef GYMFAST_CUDA_UNDO_CUH_
#define GYMFAST_CUDA_UNDO_CUH_

#include "cuda/block.cuh"

namespace gymfast::cuda {

// Records before those of `block`. All threads must call it; all get the result.
__device__ inline std::uint64_t records_before(const std::uint32_t* counts, std::uint64_t block,
                                               GroupShared& shared) {
  std::uint64_t sum = 0;
  for (std::uint64_t i = threadIdx.x; i < block; i += kThreads) sum += counts[i];
  return group_sum(sum, shared);
}

template <class T>
struct GatherArgs {
  std::uint64_t block_units = 0;
  const std::uint32_t* counts = nullptr;       // [blocks] changes
  const std::uint32_t* block_index = nullptr;  // [blocks, block_units] positions in the block
  const T* block_before = nullptr;             // [blocks, block_units]
  std::uint32_t* index = nullptr;              // the same without gaps between blocks
  T* before = nullptr;
};

// One thread block a block.
template <class T>
__global__ __launch_bounds__(kThreads) void gather_undo_kernel(GatherArgs<T> args) {
  GYMFAST_SHARED(GroupShared, shared);
  const std::uint64_t from = blockIdx.x * args.block_units;
  const std::uint64_t to = records_before(args.counts, blockIdx.x, shared);
  const std::uint32_t count = args.counts[blockIdx.x];
  for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) {
    args.index[to + i] = args.block_index[from + i];
    args.before[to + i] = args.block_before[from + i];
  }
}

template <class T>
struct RollbackArgs {
  Geometry geometry;
  std::uint64_t first_block = 0;
  std::uint8_t* data = nullptr;
  const std::uint32_t* counts = nullptr;  // [blocks]
  const std::uint32_t* index = nullptr;   // [num_records]
  const T* before = nullptr;              // [num_records]
  std::uint64_t num_records = 0;
};

// One thread block a block. Counts and positions come from the caller: what lies outside of the
// lists or of the block is left out.
template <class T>
__global__ __launch_bounds__(kThreads) void rollback_kernel(RollbackArgs<T> args) {
  GYMFAST_SHARED(GroupShared, shared);
  const Placement place = placement_of(args.geometry, args.first_block + blockIdx.x);
  const std::uint64_t first = records_before(args.counts, blockIdx.x, shared);
  const std::uint64_t last = smaller(first + args.counts[blockIdx.x], args.num_records);
  for (std::uint64_t i = first + threadIdx.x; i < last; i += kThreads) {
    const std::uint32_t position = args.index[i];
    if (position < place.num_units) store_unit<T>(args.data, place, position, args.before[i]);
  }
}

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_UNDO_CUH_
