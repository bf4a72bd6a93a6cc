// move_pieces: 16 KiB of a piece by each thread block, copied and summed in one pass.
#ifndef GYMFAST_CUDA_PIECES_CUH_
#define GYMFAST_CUDA_PIECES_CUH_

#include "cuda/block.cuh"
#include "cuda/pieces.h"

namespace gymfast::cuda {

struct MoveArgs {
  PieceTable table;
  Bucket bucket;
  bool is_packing = false;
  std::uint64_t* digest = nullptr;
};

// Odd weights without a pattern; their seeds are 1 for columns and 2 for rows.
__device__ inline std::uint64_t sum_weight(std::uint64_t place, std::uint64_t seed) {
  return splitmix64(place * 0x9E3779B97F4A7C15u + seed) | 1u;
}

// The last piece that begins at this tile or before: empty ones have no tile.
__device__ inline std::uint64_t piece_of_tile(const PieceTable& table, std::uint64_t tile) {
  std::uint64_t first = 0, last = table.num_pieces - 1;
  while (first < last) {
    const std::uint64_t middle = last - (last - first) / 2;
    if (table.pieces[middle].first_tile <= tile) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

constexpr std::uint32_t kMoveBytes = 16;  // that a thread takes at a time

// 16 bytes that are aligned to Unit.
template <class Unit>
__device__ inline uint4 load_units(const std::uint8_t* at) {
  if constexpr (sizeof(Unit) == kMoveBytes) {
    return *reinterpret_cast<const uint4*>(at);
  } else if constexpr (sizeof(Unit) == 4) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(at);
    return uint4{words[0], words[1], words[2], words[3]};
  } else {
    std::uint32_t words[4] = {0, 0, 0, 0};
    for (std::uint32_t i = 0; i < kMoveBytes; ++i) {
      words[i / 4] |= std::uint32_t{at[i]} << (8 * (i % 4));
    }
    return uint4{words[0], words[1], words[2], words[3]};
  }
}

template <class Unit>
__device__ inline void store_units(std::uint8_t* at, const uint4& value) {
  if constexpr (sizeof(Unit) == kMoveBytes) {
    *reinterpret_cast<uint4*>(at) = value;
  } else if constexpr (sizeof(Unit) == 4) {
    auto* words = reinterpret_cast<std::uint32_t*>(at);
    words[0] = value.x;
    words[1] = value.y;
    words[2] = value.z;
    words[3] = value.w;
  } else {
    const std::uint32_t words[4] = {value.x, value.y, value.z, value.w};
    for (std::uint32_t i = 0; i < kMoveBytes; ++i) {
      at[i] = static_cast<std::uint8_t>(words[i / 4] >> (8 * (i % 4)));
    }
  }
}

// Whole 16 bytes of a tile, and the sum of their words, without the weight of the row. Loads of
// several steps come before their stores, which may be to the same memory for all nvcc knows.
template <class Unit>
__device__ inline std::uint64_t move_tile(const std::uint8_t* from, std::uint8_t* to,
                                          std::uint64_t begin, std::uint64_t end) {
  constexpr std::uint32_t kSteps = 4, kStep = kMoveBytes * kThreads;
  std::uint64_t sum = 0;
  for (std::uint64_t first = begin + kMoveBytes * threadIdx.x; first < end;
       first += kSteps * kStep) {
    uint4 parts[kSteps];
#pragma unroll
    for (std::uint32_t i = 0; i < kSteps; ++i) {
      const std::uint64_t offset = first + i * kStep;
      parts[i] = offset + kMoveBytes <= end ? load_units<Unit>(from + offset) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kSteps; ++i) {
      const std::uint64_t offset = first + i * kStep;
      if (to != nullptr && offset + kMoveBytes <= end) store_units<Unit>(to + offset, parts[i]);
      const std::uint64_t word = offset / 8 % kSumColumns;
      sum += (std::uint64_t{parts[i].y} << 32 | parts[i].x) * sum_weight(word, 1);
      sum += (std::uint64_t{parts[i].w} << 32 | parts[i].z) * sum_weight(word + 1, 1);
    }
  }
  return sum;
}

// The last bytes of a piece, fewer than 16: a whole word in its row, the rest in one of its own.
__device__ inline std::uint64_t move_rest(const Piece& piece, const std::uint8_t* from,
                                          std::uint8_t* to, std::uint64_t begin) {
  const std::uint64_t num_words = piece.num_bytes / 8;
  const std::uint64_t rest_row = piece.first_row + (num_words + kSumColumns - 1) / kSumColumns;
  std::uint64_t sum = 0;
  for (std::uint64_t word = begin / 8; 8 * word < piece.num_bytes; ++word) {
    std::uint64_t value = 0;
    for (std::uint64_t i = 8 * word; i < smaller(8 * word + 8, piece.num_bytes); ++i) {
      value |= std::uint64_t{from[i]} << (8 * (i % 8));
      if (to != nullptr) to[i] = from[i];
    }
    const bool is_whole = word < num_words;
    const std::uint64_t row = is_whole ? piece.first_row + word / kSumColumns : rest_row;
    const std::uint64_t column = is_whole ? word % kSumColumns : 0;
    sum += value * sum_weight(column, 1) * sum_weight(row, 2);
  }
  return sum;
}

[[maybe_unused]] static __global__ __launch_bounds__(kThreads) void move_pieces_kernel(
    MoveArgs args) {
  GYMFAST_SHARED(GroupShared, shared);
  const std::uint64_t tile = blockIdx.x;
  const Piece piece = args.table.pieces[piece_of_tile(args.table, tile)];
  const std::uint64_t begin = (tile - piece.first_tile) * kTileBytes;
  if (begin >= piece.num_bytes || piece.bucket_offset > args.bucket.num_bytes ||
      piece.num_bytes > args.bucket.num_bytes - piece.bucket_offset) {
    return;
  }
  std::uint8_t* in_bucket = args.bucket.address + piece.bucket_offset;
  auto* in_tensor = reinterpret_cast<std::uint8_t*>(piece.address);
  const bool is_read_there = args.is_packing && in_tensor != nullptr;
  const std::uint8_t* from = is_read_there ? in_tensor : in_bucket;
  std::uint8_t* to = is_read_there ? in_bucket : in_tensor;
  const std::uint64_t whole = piece.num_bytes / kMoveBytes * kMoveBytes;
  const std::uint64_t end = smaller(begin + kTileBytes, whole);
  const std::uint64_t places =
      reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to);
  std::uint64_t sum = 0;
  if (places % kMoveBytes == 0) {
    sum = move_tile<uint4>(from, to, begin, end);
  } else if (places % 4 == 0) {
    sum = move_tile<std::uint32_t>(from, to, begin, end);
  } else {
    sum = move_tile<std::uint8_t>(from, to, begin, end);
  }
  sum *= sum_weight(piece.first_row + begin / kSumRowBytes, 2);
  const bool has_rest = whole < piece.num_bytes && begin + kTileBytes >= piece.num_bytes;
  if (has_rest && threadIdx.x == 0) sum += move_rest(piece, from, to, whole);
  const std::uint64_t total = group_sum(sum, shared);
  if (threadIdx.x == 0 && total != 0) atomic_add(args.digest, total);
}

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_PIECES_CUH_
