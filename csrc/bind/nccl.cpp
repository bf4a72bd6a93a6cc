// NCCL for gymfast.channels: arguments are checked here, the GIL is released around all work, and
// Status becomes a Python error in one place.
#include "bind/nccl.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "nccl/arena.h"
#include "nccl/communicator.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using gymfast::nccl::Arena;
using gymfast::nccl::Clock;
using gymfast::nccl::Communicator;
using gymfast::nccl::Library;
using gymfast::nccl::Problem;
using gymfast::nccl::Registration;
using gymfast::nccl::Slot;
using gymfast::nccl::Status;
using gymfast::nccl::UniqueId;
using Paths = std::vector<std::string>;

constexpr double kLongest_s = 1e8;  // years: further ahead a clock overflows

[[noreturn]] void raise(const char* type, const std::string& text) {
  nb::object error = nb::module_::import_("gymfast.errors").attr(type);
  PyErr_SetString(error.ptr(), text.c_str());
  throw nb::python_error();
}

Clock::duration to_duration(double seconds) {
  const std::chrono::duration<double> wait(std::clamp(seconds, 0.0, kLongest_s));
  return std::chrono::duration_cast<Clock::duration>(wait);
}

Clock::time_point after(double seconds) { return Clock::now() + to_duration(seconds); }

nb::bytes to_bytes(const UniqueId& id) { return nb::bytes(id.bytes, sizeof(id.bytes)); }

UniqueId to_id(const nb::bytes& bytes) {
  UniqueId id;
  if (bytes.size() != sizeof(id.bytes)) {
    const std::string found = std::to_string(bytes.size());
    throw nb::value_error(("a unique id of NCCL has 128 bytes, found " + found).c_str());
  }
  std::memcpy(id.bytes, bytes.c_str(), sizeof(id.bytes));
  return id;
}

// A library as Python sees it; it lives as long as the process.
struct Nccl {
  const Library* library;

  const Library& with_cuda() const {
    if (!library->cuda_problem.empty()) raise("MissingDependencyError", library->cuda_problem);
    return *library;
  }
};

Nccl load(const std::string& path, const Paths& beside, const std::string& cuda_path,
          const Paths& cuda_beside) {
  gymfast::nccl::Loaded loaded;
  {
    nb::gil_scoped_release release;
    loaded = gymfast::nccl::load({path, beside}, {cuda_path, cuda_beside});
  }
  if (loaded.library == nullptr) raise("MissingDependencyError", loaded.problem);
  return {loaded.library};
}

nb::bytes unique_id(const Nccl& nccl) {
  UniqueId id;
  int result;
  {
    nb::gil_scoped_release release;
    result = nccl.library->nccl.get_unique_id(&id);
  }
  if (result != gymfast::nccl::kNcclSuccess) {
    raise("ChannelError", std::string("ncclGetUniqueId: ") +
                              nccl.library->nccl.get_error_string(result) + " (result " +
                              std::to_string(result) + ")");
  }
  return to_bytes(id);
}

int ask_cuda(const Nccl& nccl, int (*gymfast::nccl::CudaTable::*call)(int*), const char* name) {
  const Library& library = nccl.with_cuda();
  int value = 0;
  const int result = (library.cuda.*call)(&value);
  if (result != gymfast::nccl::kCudaSuccess) {
    raise("ChannelError", std::string(name) + ": " + library.cuda.get_error_string(result));
  }
  return value;
}

// Memory of NCCL; it lives as long as Python refers to it.
class Memory {
 public:
  Memory(const Nccl& nccl, std::size_t num_bytes, int device) {
    if (num_bytes == 0) throw nb::value_error("num_bytes is 0, expected 1 or more");
    memory_ = std::make_unique<Arena>(nccl.with_cuda(), device);
    std::string problem;
    {
      nb::gil_scoped_release release;
      problem = memory_->allocate(num_bytes);
    }
    if (!problem.empty()) raise("ChannelError", problem);
  }
  ~Memory() {
    nb::gil_scoped_release release;
    memory_.reset();
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  const Arena& get() const { return *memory_; }

 private:
  std::unique_ptr<Arena> memory_;
};

// A communicator and the slots of its next round, whose memory is taken once.
class Rank {
 public:
  Rank(const Nccl& nccl, int device, std::size_t depth, double grace_s)
      : nccl_(nccl), device_(device), depth_(depth), grace_s_(grace_s) {
    if (depth == 0) throw nb::value_error("depth is 0, expected 1 or more");
    communicator_ =
        std::make_shared<Communicator>(nccl.with_cuda(), device, depth, to_duration(grace_s));
    call([&] { return communicator_->open(); });
  }
  ~Rank() {
    nb::gil_scoped_release release;
    communicator_.reset();
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  void join(const nb::bytes& id, int num_ranks, int rank, int max_ctas) {
    if (rank < 0 || rank >= num_ranks) throw nb::value_error("rank is not in the group");
    const UniqueId its_id = to_id(id);
    call([&] { return communicator_->join(its_id, num_ranks, rank, max_ctas); });
  }

  std::unique_ptr<Rank> shrink(std::vector<int> excluded, double timeout_s) {
    auto child = std::make_unique<Rank>(nccl_, device_, depth_, grace_s_);
    const Clock::time_point until = after(timeout_s);
    child->call([&] { return child->communicator_->shrink(communicator_, excluded, until); });
    return child;
  }

  std::unique_ptr<Rank> grow(int num_ranks, const nb::bytes& id) {
    auto child = std::make_unique<Rank>(nccl_, device_, depth_, grace_s_);
    const bool has_id = id.size() != 0;
    const UniqueId its_id = has_id ? to_id(id) : UniqueId{};
    child->call([&] {
      return child->communicator_->grow(communicator_, num_ranks, has_id ? &its_id : nullptr);
    });
    return child;
  }

  void grow_into(const nb::bytes& id, int num_ranks, int rank, int max_ctas) {
    const UniqueId its_id = to_id(id);
    call([&] { return communicator_->grow_into(its_id, num_ranks, rank, max_ctas); });
  }

  nb::bytes id_to_grow() {
    UniqueId id;
    call([&] { return communicator_->id_to_grow(&id); });
    return to_bytes(id);
  }

  bool wait_until_ready(double seconds) {
    return in_time([&] { return communicator_->wait_until_ready(after(seconds)); });
  }

  bool wait(std::size_t num_left, double seconds) {
    return in_time([&] { return communicator_->wait(num_left, after(seconds)); });
  }

  bool register_memory(const Memory& memory, bool is_window, double seconds) {
    const Registration how = is_window ? Registration::kWindow : Registration::kBuffer;
    return in_time([&] {
      return communicator_->register_memory(memory.get().address(), memory.get().num_bytes(), how,
                                            after(seconds));
    });
  }

  void deregister() {
    nb::gil_scoped_release release;
    communicator_->deregister();
  }

  bool begin(const std::vector<std::tuple<int, std::uintptr_t, std::size_t>>& slots,
             std::uintptr_t producer, double seconds) {
    slots_.clear();
    for (const auto& [root, address, num_bytes] : slots) {
      slots_.push_back({root, reinterpret_cast<void*>(address), num_bytes});
    }
    return in_time([&] {
      return communicator_->begin(slots_, reinterpret_cast<void*>(producer), after(seconds));
    });
  }

  void stop(bool is_kept) {
    nb::gil_scoped_release release;
    communicator_->stop(is_kept);
  }

  void close(double seconds) {
    nb::gil_scoped_release release;
    communicator_->close(after(seconds));
  }

  const Communicator& communicator() const { return *communicator_; }

 private:
  template <class Work>
  void call(Work&& work) {
    raise_unless_ok(run(work));
  }

  template <class Work>
  bool in_time(Work&& work) {
    const Status status = run(work);
    if (status.problem == Problem::kTimeout) return false;
    raise_unless_ok(status);
    return true;
  }

  template <class Work>
  Status run(Work&& work) {
    nb::gil_scoped_release release;
    return work();
  }

  void raise_unless_ok(const Status& status) const {
    if (status.is_ok()) return;
    const std::string text = communicator_->describe(status);
    if (status.problem == Problem::kArgument) throw nb::value_error(text.c_str());
    raise("ChannelError", text);
  }

  const Nccl nccl_;
  const int device_;
  const std::size_t depth_;
  const double grace_s_;
  std::shared_ptr<Communicator> communicator_;
  std::vector<Slot> slots_;
};

}  // namespace

void bind_nccl(nb::module_& m) {
  nb::class_<Nccl>(m, "NcclLibrary", "An NCCL that was found; see load_nccl.")
      .def_prop_ro("version",
                   [](const Nccl& n) { return gymfast::nccl::version_text(n.library->version); })
      .def_prop_ro("path", [](const Nccl& n) { return n.library->path; })
      .def_prop_ro("features", [](const Nccl& n) { return n.library->features; })
      .def_prop_ro("cuda_path", [](const Nccl& n) { return n.library->cuda_path; })
      .def_prop_ro(
          "cuda_problem", [](const Nccl& n) { return n.library->cuda_problem; },
          "Why there is no CUDA runtime; empty if there is one.")
      .def("unique_id", &unique_id, "What all ranks of a new communicator need.")
      .def("device_count",
           [](const Nccl& n) {
             return ask_cuda(n, &gymfast::nccl::CudaTable::get_device_count, "cudaGetDeviceCount");
           })
      .def("driver_version", [](const Nccl& n) {
        return ask_cuda(n, &gymfast::nccl::CudaTable::driver_get_version, "cudaDriverGetVersion");
      });

  nb::class_<Memory>(m, "NcclMemory", "Memory of a GPU that NCCL can register.")
      .def(nb::init<const Nccl&, std::size_t, int>(), "library"_a, "num_bytes"_a, "device"_a)
      .def_prop_ro(
          "address",
          [](const Memory& m) { return reinterpret_cast<std::uintptr_t>(m.get().address()); })
      .def_prop_ro("num_bytes", [](const Memory& m) { return m.get().num_bytes(); })
      .def_prop_ro(
          "is_managed", [](const Memory& m) { return m.get().is_managed(); },
          "Whether the CPU reaches it too.");

  nb::class_<Rank>(m, "NcclRank", "One rank of a communicator of NCCL (csrc/nccl/communicator.h).")
      .def(nb::init<const Nccl&, int, std::size_t, double>(), "library"_a, "device"_a, "depth"_a,
           "grace_s"_a = 10.0)
      .def("join", &Rank::join, "unique_id"_a, "num_ranks"_a, "rank"_a, "max_ctas"_a = 0,
           "Begins to make a communicator.")
      .def("shrink", &Rank::shrink, "excluded"_a, "timeout_s"_a,
           "Begins to make one of the ranks that are left.")
      .def("grow", &Rank::grow, "num_ranks"_a, "unique_id"_a,
           "Begins to make one with more ranks; the id on the rank that asked for it, else b''.")
      .def("grow_into", &Rank::grow_into, "unique_id"_a, "num_ranks"_a, "rank"_a, "max_ctas"_a = 0,
           "As grow, for a rank that is new.")
      .def("id_to_grow", &Rank::id_to_grow, "What new ranks need to grow into this one.")
      .def("wait_until_ready", &Rank::wait_until_ready, "seconds"_a,
           "Whether the communicator could be used within that time.")
      .def("register_memory", &Rank::register_memory, "memory"_a, "is_window"_a, "seconds"_a,
           "Registers memory once, before the first round; False if not within that time. A window "
           "that fails ends the communicator, a buffer changes nothing.")
      .def("deregister", &Rank::deregister, "Takes the registration back.")
      .def("begin", &Rank::begin, "slots"_a, "producer"_a, "seconds"_a,
           "Begins a round of (root, address, bytes) after what the stream `producer` was given; "
           "False if the round before was not launched within that time.")
      .def("wait", &Rank::wait, "num_left"_a, "seconds"_a,
           "Whether at most num_left rounds were under way within that time.")
      .def("stop", &Rank::stop, "is_kept"_a, "Ends all rounds, from any thread.")
      .def("close", &Rank::close, "seconds"_a, "Gives everything back; may be called twice.")
      .def_prop_ro("num_under_way", [](const Rank& r) { return r.communicator().num_under_way(); })
      .def_prop_ro("can_shrink", [](const Rank& r) { return r.communicator().can_shrink(); })
      .def_prop_ro(
          "registration",
          [](const Rank& r) {
            switch (r.communicator().registration()) {
              case Registration::kWindow: return "window";
              case Registration::kBuffer: return "buffer";
              default: return "none";
            }
          },
          "How NCCL knows the memory of register_memory: window, buffer or none.")
      .def_prop_ro("is_usable", [](const Rank& r) { return r.communicator().is_usable(); })
      .def_prop_ro(
          "is_stuck", [](const Rank& r) { return r.communicator().is_stuck(); },
          "Whether NCCL may still use the memory of unfinished rounds.")
      .def_prop_ro("rank", [](const Rank& r) { return r.communicator().rank(); })
      .def_prop_ro("num_ranks", [](const Rank& r) { return r.communicator().num_ranks(); });

  m.def("load_nccl", &load, "path"_a, "beside"_a, "cuda_path"_a, "cuda_beside"_a,
        "The NCCL that this process has, that at `path`, the first of `beside` (files), or that of "
        "the system; the CUDA runtime likewise. Empty paths are none.");
}
