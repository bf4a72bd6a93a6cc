// digest: partial digests of whole blocks, and what single changed units add (section 2).
#ifndef GYMFAST_CUDA_DIGEST_CUH_
#define GYMFAST_CUDA_DIGEST_CUH_

#include "cuda/block.cuh"

namespace gymfast::cuda {

constexpr ColumnKeys make_column_keys() {
  ColumnKeys keys{};
  for (unsigned lane = 0; lane < 2; ++lane) {
    for (std::uint64_t j = 0; j < kDigestColumns; ++j) {
      keys.lane[lane][j] =
          static_cast<std::uint32_t>(splitmix64(kDigestColumns * lane + j) >> 32) | 1u;
    }
  }
  return keys;
}
static __device__ const ColumnKeys kKeys = make_column_keys();

// What values at byte offsets of their tensor add to the digest; a value may be a difference.
// Offsets need no order, but those of one digest row in a row are cheaper.
class RowDigest {
 public:
  __device__ void add(std::uint64_t value, std::uint64_t offset) {
    const std::uint64_t row = offset / kDigestRowBytes;
    if (row != row_) flush();
    row_ = row;
    const std::uint64_t shifted = value << (8 * (offset & 3));
    const std::uint64_t column = (offset >> 2) & (kDigestColumns - 1);
    inner_[0] += kKeys.lane[0][column] * shifted;
    inner_[1] += kKeys.lane[1][column] * shifted;
  }
  __device__ std::uint64_t finish(unsigned lane) {
    flush();
    return sum_[lane];
  }

 private:
  __device__ void flush() {
    for (unsigned lane = 0; lane < 2; ++lane) {
      if (inner_[lane] != 0) sum_[lane] += row_key(row_, lane) * inner_[lane];
      inner_[lane] = 0;
    }
  }

  std::uint64_t row_ = 0;
  std::uint64_t inner_[2] = {0, 0};
  std::uint64_t sum_[2] = {0, 0};
};

struct DigestArgs {
  Geometry geometry;
  std::uint64_t first_block = 0;
  std::uint64_t groups_per_block = 0;
  const std::uint8_t* data = nullptr;
  Digest* digests = nullptr;
};

// A piece is what a line of a block and a digest row share: at most 4096 bytes, one row key.
constexpr std::uint32_t kPiecesPerWarp = 16;
constexpr std::uint32_t kWindowBytes = 16;

// An upper bound for any block of the geometry.
__host__ __device__ inline std::uint64_t pieces_per_line(std::uint64_t line_bytes) {
  return line_bytes / kDigestRowBytes + 2;
}

struct DigestShared {
  alignas(16) std::uint32_t keys[2][kDigestColumns];
};

// The 32-bit words of the window at byte `offset`; bytes outside of [begin, end) are zeros.
__device__ inline uint4 load_window(const std::uint8_t* data, std::uint64_t offset,
                                    std::uint64_t begin, std::uint64_t end) {
  const std::uint8_t* at = data + offset;
  const bool is_whole = offset >= begin && offset + kWindowBytes <= end;
  if (is_whole && reinterpret_cast<std::uintptr_t>(at) % kWindowBytes == 0) {
    return *reinterpret_cast<const uint4*>(at);
  }
  std::uint32_t words[4] = {0, 0, 0, 0};
  for (std::uint32_t i = 0; i < kWindowBytes; ++i) {
    if (offset + i < begin || offset + i >= end) continue;
    words[i / 4] |= std::uint32_t{at[i]} << (8 * (i % 4));
  }
  return uint4{words[0], words[1], words[2], words[3]};
}

__device__ inline std::uint64_t dot(const uint4& words, const std::uint32_t* keys) {
  const uint4 k = *reinterpret_cast<const uint4*>(keys);
  return std::uint64_t{words.x} * k.x + std::uint64_t{words.y} * k.y +
         std::uint64_t{words.z} * k.z + std::uint64_t{words.w} * k.w;
}

// Bytes [begin, end) of the tensor, all in digest row `row`, by one warp.
__device__ inline void digest_piece(const std::uint8_t* data, std::uint64_t row,
                                    std::uint64_t begin, std::uint64_t end,
                                    const DigestShared& shared, std::uint64_t sum[2]) {
  std::uint64_t inner0 = 0, inner1 = 0;
#pragma unroll 4
  for (std::uint32_t i = 0; i < kDigestRowBytes / kWindowBytes / kWarp; ++i) {
    const std::uint32_t window = lane_id() + kWarp * i;
    const std::uint64_t offset = row * kDigestRowBytes + window * kWindowBytes;
    if (offset + kWindowBytes <= begin || offset >= end) continue;
    const uint4 words = load_window(data, offset, begin, end);
    inner0 += dot(words, &shared.keys[0][4 * window]);
    inner1 += dot(words, &shared.keys[1][4 * window]);
  }
  sum[0] += row_key(row, 0) * inner0;
  sum[1] += row_key(row, 1) * inner1;
}

// groups_per_block thread blocks share a block and add up in its row of digests, zero on entry.
[[maybe_unused]] static __global__ __launch_bounds__(kThreads) void digest_kernel(DigestArgs args) {
  GYMFAST_SHARED(DigestShared, shared);
  for (std::uint32_t i = threadIdx.x; i < 2 * kDigestColumns; i += kThreads) {
    shared.keys[i / kDigestColumns][i % kDigestColumns] =
        kKeys.lane[i / kDigestColumns][i % kDigestColumns];
  }
  __syncthreads();
  const std::uint64_t block = args.first_block + blockIdx.x / args.groups_per_block;
  const Placement place = placement_of(args.geometry, block);
  const std::uint64_t line_bytes = std::uint64_t{place.row_units} * args.geometry.unit_bytes;
  const std::uint64_t per_line = pieces_per_line(line_bytes);
  const std::uint64_t num_pieces = place.num_units / place.row_units * per_line;
  const std::uint64_t group = blockIdx.x % args.groups_per_block;
  const std::uint64_t first = (group * kWarps + warp_id()) * kPiecesPerWarp;
  std::uint64_t sum[2] = {0, 0};
  for (std::uint64_t i = first; i < smaller(first + kPiecesPerWarp, num_pieces); ++i) {
    const std::uint64_t line_begin = place.offset + i / per_line * place.stride_bytes;
    const std::uint64_t line_end = line_begin + line_bytes;
    const std::uint64_t row = line_begin / kDigestRowBytes + i % per_line;
    const std::uint64_t row_begin = row * kDigestRowBytes;
    const std::uint64_t begin = row_begin > line_begin ? row_begin : line_begin;
    const std::uint64_t end = smaller(row_begin + kDigestRowBytes, line_end);
    if (begin < end) digest_piece(args.data, row, begin, end, shared, sum);
  }
  for (unsigned lane = 0; lane < 2; ++lane) {
    const std::uint64_t total = warp_sum(sum[lane]);
    if (lane_id() == 0 && total != 0) atomic_add(&args.digests[block].lane[lane], total);
  }
}

[[maybe_unused]] static __global__ __launch_bounds__(kThreads) void clear_digests_kernel(
    Digest* digests, std::uint64_t count) {
  const std::uint64_t i = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  digests[i].lane[0] = 0;
  digests[i].lane[1] = 0;
}

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_DIGEST_CUH_
