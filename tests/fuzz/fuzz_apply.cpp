// Invariant: any payload of any mode is refused and leaves no trace, or is applied inside its block
// with digest, check and count that match the data; no byte outside payload and block is touched.
#include "harness.h"

namespace gymfast::fuzz {
namespace {

struct Case {
  const Kernels* kernels;
  unsigned unit_log2;
  std::size_t num_units;
  Placement placement;
  BlockParams params;
  Mode mode;
  unsigned pattern;

  std::size_t unit_bytes() const { return std::size_t{1} << unit_log2; }
};

Case read_case(Input& input) {
  Case c;
  const unsigned first = input.u8();
  c.kernels = &pick_kernels(first & 3);
  c.unit_log2 = (first >> 2 & 3) % 3;
  c.mode = static_cast<Mode>(1 + (first >> 4) % 5);
  const Geometry geometry = pick_geometry(input.u8(), c.unit_bytes());
  c.num_units = static_cast<std::size_t>(geometry.tile_rows * geometry.tile_cols);
  const bool is_flat = geometry.tile_rows == 1;
  c.placement = {std::uint64_t{input.u8()} * 4, is_flat ? c.num_units : geometry.tile_cols,
                 is_flat ? 0 : geometry.cols * c.unit_bytes()};
  const unsigned classes = input.u8();
  c.params = {Profile::kAuto, static_cast<int>(classes & 7), static_cast<int>(classes >> 3) * 4,
              (input.u8() & 1) == 0};
  c.pattern = input.u8();
  return c;
}

Digest digest_of(const Case& c, const Bytes& data) {
  Digest sum;
  const std::size_t line = static_cast<std::size_t>(c.placement.row_units) * c.unit_bytes();
  std::uint64_t offset = c.placement.offset;
  for (std::size_t at = 0; at < data.size(); at += line, offset += c.placement.stride_bytes) {
    c.kernels->digest(data.data() + at, line, offset, &sum);
  }
  return sum;
}

std::uint64_t num_different(const Case& c, const Bytes& a, const Bytes& b) {
  std::uint64_t count = 0;
  for (std::size_t at = 0; at < a.size(); at += c.unit_bytes()) {
    count += std::memcmp(a.data() + at, b.data() + at, c.unit_bytes()) != 0;
  }
  return count;
}

void run(const Case& c, const Bytes& payload) {
  Bytes base(c.num_units * c.unit_bytes());
  if (c.params.has_base) fill(base, c.unit_bytes(), c.pattern);
  Bytes data = base;
  Bytes padded(payload.size() + kPayloadPadding);
  std::copy(payload.begin(), payload.end(), padded.begin());
  SplitScratch scratch(c.num_units, c.unit_bytes(), kApplySpareUnits,
                       static_cast<std::uint8_t>(c.pattern));
  ApplyJob job{data.data(), c.num_units,   c.placement,    c.params,
               c.mode,      padded.data(), payload.size(), 0};
  const Digest before = digest_of(c, base);
  // A payload that decodes fails only at the check, which says what would have been right.
  for (int round = 0; round < 2; ++round) {
    Digest digest = before;
    std::uint64_t num_changed = 0;
    const Status status = c.kernels->apply[c.unit_log2](job, scratch.scratch, digest, &num_changed);
    if (status.is_ok()) {
      const Digest after = digest_of(c, data);
      require(std::memcmp(&digest, &after, sizeof(Digest)) == 0, "digest follows the data");
      require(fold32(digest) == job.check, "the check is that of the result");
      const std::uint64_t different = num_different(c, base, data);
      require(num_changed >= different && num_changed <= c.num_units, "count of changes");
      return;
    }
    require(data == base && num_changed == 0, "a refused payload leaves no trace");
    require(std::memcmp(&digest, &before, sizeof(Digest)) == 0, "nor in the digest");
    if (status.error != Error::kResultCheck) return;
    require(round == 0, "a payload that decodes is applied when its check is right");
    job.check = static_cast<std::uint32_t>(status.found);
  }
}

}  // namespace
}  // namespace gymfast::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace gymfast::fuzz;
  Input input(data, size);
  const Case c = read_case(input);
  if (c.num_units != 0) run(c, input.rest());
  return 0;
}
