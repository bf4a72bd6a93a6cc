// The host side that all operations share: checks of arguments, division of scratch, launches.
#ifndef GYMFAST_CUDA_LAUNCH_CUH_
#define GYMFAST_CUDA_LAUNCH_CUH_

#include "cuda/diff.cuh"

namespace gymfast::cuda {

constexpr std::uint64_t kMaxGroups = (std::uint64_t{1} << 31) - 1;
constexpr std::uint64_t kAlignment = 256;

inline CallStatus refuse(const char* problem, Error error = Error::kBadArgument) {
  return {error, cudaSuccess, problem};
}

inline std::uint64_t groups(std::uint64_t items, std::uint64_t per_group) {
  return items / per_group + (items % per_group != 0);
}

// Hands out pieces of the scratch memory and says where they begin; with a null base it only
// counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<std::uint8_t*>(base)) {}
  template <class T>
  std::uint64_t take(T** piece, std::uint64_t count) {
    const std::uint64_t offset = (used_ + kAlignment - 1) / kAlignment * kAlignment;
    *piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + offset);
    used_ = offset + count * sizeof(T);
    return offset;
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
  // Loads all kernels of a call before its first launch: where memory of the device is short, a
  // later one must not fail after tensors were written.
  template <class... Kernels>
  void load(Kernels... kernels) {
    ((error_ = error_ == cudaSuccess ? cuda::load(kernels) : error_), ...);
  }
  CallStatus status() const {
    if (error_ == cudaSuccess) return {};
    return {Error::kBadArgument, error_, "CUDA refused a launch: see the CUDA error"};
  }

 private:
  cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

inline bool is_aligned(const void* pointer, std::uint64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

inline CallStatus check_blocks(const Run& run) {
  const Error error = run.geometry.check();
  if (error != Error::kOk) return refuse("the geometry is none that the format allows", error);
  const std::uint64_t total = run.geometry.num_blocks();
  if (run.first_block > total || run.num_blocks > total - run.first_block) {
    return refuse("the tensor does not have all of these blocks", Error::kBadBlockIndex);
  }
  if (run.num_blocks > kMaxGroups) return refuse("too many blocks for one call: take fewer");
  const BlockParams& p = run.params;
  if (p.class_shift < 0 || p.class_shift > 7 || p.class_base < 0 || p.class_base > 255 ||
      static_cast<unsigned>(p.profile) > 2) {
    return refuse("profile is 0..2, class_shift 0..7, class_base 0..255");
  }
  return {};
}

// Blocks whose digests the operation reads or writes.
inline CallStatus check_run(const Run& run) {
  const CallStatus status = check_blocks(run);
  if (!status.is_ok() || run.num_blocks == 0) return status;
  if (run.digests != nullptr && is_aligned(run.digests, 8)) return {};
  return refuse("digests are missing or not 8-byte aligned");
}

inline CallStatus check_units(const void* tensor, std::uint64_t unit_bytes) {
  if (tensor == nullptr) return refuse("a tensor is missing");
  if (is_aligned(tensor, unit_bytes)) return {};
  return refuse("a tensor is not aligned to its units: copy it to memory that is");
}

inline CallStatus check_tensor(const Run& run, const std::uint8_t* tensor) {
  return run.num_blocks == 0 ? CallStatus{} : check_units(tensor, run.geometry.unit_bytes);
}

inline CallStatus check_scratch(const void* scratch, std::uint64_t found, std::uint64_t needed) {
  if (found < needed) return refuse("scratch is smaller than .._scratch_bytes says");
  if (is_aligned(scratch, kAlignment) && scratch != nullptr) return {};
  return refuse("scratch is missing or not 256-byte aligned");
}

inline std::uint64_t chunks_per_block(const Geometry& g) {
  return groups(g.block_units(), kChunkUnits);
}

// Calls `operation` with a unit of 1, 2 or 4 bytes.
template <class Operation>
auto with_unit(std::uint64_t unit_bytes, const Operation& operation) {
  switch (unit_bytes) {
    case 1: return operation(std::uint8_t{});
    case 2: return operation(std::uint16_t{});
    default: return operation(std::uint32_t{});
  }
}

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_LAUNCH_CUH_
