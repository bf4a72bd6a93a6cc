// Prints a line for each case and instruction set: equal lines mean equal bytes, on any machine.
// Every block is also applied; a wrong result ends the program with 1.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu/block.h"
#include "cpu/dispatch.h"

namespace gymfast {
namespace {

struct Case {
  int unit_log2;
  std::size_t num_units;
  unsigned changed_per_1024;
  Profile profile;
};

struct Bytes {
  std::vector<std::uint8_t> base;
  std::vector<std::uint8_t> next;
};

Bytes make_bytes(const Case& c) {
  const std::size_t unit_bytes = std::size_t{1} << c.unit_log2;
  Bytes bytes;
  bytes.base.resize(c.num_units * unit_bytes);
  std::uint64_t state = c.num_units * 31 + c.changed_per_1024;
  const auto draw = [&state] { return splitmix64(state++); };
  // Small exponents spread as in weights: the top byte is drawn from few values.
  for (std::size_t i = 0; i < bytes.base.size(); ++i) {
    const std::uint64_t r = draw();
    const bool is_top = (i + 1) % unit_bytes == 0;
    bytes.base[i] = static_cast<std::uint8_t>(is_top ? 0x38 + (r & 7) + ((r >> 8) & 0x80) : r);
  }
  bytes.next = bytes.base;
  for (std::size_t i = 0; i < c.num_units; ++i) {
    if (draw() % 1024 >= c.changed_per_1024) continue;
    std::uint8_t& low = bytes.next[i * unit_bytes];
    low = static_cast<std::uint8_t>(draw() % 8 ? low + 1 : draw());
  }
  return bytes;
}

std::uint64_t hash(const std::vector<std::uint8_t>& data) {
  std::uint64_t h = data.size();
  for (const std::uint8_t byte : data) h = splitmix64(h ^ byte);
  return h;
}

bool run_case(const Case& c, const Kernels& kernels) {
  const std::size_t unit_bytes = std::size_t{1} << c.unit_log2;
  Bytes bytes = make_bytes(c);
  Scratch scratch;
  scratch.reserve(c.num_units, unit_bytes);
  const Placement placement{4096 * 3 + 64, c.num_units, c.num_units * unit_bytes};
  const BlockParams params{c.profile, 3, 6, true};
  Digest before;
  kernels.digest(bytes.base.data(), bytes.base.size(), placement.offset, &before);

  EncodedBlock block;
  Digest encoded = before;
  const EncodeJob encode{
      bytes.base.data(), bytes.next.data(), c.num_units, placement, params, false, false};
  if (!kernels.encode[c.unit_log2](encode, scratch, encoded, &block).is_ok()) return false;
  std::printf("%zu %zu %u %d: mode %d, %llu changed, %zu bytes, %016llx %08x %016llx\n", unit_bytes,
              c.num_units, c.changed_per_1024, static_cast<int>(c.profile),
              static_cast<int>(block.mode), static_cast<unsigned long long>(block.num_changed),
              block.payload.size(), static_cast<unsigned long long>(hash(block.payload)),
              block.check, static_cast<unsigned long long>(fold64(encoded)));
  if (block.mode == Mode::kUnchanged) return bytes.base == bytes.next;

  const std::size_t payload_bytes = block.payload.size();
  block.payload.resize(payload_bytes + kPayloadPadding);
  ApplyJob apply{bytes.base.data(), c.num_units,          placement,     params,
                 block.mode,        block.payload.data(), payload_bytes, block.check};
  Digest applied = before;
  std::uint64_t num_changed = 0;
  const Status status = kernels.apply[c.unit_log2](apply, scratch, applied, &num_changed);
  return status.is_ok() && num_changed == block.num_changed && bytes.base == bytes.next &&
         fold64(applied) == fold64(encoded);
}

bool run_all(const Kernels& kernels) {
  for (const int unit_log2 : {0, 1, 2}) {
    for (const std::size_t num_units :
         {std::size_t{1}, std::size_t{63}, std::size_t{4097}, std::size_t{40000}}) {
      for (const unsigned changed : {0u, 1u, 10u, 30u, 100u, 400u, 700u, 1024u}) {
        for (const Profile profile : {Profile::kAuto, Profile::kFast, Profile::kSmall}) {
          if (run_case({unit_log2, num_units, changed, profile}, kernels)) continue;
          std::printf("wrong result with %s\n", kernels.name);
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace gymfast

int main(int argc, char** argv) {
  const char* wanted = argc > 1 ? argv[1] : nullptr;
  if (wanted == nullptr) {
    for (const auto* kernels : gymfast::available_kernels()) std::printf("%s\n", kernels->name);
    return 0;
  }
  for (const auto* kernels : gymfast::available_kernels()) {
    if (std::strcmp(kernels->name, wanted) == 0) return gymfast::run_all(*kernels) ? 0 : 1;
  }
  return 2;
}
