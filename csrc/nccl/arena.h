// Memory of a GPU as NCCL allocates it, so that it can be registered.
#ifndef GYMFAST_NCCL_ARENA_H_
#define GYMFAST_NCCL_ARENA_H_

#include <cstddef>
#include <string>

#include "nccl/loader.h"

namespace gymfast::nccl {

// Communicators that it is registered with end before it.
class Arena {
 public:
  Arena(const Library& library, int device) : library_(library), device_(device) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  // Empty, or a sentence why there is none. Comes once, before anything else.
  std::string allocate(std::size_t num_bytes);
  void* address() const { return address_; }
  std::size_t num_bytes() const { return num_bytes_; }
  bool is_managed() const { return is_managed_; }  // the CPU reaches it too

 private:
  const Library& library_;
  const int device_;
  void* address_ = nullptr;
  std::size_t num_bytes_ = 0;
  bool is_managed_ = false;
};

}  // namespace gymfast::nccl

#endif  // GYMFAST_NCCL_ARENA_H_
