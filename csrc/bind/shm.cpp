#include "bind/shm.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <string>

#include "shm/ring.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using gymfast::Ring;
using gymfast::RingError;
using gymfast::RingStatus;
using U8In = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using U8InOut = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Ring::Deadline in_seconds(double seconds) {
  const auto left = std::chrono::duration<double>(seconds);
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(left);
}

void raise_unless_ok(const RingStatus& status) {
  std::string text;
  switch (status.error) {
    case RingError::kOk: return;
    case RingError::kDeadline: text = "the others did not come by the deadline"; break;
    case RingError::kCancelled: text = "it was cancelled"; break;
    case RingError::kWriterGone: text = "the rank that sends is gone"; break;
    case RingError::kOtherSize:
      text = "an item of " + std::to_string(status.found) + " bytes came, another size is expected";
      break;
    case RingError::kSystem:
      text = std::string("the system says: ") + std::strerror(static_cast<int>(status.found));
      break;
    case RingError::kNotARing: text = "that is no ring of this version of gymfast"; break;
    case RingError::kNotForThis: text = "shared-memory rings need the futexes of Linux"; break;
  }
  nb::object type = nb::module_::import_("gymfast.errors").attr("ChannelError");
  PyErr_SetObject(type.ptr(), type(text).ptr());
  throw nb::python_error();
}

}  // namespace

void bind_shm(nb::module_& m) {
  nb::class_<Ring>(m, "ShmRing",
                   "A ring of chunks in memory that processes share; raises ChannelError.")
      .def_static(
          "create",
          [](std::uint32_t rank, std::uint32_t num_ranks, std::uint64_t chunk_bytes,
             std::uint32_t num_chunks) {
            auto ring = std::make_unique<Ring>();
            raise_unless_ok(ring->create(rank, num_ranks, chunk_bytes, num_chunks));
            return ring.release();
          },
          "rank"_a, "num_ranks"_a, "chunk_bytes"_a, "num_chunks"_a,
          "A new ring, in which this rank writes.")
      .def_static(
          "open",
          [](const std::string& path, std::uint32_t rank) {
            auto ring = std::make_unique<Ring>();
            raise_unless_ok(ring->open(path, rank));
            return ring.release();
          },
          "path"_a, "rank"_a, "The ring of another process, for this rank to read.")
      .def(
          "write",
          [](Ring& ring, U8In data, double timeout_s) {
            std::vector<std::uint32_t> lost;
            RingStatus status;
            {
              nb::gil_scoped_release release;
              status = ring.write(data.data(), data.size(), in_seconds(timeout_s), &lost);
            }
            raise_unless_ok(status);
            return lost;
          },
          "data"_a, "timeout_s"_a, "Puts an item in; returns ranks that did not take one in time.")
      .def(
          "read",
          [](Ring& ring, U8InOut data, double timeout_s) {
            RingStatus status;
            {
              nb::gil_scoped_release release;
              status = ring.read(data.data(), data.size(), in_seconds(timeout_s));
            }
            raise_unless_ok(status);
          },
          "data"_a, "timeout_s"_a, "Fills data with the next item, which has to be of its size.")
      .def("leave", &Ring::leave, "This rank takes part no more.")
      .def("drop", &Ring::drop, "rank"_a, "A rank is known to be gone: nobody waits for it.")
      .def("cancel", &Ring::cancel, "Ends waits of this object soon, from any thread.")
      .def_prop_ro("fd", &Ring::fd, "The file descriptor of the memory.");
}
