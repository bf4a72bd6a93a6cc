#include "cuda/pieces.h"

#include "cuda/launch.cuh"
#include "cuda/pieces.cuh"

namespace gymfast::cuda {

CallStatus move_pieces(const PieceTable& table, const Bucket& bucket, bool is_packing,
                       std::uint64_t* digest, cudaStream_t stream) {
  if (table.num_pieces == 0 || table.num_tiles == 0) return {};
  if (table.num_tiles > kMaxGroups) return refuse("the pieces are too large for one call");
  if (table.pieces == nullptr || !is_aligned(table.pieces, 8)) {
    return refuse("the table is missing or not 8-byte aligned");
  }
  if (digest == nullptr || !is_aligned(digest, 8)) {
    return refuse("the digest is missing or not 8-byte aligned");
  }
  if (bucket.address == nullptr) return refuse("the bucket is missing");
  MoveArgs args;
  args.table = table;
  args.bucket = bucket;
  args.is_packing = is_packing;
  args.digest = digest;
  Launcher run_kernel(stream);
  run_kernel(move_pieces_kernel, table.num_tiles, kThreads, args);
  return run_kernel.status();
}

}  // namespace gymfast::cuda
