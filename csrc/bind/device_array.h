// Array arguments of gymfast._cuda: where their bytes are, and everything a kernel relies on.
#ifndef GYMFAST_BIND_DEVICE_ARRAY_H_
#define GYMFAST_BIND_DEVICE_ARRAY_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "cuda/codec.h"

namespace gymfast::bind {

namespace nb = nanobind;

constexpr int kNoDevice = -1;

// Contiguous bytes of an array and the device that holds them.
struct DeviceArray {
  std::string name;
  std::uint8_t* address = nullptr;  // as kernels reach it
  std::uint64_t size_bytes = 0;
  int device = kNoDevice;                // also of pinned host memory and of empty arrays
  nb::ndarray<nb::ro> export_of_dlpack;  // keeps the memory while the call lasts

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(address);
  }
};

enum class Fit { kExact, kAtLeast, kMultiple };

// What an operation asks of one array.
struct Need {
  std::uint64_t size_bytes = 0;
  Fit fit = Fit::kExact;
  std::uint64_t alignment = 1;
  bool is_written = true;
  bool may_be_pinned = false;
  const char* advice = "";  // on the size
};

[[noreturn]] inline void refuse(const std::string& text) { throw nb::value_error(text.c_str()); }

// The runtime keeps an error until it is read: the next launch must not report this one.
inline cudaError_t forget(cudaError_t error) {
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return error;
}

inline void require_cuda(cudaError_t error, const char* what) {
  if (forget(error) == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

struct Layout {
  std::vector<std::int64_t> shape, strides;  // strides in bytes
  std::int64_t item_bytes = 1;

  std::uint64_t size_bytes() const {
    std::uint64_t size = static_cast<std::uint64_t>(item_bytes);
    for (const std::int64_t extent : shape) size *= static_cast<std::uint64_t>(extent);
    return size;
  }
  bool is_contiguous() const {
    std::int64_t expected = item_bytes;
    for (std::size_t i = shape.size(); i-- > 0;) {
      if (shape[i] != 1 && strides[i] != expected) return size_bytes() == 0;
      expected *= shape[i];
    }
    return true;
  }
};

inline std::vector<std::int64_t> integers(nb::handle sequence) {
  std::vector<std::int64_t> values;
  for (nb::handle value : sequence) values.push_back(nb::cast<std::int64_t>(value));
  return values;
}

// Of version 2 and 3; an entry "stream" is for the caller, who orders streams.
inline Layout read_cuda_array_interface(nb::handle entries, const Need& need, DeviceArray* array) {
  const nb::dict fields = nb::cast<nb::dict>(entries);
  const nb::tuple data = nb::cast<nb::tuple>(fields["data"]);
  if (need.is_written && nb::cast<bool>(data[1])) {
    refuse(array->name + " is read-only, and the call writes it: pass memory that may be written");
  }
  Layout layout;
  layout.shape = integers(fields["shape"]);
  // Such as "<f4": byte order, kind, bytes.
  layout.item_bytes = std::stoll(nb::cast<std::string>(fields["typestr"]).substr(2));
  layout.strides.resize(layout.shape.size());
  std::int64_t stride = layout.item_bytes;
  for (std::size_t i = layout.shape.size(); i-- > 0;) {
    layout.strides[i] = stride;
    stride *= layout.shape[i];
  }
  if (fields.contains("strides") && !nb::object(fields["strides"]).is_none()) {
    layout.strides = integers(fields["strides"]);
  }
  array->address = reinterpret_cast<std::uint8_t*>(nb::cast<std::uintptr_t>(data[0]));
  return layout;
}

inline Layout read_dlpack(nb::handle object, const Need& need, DeviceArray* array) {
  nb::ndarray<nb::ro> read_only;
  nb::ndarray<> writable;
  const bool is_array = nb::hasattr(object, "__dlpack__") &&
                        nb::try_cast<nb::ndarray<nb::ro>>(object, read_only, false);
  if (!is_array) {
    const std::string type = nb::cast<std::string>(object.type().attr("__name__"));
    throw nb::type_error((array->name + " is " + type +
                          ", expected an array with __dlpack__ or __cuda_array_interface__: pass "
                          "a tensor")
                             .c_str());
  }
  if (need.is_written && !nb::try_cast<nb::ndarray<>>(object, writable, false)) {
    refuse(array->name + " is read-only, and the call writes it: pass memory that may be written");
  }
  Layout layout;
  layout.item_bytes = static_cast<std::int64_t>(read_only.itemsize());
  for (std::size_t i = 0; i < read_only.ndim(); ++i) {
    layout.shape.push_back(static_cast<std::int64_t>(read_only.shape(i)));
    layout.strides.push_back(read_only.stride(i) * layout.item_bytes);
  }
  array->address = static_cast<std::uint8_t*>(const_cast<void*>(read_only.data()));
  array->export_of_dlpack = read_only;
  return layout;
}

inline void locate(const Need& need, DeviceArray* array) {
  if (array->size_bytes == 0) return;
  cudaPointerAttributes found{};
  const cudaError_t error = forget(cudaPointerGetAttributes(&found, array->address));
  const bool has_gpu = error != cudaErrorNoDevice && error != cudaErrorInsufficientDriver;
  if (has_gpu) require_cuda(error, "cudaPointerGetAttributes");
  const bool is_device =
      has_gpu && (found.type == cudaMemoryTypeDevice || found.type == cudaMemoryTypeManaged);
  const bool is_pinned =
      has_gpu && found.type == cudaMemoryTypeHost && found.devicePointer != nullptr;
  if (!is_device && !(is_pinned && need.may_be_pinned)) {
    const char* what = is_pinned ? " is pinned host memory"
                       : has_gpu ? " is CPU memory that no GPU reaches"
                                 : " is CPU memory, and there is no GPU here";
    refuse(array->name + what + ", expected CUDA memory" +
           (need.may_be_pinned ? " or pinned host memory" : "") + ": copy it to the device");
  }
  array->address = static_cast<std::uint8_t*>(found.devicePointer);
  if (is_device) array->device = found.device;
}

inline void require_size(const Need& need, const DeviceArray& array) {
  const std::uint64_t found = array.size_bytes, expected = need.size_bytes;
  const char* relation = need.fit == Fit::kAtLeast    ? "at least "
                         : need.fit == Fit::kMultiple ? "a multiple of "
                                                      : "";
  const bool fits = need.fit == Fit::kAtLeast    ? found >= expected
                    : need.fit == Fit::kMultiple ? found % expected == 0
                                                 : found == expected;
  if (fits) return;
  refuse(array.name + " has " + std::to_string(found) + " bytes, expected " + relation +
         std::to_string(expected) + ": " + need.advice);
}

// The array that `object` stands for, after all checks that need no other array. Raises TypeError
// or ValueError.
inline DeviceArray take_array(nb::handle object, const char* name, const Need& need) {
  DeviceArray array;
  array.name = name;
  const nb::object interface = nb::getattr(object, "__cuda_array_interface__", nb::none());
  const Layout layout = interface.is_none() ? read_dlpack(object, need, &array)
                                            : read_cuda_array_interface(interface, need, &array);
  array.size_bytes = layout.size_bytes();
  if (!layout.is_contiguous()) {
    refuse(array.name +
           " has gaps or another order between its elements, expected a C-contiguous "
           "array: pass a contiguous copy");
  }
  require_size(need, array);
  locate(need, &array);
  const auto start = reinterpret_cast<std::uintptr_t>(array.address);
  if (start % need.alignment != 0) {
    refuse(array.name + " begins " + std::to_string(start % need.alignment) +
           " bytes behind a multiple of " + std::to_string(need.alignment) +
           ", expected a multiple: pass memory that is aligned");
  }
  return array;
}

using Arrays = std::initializer_list<const DeviceArray*>;

// The device of all arrays; kNoDevice where none is in device memory.
inline int common_device(Arrays arrays) {
  const DeviceArray* first = nullptr;
  for (const DeviceArray* array : arrays) {
    if (array->device == kNoDevice) continue;
    if (first == nullptr) first = array;
    if (array->device == first->device) continue;
    refuse(array->name + " is on CUDA device " + std::to_string(array->device) + ", " +
           first->name + " on " + std::to_string(first->device) +
           ", expected one device: copy one of them");
  }
  return first == nullptr ? kNoDevice : first->device;
}

inline void require_apart(Arrays arrays) {
  for (const DeviceArray* const* a = arrays.begin(); a != arrays.end(); ++a) {
    for (const DeviceArray* const* b = a + 1; b != arrays.end(); ++b) {
      const bool overlap = (*a)->size_bytes != 0 && (*b)->size_bytes != 0 &&
                           (*a)->address < (*b)->address + (*b)->size_bytes &&
                           (*b)->address < (*a)->address + (*a)->size_bytes;
      if (!overlap) continue;
      refuse((*a)->name + " and " + (*b)->name +
             " overlap, expected memory of their own: copy one of them");
    }
  }
}

inline void require_stream(cudaStream_t stream, int device) {
  int found = device;
  const cudaError_t error = forget(cudaStreamGetDevice(stream, &found));
  // A driver from before 12.8 cannot say, and runs everything else.
  if (error == cudaErrorCallRequiresNewerDriver) return;
  require_cuda(error, "stream");
  if (found == device) return;
  refuse("stream is of CUDA device " + std::to_string(found) + ", the arrays are on " +
         std::to_string(device) + ": pass a stream of their device");
}

// Makes a device the current one of this thread until the end of the scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    require_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ == device) return;
    require_cuda(cudaSetDevice(device), "cudaSetDevice");
    is_changed_ = true;
  }
  ~CurrentDevice() {
    if (is_changed_) static_cast<void>(forget(cudaSetDevice(before_)));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool is_changed_ = false;
};

}  // namespace gymfast::bind

#endif  // GYMFAST_BIND_DEVICE_ARRAY_H_
