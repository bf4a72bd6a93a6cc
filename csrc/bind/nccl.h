// The part of gymfast._core that speaks to NCCL.
#ifndef GYMFAST_BIND_NCCL_H_
#define GYMFAST_BIND_NCCL_H_

#include <nanobind/nanobind.h>

void bind_nccl(nanobind::module_& m);

#endif  // GYMFAST_BIND_NCCL_H_
