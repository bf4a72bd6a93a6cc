// The device that calls of CUDA and NCCL are about.
#ifndef GYMFAST_NCCL_ON_DEVICE_H_
#define GYMFAST_NCCL_ON_DEVICE_H_

#include "nccl/abi.h"

namespace gymfast::nccl {

// Work on a device other than the caller's, which is set again at the end.
class OnDevice {
 public:
  OnDevice(const CudaTable& cuda, int device) : cuda_(cuda) {
    result_ = cuda.get_device(&before_);
    if (result_ == kCudaSuccess && before_ != device) result_ = cuda.set_device(device);
    has_changed_ = result_ == kCudaSuccess && before_ != device;
  }
  ~OnDevice() {
    if (has_changed_) cuda_.set_device(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  int result() const { return result_; }

 private:
  const CudaTable& cuda_;
  int before_ = 0;
  int result_ = 0;
  bool has_changed_ = false;
};

}  // namespace gymfast::nccl

#endif  // GYMFAST_NCCL_ON_DEVICE_H_
