// gymfast._core: the CPU codec, the frame parser and, in nccl.cpp, NCCL. Arguments are checked
// here, the GIL is released around all work, and Status becomes a Python error in one place.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "bind/nccl.h"
#include "bind/shm.h"
#include "bind/sim.h"
#include "cpu/codec.h"
#include "cpu/zstd_sparse.h"
#include "format/frame.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using gymfast::Digest;
using gymfast::Error;
using gymfast::Status;

using U8In = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using U8InOut = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DigestsInOut = nb::ndarray<std::uint64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using DigestsOut = nb::ndarray<nb::numpy, std::uint64_t, nb::shape<-1, 2>, nb::c_contig>;

// Holds a read-only contiguous buffer; nanobind's bytes caster takes bytes only.
class BufferView {
 public:
  explicit BufferView(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  ~BufferView() { PyBuffer_Release(&view_); }
  std::span<const std::uint8_t> span() const {
    return {static_cast<const std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_;
};

[[noreturn]] void raise_status(const Status& status, const char* unit) {
  const bool is_checksum = status.error == Error::kSectionCheck ||
                           status.error == Error::kFrameCheck ||
                           status.error == Error::kResultCheck;
  std::string text = std::string(gymfast::error_text(status.error)) + " (error " +
                     std::to_string(static_cast<int>(status.error)) + ", " + unit + " " +
                     std::to_string(status.where);
  if (status.found != 0 || status.expected != 0) {
    text +=
        ", found " + std::to_string(status.found) + ", expected " + std::to_string(status.expected);
  }
  text += ")";
  nb::object errors = nb::module_::import_("gymfast.errors");
  nb::object type = errors.attr(is_checksum ? "ChecksumError" : "FormatError");
  nb::object error = type(text, static_cast<int>(status.error));
  PyErr_SetObject(type.ptr(), error.ptr());
  throw nb::python_error();
}

void raise_unless_ok(const Status& status, const char* unit = "block") {
  if (status.error == Error::kBadArgument) {
    throw nb::value_error(gymfast::error_text(status.error));
  }
  if (!status.is_ok()) raise_status(status, unit);
}

const gymfast::Kernels& kernels() {
  const gymfast::Kernels* active = gymfast::active_kernels();
  if (active == nullptr) {
    throw nb::value_error(
        "GYMFAST_CPU names no instruction set that this CPU and build have: unset it, or take one "
        "of gymfast._core.cpu_targets()");
  }
  return *active;
}

// The five numbers of a geometry, as they come from Python.
struct Shape {
  std::uint64_t num_units, unit_bytes, cols, tile_rows, tile_cols;
};

gymfast::BlockRun make_run(const Shape& shape, std::size_t threads) {
  kernels();
  gymfast::BlockRun run;
  run.geometry = {shape.num_units, shape.unit_bytes, shape.cols, shape.tile_rows, shape.tile_cols};
  raise_unless_ok(run.geometry.check());
  run.num_blocks = run.geometry.num_blocks();
  run.num_threads = threads;
  return run;
}

void require_size(const char* what, std::size_t found, std::uint64_t expected) {
  if (found == expected) return;
  throw nb::value_error((std::string(what) + " has " + std::to_string(found) +
                         " bytes, the geometry says " + std::to_string(expected))
                            .c_str());
}

void set_digests(gymfast::BlockRun* run, DigestsInOut& digests) {
  if (digests.shape(0) != run->geometry.num_blocks()) {
    throw nb::value_error("digests need one row for each block of the tensor");
  }
  run->digests = reinterpret_cast<Digest*>(digests.data());
}

static_assert(sizeof(Digest) == 16);

DigestsOut digest_blocks(U8In data, std::uint64_t num_units, std::uint64_t unit_bytes,
                         std::uint64_t cols, std::uint64_t tile_rows, std::uint64_t tile_cols,
                         std::size_t threads, std::uint64_t first_block, std::int64_t num_blocks) {
  gymfast::BlockRun run = make_run({num_units, unit_bytes, cols, tile_rows, tile_cols}, threads);
  require_size("data", data.size(), run.geometry.num_bytes());
  const std::uint64_t total = run.geometry.num_blocks();
  const std::uint64_t left = total - std::min(first_block, total);
  run.first_block = first_block;
  run.num_blocks = num_blocks < 0 ? left : static_cast<std::uint64_t>(num_blocks);
  if (first_block > total || run.num_blocks > left) {
    const std::string asked =
        std::to_string(run.num_blocks) + " blocks from " + std::to_string(first_block);
    throw nb::value_error((asked + " of a tensor of " + std::to_string(total)).c_str());
  }
  const std::size_t rows = static_cast<std::size_t>(run.num_blocks);
  auto* result = new std::uint64_t[2 * rows + 1]();
  nb::capsule owner(result, [](void* p) noexcept { delete[] static_cast<std::uint64_t*>(p); });
  // The codec indexes by block number; the result holds the asked rows only.
  run.digests = reinterpret_cast<Digest*>(result) - first_block;
  Status status;
  {
    nb::gil_scoped_release release;
    status = gymfast::digest_run(run, data.data());
  }
  raise_unless_ok(status);
  return DigestsOut(result, {rows, 2}, owner);
}

std::tuple<int, int> class_params(U8In base, std::uint64_t unit_bytes) {
  if (unit_bytes != 1 && unit_bytes != 2 && unit_bytes != 4) {
    throw nb::value_error("unit_bytes is 1, 2 or 4");
  }
  const gymfast::ClassParams params =
      gymfast::choose_classes(base.data(), base.size() / unit_bytes, unit_bytes);
  return {params.shift, params.base};
}

std::uint64_t check64(nb::args parts) {
  const gymfast::DigestFunction digest = kernels().digest;
  Digest sum;
  std::uint64_t offset = 0;
  for (nb::handle part : parts) {
    const BufferView view(part);
    nb::gil_scoped_release release;
    digest(view.span().data(), view.span().size(), offset, &sum);
    offset += view.span().size();
  }
  return gymfast::fold64(sum);
}

// A new bytes object of `size` bytes that `write` fills.
template <class Write>
nb::bytes make_bytes(std::size_t size, Write&& write) {
  PyObject* object = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (object == nullptr) throw nb::python_error();
  if (size != 0) write(reinterpret_cast<std::uint8_t*>(PyBytes_AsString(object)));
  return nb::steal<nb::bytes>(object);
}

struct EncodeArguments {
  int profile, class_shift, class_base;
  bool has_base;
};

std::tuple<nb::bytes, std::uint64_t, nb::bytes> encode(gymfast::BlockRun run,
                                                       const EncodeArguments& a, std::uint8_t* base,
                                                       const std::uint8_t* next, bool update,
                                                       bool undo) {
  if (a.profile < 0 || a.profile > 2) throw nb::value_error("profile is 0, 1 or 2");
  run.params = {static_cast<gymfast::Profile>(a.profile), a.class_shift, a.class_base, a.has_base};
  gymfast::EncodedRun out;
  Status status;
  {
    nb::gil_scoped_release release;
    status = gymfast::encode_run(run, base, next, update, undo, &out);
  }
  raise_unless_ok(status);
  return {make_bytes(out.body_bytes(), [&](std::uint8_t* to) { out.write_body(to); }),
          out.num_changed,
          make_bytes(out.undo_bytes(), [&](std::uint8_t* to) { out.write_undo(to); })};
}

nb::object digest_or_none(const Digest& digest, bool is_present) {
  if (!is_present) return nb::none();
  return nb::make_tuple(digest.lane[0], digest.lane[1]);
}

nb::tuple tensor_tuple(const gymfast::TensorView& t, const nb::tuple& blocks) {
  nb::list dims;
  for (const std::uint64_t dim : t.dims) dims.append(dim);
  const unsigned status = static_cast<unsigned>(t.status);
  const bool has_base = status == 0 || status == 1 || status == 3 || status == 4;
  const bool has_new = status == 1 || status == 2 || status == 3;
  return nb::make_tuple(static_cast<unsigned>(t.kind), t.unit_bytes, t.class_shift, t.class_base,
                        nb::str(t.name.data(), t.name.size()),
                        nb::str(t.dtype.data(), t.dtype.size()), nb::tuple(dims), t.num_bytes,
                        t.cols, t.tile_rows, t.tile_cols, nb::str(t.target.data(), t.target.size()),
                        blocks, status, digest_or_none(t.base_digest, has_base),
                        digest_or_none(t.new_digest, has_new));
}

// profile, base_root, new_root, tensors. Blocks carry (first_block, num_blocks, body offset, size).
nb::tuple parse_frame(nb::handle buffer) {
  const BufferView view(buffer);
  const gymfast::DigestFunction digest = kernels().digest;
  gymfast::FrameView frame;
  Status status;
  {
    nb::gil_scoped_release release;
    status = gymfast::parse_frame(view.span(), digest, &frame);
  }
  raise_unless_ok(status, "byte");
  nb::list tensors;
  for (const gymfast::TensorView& t : frame.tensors) {
    nb::list blocks;
    for (const gymfast::BlocksView& b : t.blocks) {
      const auto offset =
          static_cast<std::uint64_t>(b.table_and_payloads.data() - view.span().data());
      blocks.append(
          nb::make_tuple(b.first_block, b.num_blocks, offset, b.table_and_payloads.size()));
    }
    tensors.append(tensor_tuple(t, nb::tuple(blocks)));
  }
  auto root = [](std::span<const std::uint8_t> bytes) {
    return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  return nb::make_tuple(frame.profile, root(frame.base_root), root(frame.new_root),
                        nb::tuple(tensors));
}

using ZstdFunction = decltype(&gymfast::zstd_xor_frame);

void require_same_size(const U8In& old_bytes, const U8In& new_bytes) {
  if (old_bytes.size() == new_bytes.size()) return;
  throw nb::value_error(("old has " + std::to_string(old_bytes.size()) + " bytes, new has " +
                         std::to_string(new_bytes.size()))
                            .c_str());
}

nb::bytes zstd_frame(ZstdFunction make_frame, const U8In& old_bytes, const U8In& new_bytes,
                     std::size_t threads) {
  require_same_size(old_bytes, new_bytes);
  const gymfast::Kernels& active = kernels();
  gymfast::ZstdFrame frame;
  {
    nb::gil_scoped_release release;
    frame = make_frame(active, old_bytes.data(), new_bytes.data(), old_bytes.size(), threads);
  }
  return make_bytes(frame.num_bytes(), [&](std::uint8_t* to) { frame.write(to); });
}

std::tuple<nb::bytes, std::size_t> zstd_xor_part(const U8In& old_bytes, const U8In& new_bytes,
                                                 std::size_t start, std::size_t end,
                                                 std::size_t threads) {
  require_same_size(old_bytes, new_bytes);
  const std::size_t size = new_bytes.size();
  const auto is_edge = [&](std::size_t at) {
    return at == size || (at < size && at % gymfast::kZstdPartBytes == 0);
  };
  if (!is_edge(start) || !is_edge(end) || start > end || (start == end && size != 0)) {
    throw nb::value_error(("a part from " + std::to_string(start) + " to " + std::to_string(end) +
                           " of " + std::to_string(size) + " bytes: edges are multiples of " +
                           std::to_string(gymfast::kZstdPartBytes) + ", or the end")
                              .c_str());
  }
  const gymfast::Kernels& active = kernels();
  gymfast::ZstdFrame frame;
  {
    nb::gil_scoped_release release;
    frame = gymfast::zstd_xor_part(active, old_bytes.data(), new_bytes.data(), size, start, end,
                                   threads);
  }
  return {make_bytes(frame.num_bytes(), [&](std::uint8_t* to) { frame.write(to); }),
          frame.num_changed};
}

std::tuple<nb::bytes, nb::bytes> list_changes(const U8In& before, const U8In& after,
                                              std::size_t unit_bytes) {
  if (unit_bytes != 1 && unit_bytes != 2 && unit_bytes != 4) {
    throw nb::value_error("unit_bytes is 1, 2 or 4");
  }
  const std::size_t size = after.size(), num_units = size / unit_bytes;
  const auto is_aligned = [&](const U8In& bytes) {
    return reinterpret_cast<std::uintptr_t>(bytes.data()) % unit_bytes == 0;
  };
  if (before.size() != size || size % unit_bytes != 0 || num_units > UINT32_MAX ||
      !is_aligned(before) || !is_aligned(after)) {
    throw nb::value_error(("before has " + std::to_string(before.size()) + " bytes, after has " +
                           std::to_string(size) + ": both need the same whole number of units of " +
                           std::to_string(unit_bytes) + ", at most 2^32 - 1, and their alignment")
                              .c_str());
  }
  const gymfast::Kernels& active = kernels();
  // Kept: pages of a new list would cost more than the comparison.
  thread_local std::vector<std::uint32_t> positions;
  thread_local std::vector<std::uint8_t> values;
  std::size_t found = 0;
  {
    nb::gil_scoped_release release;
    if (positions.size() < num_units) positions.resize(num_units);
    if (values.size() < size) values.resize(size);
    const auto list = active.list_units[std::countr_zero(unit_bytes)];
    found = list(before.data(), after.data(), num_units, positions.data(), values.data());
  }
  const auto copy = [](const void* from, std::size_t num_bytes) {
    return make_bytes(num_bytes, [&](std::uint8_t* to) { std::memcpy(to, from, num_bytes); });
  };
  return {copy(positions.data(), 4 * found), copy(values.data(), unit_bytes * found)};
}

std::vector<std::string> cpu_targets() {
  std::vector<std::string> names;
  for (const gymfast::Kernels* k : gymfast::available_kernels()) names.emplace_back(k->name);
  return names;
}

void force_cpu_target(nb::object name) {
  const bool is_known = name.is_none()
                            ? gymfast::force_kernels(nullptr)
                            : gymfast::force_kernels(nb::cast<std::string>(name).c_str());
  if (!is_known) throw nb::value_error("no such instruction set here: see cpu_targets()");
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The native codec of gymfast: frames, blocks and digests on the CPU.";
  // Threads of channels that nobody closed may hold objects when a process ends.
  nb::set_leak_warnings(false);

  bind_nccl(m);
  bind_shm(m);
  bind_sim(m);

  m.def("cpu_targets", &cpu_targets, "Instruction sets that run here, slowest first.");
  m.def(
      "cpu_target", [] { return std::string(kernels().name); },
      "The instruction set in use: GYMFAST_CPU, a forced one, or the fastest.");
  m.def("force_cpu_target", &force_cpu_target, "name"_a.none(),
        nb::sig("def force_cpu_target(name: str | None) -> None"),
        "Forces an instruction set for this process; None gives the default back.");
  m.def("check64", &check64, nb::sig("def check64(*parts: bytes | bytearray | memoryview) -> int"),
        "fold64 of the digest of the concatenation of the parts.");
  m.def("class_params", &class_params, "base"_a, "unit_bytes"_a,
        "class_shift and class_base of a base tensor (docs/wire-format.md section 10).");
  m.def("parse_frame", &parse_frame, "buffer"_a,
        nb::sig("def parse_frame(buffer: bytes | bytearray | memoryview) -> tuple[int, bytes, "
                "bytes, tuple[tuple[typing.Any, ...], ...]]"),
        "Profile, base_root, new_root and tensors of a frame, after rules R1..R22.");
  m.def("digest_blocks", &digest_blocks, "data"_a, "num_units"_a, "unit_bytes"_a, "cols"_a,
        "tile_rows"_a, "tile_cols"_a, "threads"_a, "first_block"_a = 0, "num_blocks"_a = -1,
        "Partial digests of all blocks or of a range, [num_blocks, 2].");

  m.def(
      "encode_blocks",
      [](U8In base, U8In next, std::uint64_t num_units, std::uint64_t unit_bytes,
         std::uint64_t cols, std::uint64_t tile_rows, std::uint64_t tile_cols, int profile,
         int class_shift, int class_base, bool has_base, DigestsInOut digests,
         std::uint64_t first_block, std::uint64_t num_blocks, bool update, bool undo,
         std::size_t threads) {
        gymfast::BlockRun run =
            make_run({num_units, unit_bytes, cols, tile_rows, tile_cols}, threads);
        require_size("base", base.size(), run.geometry.num_bytes());
        require_size("new", next.size(), run.geometry.num_bytes());
        set_digests(&run, digests);
        run.first_block = first_block;
        run.num_blocks = num_blocks;
        // Without `update` the codec never writes to the base.
        return encode(run, {profile, class_shift, class_base, has_base},
                      const_cast<std::uint8_t*>(base.data()), next.data(), update, undo);
      },
      "base"_a, "new"_a, "num_units"_a, "unit_bytes"_a, "cols"_a, "tile_rows"_a, "tile_cols"_a,
      "profile"_a, "class_shift"_a, "class_base"_a, "has_base"_a, "digests"_a, "first_block"_a,
      "num_blocks"_a, "update"_a, "undo"_a, "threads"_a,
      nb::sig("def encode_blocks(base: numpy.typing.NDArray[numpy.uint8], new: "
              "numpy.typing.NDArray[numpy.uint8], num_units: int, unit_bytes: int, cols: int, "
              "tile_rows: int, tile_cols: int, profile: int, class_shift: int, class_base: int, "
              "has_base: bool, digests: numpy.typing.NDArray[numpy.uint64], first_block: int, "
              "num_blocks: int, update: bool, undo: bool, threads: int) -> tuple[bytes, int, "
              "bytes]"),
      "Body of a BLOCKS section, units changed and the undo log; see backends.Backend.");

  m.def(
      "rollback_blocks",
      [](U8InOut base, nb::handle undo, std::uint64_t num_units, std::uint64_t unit_bytes,
         std::uint64_t cols, std::uint64_t tile_rows, std::uint64_t tile_cols) {
        const gymfast::BlockRun run =
            make_run({num_units, unit_bytes, cols, tile_rows, tile_cols}, 1);
        require_size("base", base.size(), run.geometry.num_bytes());
        const BufferView view(undo);
        Status status;
        {
          nb::gil_scoped_release release;
          status = gymfast::rollback_run(run.geometry, view.span(), base.data());
        }
        raise_unless_ok(status);
      },
      "base"_a, "undo"_a, "num_units"_a, "unit_bytes"_a, "cols"_a, "tile_rows"_a, "tile_cols"_a,
      nb::sig("def rollback_blocks(base: numpy.typing.NDArray[numpy.uint8], undo: bytes | "
              "memoryview, num_units: int, unit_bytes: int, cols: int, tile_rows: int, tile_cols: "
              "int) -> None"),
      "Puts back what base held before the encode_blocks that returned undo.");

  m.def(
      "apply_blocks",
      [](U8InOut data, nb::handle body, std::uint64_t num_units, std::uint64_t unit_bytes,
         std::uint64_t cols, std::uint64_t tile_rows, std::uint64_t tile_cols, int class_shift,
         int class_base, bool has_base, DigestsInOut digests, std::uint64_t first_block,
         std::uint64_t num_blocks, std::size_t threads, DigestsInOut found) {
        gymfast::BlockRun run =
            make_run({num_units, unit_bytes, cols, tile_rows, tile_cols}, threads);
        require_size("data", data.size(), run.geometry.num_bytes());
        set_digests(&run, digests);
        run.first_block = first_block;
        run.num_blocks = num_blocks;
        run.params = {gymfast::Profile::kAuto, class_shift, class_base, has_base};
        if (found.is_valid()) {
          if (found.shape(0) != num_blocks) {
            throw nb::value_error("found needs one row for each block of the call");
          }
          run.found = reinterpret_cast<Digest*>(found.data());
        }
        const BufferView view(body);
        std::uint64_t num_changed = 0;
        Status status;
        {
          nb::gil_scoped_release release;
          status = gymfast::apply_run(run, view.span(), data.data(), &num_changed);
        }
        raise_unless_ok(status);
        return num_changed;
      },
      "data"_a, "body"_a, "num_units"_a, "unit_bytes"_a, "cols"_a, "tile_rows"_a, "tile_cols"_a,
      "class_shift"_a, "class_base"_a, "has_base"_a, "digests"_a, "first_block"_a, "num_blocks"_a,
      "threads"_a, "found"_a.none() = nb::none(),
      nb::sig("def apply_blocks(data: numpy.typing.NDArray[numpy.uint8], body: bytes | bytearray "
              "| memoryview, num_units: int, unit_bytes: int, cols: int, tile_rows: int, "
              "tile_cols: int, class_shift: int, class_base: int, has_base: bool, digests: "
              "numpy.typing.NDArray[numpy.uint64], first_block: int, num_blocks: int, threads: "
              "int, found: numpy.typing.NDArray[numpy.uint64] | None = None) -> int"),
      "Units changed; a block is written only after its check matched. `found` gets the digests of "
      "the blocks as they lie in memory afterwards.");

  m.def(
      "zstd_xor_frame",
      [](U8In old_bytes, U8In new_bytes, std::size_t threads) {
        return zstd_frame(&gymfast::zstd_xor_frame, old_bytes, new_bytes, threads);
      },
      "old"_a.noconvert(), "new"_a.noconvert(), "threads"_a = 1,
      "A standard zstd frame of old XOR new, made without a match search.");
  m.def("list_changes", &list_changes, "before"_a.noconvert(), "after"_a.noconvert(),
        "unit_bytes"_a,
        "u32 numbers of the units that differ, ascending, and their new values; native order.");
  m.attr("ZSTD_PART_BYTES") = gymfast::kZstdPartBytes;
  m.def("zstd_xor_part", &zstd_xor_part, "old"_a.noconvert(), "new"_a.noconvert(), "start"_a,
        "end"_a, "threads"_a = 1,
        "What zstd_xor_frame has for the bytes from start to end, multiples of ZSTD_PART_BYTES or "
        "the end, and how many of them differ.");
  m.def(
      "zstd_overwrite_frame",
      [](U8In old_bytes, U8In new_bytes, std::size_t threads) {
        if (old_bytes.size() > UINT32_MAX) {
          throw nb::value_error(
              "positions of the overwrite encoding have 32 bits: use xor for a tensor of 4 GiB");
        }
        return zstd_frame(&gymfast::zstd_overwrite_frame, old_bytes, new_bytes, threads);
      },
      "old"_a.noconvert(), "new"_a.noconvert(), "threads"_a = 1,
      "A standard zstd frame of a u32 count of the bytes that differ, their u32 positions and new "
      "values.");
}
