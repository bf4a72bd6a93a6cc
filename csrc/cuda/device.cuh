// What kernels need from their compiler: CUDA's, or the C++ compiler by way of host_shim.h.
#ifndef GYMFAST_CUDA_DEVICE_CUH_
#define GYMFAST_CUDA_DEVICE_CUH_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#ifdef GYMFAST_CUDA_SHIM
#include "cuda/host_shim.h"
#else
#include <cuda_runtime.h>
// Shared memory of a kernel: one trivially constructible struct, declared once.
#define GYMFAST_SHARED(type, name) __shared__ type name
#endif

namespace gymfast::cuda {

constexpr unsigned kFullMask = 0xFFFFFFFFu;
constexpr unsigned kWarp = 32;

__device__ inline unsigned lane_id() { return threadIdx.x % kWarp; }
__device__ inline unsigned warp_id() { return threadIdx.x / kWarp; }

__device__ inline std::uint64_t atomic_add(std::uint64_t* to, std::uint64_t value) {
  static_assert(sizeof(unsigned long long) == sizeof(std::uint64_t));
  return atomicAdd(reinterpret_cast<unsigned long long*>(to),
                   static_cast<unsigned long long>(value));
}
__device__ inline void atomic_min(std::uint64_t* to, std::uint64_t value) {
  atomicMin(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}

__device__ inline std::uint64_t shuffle_xor(std::uint64_t value, int lanes) {
  return __shfl_xor_sync(kFullMask, static_cast<unsigned long long>(value), lanes);
}

__device__ inline std::uint64_t warp_sum(std::uint64_t value) {
  for (int lanes = 16; lanes != 0; lanes /= 2) value += shuffle_xor(value, lanes);
  return value;
}

// Inclusive prefix sum over the lanes of a warp.
__device__ inline std::uint32_t warp_scan(std::uint32_t value) {
  for (unsigned lanes = 1; lanes < kWarp; lanes *= 2) {
    const std::uint32_t below = __shfl_up_sync(kFullMask, value, lanes);
    if (lane_id() >= lanes) value += below;
  }
  return value;
}
__device__ inline std::uint64_t warp_scan(std::uint64_t value) {
  for (unsigned lanes = 1; lanes < kWarp; lanes *= 2) {
    const std::uint64_t below =
        __shfl_up_sync(kFullMask, static_cast<unsigned long long>(value), lanes);
    if (lane_id() >= lanes) value += below;
  }
  return value;
}

// Kernels that give a block to a thread block run with so many threads.
constexpr unsigned kThreads = 128;
constexpr unsigned kWarps = kThreads / kWarp;

struct GroupShared {
  std::uint64_t sums[kWarps];
};

// Sum over the thread block, for every thread. All threads must call it.
__device__ inline std::uint64_t group_sum(std::uint64_t value, GroupShared& shared) {
  value = warp_sum(value);
  if (lane_id() == 0) shared.sums[warp_id()] = value;
  __syncthreads();
  std::uint64_t sum = 0;
  for (unsigned i = 0; i < kWarps; ++i) sum += shared.sums[i];
  __syncthreads();
  return sum;
}

// Exclusive prefix sum over the thread block; *total is the sum. All threads must call it.
template <class Sum>
__device__ inline Sum group_scan(Sum value, Sum* total, GroupShared& shared) {
  const Sum inclusive = warp_scan(value);
  if (lane_id() == kWarp - 1) shared.sums[warp_id()] = inclusive;
  __syncthreads();
  Sum before = 0, sum = 0;
  for (unsigned i = 0; i < kWarps; ++i) {
    const Sum part = static_cast<Sum>(shared.sums[i]);
    if (i < warp_id()) before += part;
    sum += part;
  }
  __syncthreads();
  *total = sum;
  return before + inclusive - value;
}

#ifndef GYMFAST_CUDA_SHIM
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), std::uint64_t num_groups, unsigned num_threads,
                   cudaStream_t stream, Args... args) {
  kernel<<<static_cast<unsigned>(num_groups), num_threads, 0, stream>>>(args...);
  return cudaGetLastError();
}

// Brings the code of a kernel onto the device, which its first launch would do otherwise.
template <class... Params>
cudaError_t load(void (*kernel)(Params...)) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}
#else
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), std::uint64_t num_groups, unsigned num_threads,
                   cudaStream_t, Args... args) {
  return shim::run_grid(static_cast<unsigned>(num_groups), num_threads, [&] { kernel(args...); });
}

template <class... Params>
cudaError_t load(void (*)(Params...)) {
  return shim::load_error();
}
#endif

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_DEVICE_CUH_
