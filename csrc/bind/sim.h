// The part of gymfast._core that the simulator draws its numbers with.
#ifndef GYMFAST_BIND_SIM_H_
#define GYMFAST_BIND_SIM_H_

#include <nanobind/nanobind.h>

void bind_sim(nanobind::module_& m);

#endif  // GYMFAST_BIND_SIM_H_
