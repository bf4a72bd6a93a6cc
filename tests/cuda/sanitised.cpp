// Round trips and damaged bodies on the shim, for builds with sanitisers. Prints what every case
// came to, so that builds can be compared; with `few` every fifth case. Other arguments do one
// thing that must be caught:
//   race      threads read shared memory that others write, without a barrier
//   barrier   a barrier that one thread does not reach
//   overflow  a write behind the end of a tensor
#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cuda/device.cuh"
#include "cuda/pieces.h"
#include "shim.cpp"

namespace {

using gymfast::cuda::launch;

struct Rows {
  unsigned values[64];
};

__global__ void read_neighbour_kernel(unsigned* out, bool with_barrier) {
  GYMFAST_SHARED(Rows, shared);
  shared.values[threadIdx.x] = threadIdx.x;
  if (with_barrier) __syncthreads();
  out[threadIdx.x] = shared.values[(threadIdx.x + 1) % 64];
}

__global__ void skip_barrier_kernel() {
  if (threadIdx.x == 5) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

__global__ void write_behind_kernel(std::uint8_t* data, std::size_t size) {
  data[size + threadIdx.x] = 1;
}

int misbehave(const std::string& how) {
  unsigned out[64];
  if (how == "race") launch(read_neighbour_kernel, 1, 64, nullptr, out, false);
  if (how == "no-race") launch(read_neighbour_kernel, 1, 64, nullptr, out, true);
  if (how == "barrier") launch(skip_barrier_kernel, 1, 64, nullptr);
  if (how == "overflow") {
    Memory memory(100);
    launch(write_behind_kernel, 1, 32, nullptr, memory.bytes(), std::size_t{100});
  }
  return 0;
}

struct Shape {
  std::uint64_t rows, cols, tile_rows, tile_cols;
};
constexpr Shape kShapes[] = {{1, 1, 1, 1}, {1, 5000, 1, 3000}, {37, 61, 10, 23}, {64, 64, 8, 16}};
constexpr unsigned kPerMille[] = {0, 4, 60, 600, 1000};

struct Case {
  ShimRun run;
  std::vector<std::uint8_t> base, next;
};

Case make_case(const Shape& shape, std::uint64_t unit_bytes, std::uint64_t profile,
               unsigned per_mille, bool has_base, std::mt19937& random) {
  Case c;
  const std::uint64_t n = shape.rows * shape.cols;
  const bool is_flat = shape.rows == 1;
  c.run = {n,
           unit_bytes,
           is_flat ? n : shape.cols,
           shape.tile_rows,
           shape.tile_cols,
           profile,
           unit_bytes == 1 ? 3u : 0u,
           unit_bytes == 1 ? 0u : 110u,
           has_base,
           0,
           0,
           0};
  c.run.num_blocks = run_of(c.run, nullptr).geometry.num_blocks();
  c.run.shift = unit_bytes * (random() % 5);
  c.base.resize(n * unit_bytes);
  for (std::uint64_t i = 0; i < n && has_base; ++i) {
    // Exponents from 112 on, most of them near 122, as weights have.
    const auto exponent = 122u - static_cast<unsigned>(__builtin_ctz(random() | 1024u));
    const std::uint32_t bits = random() << 31 | exponent << 23 | (random() & 0x7FFFFFu);
    const std::uint32_t unit = bits >> (32 - 8 * unit_bytes);
    std::memcpy(c.base.data() + i * unit_bytes, &unit, unit_bytes);
  }
  c.next = c.base;
  for (std::uint64_t i = 0; i < n; ++i) {
    if (random() % 1000 >= per_mille) continue;
    c.next[i * unit_bytes] = static_cast<std::uint8_t>(
        c.next[i * unit_bytes] + (random() % 4 == 0 ? random() : 1 - 2 * (random() & 1u)));
    if (random() % 16 == 0) c.next[(i + 1) * unit_bytes - 1] ^= 0x80;
  }
  return c;
}

std::uint64_t hash_of(const std::uint8_t* bytes, std::size_t size) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (std::size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001B3u;
  return hash;
}

// Applies a body to a copy of the base; the number of the error, or 0 with the result in *data.
int apply(const Case& c, const std::uint8_t* body, std::uint64_t size,
          std::vector<std::uint64_t> digests, std::vector<std::uint8_t>* data) {
  *data = c.base;
  const std::uint64_t section[5] = {0, c.run.num_blocks, 0, size, 0};
  std::uint64_t result[2];
  const int number = shim_apply(&c.run, data->data(), body, size, section, 1, digests.data(),
                                digests.size() / 2, result);
  if (number != 0) return number;
  return result[0] == gymfast::cuda::kNoError ? 0 : static_cast<int>(result[0] & 255);
}

// Packs pieces of tensors, in memory of their exact size, into a bucket of its exact size, and
// unpacks them again.
int move_pieces(std::size_t shift, std::mt19937& random) {
  using gymfast::cuda::Piece;
  const std::uint64_t sizes[] = {0, 1, 8, 15, 16, 33, 16384, 16385, 40000, 0};
  std::vector<std::unique_ptr<Memory>> tensors;
  std::vector<Piece> pieces;
  Piece next;
  for (const std::uint64_t size : sizes) {
    tensors.push_back(std::make_unique<Memory>(size, shift));
    for (std::uint64_t i = 0; i < size; ++i) {
      tensors.back()->bytes()[i] = static_cast<std::uint8_t>(random());
    }
    next.num_bytes = size;
    next.address = reinterpret_cast<std::uintptr_t>(tensors.back()->bytes());
    pieces.push_back(next);
    next.bucket_offset += shift == 0 ? (size + 15) / 16 * 16 : size;
    next.first_tile += gymfast::cuda::num_tiles_of(size);
    next.first_row += gymfast::cuda::num_rows_of(size);
  }
  Memory bucket(next.bucket_offset);
  const gymfast::cuda::PieceTable table = {pieces.data(), pieces.size(), next.first_tile};
  const gymfast::cuda::Bucket whole = {bucket.bytes(), next.bucket_offset};
  std::uint64_t digests[2] = {0, 0};
  std::vector<std::vector<std::uint8_t>> before;
  for (const bool is_packing : {true, false}) {
    if (!gymfast::cuda::move_pieces(table, whole, is_packing, &digests[!is_packing], nullptr)
             .is_ok()) {
      return 1;
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      std::uint8_t* bytes = tensors[i]->bytes();
      if (is_packing) {
        before.emplace_back(bytes, bytes + sizes[i]);
        std::memset(bytes, 0, sizes[i]);
      } else if (!std::equal(before[i].begin(), before[i].end(), bytes)) {
        return 1;
      }
    }
  }
  std::printf("pieces %016llx\n", static_cast<unsigned long long>(digests[0]));
  return digests[0] == digests[1] ? 0 : 1;
}

int run_case(const Case& c, std::mt19937& random) {
  std::vector<std::uint64_t> digests(2 * c.run.num_blocks), after(2 * c.run.num_blocks);
  shim_digest(&c.run, c.base.data(), digests.data(), c.run.num_blocks);
  shim_digest(&c.run, c.next.data(), after.data(), c.run.num_blocks);
  std::vector<std::uint64_t> coded = digests;
  std::vector<std::uint8_t> base = c.base, body(shim_body_capacity(&c.run)), data;
  std::uint64_t section[5];
  const int number = shim_encode(&c.run, base.data(), c.next.data(), 1, c.run.num_blocks,
                                 coded.data(), c.run.num_blocks, body.data(), section, 1);
  if (number != 0 || base != c.next || coded != after) return 1;
  const std::uint64_t size = section[3];
  std::uint8_t samples[1024];
  const std::uint64_t num_samples = shim_sample(&c.run, c.base.data(), samples);
  std::printf("%llu %016llx %016llx", static_cast<unsigned long long>(size),
              static_cast<unsigned long long>(hash_of(body.data(), size)),
              static_cast<unsigned long long>(hash_of(samples, num_samples)));
  if (size != 0 && (apply(c, body.data(), size, digests, &data) != 0 || data != c.next)) return 1;
  for (int i = 0; i < 6 && size != 0; ++i) {
    std::vector<std::uint8_t> damaged(body.begin(), body.begin() + static_cast<long>(size));
    damaged[random() % size] ^= static_cast<std::uint8_t>(1 + random() % 255);
    damaged.resize(size - (i == 5));
    std::printf(" %d", apply(c, damaged.data(), damaged.size(), digests, &data));
  }
  std::printf("\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_few = argc > 1 && std::string(argv[1]) == "few";
  if (argc > 1 && !is_few) return misbehave(argv[1]);
  std::mt19937 random(1);
  for (const std::size_t shift : {0, 4, 1}) {
    if (move_pieces(shift, random) != 0) {
      std::printf("pieces: the round trip failed\n");
      return 1;
    }
  }
  int cases = 0;
  for (const Shape& shape : kShapes) {
    for (const std::uint64_t unit_bytes : {1, 2, 4}) {
      for (std::uint64_t profile = 0; profile < 3; ++profile) {
        for (const unsigned per_mille : kPerMille) {
          if (is_few && cases % 5 != cases / 5 % 5) {
            ++cases;
            continue;
          }
          shim_set_descending(cases % 2);
          const Case c = make_case(shape, unit_bytes, profile, per_mille, cases % 7 != 0, random);
          if (run_case(c, random) != 0) {
            std::printf("case %d: the round trip failed\n", cases);
            return 1;
          }
          ++cases;
        }
      }
    }
  }
  std::printf("%d cases\n", cases);
  return 0;
}
