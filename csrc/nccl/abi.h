// What gymfast calls of NCCL and of the CUDA runtime, declared here: neither is needed to build,
// and a process uses whatever copies it finds (loader.h). Source: nccl.h 2.18.1 to 2.32.3,
// driver_types.h of CUDA 11.8 to 13.0.
#ifndef GYMFAST_NCCL_ABI_H_
#define GYMFAST_NCCL_ABI_H_

#include <climits>
#include <cstddef>

namespace gymfast::nccl {

using Comm = void*;    // ncclComm_t
using Stream = void*;  // cudaStream_t
using Event = void*;   // cudaEvent_t

constexpr int kNcclSuccess = 0;
constexpr int kNcclInternalError = 3;
constexpr int kNcclInProgress = 7;
constexpr int kNcclUint8 = 1;
constexpr int kShrinkDefault = 0;
constexpr int kRevokeDefault = 0;
constexpr int kWindowSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC

constexpr int kCudaSuccess = 0;
constexpr int kCudaNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr int kMemoryDevice = 2;
constexpr int kMemoryManaged = 3;

// ncclUniqueId: passed by value.
struct UniqueId {
  char bytes[128];
};
static_assert(sizeof(UniqueId) == 128);

constexpr int kOldestVersion = 21800;
constexpr int kUndefined = INT_MIN;

// ncclConfig_t as of kOldestVersion: newer libraries read `size` bytes and take defaults for the
// rest. `traffic_class` was padding then; its value is the default of those that read it.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kOldestVersion;
  int blocking = 0;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
};
static_assert(sizeof(Config) == 48);
static_assert(offsetof(Config, net_name) == 32);

// cudaPointerAttributes, with room for what later runtimes add.
struct PointerAttributes {
  int type = 0;
  int device = 0;
  void* device_pointer = nullptr;
  void* host_pointer = nullptr;
  long reserved[16] = {};
};

struct NcclTable {
  int (*get_version)(int*) = nullptr;
  int (*get_unique_id)(UniqueId*) = nullptr;
  const char* (*get_error_string)(int) = nullptr;
  const char* (*get_last_error)(Comm) = nullptr;
  int (*comm_init_rank_config)(Comm*, int, UniqueId, int, Config*) = nullptr;
  int (*comm_get_async_error)(Comm, int*) = nullptr;
  int (*comm_finalize)(Comm) = nullptr;
  int (*comm_destroy)(Comm) = nullptr;
  int (*comm_abort)(Comm) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*broadcast)(const void*, void*, std::size_t, int, int, Comm, Stream) = nullptr;
  // Not in all versions: null where they are missing.
  int (*comm_shrink)(Comm, int*, int, Comm*, Config*, int) = nullptr;
  int (*comm_get_unique_id)(Comm, UniqueId*) = nullptr;
  int (*comm_grow)(Comm, int, const UniqueId*, int, Comm*, Config*) = nullptr;
  int (*comm_revoke)(Comm, int) = nullptr;
  int (*mem_alloc)(void**, std::size_t) = nullptr;
  int (*mem_free)(void*) = nullptr;
  int (*comm_register)(Comm, void*, std::size_t, void**) = nullptr;
  int (*comm_deregister)(Comm, void*) = nullptr;
  int (*comm_window_register)(Comm, void*, std::size_t, void**, int) = nullptr;
  int (*comm_window_deregister)(Comm, void*) = nullptr;
};

struct CudaTable {
  const char* (*get_error_string)(int) = nullptr;
  int (*get_device_count)(int*) = nullptr;
  int (*driver_get_version)(int*) = nullptr;
  int (*get_device)(int*) = nullptr;
  int (*set_device)(int) = nullptr;
  int (*stream_create_with_flags)(Stream*, unsigned) = nullptr;
  int (*stream_destroy)(Stream) = nullptr;
  int (*stream_query)(Stream) = nullptr;
  int (*stream_wait_event)(Stream, Event, unsigned) = nullptr;
  int (*event_create_with_flags)(Event*, unsigned) = nullptr;
  int (*event_destroy)(Event) = nullptr;
  int (*event_record)(Event, Stream) = nullptr;
  int (*event_query)(Event) = nullptr;
  int (*pointer_get_attributes)(PointerAttributes*, const void*) = nullptr;
};

}  // namespace gymfast::nccl

#endif  // GYMFAST_NCCL_ABI_H_
