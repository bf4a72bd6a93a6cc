// Invariant: every instruction set encodes the same bytes, gives the same digests, and accepts the
// same payloads with the same result; a list never overflows its part of the scratch memory.
#include "edits.h"

namespace gymfast::fuzz {
namespace {

// The first block of an update, as contiguous units.
struct Block {
  std::size_t num_units = 0;
  Placement placement;
  Bytes base;
  Bytes next;
};

Block first_block(const Update& u) {
  const Geometry& g = u.geometry;
  const auto unit = static_cast<std::size_t>(g.unit_bytes);
  const bool is_flat = g.tile_rows == 1 || g.tile_cols == g.cols;
  Block block;
  block.num_units = static_cast<std::size_t>(g.tile_rows * g.tile_cols);
  block.placement = {0, is_flat ? block.num_units : g.tile_cols, is_flat ? 0 : g.cols * unit};
  block.base = Bytes(block.num_units * unit);
  block.next = block.base;
  const auto line = static_cast<std::size_t>(g.tile_cols) * unit;
  for (std::size_t row = 0; row < g.tile_rows; ++row) {
    const std::size_t from = row * static_cast<std::size_t>(g.cols) * unit;
    std::memcpy(block.base.data() + row * line, u.base.data() + from, line);
    std::memcpy(block.next.data() + row * line, u.next.data() + from, line);
  }
  return block;
}

// Scratch memory starts differently for each target, so that a read of what was never written
// shows.
std::uint8_t garbage_of(unsigned target) { return static_cast<std::uint8_t>(0xA5 * (target + 1)); }

struct Encoded {
  EncodedBlock block;
  Digest digest;
  Bytes base;
};

Encoded encode(unsigned target, const Update& u, const Block& block, unsigned log2) {
  const Kernels& kernels = pick_kernels(target);
  Encoded out{{}, {}, block.base};
  SplitScratch scratch(block.num_units, static_cast<std::size_t>(u.geometry.unit_bytes),
                       kEncodeSpareUnits, garbage_of(target));
  const EncodeJob job{
      out.base.data(), block.next.data(), block.num_units, block.placement, u.params, true, true};
  require(kernels.encode[log2](job, scratch.scratch, out.digest, &out.block).is_ok(),
          "a block can be encoded");
  require(out.base == block.next, "encode stores the new units");
  return out;
}

struct Applied {
  bool is_ok = false;
  Digest digest;
  std::uint64_t num_changed = 0;
  Bytes data;
};

Applied apply(unsigned target, const Update& u, const Block& block, unsigned log2, Mode mode,
              std::uint32_t check, const Bytes& payload) {
  Applied out{false, {}, 0, block.base};
  Bytes padded(payload.size() + kPayloadPadding);
  std::copy(payload.begin(), payload.end(), padded.begin());
  const Kernels& kernels = pick_kernels(target);
  SplitScratch scratch(block.num_units, static_cast<std::size_t>(u.geometry.unit_bytes),
                       kApplySpareUnits, garbage_of(target));
  ApplyJob job{out.data.data(),
               block.num_units,
               block.placement,
               u.params,
               mode,
               padded.data(),
               payload.size(),
               check};
  Status status = kernels.apply[log2](job, scratch.scratch, out.digest, &out.num_changed);
  if (status.error == Error::kResultCheck) {
    job.check = static_cast<std::uint32_t>(status.found);
    status = kernels.apply[log2](job, scratch.scratch, out.digest, &out.num_changed);
  }
  out.is_ok = status.is_ok();
  return out;
}

bool are_same(const Digest& a, const Digest& b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

void compare_apply(const Update& u, const Block& block, unsigned log2, const EncodedBlock& coded,
                   const Bytes& payload) {
  const Applied first = apply(0, u, block, log2, coded.mode, coded.check, payload);
  for (unsigned i = 1; i < available_kernels().size(); ++i) {
    const Applied other = apply(i, u, block, log2, coded.mode, coded.check, payload);
    require(other.is_ok == first.is_ok, "targets accept the same payloads");
    require(other.data == first.data && other.num_changed == first.num_changed, "same result");
    require(are_same(other.digest, first.digest), "same digest");
  }
}

void compare_digests(const Bytes& data, std::size_t skip, std::uint64_t offset) {
  skip = std::min(skip, data.size());
  Digest first;
  pick_kernels(0).digest(data.data() + skip, data.size() - skip, offset, &first);
  for (unsigned i = 1; i < available_kernels().size(); ++i) {
    Digest other;
    pick_kernels(i).digest(data.data() + skip, data.size() - skip, offset, &other);
    require(are_same(first, other), "same digest of the same bytes");
  }
}

void run(Input& input) {
  const unsigned skip = input.u8(), num_flips = input.u8() & 3;
  const std::uint64_t where = input.u32();
  const Update u = read_update(input);
  compare_digests(u.next, skip, where);
  if (u.geometry.num_units == 0) return;
  const unsigned log2 = u.geometry.unit_bytes == 4 ? 2 : u.geometry.unit_bytes == 2 ? 1 : 0;
  const Block block = first_block(u);
  const Encoded first = encode(0, u, block, log2);
  for (unsigned i = 1; i < available_kernels().size(); ++i) {
    const Encoded other = encode(i, u, block, log2);
    require(other.block.mode == first.block.mode, "same mode");
    require(other.block.payload == first.block.payload, "same payload");
    require(other.block.undo == first.block.undo, "same undo");
    require(other.block.check == first.block.check, "same check");
    require(other.block.num_changed == first.block.num_changed, "same count");
    require(are_same(other.digest, first.digest), "same digest");
  }
  if (first.block.mode == Mode::kUnchanged) return;
  compare_apply(u, block, log2, first.block, first.block.payload);
  Bytes damaged = first.block.payload;
  for (unsigned i = 0; i < num_flips; ++i) {
    const std::uint64_t bit = splitmix64(where + i) % (8 * damaged.size());
    // Most damage in the header, which is small.
    const std::uint64_t at =
        (where & 1) != 0 ? bit % (8 * std::min<std::size_t>(16, damaged.size())) : bit;
    damaged[static_cast<std::size_t>(at / 8)] ^= static_cast<std::uint8_t>(1u << (at % 8));
  }
  compare_apply(u, block, log2, first.block, damaged);
}

}  // namespace
}  // namespace gymfast::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gymfast::fuzz::Input input(data, size);
  gymfast::fuzz::run(input);
  return 0;
}
