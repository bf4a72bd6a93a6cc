// classes: a sample of the class fields of a tensor, from which class parameters are chosen.
#ifndef GYMFAST_CUDA_CLASSES_CUH_
#define GYMFAST_CUDA_CLASSES_CUH_

#include "cuda/block.cuh"

namespace gymfast::cuda {

constexpr std::uint64_t kMaxSamples = 1024;

// Sample i is unit i * num_units / num_samples (section 10), without a product of 128 bits.
template <class T>
__global__ __launch_bounds__(kThreads) void sample_classes_kernel(const T* data,
                                                                  std::uint64_t num_units,
                                                                  std::uint64_t num_samples,
                                                                  std::uint8_t* out) {
  const std::uint64_t i = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= num_samples) return;
  const std::uint64_t step = num_units / num_samples, rest = num_units % num_samples;
  out[i] = static_cast<std::uint8_t>(class_field(data[i * step + i * rest / num_samples]));
}

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_CLASSES_CUH_
