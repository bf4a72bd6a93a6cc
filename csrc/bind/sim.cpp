#include "bind/sim.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include "sim/elementary.h"
#include "sim/laws.h"
#include "sim/philox.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using gymfast::sim::Law;
using gymfast::sim::PhiloxKey;
using I64In = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using F64In = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using F64InOut = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void each(double (*function)(double), const F64In& from, const F64InOut& to) {
  if (from.size() != to.size()) {
    throw nb::value_error(("out has " + std::to_string(to.size()) + " numbers, the argument has " +
                           std::to_string(from.size()))
                              .c_str());
  }
  const double* x = from.data();
  double* y = to.data();
  const std::size_t size = from.size();
  nb::gil_scoped_release release;
  for (std::size_t i = 0; i < size; ++i) y[i] = function(x[i]);
}

// Seconds of a law at places; see gymfast_sim/laws/program.py for the numbers of a program.
void law_each(const F64In& program, const F64In& values, const F64In& branches,
              const I64In& num_starting, const F64InOut& out) {
  const std::size_t size = values.size();
  if (branches.size() != size || num_starting.size() != size || out.size() != size) {
    throw nb::value_error(("values has " + std::to_string(size) + " numbers, branches " +
                           std::to_string(branches.size()) + ", num_starting " +
                           std::to_string(num_starting.size()) + " and out " +
                           std::to_string(out.size()) + ", expected as many")
                              .c_str());
  }
  Law law;
  if (!gymfast::sim::read_law({program.data(), program.size()}, law)) {
    throw nb::value_error("this is no program of a law: make it with laws.program");
  }
  const double *value = values.data(), *branch = branches.data();
  for (std::size_t i = 0; i < size; ++i) {
    if (!(value[i] > 0 && value[i] < 1)) {
      throw nb::value_error("a place in a law lies between 0 and 1");
    }
  }
  const std::int64_t* count = num_starting.data();
  double* seconds = out.data();
  nb::gil_scoped_release release;
  for (std::size_t i = 0; i < size; ++i) seconds[i] = law.at(value[i], branch[i], count[i]);
}

void bind_function(nb::module_& m, const char* name, const char* each_name,
                   double (*function)(double), const char* doc) {
  m.def(name, [function](double x) { return function(x); }, "x"_a, doc);
  m.def(
      each_name, [function](const F64In& x, const F64InOut& out) { each(function, x, out); },
      "x"_a.noconvert(), "out"_a.noconvert(), "The same for each number of an array, into out.");
}

}  // namespace

void bind_sim(nb::module_& m) {
  m.def(
      "sim_philox",
      [](std::uint32_t c0, std::uint32_t c1, std::uint32_t c2, std::uint32_t c3, std::uint32_t k0,
         std::uint32_t k1) {
        const auto out = gymfast::sim::philox({c0, c1, c2, c3}, {k0, k1});
        return std::make_tuple(out[0], out[1], out[2], out[3]);
      },
      "c0"_a, "c1"_a, "c2"_a, "c3"_a, "k0"_a, "k1"_a,
      "Philox4x32-10 of a counter of four words and a key of two.");
  m.def(
      "sim_draw",
      [](std::uint32_t seed, std::uint32_t replication, std::uint64_t entity, std::uint32_t attempt,
         std::uint32_t purpose, std::uint32_t index) {
        if (purpose >> 8 || index >> 24) {
          throw nb::value_error("purpose has 8 bits and index has 24");
        }
        const auto out =
            gymfast::sim::draw(PhiloxKey{seed, replication}, entity, attempt, purpose, index);
        return std::make_pair(out.value, out.branch);
      },
      "seed"_a, "replication"_a, "entity"_a, "attempt"_a, "purpose"_a, "index"_a = 0,
      "Two numbers in (0, 1) for a purpose (docs/simulator.md section 3).");
  bind_function(m, "sim_log", "sim_log_each", &gymfast::sim::log_of,
                "Natural logarithm, the same bits everywhere.");
  bind_function(m, "sim_exp", "sim_exp_each", &gymfast::sim::exp_of,
                "Exponential, the same bits everywhere.");
  bind_function(m, "sim_normal_quantile", "sim_normal_quantile_each",
                &gymfast::sim::normal_quantile_of,
                "Quantile of the standard normal law, the same bits everywhere.");
  m.def("sim_law_each", &law_each, "program"_a.noconvert(), "values"_a.noconvert(),
        "branches"_a.noconvert(), "num_starting"_a.noconvert(), "out"_a.noconvert(),
        "Seconds of a law at places in (0, 1), into out (docs/simulator.md section 5).");
  m.def("sim_to_ns", &gymfast::sim::to_ns, "seconds"_a,
        "Seconds as whole nanoseconds, half to even, at most 10^18.");
}
