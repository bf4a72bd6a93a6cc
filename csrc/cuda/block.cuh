// Where the units of a block lie, how they are coded, and access to them. The numbers are those of
// docs/wire-format.md; csrc/cpu has its own copy, because the two do not know each other.
#ifndef GYMFAST_CUDA_BLOCK_CUH_
#define GYMFAST_CUDA_BLOCK_CUH_

#include "cuda/codec.h"
#include "cuda/device.cuh"
#include "format/digest.h"

namespace gymfast::cuda {

constexpr std::uint32_t kNumClasses = 16;

enum class Mode : std::uint8_t {
  kUnchanged = 0,
  kFast = 1,
  kBalanced = 2,
  kSmall = 3,
  kDense = 4,
  kRaw = 5,
};

// Unit i of a block lies at byte `offset + (i / row_units) * stride_bytes + (i % row_units) * unit`
// of the tensor; stride_bytes is 0 for a block in one piece.
struct Placement {
  std::uint64_t offset;
  std::uint64_t stride_bytes;
  std::uint32_t row_units;
  std::uint32_t num_units;
};

__host__ __device__ inline std::uint64_t smaller(std::uint64_t a, std::uint64_t b) {
  return a < b ? a : b;
}

__device__ inline Placement placement_of(const Geometry& g, std::uint64_t block) {
  const std::uint64_t i = block / g.blocks_per_row(), j = block % g.blocks_per_row();
  const std::uint64_t row = i * g.tile_rows, col = j * g.tile_cols;
  const std::uint64_t rows = smaller(g.tile_rows, g.num_units / g.cols - row);
  const std::uint64_t cols = smaller(g.tile_cols, g.cols - col);
  const bool is_flat = rows == 1 || cols == g.cols;
  Placement place;
  place.offset = (row * g.cols + col) * g.unit_bytes;
  place.stride_bytes = is_flat ? 0 : g.cols * g.unit_bytes;
  place.num_units = static_cast<std::uint32_t>(rows * cols);
  place.row_units = is_flat ? place.num_units : static_cast<std::uint32_t>(cols);
  return place;
}

template <class T>
__device__ inline std::uint64_t byte_of(const Placement& place, std::uint32_t unit) {
  if (place.stride_bytes == 0) return place.offset + std::uint64_t{unit} * sizeof(T);
  const std::uint32_t line = unit / place.row_units;
  return place.offset + line * place.stride_bytes +
         std::uint64_t{unit - line * place.row_units} * sizeof(T);
}

template <class T>
__device__ inline T load_unit(const std::uint8_t* tensor, const Placement& place,
                              std::uint32_t unit) {
  return *reinterpret_cast<const T*>(tensor + byte_of<T>(place, unit));
}

template <class T>
__device__ inline void store_unit(std::uint8_t* tensor, const Placement& place, std::uint32_t unit,
                                  T value) {
  *reinterpret_cast<T*>(tensor + byte_of<T>(place, unit)) = value;
}

template <class T>
constexpr std::uint32_t kMagnitude = static_cast<std::uint32_t>(T(~T{0}) >> 1);
template <class T>
constexpr std::uint32_t kSignShift = 8 * sizeof(T) - 1;

// v of section 5.2.
template <class T>
__device__ inline std::uint32_t step_of(T before, T after) {
  const std::uint32_t a = after & kMagnitude<T>, b = before & kMagnitude<T>;
  const std::uint32_t size = a < b ? b - a : a - b;
  return (size - 1) & kMagnitude<T>;
}
template <class T>
__device__ inline bool is_negative(T before, T after) {
  return (after & kMagnitude<T>) < (before & kMagnitude<T>);
}
template <class T>
__device__ inline bool is_flip(T before, T after) {
  return (static_cast<std::uint32_t>(before ^ after) >> kSignShift<T>) != 0;
}

// A code is a step to add modulo M in the low bits and a flip in the top bit.
template <class T>
__device__ inline T code_of(std::uint32_t v, bool is_down) {
  const std::uint32_t size = v + 1;
  return static_cast<T>((is_down ? 0u - size : size) & kMagnitude<T>);
}
template <class T>
__device__ inline T apply_code(T before, T code) {
  constexpr T kSign = static_cast<T>(T{1} << kSignShift<T>);
  return static_cast<T>((static_cast<T>(before + code) & kMagnitude<T>) |
                        ((before ^ code) & kSign));
}

// The bits of a unit that its class is taken from.
template <class T>
__device__ inline unsigned class_field(T unit) {
  if constexpr (sizeof(T) == 1) {
    return unit & 0x7Fu;
  } else {
    return (unit >> (8 * sizeof(T) - 9)) & 0xFFu;
  }
}

template <class T>
__device__ inline unsigned class_of(T unit, int class_shift, int class_base) {
  const int c = static_cast<int>(class_field(unit) >> class_shift) - class_base;
  return static_cast<unsigned>(c < 0 ? 0 : (c > 15 ? 15 : c));
}

__device__ inline std::uint32_t varint_bytes(std::uint64_t value) {
  std::uint32_t count = 1;
  for (; value >= 128; value >>= 7) ++count;
  return count;
}

// Bits of a body. Neighbours share words, so all writes go through an atomic OR into zeros.
struct BitSink {
  std::uint32_t* words;  // the body, 4-byte aligned

  __device__ void put(std::uint64_t bit, std::uint32_t value) const {  // up to 32 bits
    if (value == 0) return;
    const unsigned shift = static_cast<unsigned>(bit & 31);
    atomicOr(words + (bit >> 5), value << shift);
    const std::uint32_t high = shift == 0 ? 0 : value >> (32 - shift);
    if (high != 0) atomicOr(words + (bit >> 5) + 1, high);
  }
  __device__ void put_byte(std::uint64_t byte, std::uint32_t value) const { put(8 * byte, value); }
};

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_BLOCK_CUH_
