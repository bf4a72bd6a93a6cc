#include "cuda/host_shim.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define GYMFAST_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GYMFAST_ASAN 1
#endif
#endif
#ifdef GYMFAST_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
// Defined where the kernels are built with ThreadSanitizer. This file never is: its books are kept
// by whoever runs, and fibres never run at the same time.
#ifdef GYMFAST_TSAN
#include <sanitizer/tsan_interface.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace gymfast::shim {
namespace {

constexpr std::size_t kStackBytes = 256 * 1024;
constexpr unsigned kMaxThreads = 1024;

struct Fibre {
  std::unique_ptr<std::uint8_t[]> stack;
  void* stack_pointer = nullptr;
  Fibre* next = nullptr;
  Fibre* previous = nullptr;
  unsigned thread = 0;
  unsigned num_shared = 0;  // declarations of shared memory that this thread passed
#ifdef GYMFAST_ASAN
  void* fake_stack = nullptr;
  const void* asan_bottom = nullptr;
  std::size_t asan_size = 0;
#endif
#ifdef GYMFAST_TSAN
  void* tsan = nullptr;
#endif
#if !defined(__x86_64__)
  ucontext_t context;
#endif
};

struct Barrier {
  unsigned arrived = 0;
  unsigned generation = 0;
  int op = -1;
  char order[2] = {};  // addresses that ThreadSanitizer orders memory by
};

struct Warp {
  Barrier barrier;
  std::uint64_t lanes[2][32];
};

struct Machine {
  Fibre host;
  std::vector<std::unique_ptr<Fibre>> fibres;
  Fibre* current = nullptr;
  unsigned num_threads = 0;
  unsigned num_live = 0;
  unsigned group = 0;
  unsigned idle_switches = 0;
  bool is_descending = false;
  const std::function<void()>* kernel = nullptr;
  Barrier barrier;
  Warp warps[kMaxThreads / 32];
  std::vector<std::unique_ptr<std::uint8_t[]>> shared;  // one exact piece for each declaration
  std::vector<std::size_t> shared_sizes;
  char started = 0;  // addresses that ThreadSanitizer orders the host and the kernel by
  char ended = 0;
  char allocated = 0;
};

struct Region {
  std::uintptr_t start;
  std::size_t size;
  cudaMemoryType type;
  int device;
};
struct StreamDevice {
  cudaStream_t stream;
  int device;
};

// What the calls of the CUDA runtime answer.
struct Runtime {
  std::vector<Region> regions;
  std::vector<StreamDevice> streams;
  cudaError_t launch_error = cudaSuccess;
  cudaError_t load_error = cudaSuccess;
  std::uint64_t num_launches = 0;
  int device = 0;
};

Runtime& runtime() {
  static Runtime instance;
  return instance;
}

Machine& machine() {
  static Machine instance;
  return instance;
}

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "host_shim: thread block %u, thread %u: %s\n", machine().group,
               machine().current == nullptr ? 0 : machine().current->thread, what);
  std::abort();
}

#if defined(__x86_64__)
// Saves callee-saved registers on the stack, swaps stacks. rdi: where to store the old stack
// pointer, rsi: the new one.
extern "C" void gymfast_shim_switch(void** from, void* to);
asm(R"(
.text
.type gymfast_shim_switch, @function
gymfast_shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gymfast_shim_switch, .-gymfast_shim_switch
)");
#endif

#ifdef GYMFAST_TSAN
void order_before(void* at) { __tsan_release(at); }
void order_after(void* at) { __tsan_acquire(at); }
#else
void order_before(void*) {}
void order_after(void*) {}
#endif

void switch_to(Fibre* to) {
  Machine& m = machine();
  Fibre* from = m.current;
  m.current = to;
  if (from == to) return;
#ifdef GYMFAST_ASAN
  __sanitizer_start_switch_fiber(&from->fake_stack, to->asan_bottom, to->asan_size);
#endif
#ifdef GYMFAST_TSAN
  __tsan_switch_to_fiber(to->tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__)
  gymfast_shim_switch(&from->stack_pointer, to->stack_pointer);
#else
  swapcontext(&from->context, &to->context);
#endif
#ifdef GYMFAST_ASAN
  __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

Fibre* leave_ring(Fibre* fibre) {
  Machine& m = machine();
  Fibre* next = fibre->next == fibre ? &m.host : fibre->next;
  fibre->previous->next = fibre->next;
  fibre->next->previous = fibre->previous;
  --m.num_live;
  m.idle_switches = 0;
  return next;
}

void fibre_main() {
#ifdef GYMFAST_ASAN
  const void* bottom;
  std::size_t size;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
  if (machine().host.asan_bottom == nullptr) {  // the first fibre of all comes from the host
    machine().host.asan_bottom = bottom;
    machine().host.asan_size = size;
  }
#endif
  for (;;) {
    order_after(&machine().started);
    (*machine().kernel)();
    order_before(&machine().ended);
    Fibre* self = machine().current;
    switch_to(leave_ring(self));  // reused by the next thread block
  }
}

void yield() {
  Machine& m = machine();
  if (++m.idle_switches > 4 * m.num_threads + 4) {
    die("no thread can go on: a barrier or warp operation that not all threads reach");
  }
  switch_to(m.current->next);
}

void wait(Barrier& barrier, unsigned expected, int op, bool orders_memory) {
  Machine& m = machine();
  const unsigned generation = barrier.generation;
  if (barrier.arrived != 0 && barrier.op != op) die("different warp operations meet");
  barrier.op = op;
  if (orders_memory) order_before(&barrier.order[generation & 1]);
  m.idle_switches = 0;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    while (barrier.generation == generation) yield();
  }
  if (orders_memory) order_after(&barrier.order[generation & 1]);
}

Fibre* make_fibre() {
  auto* fibre = new Fibre;
  fibre->stack.reset(new std::uint8_t[kStackBytes]);
#ifdef GYMFAST_ASAN
  fibre->asan_bottom = fibre->stack.get();
  fibre->asan_size = kStackBytes;
#endif
#ifdef GYMFAST_TSAN
  fibre->tsan = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__)
  auto top =
      reinterpret_cast<std::uintptr_t>(fibre->stack.get() + kStackBytes) & ~std::uintptr_t{15};
  auto* stack = reinterpret_cast<void**>(top);
  *--stack = nullptr;  // fibre_main never returns; keeps the stack aligned as after a call
  *--stack = reinterpret_cast<void*>(&fibre_main);
  for (int i = 0; i < 6; ++i) *--stack = nullptr;
  fibre->stack_pointer = stack;
#else
  getcontext(&fibre->context);
  fibre->context.uc_stack.ss_sp = fibre->stack.get();
  fibre->context.uc_stack.ss_size = kStackBytes;
  fibre->context.uc_link = nullptr;
  makecontext(&fibre->context, fibre_main, 0);
#endif
  return fibre;
}

void run_group(unsigned num_threads) {
  Machine& m = machine();
  m.barrier = Barrier();
  for (unsigned w = 0; w < num_threads / 32; ++w) m.warps[w].barrier = Barrier();
  for (std::size_t i = 0; i < m.shared.size(); ++i) {
    std::memset(m.shared[i].get(), 0xA5, m.shared_sizes[i]);
  }
  m.num_live = num_threads;
  m.idle_switches = 0;
  for (unsigned i = 0; i < num_threads; ++i) {
    Fibre* fibre = m.fibres[i].get();
    Fibre* above = m.fibres[(i + 1) % num_threads].get();
    Fibre* below = m.fibres[(i + num_threads - 1) % num_threads].get();
    fibre->thread = i;
    fibre->num_shared = 0;
    fibre->next = m.is_descending ? below : above;
    fibre->previous = m.is_descending ? above : below;
  }
  order_before(&m.started);
  switch_to(m.fibres[m.is_descending ? num_threads - 1 : 0].get());
  order_after(&m.ended);
  if (m.num_live != 0) die("the thread block ended before its threads");
}

}  // namespace

cudaError_t run_grid(unsigned num_groups, unsigned num_threads,
                     const std::function<void()>& kernel) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  Runtime& r = runtime();
  if (r.launch_error != cudaSuccess) return r.launch_error;
  ++r.num_launches;
  Machine& m = machine();
  if (num_threads == 0 || num_threads % 32 != 0 || num_threads > kMaxThreads) {
    die("a thread block has 32, 64, .. 1024 threads");
  }
#ifdef GYMFAST_TSAN
  if (m.host.tsan == nullptr) m.host.tsan = __tsan_get_current_fiber();
#endif
  while (m.fibres.size() < num_threads) m.fibres.emplace_back(make_fibre());
  m.current = &m.host;
  m.num_threads = num_threads;
  m.kernel = &kernel;
  m.shared.clear();
  m.shared_sizes.clear();
  for (unsigned group = 0; group < num_groups; ++group) {
    m.group = group;
    run_group(num_threads);
  }
  m.kernel = nullptr;
  return cudaSuccess;
}

void set_memory(const void* start, std::size_t size, cudaMemoryType type, int device) {
  runtime().regions.push_back({reinterpret_cast<std::uintptr_t>(start), size, type, device});
}
void forget_memory() { runtime().regions.clear(); }
void set_stream_device(cudaStream_t stream, int device) {
  runtime().streams.push_back({stream, device});
}
void set_launch_error(cudaError_t error) { runtime().launch_error = error; }

void set_load_error(cudaError_t error) { runtime().load_error = error; }

cudaError_t load_error() { return runtime().load_error; }
std::uint64_t num_launches() { return runtime().num_launches; }

void set_descending(bool is_descending) { machine().is_descending = is_descending; }

Index thread_index() { return {machine().current->thread}; }
Index group_index() { return {machine().group}; }

void* shared_memory(std::size_t size) {
  Machine& m = machine();
  const unsigned i = m.current->num_shared++;
  if (i == m.shared.size()) {
    m.shared.emplace_back(new std::uint8_t[size]);
    m.shared_sizes.push_back(size);
    std::memset(m.shared[i].get(), 0xA5, size);
    order_before(&m.allocated);
  }
  order_after(&m.allocated);
  if (m.shared_sizes[i] != size) die("threads declare different shared memory");
  return m.shared[i].get();
}

void sync_threads() {
  Machine& m = machine();
  if (m.num_live != m.num_threads) die("a barrier after a thread of the block has ended");
  wait(m.barrier, m.num_threads, 0, true);
}

void sync_warp() {
  Machine& m = machine();
  wait(m.warps[m.current->thread / 32].barrier, 32, 100, true);
}

const std::uint64_t* exchange(WarpOp op, unsigned mask, std::uint64_t value) {
  Machine& m = machine();
  if (mask != 0xFFFFFFFFu) die("warp operations here take all 32 lanes");
  Warp& warp = m.warps[m.current->thread / 32];
  // A lane is at most one operation ahead of another, so two sets of slots are enough.
  std::uint64_t* lanes = warp.lanes[warp.barrier.generation & 1];
  lanes[m.current->thread % 32] = value;
  wait(warp.barrier, 32, static_cast<int>(op), false);
  return lanes;
}

}  // namespace gymfast::shim

using gymfast::shim::runtime;

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = runtime().device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  runtime().device = device;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  void* address = const_cast<void*>(pointer);
  *attributes = {cudaMemoryTypeDevice, 0, address};
  for (const auto& region : runtime().regions) {
    if (reinterpret_cast<std::uintptr_t>(pointer) - region.start >= region.size) continue;
    const bool is_reached = region.type != cudaMemoryTypeUnregistered;
    *attributes = {region.type, region.device, is_reached ? address : nullptr};
  }
  return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  *device = runtime().device;
  for (const auto& known : runtime().streams) {
    if (known.stream == stream) *device = known.device;
  }
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? "unspecified launch failure" : "another CUDA error";
}
