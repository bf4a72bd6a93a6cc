// The functions of NCCL that gymfast calls, on the memory that group.cpp shares. Calls on a
// non-blocking communicator make progress when the caller looks at its state, so that a caller
// that does not look, or goes on too early, is found out.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "double.h"

namespace nccl_double {

Knobs& knobs() {
  static Knobs all;
  return all;
}

namespace {

std::mutex log_mutex;
std::string log_text;
thread_local std::string last_error;

struct Config {
  std::size_t size;
  unsigned magic, version;
  int blocking;
};

struct Transfer {
  int root;
  unsigned char* data;
  std::size_t num_bytes, place;
};

struct Region {
  unsigned char* begin;
  std::size_t num_bytes;
  bool is_window;
};

std::mutex memory_mutex;
std::vector<Region> memory;  // of ncclMemAlloc

struct Comm {
  Comm(const std::string& name, int num_ranks, int rank) : group(name, num_ranks, rank) {}

  Group group;
  std::function<int()> step;    // what is in progress, until it says something else
  std::unique_ptr<Comm> child;  // that a shrink in progress makes
  std::atomic<int> error{0};
  std::atomic<bool> is_over{false};
  std::atomic<int> num_running{0};
  bool is_revoked = false, is_final = false, has_id = false;
  int num_children = 0;
  std::uint64_t num_rounds = 0;
  std::unique_ptr<Region> registered;  // gymfast registers one piece of memory
  // Of the group that a thread is in:
  std::vector<Transfer> transfers;
  Stream* stream = nullptr;
};

thread_local int group_depth = 0;
thread_local std::vector<Comm*> group_comms;

int refuse(int result, const std::string& words) {
  last_error = words;
  return result;
}

std::string who(const Comm& comm) { return "r" + std::to_string(comm.group.rank) + " "; }

int check_config(const Config* config) {
  if (config == nullptr || config->magic != 0xcafebeef) {
    return refuse(kArgument, "config was not initialised");
  }
  if (config->blocking != 0) return refuse(kArgument, "the double only does non-blocking");
  return kSuccess;
}

// In progress at least once; then until all ranks are there.
std::function<int()> joining(Comm* comm) {
  return [comm, count = 0]() mutable {
    if (count++ == 0 || knobs().init_hangs[comm->group.rank] != 0) return int{kInProgress};
    return comm->group.is_complete() ? int{kSuccess} : int{kInProgress};
  };
}

void run(Comm* comm, const std::vector<Transfer>& transfers) {
  const auto is_over = [comm] { return comm->is_over.load(); };
  const auto on_gone = [comm] {
    int none = 0;
    comm->error.compare_exchange_strong(none, kRemote);
  };
  for (const Transfer& one : transfers) {
    if (!comm->group.broadcast(one.root, one.data, one.num_bytes, one.place, is_over, on_gone)) {
      break;
    }
  }
  --comm->num_running;
}

int make(Comm** out, const std::string& name, int num_ranks, int rank) {
  if (num_ranks < 1 || num_ranks > kMaxRanks || rank < 0 || rank >= num_ranks) {
    return refuse(kArgument, "rank or number of ranks");
  }
  try {
    *out = new Comm(name, num_ranks, rank);
  } catch (const std::runtime_error& error) {
    return refuse(kUsage, error.what());
  }
  (*out)->step = joining(*out);
  return kInProgress;
}

bool is_busy(const Comm* comm) { return comm->step != nullptr; }

// Communicators that have memory registered.
std::vector<const Comm*> holders;

int check_registration(const Comm* comm, void* address, std::size_t num_bytes) {
  if (is_busy(comm) || comm->is_revoked || comm->is_final || comm->num_running != 0) {
    return refuse(kUsage, "registration with a communicator that is not idle");
  }
  if (comm->registered != nullptr) return refuse(kUsage, "memory is registered already");
  const std::lock_guard<std::mutex> lock(memory_mutex);
  for (const Region& one : memory) {
    if (one.begin == address && one.num_bytes == num_bytes) return kSuccess;
  }
  return refuse(kArgument, "memory is not that of ncclMemAlloc");
}

void hold(Comm* comm, void* address, std::size_t num_bytes, bool is_window) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  comm->registered.reset(new Region{static_cast<unsigned char*>(address), num_bytes, is_window});
  holders.push_back(comm);
}

void let_go(Comm* comm) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  comm->registered.reset();
  std::erase(holders, comm);
}

int deregister(Comm* comm, void* handle, bool is_window) {
  if (comm->registered == nullptr || handle != comm->registered.get() ||
      comm->registered->is_window != is_window || comm->is_final || comm->num_running != 0) {
    log("wrong: " + who(*comm) + "deregisters what is not registered, or too late");
    return refuse(kUsage, "could not find the handle");
  }
  log(who(*comm) + (is_window ? "window_deregister" : "deregister"));
  let_go(comm);
  return kSuccess;
}

void release(Comm* comm) {
  comm->is_over = true;
  while (comm->num_running != 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
  let_go(comm);
  delete comm;
}

}  // namespace

void log(const std::string& line) {
  const std::lock_guard<std::mutex> lock(log_mutex);
  log_text += line + "\n";
}

}  // namespace nccl_double

using namespace nccl_double;

struct UniqueId {
  char bytes[128];
};

// ---- for tests

EXPORT int double_set(const char* name, int rank, int value) {
  Knobs& all = knobs();
  const std::string what(name);
  if (what == "version") all.version = value;
  if (what == "device_count") all.device_count = value;
  if (what == "host_memory") all.host_memory = value;
  if (what == "init_hangs") all.init_hangs[rank] = value;
  if (what == "async_error") all.async_error[rank] = value;
  if (what == "call_error") all.call_error[rank] = value;
  if (what == "abort_hangs") all.abort_hangs[rank] = value;
  if (what == "is_silent") all.is_silent[rank] = value;
  if (what == "alloc_error") all.alloc_error = value;
  if (what == "register_error") all.register_error[rank] = value;
  if (what == "window_error") all.window_error[rank] = value;
  if (what == "skips_registration") all.skips_registration = value;
  if (what == "skips_windows") all.skips_windows = value;
  return 0;
}

// Calls so far, one a line; they are forgotten then.
EXPORT std::size_t double_log(char* out, std::size_t size) {
  const std::lock_guard<std::mutex> lock(log_mutex);
  const std::size_t needed = log_text.size();
  if (needed >= size) return needed;
  std::memcpy(out, log_text.c_str(), needed + 1);
  log_text.clear();
  return needed;
}

// ---- NCCL

EXPORT int ncclGetVersion(int* version) {
  *version = knobs().version;
  return kSuccess;
}

EXPORT const char* ncclGetErrorString(int result) {
  switch (result) {
    case kSuccess: return "no error";
    case kCuda: return "unhandled cuda error";
    case kSystem: return "unhandled system error";
    case kInternal: return "internal error";
    case kArgument: return "invalid argument";
    case kUsage: return "invalid usage";
    case kRemote: return "remote process exited or there was a network error";
    case kInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

EXPORT const char* ncclGetLastError(void*) { return last_error.c_str(); }

EXPORT int ncclGetUniqueId(UniqueId* id) {
  static std::atomic<int> count{0};
  std::memset(id, 0, sizeof(*id));
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  std::snprintf(id->bytes, sizeof(id->bytes), "%d-%d-%lld", static_cast<int>(getpid()), ++count,
                static_cast<long long>(now));
  log("unique_id");
  return kSuccess;
}

EXPORT int ncclCommInitRankConfig(Comm** comm, int num_ranks, UniqueId id, int rank,
                                  Config* config) {
  if (const int result = check_config(config); result != kSuccess) return result;
  log("r" + std::to_string(rank) + " init " + std::to_string(num_ranks));
  return make(comm, id.bytes, num_ranks, rank);
}

EXPORT int ncclCommGetAsyncError(Comm* comm, int* state) {
  const int rank = comm->group.rank;
  if (const int error = knobs().async_error[rank].exchange(0); error != 0) comm->error = error;
  *state = comm->error;
  if (*state != kSuccess || comm->step == nullptr) return kSuccess;
  *state = comm->step();
  if (*state != kInProgress) comm->step = nullptr;
  return kSuccess;
}

EXPORT int ncclCommFinalize(Comm* comm) {
  if (is_busy(comm) || comm->is_revoked || comm->is_final) {
    return refuse(kUsage, "finalize of a communicator that is busy, revoked or finalized");
  }
  if (comm->registered != nullptr) log("wrong: finalize before memory is deregistered");
  log(who(*comm) + "finalize");
  comm->is_final = true;
  comm->step = [comm, count = 0]() mutable {
    return count++ == 0 || comm->num_running != 0 ? int{kInProgress} : int{kSuccess};
  };
  return kInProgress;
}

EXPORT int ncclCommDestroy(Comm* comm) {
  log(who(*comm) + "destroy");
  release(comm);
  return kSuccess;
}

EXPORT int ncclCommAbort(Comm* comm) {
  log(who(*comm) + "abort");
  while (knobs().abort_hangs[comm->group.rank] != 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  release(comm);
  return kSuccess;
}

EXPORT int ncclGroupStart() {
  ++group_depth;
  return kSuccess;
}

EXPORT int ncclBroadcast(const void* from, void* to, std::size_t num_bytes, int type, int root,
                         Comm* comm, void* stream) {
  if (group_depth == 0) return refuse(kUsage, "the double takes broadcasts in groups only");
  if (is_busy(comm)) return refuse(kUsage, "a call on a communicator that is in progress");
  if (comm->is_revoked || comm->is_final) return refuse(kUsage, "communicator is not usable");
  if (from != to || type != 1 || root < 0 || root >= comm->group.num_ranks) {
    return refuse(kArgument, "broadcast with arguments that gymfast never passes");
  }
  if (const int error = knobs().call_error[comm->group.rank].exchange(0); error != 0) {
    return refuse(error, "an injected error");
  }
  for (const Transfer& other : comm->transfers) {
    if (other.root == root) return refuse(kUsage, "a root has two broadcasts in one group");
  }
  if (std::ranges::find(group_comms, comm) == group_comms.end()) group_comms.push_back(comm);
  auto* data = static_cast<unsigned char*>(to);
  const Region* region = comm->registered.get();
  const bool is_inside = region != nullptr && data >= region->begin &&
                         data + num_bytes <= region->begin + region->num_bytes;
  const std::size_t place = is_inside ? static_cast<std::size_t>(data - region->begin) + 1 : 0;
  comm->transfers.push_back({root, data, num_bytes, place});
  comm->stream = static_cast<Stream*>(stream);
  return kSuccess;
}

EXPORT int ncclGroupEnd() {
  if (--group_depth != 0) return kSuccess;
  int result = kSuccess;
  for (Comm* comm : group_comms) {
    std::string line = who(*comm) + "group";
    for (const Transfer& one : comm->transfers) {
      line += " " + std::to_string(one.root) + ":" + std::to_string(one.num_bytes);
    }
    log(line);
    comm->step = [comm, transfers = std::move(comm->transfers), count = 0]() mutable {
      if (count++ == 0) return int{kInProgress};
      ++comm->num_running;
      comm->stream->add([comm, transfers] { run(comm, transfers); });
      return int{kSuccess};
    };
    comm->transfers.clear();
    ++comm->num_rounds;
    result = kInProgress;
  }
  group_comms.clear();
  return result;
}

EXPORT int ncclCommShrink(Comm* comm, int* excluded, int num_excluded, Comm** out, Config*, int) {
  *out = nullptr;
  if (is_busy(comm)) return refuse(kUsage, "a call on a communicator that is in progress");
  if (num_excluded < 1) return refuse(kArgument, "nobody is excluded");
  int rank = comm->group.rank;
  std::string line = who(*comm) + "shrink";
  for (int i = 0; i < num_excluded; ++i) {
    if (excluded[i] == comm->group.rank) return refuse(kArgument, "an excluded rank calls");
    if (excluded[i] < comm->group.rank) --rank;
    line += " " + std::to_string(excluded[i]);
  }
  log(line);
  Comm* child = nullptr;
  const std::string name = comm->group.name + "s" + std::to_string(++comm->num_children);
  const int result = make(&child, name, comm->group.num_ranks - num_excluded, rank);
  if (result != kInProgress) return result;
  comm->child.reset(child);
  comm->step = [comm, out, wait = joining(child)]() mutable {
    const int state = wait();
    if (state == kSuccess) {
      comm->child->step = nullptr;
      *out = comm->child.release();
    }
    return state;
  };
  return kInProgress;
}

EXPORT int ncclCommGetUniqueId(Comm* comm, UniqueId* id) {
  if (is_busy(comm) || comm->has_id) return refuse(kUsage, "an id of this group is not used yet");
  log(who(*comm) + "grow_id");
  comm->has_id = true;
  std::memset(id, 0, sizeof(*id));
  std::snprintf(id->bytes, sizeof(id->bytes), "%sg%d", comm->group.name.c_str(),
                comm->num_children + 1);
  return kSuccess;
}

EXPORT int ncclCommGrow(Comm* comm, int num_ranks, const UniqueId* id, int rank, Comm** out,
                        Config* config) {
  *out = nullptr;
  if (comm == nullptr) {
    if (id == nullptr) return refuse(kArgument, "a new rank has no id");
    if (const int result = check_config(config); result != kSuccess) return result;
    log("r" + std::to_string(rank) + " grow_into " + std::to_string(num_ranks));
    return make(out, id->bytes, num_ranks, rank);
  }
  if (is_busy(comm) || comm->is_revoked) return refuse(kUsage, "grow of an unusable communicator");
  if (rank != -1 || num_ranks <= comm->group.num_ranks || (id != nullptr) != comm->has_id) {
    return refuse(kArgument, "grow with arguments of another rank");
  }
  comm->has_id = false;
  log(who(*comm) + "grow " + std::to_string(num_ranks));
  const std::string name = comm->group.name + "g" + std::to_string(++comm->num_children);
  return make(out, name, num_ranks, comm->group.rank);
}

EXPORT int ncclCommRevoke(Comm* comm, int flags) {
  if (flags != 0 || comm->is_revoked || comm->is_final) return refuse(kArgument, "revoke");
  log(who(*comm) + "revoke");
  comm->is_revoked = true;
  comm->is_over = true;
  comm->error = kSuccess;
  comm->step = [comm, count = 0]() mutable {
    return count++ == 0 || comm->num_running != 0 ? int{kInProgress} : int{kSuccess};
  };
  return kInProgress;
}

EXPORT int ncclMemAlloc(void** address, std::size_t num_bytes) {
  if (const int error = knobs().alloc_error.exchange(0); error != 0) {
    return refuse(error, "an injected error");
  }
  *address = std::aligned_alloc(4096, (num_bytes + 4095) / 4096 * 4096);
  std::memset(*address, 0xA5, num_bytes);
  const std::lock_guard<std::mutex> lock(memory_mutex);
  memory.push_back({static_cast<unsigned char*>(*address), num_bytes, false});
  log("alloc " + std::to_string(num_bytes));
  return kSuccess;
}

EXPORT int ncclMemFree(void* address) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  for (const Comm* comm : holders) {
    if (comm->registered->begin == address) log("wrong: memory is freed while it is registered");
  }
  const auto is_it = [address](const Region& one) { return one.begin == address; };
  if (std::erase_if(memory, is_it) != 1) return refuse(kArgument, "no memory of ncclMemAlloc");
  std::free(address);
  log("free");
  return kSuccess;
}

EXPORT int ncclCommRegister(Comm* comm, void* address, std::size_t num_bytes, void** handle) {
  *handle = nullptr;
  if (knobs().skips_registration != 0) return kSuccess;
  if (const int r = check_registration(comm, address, num_bytes); r != kSuccess) return r;
  if (const int error = knobs().register_error[comm->group.rank].exchange(0); error != 0) {
    return refuse(error, "an injected error");
  }
  log(who(*comm) + "register " + std::to_string(num_bytes));
  hold(comm, address, num_bytes, false);
  *handle = comm->registered.get();
  return kSuccess;
}

EXPORT int ncclCommDeregister(Comm* comm, void* handle) { return deregister(comm, handle, false); }

EXPORT int ncclCommWindowRegister(Comm* comm, void* address, std::size_t num_bytes, void** window,
                                  int flags) {
  *window = nullptr;
  if (knobs().skips_windows != 0) return kSuccess;
  if (flags != 1) return refuse(kArgument, "window with flags that gymfast never passes");
  if (const int r = check_registration(comm, address, num_bytes); r != kSuccess) return r;
  log(who(*comm) + "window " + std::to_string(num_bytes));
  const int error = knobs().window_error[comm->group.rank].exchange(0);
  if (error == 0) comm->group.begin_window(num_bytes, comm->num_rounds);
  comm->step = [comm, address, num_bytes, window, error, count = 0]() mutable {
    if (count++ == 0) return int{kInProgress};
    if (error != 0) return comm->error = error, error;
    if (!comm->group.have_all_windows()) return int{kInProgress};
    hold(comm, address, num_bytes, true);
    *window = comm->registered.get();
    return int{kSuccess};
  };
  return kInProgress;
}

EXPORT int ncclCommWindowDeregister(Comm* comm, void* window) {
  return deregister(comm, window, true);
}

// There for `gymfast doctor nccl` to find; nothing calls it.
EXPORT int ncclBroadcastConfig() { return kInternal; }
