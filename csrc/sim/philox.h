// Random numbers of the simulator: Philox4x32-10 of Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3" (SC 2011). A number depends on what it is for, never on what was drawn before.
#ifndef GYMFAST_SIM_PHILOX_H_
#define GYMFAST_SIM_PHILOX_H_

#include <array>
#include <cstdint>

namespace gymfast::sim {

using PhiloxCounter = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

inline PhiloxCounter philox(PhiloxCounter counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {
        static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
        static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

// The middle of one of 2^52 equal parts of (0, 1): never 0, never 1, and 1 - u is exact. Each
// operation is exact, so flags of the file that includes this do not matter.
inline double unit(std::uint32_t low, std::uint32_t high) {
  const std::uint64_t bits = (std::uint64_t{high} << 32 | low) >> 12;
  return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

struct Draw {
  double value;   // where in its law a number lies
  double branch;  // which component of a mixture it comes from
};

// docs/simulator.md section 3 lists the purposes; index tells the turns of one attempt apart.
inline Draw draw(PhiloxKey key, std::uint64_t entity, std::uint32_t attempt, std::uint32_t purpose,
                 std::uint32_t index) {
  const PhiloxCounter out =
      philox({static_cast<std::uint32_t>(entity), static_cast<std::uint32_t>(entity >> 32), attempt,
              purpose << 24 | index},
             key);
  return {unit(out[0], out[1]), unit(out[2], out[3])};
}

}  // namespace gymfast::sim

#endif  // GYMFAST_SIM_PHILOX_H_
