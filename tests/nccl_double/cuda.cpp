// The few functions of the CUDA runtime that gymfast calls: a stream is a thread.
#include "double.h"

namespace nccl_double {

Stream::Stream() : thread_([this] { run(); }) {}

Stream::~Stream() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Stream::add(std::function<void()> work) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    ++num_left_;
  }
  changed_.notify_all();
}

bool Stream::is_idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_left_ == 0;
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    lock.lock();
    --num_left_;
  }
}

namespace {

struct Marks {
  std::atomic<std::uint64_t> num_recorded{0}, num_done{0};
};
struct Event {
  std::shared_ptr<Marks> marks = std::make_shared<Marks>();
};
struct PointerAttributes {
  int type, device;
  void *device_pointer, *host_pointer;
};

thread_local int current_device = 0;

}  // namespace
}  // namespace nccl_double

using namespace nccl_double;

EXPORT const char* cudaGetErrorString(int error) {
  return error == 0 ? "no error" : error == 600 ? "device not ready" : "an error of the double";
}
EXPORT int cudaGetDeviceCount(int* count) {
  *count = knobs().device_count;
  return 0;
}
EXPORT int cudaDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
EXPORT int cudaGetDevice(int* device) {
  *device = current_device;
  return 0;
}
EXPORT int cudaSetDevice(int device) {
  if (device < 0 || device >= knobs().device_count) return 101;
  current_device = device;
  return 0;
}
EXPORT int cudaStreamCreateWithFlags(void** stream, unsigned) {
  *stream = new Stream;
  return 0;
}
EXPORT int cudaStreamDestroy(void* stream) {
  delete static_cast<Stream*>(stream);
  return 0;
}
EXPORT int cudaStreamQuery(void* stream) {
  return static_cast<Stream*>(stream)->is_idle() ? 0 : 600;
}
EXPORT int cudaEventCreateWithFlags(void** event, unsigned) {
  *event = new Event;
  return 0;
}
EXPORT int cudaEventDestroy(void* event) {
  delete static_cast<Event*>(event);
  return 0;
}
EXPORT int cudaEventRecord(void* event, void* stream) {
  const std::shared_ptr<Marks> marks = static_cast<Event*>(event)->marks;
  const std::uint64_t number = ++marks->num_recorded;
  if (stream == nullptr) {
    marks->num_done = number;
  } else {
    static_cast<Stream*>(stream)->add([marks, number] { marks->num_done = number; });
  }
  return 0;
}
EXPORT int cudaEventQuery(void* event) {
  const Marks& marks = *static_cast<Event*>(event)->marks;
  return marks.num_done == marks.num_recorded ? 0 : 600;
}
EXPORT int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  const std::shared_ptr<Marks> marks = static_cast<Event*>(event)->marks;
  const std::uint64_t number = marks->num_recorded;
  static_cast<Stream*>(stream)->add([marks, number] {
    while (marks->num_done < number) std::this_thread::sleep_for(std::chrono::microseconds(20));
  });
  return 0;
}
EXPORT int cudaPointerGetAttributes(PointerAttributes* attributes, const void* pointer) {
  // Managed memory: that of a GPU which the CPU reaches too.
  void* address = const_cast<void*>(pointer);
  *attributes = {knobs().host_memory != 0 ? 0 : 3, 0, address, address};
  return 0;
}
