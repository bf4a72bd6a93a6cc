// gymfast::cuda: pieces of tensors into a bucket and out of it, all of a bucket in one launch, with
// their digest in the same pass. Nothing here allocates or waits.
#ifndef GYMFAST_CUDA_PIECES_H_
#define GYMFAST_CUDA_PIECES_H_

#include <cstddef>
#include <cstdint>

#include "cuda/codec.h"

namespace gymfast::cuda {

constexpr std::uint64_t kTileBytes = 16 << 10;  // what a thread block moves
constexpr std::uint64_t kSumColumns = 1 << 16;  // words of a row of the digest
constexpr std::uint64_t kSumRowBytes = 8 * kSumColumns;
static_assert(kSumRowBytes % kTileBytes == 0);

// Bytes of one tensor and where they lie in a bucket: a row of the table, in device memory. Pieces
// of a table are in the order of the bucket and do not overlap in it.
struct Piece {
  std::uint64_t address = 0;  // of its bytes in the tensor; 0: they are summed, not moved
  std::uint64_t bucket_offset = 0;
  std::uint64_t num_bytes = 0;
  std::uint64_t first_tile = 0;  // tiles of the pieces before
  std::uint64_t first_row = 0;   // rows of the digest of the pieces before
};

constexpr std::uint64_t num_tiles_of(std::uint64_t num_bytes) {
  return num_bytes / kTileBytes + (num_bytes % kTileBytes != 0);
}
// Whole words fill rows; what is left of a piece is a word in a row of its own.
constexpr std::uint64_t num_rows_of(std::uint64_t num_bytes) {
  const std::uint64_t num_words = num_bytes / 8;
  return num_words / kSumColumns + (num_words % kSumColumns != 0) + (num_bytes % 8 != 0);
}

struct PieceTable {
  const Piece* pieces = nullptr;
  std::uint64_t num_pieces = 0;
  std::uint64_t num_tiles = 0;  // of all pieces
};

struct Bucket {
  std::uint8_t* address = nullptr;
  std::uint64_t num_bytes = 0;
};

// Copies all pieces from their tensors to the bucket (is_packing) or from there to their tensors,
// and adds sum(word[i] * weight[i]) mod 2^64 of their bytes to *digest: the sum that
// gymfast.channels.device_memory states. A piece outside of the bucket is left out.
CallStatus move_pieces(const PieceTable& table, const Bucket& bucket, bool is_packing,
                       std::uint64_t* digest, cudaStream_t stream);

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_PIECES_H_
