// Laws of durations: docs/simulator.md section 5, the same bits as gymfast_sim.laws.
#ifndef GYMFAST_SIM_LAWS_H_
#define GYMFAST_SIM_LAWS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gymfast::sim {

// The numbers are those of gymfast_sim/laws/program.py.
enum class LawKind : std::uint8_t {
  kConstant,
  kUniform,
  kExponential,
  kGamma,
  kLognormal,
  kWeibull,
  kPareto,
  kEmpirical,
  kQuantiles,
  kBurr,
  kBoundedPareto,
  kMixture,
  kCrowded,
};
constexpr int kNumLawKinds = 13;

struct Law {
  LawKind kind = LawKind::kConstant;
  double cap = 0;
  std::vector<double> settings;
  std::vector<Law> parts;  // components of a mixture, the base of a crowded law

  // Seconds at a place in (0, 1); `branch` chooses a component, `num_starting` is for crowded laws.
  double at(double value, double branch, std::int64_t num_starting) const;
};

// Reads what program.py writes: kind, cap, number of settings, settings, number of parts, parts.
// Returns false for what it does not write.
bool read_law(std::span<const double> program, Law& law);

// Seconds as nanoseconds, half to even, at most 10^18.
std::int64_t to_ns(double seconds);

}  // namespace gymfast::sim

#endif  // GYMFAST_SIM_LAWS_H_
