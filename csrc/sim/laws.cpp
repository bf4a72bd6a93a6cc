// This file is compiled without contraction of a * b + c (CMakeLists.txt), like elementary.cpp.
#include "sim/laws.h"

#include <algorithm>
#include <cmath>

#include "sim/elementary.h"

namespace gymfast::sim {
namespace {

constexpr double kReach = 37.0;
constexpr double kNodesPerUnit = 32.0;
constexpr std::size_t kNumNodes = 2369;
constexpr double kMaxNs = 1e18;
constexpr int kMaxDepth = 3;  // crowded, mixture, component
constexpr double kMaxCount = 1e8;

double interpolate(double x, std::span<const double> places, std::span<const double> values) {
  if (x <= places.front()) return values.front();
  if (x >= places.back()) return values.back();
  const auto next = std::upper_bound(places.begin(), places.end(), x);
  const auto i = static_cast<std::size_t>(next - places.begin()) - 1;
  const double part = (x - places[i]) / (places[i + 1] - places[i]);
  return values[i] + (values[i + 1] - values[i]) * part;
}

double gamma_at(std::span<const double> y, std::span<const double> slope, double value) {
  const double place = (log_of(value) - log_of(1.0 - value) + kReach) * kNodesPerUnit;
  const auto i = static_cast<std::size_t>(place);
  const double part = place - static_cast<double>(i);
  const double rise = y[i + 1] - y[i];
  const double square = 3.0 * rise - 2.0 * slope[i] - slope[i + 1];
  const double cube = slope[i] + slope[i + 1] - 2.0 * rise;
  return exp_of(y[i] + part * (slope[i] + part * (square + part * cube)));
}

double uncapped(const Law& law, double value, double branch, std::int64_t num_starting) {
  const std::span<const double> s = law.settings;
  switch (law.kind) {
    case LawKind::kConstant: return s[0];
    case LawKind::kUniform: return s[0] + value * (s[1] - s[0]);
    case LawKind::kExponential: return -s[0] * log_of(1.0 - value);
    case LawKind::kGamma:
      return s[0] * gamma_at(s.subspan(1, kNumNodes), s.subspan(1 + kNumNodes), value);
    case LawKind::kLognormal: return s[2] + s[0] * exp_of(s[1] * normal_quantile_of(value));
    case LawKind::kWeibull: return s[0] * exp_of(log_of(-log_of(1.0 - value)) / s[1]);
    case LawKind::kPareto: return s[0] * exp_of(-log_of(1.0 - value) / s[1]);
    case LawKind::kEmpirical: {
      const auto i = static_cast<std::size_t>(value * static_cast<double>(s.size()));
      return s[std::min(i, s.size() - 1)];
    }
    case LawKind::kQuantiles:
      return interpolate(value, s.first(s.size() / 2), s.subspan(s.size() / 2));
    case LawKind::kBurr: {
      const double odds = exp_of(-log_of(1.0 - value) / s[2]) - 1.0;
      return s[0] * exp_of(log_of(odds) / s[1]);
    }
    case LawKind::kBoundedPareto: return s[0] * exp_of(-log_of(1.0 - value * s[2]) / s[1]);
    case LawKind::kMixture: {
      double total = 0.0;
      for (std::size_t i = 0; i + 1 < law.parts.size(); ++i) {
        total = total + s[i];
        if (branch < total) return law.parts[i].at(value, 0.5, 1);
      }
      return law.parts.back().at(value, 0.5, 1);
    }
    case LawKind::kCrowded: {
      const std::size_t half = s.size() / 2;
      const double factor =
          interpolate(static_cast<double>(num_starting), s.first(half), s.subspan(half));
      return law.parts[0].at(value, branch, 1) * factor;
    }
  }
  return 0.0;
}

bool has_its_settings(const Law& law) {
  const std::size_t settings = law.settings.size(), parts = law.parts.size();
  switch (law.kind) {
    case LawKind::kConstant:
    case LawKind::kExponential: return settings == 1 && parts == 0;
    case LawKind::kUniform:
    case LawKind::kWeibull:
    case LawKind::kPareto: return settings == 2 && parts == 0;
    case LawKind::kLognormal:
    case LawKind::kBurr:
    case LawKind::kBoundedPareto: return settings == 3 && parts == 0;
    case LawKind::kGamma: return settings == 1 + 2 * kNumNodes && parts == 0;
    case LawKind::kEmpirical: return settings >= 1 && parts == 0;
    case LawKind::kQuantiles: return settings >= 4 && settings % 2 == 0 && parts == 0;
    case LawKind::kMixture: return parts >= 1 && settings == parts;
    case LawKind::kCrowded: return settings >= 2 && settings % 2 == 0 && parts == 1;
  }
  return false;
}

bool take_count(std::span<const double>& rest, std::size_t& count) {
  if (rest.empty() || !(rest[0] >= 0 && rest[0] <= kMaxCount)) return false;
  count = static_cast<std::size_t>(rest[0]);
  rest = rest.subspan(1);
  return true;
}

bool take_law(std::span<const double>& rest, Law& law, int depth) {
  if (depth > kMaxDepth || rest.size() < 2) return false;
  if (!(rest[0] >= 0 && rest[0] < kNumLawKinds)) return false;
  law.kind = static_cast<LawKind>(static_cast<int>(rest[0]));
  law.cap = rest[1];
  rest = rest.subspan(2);
  std::size_t count = 0;
  if (!take_count(rest, count) || count > rest.size()) return false;
  law.settings.assign(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(count));
  rest = rest.subspan(count);
  if (!take_count(rest, count) || count > rest.size()) return false;
  law.parts.resize(count);
  for (Law& part : law.parts) {
    if (!take_law(rest, part, depth + 1)) return false;
  }
  return has_its_settings(law);
}

}  // namespace

double Law::at(double value, double branch, std::int64_t num_starting) const {
  const double found = uncapped(*this, value, branch, num_starting);
  return found < cap ? found : cap;
}

bool read_law(std::span<const double> program, Law& law) {
  return take_law(program, law, 1) && program.empty();
}

std::int64_t to_ns(double seconds) {
  const double scaled = seconds * 1e9;
  return static_cast<std::int64_t>(scaled < kMaxNs ? std::nearbyint(scaled) : kMaxNs);
}

}  // namespace gymfast::sim
