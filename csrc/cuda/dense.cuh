// dense: exponents as ranked symbols in split-Rice form, the other bits raw (section 6): its plan.
#ifndef GYMFAST_CUDA_DENSE_CUH_
#define GYMFAST_CUDA_DENSE_CUH_

#include "cuda/block.cuh"

namespace gymfast::cuda {

template <class T>
struct DenseLayout {
  static constexpr unsigned kSymbolShift = sizeof(T) == 4 ? 23 : 7;
  static constexpr std::uint32_t kRestBytes = sizeof(T) == 4 ? 3 : 1;
  static constexpr std::uint32_t kRestMask = (1u << kSymbolShift) - 1;

  __device__ static std::uint32_t symbol(T x) {
    return (static_cast<std::uint32_t>(x) >> kSymbolShift) & 0xFFu;
  }
  __device__ static std::uint32_t rest(T x) {
    return (static_cast<std::uint32_t>(x) >> kSignShift<T>) << kSymbolShift |
           (static_cast<std::uint32_t>(x) & kRestMask);
  }
  __device__ static T join(std::uint32_t symbol, std::uint32_t rest) {
    return static_cast<T>((rest >> kSymbolShift) << kSignShift<T> | symbol << kSymbolShift |
                          (rest & kRestMask));
  }
};

struct DensePlan {
  std::uint32_t low_bits;
  std::uint32_t num_symbols;
  std::uint8_t index_of[256];  // by symbol
};

struct DenseShared {
  std::uint32_t counts[256];
  std::uint32_t sorted[256];
};

// The units of a block; with `use_base` symbols are differences, 0 for what did not change.
template <class T>
struct DenseSource {
  const T* before;
  const T* after;
  const std::uint8_t* next;
  std::uint32_t num_changes;
  bool use_base;

  __device__ std::uint32_t changed_symbol(std::uint32_t i) const {
    using Layout = DenseLayout<T>;
    return (Layout::symbol(after[i]) - Layout::symbol(before[i])) & 0xFFu;
  }
};

template <class T>
__device__ void count_symbols(const DenseSource<T>& source, const Placement& place,
                              DenseShared& shared) {
  for (std::uint32_t s = threadIdx.x; s < 256; s += kThreads) shared.counts[s] = 0;
  __syncthreads();
  if (source.use_base) {
    for (std::uint32_t i = threadIdx.x; i < source.num_changes; i += kThreads) {
      atomicAdd(&shared.counts[source.changed_symbol(i)], 1u);
    }
    if (threadIdx.x == 0) atomicAdd(&shared.counts[0], place.num_units - source.num_changes);
  } else {
    for (std::uint32_t i = threadIdx.x; i < place.num_units; i += kThreads) {
      const T unit = load_unit<T>(source.next, place, i);
      atomicAdd(&shared.counts[DenseLayout<T>::symbol(unit)], 1u);
    }
  }
  __syncthreads();
}

// Size of the dense payload. If it is below `limit`, thread 0 .. 127 leave the plan and the header.
// All threads must call it.
template <class T>
__device__ std::uint64_t plan_dense(const DenseSource<T>& source, const Placement& place,
                                    std::uint64_t limit, DensePlan* plan, std::uint8_t* header,
                                    DenseShared& shared, GroupShared& group) {
  count_symbols(source, place, shared);
  std::uint32_t index[2];  // of the symbols threadIdx.x and threadIdx.x + 128
  std::uint32_t present = 0;
  for (std::uint32_t j = 0; j < 2; ++j) {
    const std::uint32_t s = threadIdx.x + j * kThreads, count = shared.counts[s];
    index[j] = 0;
    for (std::uint32_t t = 0; t < 256; ++t) {
      const std::uint32_t other = shared.counts[t];
      index[j] += other > count || (other == count && t < s);
    }
    shared.sorted[index[j]] = count;
    present += count != 0;
  }
  const auto num_symbols = static_cast<std::uint32_t>(group_sum(present, group));
  const std::uint64_t n = place.num_units;
  std::uint64_t best = ~std::uint64_t{0}, unary_bits = 0;
  std::uint32_t low_bits = 0;
  for (std::uint32_t l = 0; l < 8; ++l) {
    std::uint64_t quotients = 0;
    for (std::uint32_t i = threadIdx.x; i < 256; i += kThreads) {
      quotients += std::uint64_t{shared.sorted[i]} * (i >> l);
    }
    quotients = group_sum(quotients, group);
    if (n * l + quotients >= best) continue;
    best = n * l + quotients;
    low_bits = l;
    unary_bits = n + quotients;
  }
  const std::uint64_t size = 3 + num_symbols + (n * low_bits + 7) / 8 +
                             n * DenseLayout<T>::kRestBytes + (unary_bits + 7) / 8;
  if (size >= limit) return size;
  for (std::uint32_t j = 0; j < 2; ++j) {
    const std::uint32_t s = threadIdx.x + j * kThreads;
    plan->index_of[s] = static_cast<std::uint8_t>(index[j]);
    if (index[j] < num_symbols) header[2 + index[j]] = static_cast<std::uint8_t>(s);
  }
  if (threadIdx.x == 0) {
    plan->low_bits = low_bits;
    plan->num_symbols = num_symbols;
    header[0] = source.use_base ? 1 : 0;
    header[1] = static_cast<std::uint8_t>(num_symbols - 1);
    header[2 + num_symbols] = static_cast<std::uint8_t>(low_bits);
  }
  return size;
}

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_DENSE_CUH_
