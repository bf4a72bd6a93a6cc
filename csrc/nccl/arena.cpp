#include "nccl/arena.h"

#include "nccl/on_device.h"

namespace gymfast::nccl {

Arena::~Arena() {
  if (address_ == nullptr) return;
  const OnDevice on(library_.cuda, device_);
  library_.nccl.mem_free(address_);
}

std::string Arena::allocate(std::size_t num_bytes) {
  if (!library_.has_memory()) return "this NCCL has no memory of its own";
  const OnDevice on(library_.cuda, device_);
  if (on.result() != kCudaSuccess) {
    return std::string("cudaSetDevice: ") + library_.cuda.get_error_string(on.result());
  }
  const int result = library_.nccl.mem_alloc(&address_, num_bytes);
  if (result != kNcclSuccess) {
    address_ = nullptr;
    return std::string("ncclMemAlloc of ") + std::to_string(num_bytes) +
           " bytes: " + library_.nccl.get_error_string(result);
  }
  num_bytes_ = num_bytes;
  PointerAttributes found;
  is_managed_ = library_.cuda.pointer_get_attributes(&found, address_) == kCudaSuccess &&
                found.type == kMemoryManaged;
  return "";
}

}  // namespace gymfast::nccl
