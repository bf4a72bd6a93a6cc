// Prints, for each function of the simulator, a digest of the bits of its values at a million
// places that are spread over all doubles and over the unit interval.
#include <bit>
#include <cinttypes>
#include <cstdint>
#include <cstdio>

#include "sim/elementary.h"
#include "sim/philox.h"

namespace {

constexpr std::uint64_t kCount = 1'000'000;

void print_digest(const char* name, double (*function)(double)) {
  std::uint64_t digest = 0xCBF29CE484222325;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const auto words = gymfast::sim::philox({static_cast<std::uint32_t>(i), 0, 0, 0}, {1, 2});
    const double place = gymfast::sim::unit(words[0], words[1]);
    const double any = std::bit_cast<double>(std::uint64_t{words[2]} << 32 | words[3]);
    for (const double x : {place, 1500 * place - 760, any}) {
      const double y = function(x);
      // The sign and payload of a NaN are no part of a value.
      const auto bits = y == y ? std::bit_cast<std::uint64_t>(y) : 0x7FF8'0000'0000'0000;
      digest = (digest ^ bits) * 0x100000001B3;
    }
  }
  std::printf("%s %016" PRIx64 "\n", name, digest);
}

}  // namespace

int main() {
  print_digest("log", &gymfast::sim::log_of);
  print_digest("exp", &gymfast::sim::exp_of);
  print_digest("normal_quantile", &gymfast::sim::normal_quantile_of);
}
