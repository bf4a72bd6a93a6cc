// unpack: split-Rice arrays by prefix sums (section 5.1), headers by one thread.
#ifndef GYMFAST_CUDA_UNPACK_CUH_
#define GYMFAST_CUDA_UNPACK_CUH_

#include "cuda/block.cuh"

namespace gymfast::cuda {

struct ValueGroup {
  std::uint32_t count;
  std::uint32_t mode, low_bits, gap_low_bits, flip_low_bits;
  std::uint32_t num_exceptions, num_flips;
};

struct PositionGroup {
  std::uint32_t count, limit, coded;  // coded: length of the array
  std::uint32_t low_bits;
  bool is_inverted;
};

// Reader of header fields; the first failure sticks. For one thread.
struct HeaderReader {
  const std::uint8_t* data;
  std::uint64_t size;
  std::uint64_t used = 0;
  std::uint64_t low_bits = 0;  // length of L, as far as it is known
  Error error = Error::kOk;

  __device__ bool is_ok() const { return error == Error::kOk; }
  __device__ bool fail(Error e) {
    if (is_ok()) error = e;
    return false;
  }
  __device__ std::uint32_t u8() {
    if (used < size) return data[used++];
    fail(Error::kStreamLength);
    return 0;
  }
  __device__ std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 70; shift += 7) {
      const std::uint32_t byte = u8();
      if (!is_ok()) return 0;
      if ((byte == 0 && shift != 0) || (shift == 63 && byte > 1)) break;
      value |= std::uint64_t{byte & 127u} << shift;
      if (byte < 128) return value;
    }
    fail(Error::kStreamLength);
    return 0;
  }
  // A u16 mask of classes, not 0.
  __device__ std::uint32_t class_mask() {
    std::uint32_t mask = u8();
    mask |= u8() << 8;
    if (is_ok() && mask == 0) fail(Error::kCountRange);
    return is_ok() ? mask : 0;
  }

  __device__ bool positions(std::uint32_t limit, PositionGroup* group) {
    const std::uint64_t k = varint();
    const std::uint32_t p = u8();
    if (!is_ok()) return false;
    if (p >> 6 != 0) return fail(Error::kReservedNotZero);
    if (k == 0 || k > limit) return fail(Error::kCountRange);
    group->count = static_cast<std::uint32_t>(k);
    group->limit = limit;
    group->low_bits = p & 31;
    group->is_inverted = (p & 32) != 0;
    group->coded = group->is_inverted ? limit - group->count : group->count;
    low_bits += std::uint64_t{group->coded} * group->low_bits;
    return true;
  }

  __device__ bool values(std::uint32_t count, ValueGroup* group) {
    const std::uint32_t q = u8();
    *group = ValueGroup{count, q >> 5 & 3, q & 31, 0, 0, 0, 0};
    if (group->mode == 3) return fail(Error::kBadMode);
    if (group->mode == 0 && group->low_bits != 0) return fail(Error::kReservedNotZero);
    if (group->mode == 1) {
      if (!list(count, &group->num_exceptions, &group->gap_low_bits)) return false;
      low_bits += std::uint64_t{group->num_exceptions} * (group->gap_low_bits + group->low_bits);
    } else if (group->mode == 2) {
      low_bits += std::uint64_t{count} * group->low_bits;
    }
    if ((q & 128) == 0) return is_ok();
    if (!list(count, &group->num_flips, &group->flip_low_bits)) return false;
    low_bits += std::uint64_t{group->num_flips} * group->flip_low_bits;
    return true;
  }

 private:
  __device__ bool list(std::uint32_t count, std::uint32_t* size, std::uint32_t* bits) {
    const std::uint64_t m = varint();
    const std::uint32_t g = u8();
    if (!is_ok()) return false;
    if (g >> 5 != 0) return fail(Error::kReservedNotZero);
    if (m == 0 || m > count) return fail(Error::kCountRange);
    *size = static_cast<std::uint32_t>(m);
    *bits = g;
    return true;
  }
};

struct UnpackShared {
  GroupShared group;
  std::uint64_t first_failure;  // element << 8 | number of the error
};

// Streams of a payload and how far they are read; every thread holds the same.
struct Streams {
  const std::uint8_t* lows = nullptr;
  const std::uint8_t* middle = nullptr;  // signs, or the rests of a dense payload
  const std::uint8_t* unary = nullptr;
  std::uint64_t low_bits = 0;
  std::uint64_t unary_bytes = 0;
  std::uint64_t low_bit = 0;  // where the next array begins
  std::uint64_t unary_bit = 0;

  // L, the middle and U behind a header; U is the rest of the payload.
  __device__ Error open(const std::uint8_t* payload, std::uint64_t size, std::uint64_t header_bytes,
                        std::uint64_t num_low_bits, std::uint64_t middle_bytes) {
    const std::uint64_t low_bytes = (num_low_bits + 7) / 8, left = size - header_bytes;
    if (low_bytes > left || middle_bytes > left - low_bytes) return Error::kStreamLength;
    lows = payload + header_bytes;
    middle = lows + low_bytes;
    unary = middle + middle_bytes;
    low_bits = num_low_bits;
    unary_bytes = left - low_bytes - middle_bytes;
    return Error::kOk;
  }
  __device__ static bool has_dirty_padding(const std::uint8_t* stream, std::uint64_t num_bits) {
    const unsigned used = static_cast<unsigned>(num_bits & 7);
    return used != 0 && stream[num_bits / 8] >> used != 0;
  }
  // Every stream ends where its arrays end, and only zeros follow.
  __device__ Error finish() const {
    if ((unary_bit + 7) / 8 != unary_bytes) return Error::kStreamLength;
    return has_dirty_padding(unary, unary_bit) ? Error::kStreamLength : Error::kOk;
  }

  __device__ std::uint32_t sign(std::uint32_t change) const {
    return middle[change >> 3] >> (change & 7) & 1u;
  }
  // Bytes one by one: the stream begins anywhere, and nothing behind it may be read.
  __device__ std::uint32_t low_field(std::uint64_t bit, std::uint32_t width) const {
    if (width == 0) return 0;
    std::uint64_t value = 0;
    const std::uint64_t first = bit >> 3, last = (bit + width - 1) >> 3;
    for (std::uint64_t i = first; i <= last; ++i) {
      value |= std::uint64_t{lows[i]} << (8 * (i - first));
    }
    return static_cast<std::uint32_t>(value >> (bit & 7)) & ((1u << width) - 1);
  }
  __device__ std::uint32_t unary_word(std::uint64_t word) const {
    std::uint32_t bits = 0;
    for (std::uint64_t i = 0; i < 4 && 4 * word + i < unary_bytes; ++i) {
      bits |= std::uint32_t{unary[4 * word + i]} << (8 * i);
    }
    return bits;
  }
};

// Positions in U of the next `count` ones into `ones`; returns how many there are.
__device__ inline std::uint32_t find_ones(const Streams& streams, std::uint32_t count,
                                          std::uint64_t* ones, GroupShared& shared) {
  const std::uint64_t first_word = streams.unary_bit / 32;
  const std::uint64_t num_words = (streams.unary_bytes + 3) / 4;
  std::uint32_t found = 0;
  for (std::uint64_t at = first_word; at < num_words && found < count; at += kThreads) {
    const std::uint64_t word = at + threadIdx.x;
    std::uint32_t bits = word < num_words ? streams.unary_word(word) : 0;
    if (word == first_word) bits &= ~0u << (streams.unary_bit & 31);
    std::uint32_t total;
    std::uint32_t rank =
        found + group_scan(static_cast<std::uint32_t>(__popc(bits)), &total, shared);
    for (; bits != 0 && rank < count; bits &= bits - 1, ++rank) {
      ones[rank] = 32 * word + static_cast<unsigned>(__ffs(static_cast<int>(bits))) - 1;
    }
    found += total;
  }
  __syncthreads();
  return found < count ? found : count;
}

__device__ inline void report(UnpackShared& shared, std::uint64_t element, Error error) {
  atomic_min(&shared.first_failure, element << 8 | static_cast<std::uint64_t>(error));
}

// Decodes an array of `count` values, each below `limit`. All threads must call it; all get the
// same error: the one that a reader from front to back meets first.
__device__ inline Error unpack_values(Streams& streams, std::uint32_t low_bits, std::uint32_t count,
                                      std::uint64_t limit, std::uint64_t* ones, std::uint32_t* out,
                                      UnpackShared& shared) {
  if (count == 0) return Error::kOk;
  if (threadIdx.x == 0) shared.first_failure = ~std::uint64_t{0};
  const std::uint32_t found = find_ones(streams, count, ones, shared.group);
  if (threadIdx.x == 0 && found < count) report(shared, found, Error::kStreamLength);
  for (std::uint32_t i = threadIdx.x; i < found; i += kThreads) {
    const std::uint64_t start = i == 0 ? streams.unary_bit : ones[i - 1] + 1;
    const std::uint64_t quotient = ones[i] - start;
    if (quotient >= limit) {  // so that the shift below fits 64 bits
      report(shared, i, Error::kPositionRange);
      continue;
    }
    const std::uint64_t value =
        quotient << low_bits |
        streams.low_field(streams.low_bit + std::uint64_t{i} * low_bits, low_bits);
    // Behind everything that stops a reader.
    if (value >= limit) report(shared, std::uint64_t{1} << 40, Error::kPositionRange);
    out[i] = static_cast<std::uint32_t>(value);
  }
  __syncthreads();
  const std::uint64_t failure = shared.first_failure;
  if (failure == ~std::uint64_t{0}) streams.unary_bit = ones[count - 1] + 1;
  streams.low_bit += std::uint64_t{count} * low_bits;
  __syncthreads();
  return failure == ~std::uint64_t{0} ? Error::kOk : static_cast<Error>(failure & 0xFF);
}

// As unpack_values, for gaps: gives the ascending positions, each below `limit`. With j ones before
// it, the one of gap j stands at the sum of all quotients so far plus j.
__device__ inline Error unpack_positions(Streams& streams, std::uint32_t low_bits,
                                         std::uint32_t count, std::uint64_t limit,
                                         std::uint64_t* ones, std::uint32_t* out,
                                         UnpackShared& shared) {
  if (count == 0) return Error::kOk;
  if (threadIdx.x == 0) shared.first_failure = ~std::uint64_t{0};
  const std::uint32_t found = find_ones(streams, count, ones, shared.group);
  if (threadIdx.x == 0 && found < count) report(shared, found, Error::kStreamLength);
  std::uint64_t lows = 0;
  for (std::uint32_t at = 0; at < found; at += kThreads) {
    const std::uint32_t i = at + threadIdx.x;
    const std::uint64_t low =
        i < found ? streams.low_field(streams.low_bit + std::uint64_t{i} * low_bits, low_bits) : 0;
    std::uint64_t total;
    const std::uint64_t below = group_scan(low, &total, shared.group);
    if (i < found) {
      const std::uint64_t quotients = ones[i] - streams.unary_bit - i;
      const std::uint64_t position =
          quotients >= limit ? limit : (quotients << low_bits) + lows + below + low + i;
      if (position >= limit) report(shared, i, Error::kPositionRange);
      out[i] = static_cast<std::uint32_t>(position);
    }
    lows += total;
  }
  __syncthreads();
  const std::uint64_t failure = shared.first_failure;
  if (failure == ~std::uint64_t{0}) streams.unary_bit = ones[count - 1] + 1;
  streams.low_bit += std::uint64_t{count} * low_bits;
  __syncthreads();
  return failure == ~std::uint64_t{0} ? Error::kOk : static_cast<Error>(failure & 0xFF);
}

// Changed places of a group: those listed, or those that the list leaves out.
__device__ inline Error unpack_places(Streams& streams, const PositionGroup& group,
                                      std::uint64_t* ones, std::uint32_t* holes, std::uint32_t* out,
                                      UnpackShared& shared) {
  if (!group.is_inverted) {
    return unpack_positions(streams, group.low_bits, group.count, group.limit, ones, out, shared);
  }
  const Error error =
      unpack_positions(streams, group.low_bits, group.coded, group.limit, ones, holes, shared);
  if (error != Error::kOk) return error;
  for (std::uint32_t i = threadIdx.x; i < group.count; i += kThreads) {
    std::uint32_t low = 0, high = group.coded;  // the first hole with more than i places before it
    while (low < high) {
      const std::uint32_t middle = (low + high) / 2;
      if (holes[middle] - middle > i) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    out[i] = i + low;
  }
  __syncthreads();
  return Error::kOk;
}

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_UNPACK_CUH_
