// The part of gymfast._core that moves bytes between processes of a host.
#ifndef GYMFAST_BIND_SHM_H_
#define GYMFAST_BIND_SHM_H_

#include <nanobind/nanobind.h>

void bind_shm(nanobind::module_& m);

#endif  // GYMFAST_BIND_SHM_H_
