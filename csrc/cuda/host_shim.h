// Runs the kernels of csrc/cuda on the CPU: tests only. One operating system thread; the threads of
// a thread block are fibres that switch at barriers and warp operations, thread blocks run one
// after another. Deterministic. Under ThreadSanitizer a missing barrier is reported as a race: only
// __syncthreads and __syncwarp order memory here, as in the CUDA model.
#ifndef GYMFAST_CUDA_HOST_SHIM_H_
#define GYMFAST_CUDA_HOST_SHIM_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define GYMFAST_SHARED(type, name)                        \
  static_assert(std::is_trivially_constructible_v<type>); \
  type& name = *static_cast<type*>(::gymfast::shim::shared_memory(sizeof(type)))

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using cudaStream_t = void*;
enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInsufficientDriver = 35,
  cudaErrorCallRequiresNewerDriver = 36,
  cudaErrorNoDevice = 100,
  cudaErrorLaunchFailure = 719,
};
enum cudaMemoryType : int {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2,
  cudaMemoryTypeManaged = 3,
};
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void* devicePointer;
};

// Memory is that of device 0, and so are streams, unless gymfast::shim says otherwise.
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer);
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device);
const char* cudaGetErrorString(cudaError_t error);
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

namespace gymfast::shim {

// What [start, start + size) is from now on; the last call counts.
void set_memory(const void* start, std::size_t size, cudaMemoryType type, int device);
void forget_memory();
void set_stream_device(cudaStream_t stream, int device);

// All launches fail with this error, and run nothing, until it is cudaSuccess again.
void set_launch_error(cudaError_t error);
void set_load_error(cudaError_t error);
cudaError_t load_error();
std::uint64_t num_launches();

struct Index {
  unsigned x;
};

// Runs `kernel` once for every thread of the grid; one grid at a time, whatever thread calls.
// Aborts with a message on what is undefined on a GPU: a barrier that not all threads reach, warp
// operations of different kinds that meet.
cudaError_t run_grid(unsigned num_groups, unsigned num_threads,
                     const std::function<void()>& kernel);

// Threads take turns from the last to the first: other interleavings, the same results.
void set_descending(bool is_descending);

Index thread_index();
Index group_index();

// The same memory for all threads of a thread block, filled with garbage when the block starts.
void* shared_memory(std::size_t size);

void sync_threads();
void sync_warp();

// Lanes give a value each and see all 32 of them; valid until the lane's next warp operation.
enum class WarpOp : int { kBallot, kShuffle, kReduce, kMatch };
const std::uint64_t* exchange(WarpOp op, unsigned mask, std::uint64_t value);

template <class T>
T as(std::uint64_t bits) {
  return static_cast<T>(bits);
}

}  // namespace gymfast::shim

#define threadIdx (::gymfast::shim::thread_index())
#define blockIdx (::gymfast::shim::group_index())

inline void __syncthreads() { gymfast::shim::sync_threads(); }
inline void __syncwarp() { gymfast::shim::sync_warp(); }

inline unsigned __ballot_sync(unsigned mask, bool value) {
  const std::uint64_t* lanes = gymfast::shim::exchange(gymfast::shim::WarpOp::kBallot, mask, value);
  unsigned bits = 0;
  for (unsigned i = 0; i < 32; ++i) bits |= static_cast<unsigned>(lanes[i]) << i;
  return bits;
}
template <class T>
T __shfl_sync(unsigned mask, T value, unsigned lane) {
  return gymfast::shim::as<T>(
      gymfast::shim::exchange(gymfast::shim::WarpOp::kShuffle, mask, value)[lane % 32]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  const unsigned lane = threadIdx.x % 32;
  const std::uint64_t* lanes =
      gymfast::shim::exchange(gymfast::shim::WarpOp::kShuffle, mask, value);
  return gymfast::shim::as<T>(lanes[lane < delta ? lane : lane - delta]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes_apart) {
  const unsigned lane = threadIdx.x % 32;
  return gymfast::shim::as<T>(gymfast::shim::exchange(
      gymfast::shim::WarpOp::kShuffle, mask, value)[lane ^ static_cast<unsigned>(lanes_apart)]);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  const std::uint64_t* lanes = gymfast::shim::exchange(gymfast::shim::WarpOp::kReduce, mask, value);
  unsigned sum = 0;
  for (unsigned i = 0; i < 32; ++i) sum += static_cast<unsigned>(lanes[i]);
  return sum;
}

inline unsigned __match_any_sync(unsigned mask, unsigned value) {
  const std::uint64_t* lanes = gymfast::shim::exchange(gymfast::shim::WarpOp::kMatch, mask, value);
  unsigned same = 0;
  for (unsigned i = 0; i < 32; ++i) same |= static_cast<unsigned>(lanes[i] == value) << i;
  return same;
}

template <class T>
T atomicAdd(T* to, T value) {
  return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicOr(T* to, T value) {
  return __atomic_fetch_or(to, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicMin(T* to, T value) {
  T seen = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (value < seen &&
         !__atomic_compare_exchange_n(to, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }

#endif  // GYMFAST_CUDA_HOST_SHIM_H_
