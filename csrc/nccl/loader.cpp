#include "nccl/loader.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>

namespace gymfast::nccl {
namespace {

struct Symbol {
  const char* name;
  void* slot;  // of a function pointer of a table
  bool is_required;
};

bool is_same_file(const std::string& one, const std::string& other) {
  struct stat a, b;
  if (stat(one.c_str(), &a) != 0 || stat(other.c_str(), &b) != 0) return one == other;
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

struct Search {
  std::string_view prefix;
  std::vector<std::string> found;
};

// Files of this process whose names begin with `prefix`, such as libnccl.so.
std::vector<std::string> loaded_files(std::string_view prefix) {
  Search search{prefix, {}};
  auto look = [](dl_phdr_info* info, std::size_t, void* data) {
    auto* to = static_cast<Search*>(data);
    const std::string_view path(info->dlpi_name == nullptr ? "" : info->dlpi_name);
    const std::string_view name = path.substr(path.rfind('/') + 1);
    if (name.substr(0, to->prefix.size()) == to->prefix) to->found.emplace_back(path);
    return 0;
  };
  dl_iterate_phdr(look, &search);
  return search.found;
}

std::string path_of(void* symbol, const std::string& otherwise) {
  Dl_info info;
  return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : otherwise;
}

// Closes a library that turned out to be of no use.
struct Close {
  void operator()(void* handle) const { dlclose(handle); }
};
using Handle = std::unique_ptr<void, Close>;

Handle open_first(const std::vector<std::string>& paths, std::string* problem) {
  for (const std::string& path : paths) {
    if (Handle handle{dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)}) return handle;
    const char* text = dlerror();
    *problem = text == nullptr ? path : text;
  }
  return nullptr;
}

// The name of a required function that is missing, or null.
const char* resolve(void* handle, const std::vector<Symbol>& symbols) {
  for (const Symbol& symbol : symbols) {
    void* address = dlsym(handle, symbol.name);
    if (address == nullptr && symbol.is_required) return symbol.name;
    std::memcpy(symbol.slot, &address, sizeof(address));
  }
  return nullptr;
}

std::vector<Symbol> symbols_of(NcclTable* table) {
  return {{"ncclGetVersion", &table->get_version, true},
          {"ncclGetUniqueId", &table->get_unique_id, true},
          {"ncclGetErrorString", &table->get_error_string, true},
          {"ncclGetLastError", &table->get_last_error, true},
          {"ncclCommInitRankConfig", &table->comm_init_rank_config, true},
          {"ncclCommGetAsyncError", &table->comm_get_async_error, true},
          {"ncclCommFinalize", &table->comm_finalize, true},
          {"ncclCommDestroy", &table->comm_destroy, true},
          {"ncclCommAbort", &table->comm_abort, true},
          {"ncclGroupStart", &table->group_start, true},
          {"ncclGroupEnd", &table->group_end, true},
          {"ncclBroadcast", &table->broadcast, true},
          {"ncclCommShrink", &table->comm_shrink, false},
          {"ncclCommGetUniqueId", &table->comm_get_unique_id, false},
          {"ncclCommGrow", &table->comm_grow, false},
          {"ncclCommRevoke", &table->comm_revoke, false},
          {"ncclMemAlloc", &table->mem_alloc, false},
          {"ncclMemFree", &table->mem_free, false},
          {"ncclCommRegister", &table->comm_register, false},
          {"ncclCommDeregister", &table->comm_deregister, false},
          {"ncclCommWindowRegister", &table->comm_window_register, false},
          {"ncclCommWindowDeregister", &table->comm_window_deregister, false}};
}

std::vector<Symbol> symbols_of(CudaTable* table) {
  return {{"cudaGetErrorString", &table->get_error_string, true},
          {"cudaGetDeviceCount", &table->get_device_count, true},
          {"cudaDriverGetVersion", &table->driver_get_version, true},
          {"cudaGetDevice", &table->get_device, true},
          {"cudaSetDevice", &table->set_device, true},
          {"cudaStreamCreateWithFlags", &table->stream_create_with_flags, true},
          {"cudaStreamDestroy", &table->stream_destroy, true},
          {"cudaStreamQuery", &table->stream_query, true},
          {"cudaStreamWaitEvent", &table->stream_wait_event, true},
          {"cudaEventCreateWithFlags", &table->event_create_with_flags, true},
          {"cudaEventDestroy", &table->event_destroy, true},
          {"cudaEventRecord", &table->event_record, true},
          {"cudaEventQuery", &table->event_query, true},
          {"cudaPointerGetAttributes", &table->pointer_get_attributes, true}};
}

struct Probe {
  const char* feature;
  const char* symbol;
  int version;  // the first in which it is known to work
};

// Source: release notes and headers; what gymfast does not use is there for `gymfast doctor nccl`.
constexpr Probe kProbes[] = {{"nonblocking", "ncclCommInitRankConfig", 21400},
                             {"memory", "ncclMemAlloc", 21900},
                             {"registration", "ncclCommRegister", 21900},
                             {"windows", "ncclCommWindowRegister", 22700},
                             {"shrink", "ncclCommShrink", 22700},
                             {"grow", "ncclCommGrow", 0},
                             {"revoke", "ncclCommRevoke", 0},
                             {"call-config", "ncclBroadcastConfig", 23100}};

void probe(void* handle, Library* library) {
  for (const Probe& one : kProbes) {
    if (library->version >= one.version && dlsym(handle, one.symbol) != nullptr) {
      library->features.emplace_back(one.feature);
    }
  }
}

std::string another(const std::string& one, const std::string& other) {
  return "two different NCCLs in one process, " + one + " and " + other +
         ": start a process that loads one of them only";
}

// The places in which to look, or nothing with a problem.
std::vector<std::string> candidates(const Places& places, std::string* problem) {
  const std::vector<std::string> loaded = loaded_files("libnccl.so");
  for (const std::string& path : loaded) {
    if (!is_same_file(path, loaded[0])) {
      *problem = another(loaded[0], path);
      return {};
    }
  }
  if (!loaded.empty() && !places.given.empty() && !is_same_file(loaded[0], places.given)) {
    *problem = another(loaded[0], places.given);
    return {};
  }
  if (!loaded.empty()) return {loaded[0]};
  if (!places.given.empty()) return {places.given};
  std::vector<std::string> paths = places.beside;
  paths.emplace_back("libnccl.so.2");
  return paths;
}

std::string load_cuda(const Places& places, Library* library) {
  std::vector<std::string> paths;
  if (!places.given.empty()) {
    paths = {places.given};
  } else {
    paths = loaded_files("libcudart.so");
    paths.insert(paths.end(), places.beside.begin(), places.beside.end());
    paths.insert(paths.end(), {"libcudart.so.13", "libcudart.so.12", "libcudart.so"});
  }
  std::string problem;
  Handle handle = open_first(paths, &problem);
  if (handle == nullptr) return "no CUDA runtime was found: " + problem;
  if (const char* missing = resolve(handle.get(), symbols_of(&library->cuda))) {
    return "the CUDA runtime has no " + std::string(missing) + ": take CUDA 11.8 or later";
  }
  void* address = nullptr;
  std::memcpy(&address, &library->cuda.event_query, sizeof(address));
  library->cuda_path = path_of(address, paths[0]);
  static_cast<void>(handle.release());  // it stays
  return "";
}

std::string load_nccl(const Places& places, Library* library) {
  std::string problem;
  const std::vector<std::string> paths = candidates(places, &problem);
  if (paths.empty()) return problem;
  Handle handle = open_first(paths, &problem);
  if (handle == nullptr) {
    return "no NCCL was found: " + problem +
           "; install torch with CUDA or nvidia-nccl-cu13, or give the path of libnccl.so.2";
  }
  void* address = dlsym(handle.get(), "ncclGetVersion");
  if (address == nullptr) return paths[0] + " is no NCCL: it has no ncclGetVersion";
  library->path = path_of(address, paths[0]);
  std::memcpy(&library->nccl.get_version, &address, sizeof(address));
  if (library->nccl.get_version(&library->version) != kNcclSuccess) {
    return "NCCL at " + library->path + " does not tell its version";
  }
  if (library->version < kOldestVersion) {
    return "NCCL at " + library->path + " is " + version_text(library->version) + ", " +
           version_text(kOldestVersion) + " is the oldest that gymfast works with: install a newer";
  }
  if (const char* missing = resolve(handle.get(), symbols_of(&library->nccl))) {
    return "NCCL " + version_text(library->version) + " at " + library->path + " has no " +
           missing + ": it is damaged or cut down";
  }
  probe(handle.get(), library);
  static_cast<void>(handle.release());  // it stays
  return "";
}

}  // namespace

std::string version_text(int version) {
  // From 2.9 on a minor version has two digits.
  const int major = version < 10000 ? version / 1000 : version / 10000;
  const int minor = version < 10000 ? version % 1000 / 100 : version % 10000 / 100;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(version % 100);
}

Loaded load(const Places& nccl, const Places& cuda) {
  static std::mutex mutex;
  static std::unique_ptr<Library> only;
  const std::lock_guard<std::mutex> lock(mutex);
  if (only != nullptr) {
    std::string problem;
    if (candidates(nccl, &problem).empty()) return {nullptr, std::move(problem)};
    if (!only->cuda_problem.empty()) only->cuda_problem = load_cuda(cuda, only.get());
    return {only.get(), ""};
  }
  auto fresh = std::make_unique<Library>();
  if (std::string problem = load_nccl(nccl, fresh.get()); !problem.empty()) {
    return {nullptr, std::move(problem)};
  }
  fresh->cuda_problem = load_cuda(cuda, fresh.get());
  only = std::move(fresh);
  return {only.get(), ""};
}

}  // namespace gymfast::nccl
