// What tests tell the CUDA runtime of _cuda_shim: whose memory and streams are whose, and whether
// launches fail. tests/cuda_module.py calls it by ctypes.
#include <cstdint>

#include "cuda/host_shim.h"

extern "C" {

__attribute__((visibility("default"))) void shim_set_memory(void* start, std::uint64_t size,
                                                            int type, int device) {
  gymfast::shim::set_memory(start, size, static_cast<cudaMemoryType>(type), device);
}

__attribute__((visibility("default"))) void shim_forget_memory() { gymfast::shim::forget_memory(); }

__attribute__((visibility("default"))) void shim_set_stream_device(void* stream, int device) {
  gymfast::shim::set_stream_device(stream, device);
}

__attribute__((visibility("default"))) void shim_set_launch_error(int error) {
  gymfast::shim::set_launch_error(static_cast<cudaError_t>(error));
}

__attribute__((visibility("default"))) void shim_set_load_error(int error) {
  gymfast::shim::set_load_error(static_cast<cudaError_t>(error));
}

__attribute__((visibility("default"))) std::uint64_t shim_num_launches() {
  return gymfast::shim::num_launches();
}

__attribute__((visibility("default"))) int shim_current_device() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess ? device : -1;
}

__attribute__((visibility("default"))) void shim_set_current_device(int device) {
  static_cast<void>(cudaSetDevice(device));
}

}  // extern "C"
