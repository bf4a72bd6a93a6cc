// This file is compiled without contraction of a * b + c (CMakeLists.txt); nothing here may be
// inline in a header, where the flags of another file would apply.
#include "sim/elementary.h"

#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>

namespace gymfast::sim {
namespace {

static_assert(FLT_EVAL_METHOD == 0, "operations on double have to round to double");
static_assert(std::numeric_limits<double>::is_iec559);

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
// ln 2 in two parts; the first has 32 bits, so that its products with exponents are exact.
constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
constexpr double kInverseLn2 = 0x1.71547652b82fep+0;
constexpr double kSqrtHalf = 0x1.6a09e667f3bcdp-1;
constexpr double kToInteger = 0x1.8p52;  // x + this - this rounds |x| < 2^51 half to even

double power_of_2(int exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

template <std::size_t N>
double polynomial(const std::array<double, N>& coefficients, double x) {
  double sum = coefficients[0];
  for (std::size_t i = 1; i < N; ++i) sum = sum * x + coefficients[i];
  return sum;
}

// 2 / (2 k + 1) for k = 10 .. 1: the series of 2 artanh(s) - 2 s, divided by s.
constexpr std::array<double, 10> kArtanh = {2.0 / 21, 2.0 / 19, 2.0 / 17, 2.0 / 15, 2.0 / 13,
                                            2.0 / 11, 2.0 / 9,  2.0 / 7,  2.0 / 5,  2.0 / 3};
// 1 / k! for k = 14 .. 2.
constexpr std::array<double, 13> kExp = {1.0 / 87178291200.0,
                                         1.0 / 6227020800.0,
                                         1.0 / 479001600.0,
                                         1.0 / 39916800.0,
                                         1.0 / 3628800.0,
                                         1.0 / 362880.0,
                                         1.0 / 40320.0,
                                         1.0 / 5040.0,
                                         1.0 / 720.0,
                                         1.0 / 120.0,
                                         1.0 / 24.0,
                                         1.0 / 6.0,
                                         0.5};

// Coefficients of M. J. Wichura, Algorithm AS 241 (PPND16), Applied Statistics 37 (1988) 477-484,
// highest power first.
constexpr std::array<double, 8> kCentre = {2.5090809287301226727e+3, 3.3430575583588128105e+4,
                                           6.7265770927008700853e+4, 4.5921953931549871457e+4,
                                           1.3731693765509461125e+4, 1.9715909503065514427e+3,
                                           1.3314166789178437745e+2, 3.3871328727963666080e+0};
constexpr std::array<double, 8> kCentreBelow = {5.2264952788528545610e+3, 2.8729085735721942674e+4,
                                                3.9307895800092710610e+4, 2.1213794301586595867e+4,
                                                5.3941960214247511077e+3, 6.8718700749205790830e+2,
                                                4.2313330701600911252e+1, 1.0};
constexpr std::array<double, 8> kTail = {7.74545014278341407640e-4, 2.27238449892691845833e-2,
                                         2.41780725177450611770e-1, 1.27045825245236838258e+0,
                                         3.64784832476320460504e+0, 5.76949722146069140550e+0,
                                         4.63033784615654529590e+0, 1.42343711074968357734e+0};
constexpr std::array<double, 8> kTailBelow = {1.05075007164441684324e-9, 5.47593808499534494600e-4,
                                              1.51986665636164571966e-2, 1.48103976427480074590e-1,
                                              6.89767334985100004550e-1, 1.67638483018380384940e+0,
                                              2.05319162663775882187e+0, 1.0};
constexpr std::array<double, 8> kFarTail = {2.01033439929228813265e-7, 2.71155556874348757815e-5,
                                            1.24266094738807843860e-3, 2.65321895265761230930e-2,
                                            2.96560571828504891230e-1, 1.78482653991729133580e+0,
                                            5.46378491116411436990e+0, 6.65790464350110377720e+0};
constexpr std::array<double, 8> kFarTailBelow = {
    2.04426310338993978564e-15, 1.42151175831644588870e-7,
    1.84631831751005468180e-5,  7.86869131145613259100e-4,
    1.48753612908506148525e-2,  1.36929880922735805310e-1,
    5.99832206555887937690e-1,  1.0};

}  // namespace

double log_of(double x) {
  if (std::isnan(x) || x < 0) return kNan;
  if (x == 0) return -kInfinity;
  if (x == kInfinity) return kInfinity;
  int exponent = 0;
  if (x < DBL_MIN) {
    x *= 0x1p54;
    exponent = -54;
  }
  // x = m 2^exponent with m in [sqrt(1/2), sqrt(2)).
  const auto bits = std::bit_cast<std::uint64_t>(x);
  exponent += static_cast<int>(bits >> 52) - 1022;
  double m = std::bit_cast<double>((bits & 0x000F'FFFF'FFFF'FFFF) | 0x3FE0'0000'0000'0000);
  if (m < kSqrtHalf) {
    m = m + m;
    exponent -= 1;
  }
  const double k = exponent;
  const double f = m - 1.0;
  const double s = f / (2.0 + f);
  const double z = s * s;
  const double rest = polynomial(kArtanh, z) * z;
  const double half_square = 0.5 * f * f;
  return k * kLn2High - ((half_square - (s * (half_square + rest) + k * kLn2Low)) - f);
}

double exp_of(double x) {
  if (std::isnan(x)) return kNan;
  if (x > 710.0) return kInfinity;
  if (x < -746.0) return 0.0;
  const double k = (x * kInverseLn2 + kToInteger) - kToInteger;
  const double high = x - k * kLn2High;
  const double low = k * kLn2Low;
  const double r = high - low;
  const double value = 1.0 + (high - (low - r * r * polynomial(kExp, r)));
  // In two steps, of which only the second can round: results below DBL_MIN have fewer bits.
  const int exponent = static_cast<int>(k);
  const int half = exponent / 2;
  return value * power_of_2(half) * power_of_2(exponent - half);
}

double normal_quantile_of(double p) {
  if (!(p > 0.0 && p < 1.0)) return kNan;
  const double q = p - 0.5;
  if (q >= -0.425 && q <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * polynomial(kCentre, r) / polynomial(kCentreBelow, r);
  }
  const double tail = q < 0.0 ? p : 1.0 - p;
  const double root = std::sqrt(-log_of(tail));
  const double value =
      root <= 5.0 ? polynomial(kTail, root - 1.6) / polynomial(kTailBelow, root - 1.6)
                  : polynomial(kFarTail, root - 5.0) / polynomial(kFarTailBelow, root - 5.0);
  return q < 0.0 ? -value : value;
}

}  // namespace gymfast::sim
