// NCCL and the CUDA runtime, found when they are needed: never linked, never pinned.
#ifndef GYMFAST_NCCL_LOADER_H_
#define GYMFAST_NCCL_LOADER_H_

#include <string>
#include <vector>

#include "nccl/abi.h"

namespace gymfast::nccl {

// Where to look, in this order: a copy that the process has already, `given` (a path or nothing),
// those `beside` torch, the system's. A copy that is there and another that is given are refused.
struct Places {
  std::string given;
  std::vector<std::string> beside;
};

struct Library {
  NcclTable nccl;
  int version = 0;  // as ncclGetVersion says it: 23007 is 2.30.7
  std::string path;
  std::vector<std::string> features;
  CudaTable cuda;
  std::string cuda_path;
  std::string cuda_problem;  // one sentence why there is no CUDA runtime, or nothing

  bool has_shrink() const { return nccl.comm_shrink != nullptr; }
  bool has_grow() const { return nccl.comm_grow != nullptr && nccl.comm_get_unique_id != nullptr; }
  bool has_revoke() const { return nccl.comm_revoke != nullptr; }
  bool has_memory() const { return nccl.mem_alloc != nullptr && nccl.mem_free != nullptr; }
  bool has_registration() const {
    return nccl.comm_register != nullptr && nccl.comm_deregister != nullptr;
  }
  bool has_windows() const {
    return nccl.comm_window_register != nullptr && nccl.comm_window_deregister != nullptr;
  }
};

// One of the two is set. A library, once loaded, stays for the life of the process.
struct Loaded {
  const Library* library = nullptr;
  std::string problem;  // one sentence
};

// Thread-safe. The same library for every call that does not ask for another.
Loaded load(const Places& nccl, const Places& cuda);

// "2.30.7" for 23007.
std::string version_text(int version);

}  // namespace gymfast::nccl

#endif  // GYMFAST_NCCL_LOADER_H_
