#include "cpu/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace gymfast {
namespace {

std::atomic<const Kernels*> forced{nullptr};

const Kernels* find_kernels(const char* name) {
  for (const Kernels* kernels : available_kernels()) {
    if (std::strcmp(kernels->name, name) == 0) return kernels;
  }
  return nullptr;
}

}  // namespace

const Kernels* active_kernels() {
  if (const Kernels* kernels = forced.load()) return kernels;
  static const Kernels* const chosen = [] {
    const char* name = std::getenv("GYMFAST_CPU");
    return name != nullptr && *name != '\0' ? find_kernels(name) : available_kernels().back();
  }();
  return chosen;
}

bool force_kernels(const char* name) {
  const Kernels* kernels = name == nullptr ? nullptr : find_kernels(name);
  forced.store(kernels);
  return name == nullptr || kernels != nullptr;
}

}  // namespace gymfast
