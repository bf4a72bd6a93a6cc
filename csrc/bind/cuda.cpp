// gymfast._cuda: the kernels of csrc/cuda on memory that Python owns. All arguments are checked
// before the first launch; nothing here allocates device memory or waits for the device.
// With GYMFAST_CUDA_SHIM the same module for tests, on ordinary memory: _cuda_shim.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bind/device_array.h"
#include "cuda/codec.h"
#include "cuda/pieces.h"

#ifdef GYMFAST_CUDA_SHIM
#define GYMFAST_CUDA_MODULE _cuda_shim
#else
#define GYMFAST_CUDA_MODULE _cuda
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using gymfast::Digest;
using gymfast::Error;
using gymfast::bind::Arrays;
using gymfast::bind::DeviceArray;
using gymfast::bind::Fit;
using gymfast::bind::Need;
using gymfast::bind::refuse;
using gymfast::bind::take_array;
using gymfast::cuda::ApplyResult;
using gymfast::cuda::CallStatus;
using gymfast::cuda::Piece;
using gymfast::cuda::Run;
using gymfast::cuda::Section;
using u64 = std::uint64_t;

static_assert(sizeof(Digest) == 16 && sizeof(Section) == 40 && sizeof(ApplyResult) == 16);
static_assert(sizeof(Piece) == 40);

using Offsets = std::vector<std::tuple<u64, u64, u64>>;  // in the tensor, in the bucket, bytes
using Rows = nb::ndarray<u64, nb::shape<-1, 5>, nb::device::cpu, nb::c_contig>;

[[noreturn]] void raise_format_error(const std::string& what, Error error) {
  const int number = static_cast<int>(error);
  nb::object type = nb::module_::import_("gymfast.errors").attr("FormatError");
  nb::object value = type(what + " (error " + std::to_string(number) + ")", number);
  PyErr_SetObject(type.ptr(), value.ptr());
  throw nb::python_error();
}

void raise_unless_ok(const CallStatus& status) {
  if (status.is_ok()) return;
  if (status.cuda != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA refused a launch: ") +
                             cudaGetErrorString(status.cuda));
  }
  if (status.error == Error::kBadArgument) refuse(status.problem);
  raise_format_error(status.problem, status.error);
}

// A run of blocks that the tensor has, without digests.
Run make_run(const gymfast::cuda::Geometry& geometry, u64 first_block, u64 num_blocks) {
  Run run;
  run.geometry = geometry;
  const Error error = geometry.check();
  if (error != Error::kOk) raise_format_error(gymfast::error_text(error), error);
  const u64 total = geometry.num_blocks();
  if (first_block > total || num_blocks > total - first_block) {
    raise_format_error(std::to_string(num_blocks) + " blocks from " + std::to_string(first_block) +
                           ", the tensor has " + std::to_string(total),
                       Error::kBadBlockIndex);
  }
  run.first_block = first_block;
  run.num_blocks = num_blocks;
  return run;
}

int require_range(const char* name, int value, int last) {
  if (value >= 0 && value <= last) return value;
  refuse(std::string(name) + " is " + std::to_string(value) + ", expected 0.." +
         std::to_string(last) + ": take it from the frame or from class_params");
}

void set_classes(Run* run, int class_shift, int class_base, bool has_base) {
  run->params.class_shift = require_range("class_shift", class_shift, 7);
  run->params.class_base = require_range("class_base", class_base, 255);
  run->params.has_base = has_base;
}

void set_profile(Run* run, int profile) {
  run->params.profile = static_cast<gymfast::cuda::Profile>(require_range("profile", profile, 2));
}

DeviceArray take_tensor(nb::handle object, const char* name, const Run& run, bool is_written,
                        bool may_be_pinned) {
  const gymfast::cuda::Geometry& g = run.geometry;
  return take_array(object, name,
                    {g.num_bytes(), Fit::kExact, g.unit_bytes, is_written, may_be_pinned,
                     "pass the tensor that the geometry describes"});
}

// The codec indexes digests by block number; the array holds the rows of the run only.
DeviceArray take_digests(nb::handle object, Run* run) {
  DeviceArray digests = take_array(object, "digests",
                                   {sizeof(Digest) * run->num_blocks, Fit::kExact, 8, true, false,
                                    "pass two 64-bit numbers for each block of the call"});
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(digests.address);
  run->digests = reinterpret_cast<Digest*>(first - sizeof(Digest) * run->first_block);
  return digests;
}

DeviceArray take_scratch(nb::handle object, u64 size_bytes, const char* advice) {
  return take_array(object, "scratch", {size_bytes, Fit::kAtLeast, 256, true, false, advice});
}

// Runs `operation` on the stream and the device of the arrays, after the checks of them together.
template <class Operation>
void launch(Arrays arrays, u64 stream, const Operation& operation) {
  const int device = gymfast::bind::common_device(arrays);
  gymfast::bind::require_apart(arrays);
  const auto handle = reinterpret_cast<cudaStream_t>(static_cast<std::uintptr_t>(stream));
  CallStatus status;
  {
    nb::gil_scoped_release release;
    if (device == gymfast::bind::kNoDevice) {
      status = operation(handle);  // all arrays are empty: nothing is launched
    } else {
      const gymfast::bind::CurrentDevice current(device);
      gymfast::bind::require_stream(handle, device);
      status = operation(handle);
    }
  }
  raise_unless_ok(status);
}

int device_count() {
  int count = 0;
  const bool has_gpu = gymfast::bind::forget(cudaGetDeviceCount(&count)) == cudaSuccess;
  return has_gpu ? count : 0;
}

u64 encode_body_capacity(u64 num_units, u64 unit_bytes, u64 cols, u64 tile_rows, u64 tile_cols,
                         u64 num_blocks) {
  return gymfast::cuda::encode_body_capacity(
      make_run({num_units, unit_bytes, cols, tile_rows, tile_cols}, 0, num_blocks));
}

u64 encode_scratch_bytes(u64 num_units, u64 unit_bytes, u64 cols, u64 tile_rows, u64 tile_cols,
                         int profile, u64 num_blocks) {
  Run run = make_run({num_units, unit_bytes, cols, tile_rows, tile_cols}, 0, num_blocks);
  set_profile(&run, profile);
  return gymfast::cuda::encode_scratch_bytes(run);
}

u64 apply_scratch_bytes(u64 num_units, u64 unit_bytes, u64 cols, u64 tile_rows, u64 tile_cols,
                        u64 num_blocks) {
  return gymfast::cuda::apply_scratch_bytes(
      make_run({num_units, unit_bytes, cols, tile_rows, tile_cols}, 0, num_blocks));
}

void digest_blocks(nb::handle data, u64 num_units, u64 unit_bytes, u64 cols, u64 tile_rows,
                   u64 tile_cols, u64 first_block, u64 num_blocks, nb::handle digests, u64 stream) {
  Run run = make_run({num_units, unit_bytes, cols, tile_rows, tile_cols}, first_block, num_blocks);
  const DeviceArray tensor = take_tensor(data, "data", run, false, true);
  const DeviceArray rows = take_digests(digests, &run);
  launch({&tensor, &rows}, stream,
         [&](cudaStream_t on) { return gymfast::cuda::digest_blocks(run, tensor.address, on); });
}

void encode_blocks(nb::handle base, nb::handle next, u64 num_units, u64 unit_bytes, u64 cols,
                   u64 tile_rows, u64 tile_cols, int profile, int class_shift, int class_base,
                   bool has_base, nb::handle digests, u64 first_block, u64 num_blocks,
                   u64 blocks_per_section, bool update, nb::handle body, nb::handle sections,
                   nb::handle scratch, u64 stream) {
  Run run = make_run({num_units, unit_bytes, cols, tile_rows, tile_cols}, first_block, num_blocks);
  set_profile(&run, profile);
  set_classes(&run, class_shift, class_base, has_base);
  if (blocks_per_section == 0) refuse("blocks_per_section is 0, expected at least 1");
  const u64 num_sections = num_blocks / blocks_per_section + (num_blocks % blocks_per_section != 0);
  const DeviceArray old_tensor = take_tensor(base, "base", run, update, true);
  const DeviceArray new_tensor = take_tensor(next, "new", run, false, false);
  const DeviceArray rows = take_digests(digests, &run);
  const DeviceArray out = take_array(body, "body",
                                     {gymfast::cuda::encode_body_capacity(run), Fit::kAtLeast, 16,
                                      true, false, "take what encode_body_capacity says"});
  const DeviceArray table = take_array(sections, "sections",
                                       {sizeof(Section) * num_sections, Fit::kExact, 8, true, false,
                                        "pass five 64-bit numbers for each section of the call"});
  const DeviceArray work = take_scratch(scratch, gymfast::cuda::encode_scratch_bytes(run),
                                        "take what encode_scratch_bytes says");
  gymfast::cuda::EncodeBuffers buffers;
  buffers.body = out.address;
  buffers.body_capacity = out.size_bytes;
  buffers.sections = table.as<Section>();
  buffers.scratch = work.address;
  buffers.scratch_bytes = work.size_bytes;
  launch({&new_tensor, &old_tensor, &rows, &out, &table, &work}, stream, [&](cudaStream_t on) {
    return gymfast::cuda::encode_blocks(run, old_tensor.address, new_tensor.address, update,
                                        blocks_per_section, buffers, on);
  });
}

std::tuple<u64, u64, u64> undo_offsets(u64 num_units, u64 unit_bytes, u64 cols, u64 tile_rows,
                                       u64 tile_cols, int profile, u64 num_blocks) {
  Run run = make_run({num_units, unit_bytes, cols, tile_rows, tile_cols}, 0, num_blocks);
  set_profile(&run, profile);
  const gymfast::cuda::UndoOffsets offsets = gymfast::cuda::undo_offsets(run);
  return {offsets.counts, offsets.index, offsets.before};
}

void gather_undo(u64 num_units, u64 unit_bytes, u64 cols, u64 tile_rows, u64 tile_cols, int profile,
                 u64 num_blocks, nb::handle scratch, u64 stream) {
  Run run = make_run({num_units, unit_bytes, cols, tile_rows, tile_cols}, 0, num_blocks);
  set_profile(&run, profile);
  const DeviceArray work = take_scratch(scratch, gymfast::cuda::encode_scratch_bytes(run),
                                        "pass the scratch of the encode_blocks before");
  launch({&work}, stream, [&](cudaStream_t on) {
    return gymfast::cuda::gather_undo(run, work.address, work.size_bytes, on);
  });
}

void rollback_blocks(nb::handle data, u64 num_units, u64 unit_bytes, u64 cols, u64 tile_rows,
                     u64 tile_cols, u64 first_block, u64 num_blocks, nb::handle counts,
                     nb::handle index, nb::handle before, u64 stream) {
  const Run run =
      make_run({num_units, unit_bytes, cols, tile_rows, tile_cols}, first_block, num_blocks);
  const DeviceArray tensor = take_tensor(data, "data", run, true, true);
  const DeviceArray blocks = take_array(counts, "counts",
                                        {4 * num_blocks, Fit::kExact, 4, false, false,
                                         "pass one 32-bit number for each block of the call"});
  const DeviceArray places =
      take_array(index, "index", {4, Fit::kMultiple, 4, false, false, "pass 32-bit numbers"});
  const u64 num_records = places.size_bytes / 4;
  const DeviceArray units = take_array(before, "before",
                                       {num_records * unit_bytes, Fit::kExact, unit_bytes, false,
                                        false, "pass one unit for each number of index"});
  const gymfast::cuda::UndoLists undo = {blocks.as<std::uint32_t>(), places.as<std::uint32_t>(),
                                         units.address, num_records};
  launch({&places, &tensor, &blocks, &units}, stream, [&](cudaStream_t on) {
    return gymfast::cuda::rollback_blocks(run, tensor.address, undo, on);
  });
}

u64 sample_classes(nb::handle data, u64 num_units, u64 unit_bytes, nb::handle out, u64 stream) {
  if (unit_bytes != 1 && unit_bytes != 2 && unit_bytes != 4) {
    raise_format_error("unit_bytes is " + std::to_string(unit_bytes) + ", expected 1, 2 or 4",
                       Error::kBadShape);
  }
  if (num_units > (u64{1} << 62) / unit_bytes) {
    raise_format_error(gymfast::error_text(Error::kLimitExceeded), Error::kLimitExceeded);
  }
  const DeviceArray tensor = take_array(data, "data",
                                        {num_units * unit_bytes, Fit::kExact, unit_bytes, false,
                                         true, "pass num_units units of unit_bytes bytes"});
  const u64 num_samples = gymfast::cuda::num_class_samples(num_units);
  const DeviceArray samples = take_array(
      out, "out", {num_samples, Fit::kAtLeast, 1, true, false, "pass one byte for each sample"});
  launch({&tensor, &samples}, stream, [&](cudaStream_t on) {
    return gymfast::cuda::sample_classes(tensor.address, num_units, unit_bytes, samples.address,
                                         on);
  });
  return num_samples;
}

void apply_blocks(nb::handle data, nb::handle body, u64 num_units, u64 unit_bytes, u64 cols,
                  u64 tile_rows, u64 tile_cols, int class_shift, int class_base, bool has_base,
                  nb::handle digests, u64 first_block, u64 num_blocks, nb::handle sections,
                  nb::handle result, nb::handle scratch, u64 stream) {
  Run run = make_run({num_units, unit_bytes, cols, tile_rows, tile_cols}, first_block, num_blocks);
  set_classes(&run, class_shift, class_base, has_base);
  if (num_blocks == 0) {
    raise_format_error("no blocks, a section has at least one", Error::kBadBlockIndex);
  }
  const DeviceArray tensor = take_tensor(data, "data", run, true, false);
  const DeviceArray payloads =
      take_array(body, "body", {1, Fit::kMultiple, 1, false, false, "pass bytes"});
  const DeviceArray rows = take_digests(digests, &run);
  const DeviceArray table = take_array(sections, "sections",
                                       {sizeof(Section), Fit::kMultiple, 8, false, false,
                                        "pass five 64-bit numbers for each section"});
  if (table.size_bytes == 0) refuse("sections is empty, expected at least one row");
  const DeviceArray outcome =
      take_array(result, "result",
                 {sizeof(ApplyResult), Fit::kExact, 8, true, false, "pass two 64-bit numbers"});
  const DeviceArray work = take_scratch(scratch, gymfast::cuda::apply_scratch_bytes(run),
                                        "take what apply_scratch_bytes says");
  gymfast::cuda::ApplyBuffers buffers;
  buffers.body = payloads.address;
  buffers.body_bytes = payloads.size_bytes;
  buffers.sections = table.as<Section>();
  buffers.num_sections = table.size_bytes / sizeof(Section);
  buffers.result = outcome.as<ApplyResult>();
  buffers.scratch = work.address;
  buffers.scratch_bytes = work.size_bytes;
  launch({&tensor, &payloads, &rows, &table, &outcome, &work}, stream, [&](cudaStream_t on) {
    return gymfast::cuda::apply_blocks(run, tensor.address, buffers, on);
  });
}

// The bytes of a piece in its tensor, for as long as that lives.
u64 address_of_piece(const DeviceArray& tensor, u64 offset, u64 num_bytes) {
  if (offset <= tensor.size_bytes && num_bytes <= tensor.size_bytes - offset) {
    return reinterpret_cast<std::uintptr_t>(tensor.address) + offset;
  }
  refuse(tensor.name + " has " + std::to_string(tensor.size_bytes) + " bytes, expected " +
         std::to_string(num_bytes) + " from " + std::to_string(offset) +
         " on: pass the tensor that the piece is of");
}

u64 fill_pieces(nb::handle bucket, const std::vector<nb::object>& tensors, const Offsets& pieces,
                bool is_packing, Rows rows) {
  const DeviceArray whole =
      take_array(bucket, "bucket", {1, Fit::kMultiple, 1, is_packing, false, "pass bytes"});
  const bool is_moved = !tensors.empty();
  if (is_moved && tensors.size() != pieces.size()) {
    refuse("tensors are " + std::to_string(tensors.size()) + ", expected one for each of " +
           std::to_string(pieces.size()) + " pieces, or none to sum the bucket");
  }
  if (rows.shape(0) != pieces.size()) {
    refuse("rows has " + std::to_string(rows.shape(0)) + " rows, expected one for each of " +
           std::to_string(pieces.size()) + " pieces");
  }
  Piece next;
  u64 used = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto& [in_tensor, in_bucket, num_bytes] = pieces[i];
    if (in_bucket < used || in_bucket > whole.size_bytes ||
        num_bytes > whole.size_bytes - in_bucket) {
      refuse("piece " + std::to_string(i) + " has " + std::to_string(num_bytes) + " bytes from " +
             std::to_string(in_bucket) + " on, expected a place between " + std::to_string(used) +
             " and the end of the bucket, " + std::to_string(whole.size_bytes) +
             ": pass pieces in the order of the bucket");
    }
    next.bucket_offset = in_bucket;
    next.num_bytes = num_bytes;
    if (is_moved) {
      const std::string name = "tensors[" + std::to_string(i) + "]";
      const DeviceArray tensor = take_array(
          tensors[i], name.c_str(), {1, Fit::kMultiple, 1, !is_packing, false, "pass bytes"});
      gymfast::bind::common_device({&whole, &tensor});
      gymfast::bind::require_apart({&whole, &tensor});
      next.address = address_of_piece(tensor, in_tensor, num_bytes);
    }
    std::memcpy(rows.data() + 5 * i, &next, sizeof(next));
    next.first_tile += gymfast::cuda::num_tiles_of(num_bytes);
    next.first_row += gymfast::cuda::num_rows_of(num_bytes);
    used = in_bucket + num_bytes;
  }
  return next.first_tile;
}

void move_pieces(nb::handle bucket, nb::handle table, u64 num_tiles, bool is_packing,
                 nb::handle digest, u64 stream) {
  const DeviceArray whole =
      take_array(bucket, "bucket", {1, Fit::kMultiple, 1, is_packing, false, "pass bytes"});
  const DeviceArray pieces = take_array(
      table, "table",
      {sizeof(Piece), Fit::kMultiple, 8, false, false, "pass the rows that fill_pieces filled"});
  const DeviceArray sum =
      take_array(digest, "digest", {8, Fit::kExact, 8, true, false, "pass one 64-bit number"});
  const gymfast::cuda::PieceTable rows = {pieces.as<Piece>(), pieces.size_bytes / sizeof(Piece),
                                          num_tiles};
  launch({&whole, &pieces, &sum}, stream, [&](cudaStream_t on) {
    return gymfast::cuda::move_pieces(rows, {whole.address, whole.size_bytes}, is_packing,
                                      sum.as<u64>(), on);
  });
}

}  // namespace

NB_MODULE(GYMFAST_CUDA_MODULE, m) {
  m.doc() =
      "The CUDA kernels of gymfast on arrays with __dlpack__ or __cuda_array_interface__. Calls "
      "return before the device is done: the caller keeps the arrays and orders the streams.";

  m.def("device_count", &device_count, "GPUs that the driver reports; 0 without a driver.");
  m.def(
      "error_text", [](int number) { return gymfast::error_text(static_cast<Error>(number)); },
      "number"_a, "What the number of an error in a result says.");
  m.def("encode_body_capacity", &encode_body_capacity, "num_units"_a, "unit_bytes"_a, "cols"_a,
        "tile_rows"_a, "tile_cols"_a, "num_blocks"_a, "Bytes of body that encode_blocks needs.");
  m.def("encode_scratch_bytes", &encode_scratch_bytes, "num_units"_a, "unit_bytes"_a, "cols"_a,
        "tile_rows"_a, "tile_cols"_a, "profile"_a, "num_blocks"_a,
        "Bytes of scratch that encode_blocks needs.");
  m.def("apply_scratch_bytes", &apply_scratch_bytes, "num_units"_a, "unit_bytes"_a, "cols"_a,
        "tile_rows"_a, "tile_cols"_a, "num_blocks"_a, "Bytes of scratch that apply_blocks needs.");
  m.def("digest_blocks", &digest_blocks, "data"_a, "num_units"_a, "unit_bytes"_a, "cols"_a,
        "tile_rows"_a, "tile_cols"_a, "first_block"_a, "num_blocks"_a, "digests"_a, "stream"_a,
        "Partial digests of the blocks into digests, u64[num_blocks, 2].");
  m.def("encode_blocks", &encode_blocks, "base"_a, "new"_a, "num_units"_a, "unit_bytes"_a, "cols"_a,
        "tile_rows"_a, "tile_cols"_a, "profile"_a, "class_shift"_a, "class_base"_a, "has_base"_a,
        "digests"_a, "first_block"_a, "num_blocks"_a, "blocks_per_section"_a, "update"_a, "body"_a,
        "sections"_a, "scratch"_a, "stream"_a,
        "Sections of the step from base to new into body, and their rows first_block, num_blocks, "
        "offset, size, num_changed into sections, u64[n, 5]. digests become those of new; with "
        "update so does base.");
  m.def("undo_offsets", &undo_offsets, "num_units"_a, "unit_bytes"_a, "cols"_a, "tile_rows"_a,
        "tile_cols"_a, "profile"_a, "num_blocks"_a,
        "Where gather_undo leaves counts u32[num_blocks], index u32[n] and before unit[n], n the "
        "sum of counts: bytes from the start of scratch.");
  m.def("gather_undo", &gather_undo, "num_units"_a, "unit_bytes"_a, "cols"_a, "tile_rows"_a,
        "tile_cols"_a, "profile"_a, "num_blocks"_a, "scratch"_a, "stream"_a,
        "Old values of all units that the encode_blocks before found changed, block by block, in "
        "its scratch; index counts from the start of the block.");
  m.def("rollback_blocks", &rollback_blocks, "data"_a, "num_units"_a, "unit_bytes"_a, "cols"_a,
        "tile_rows"_a, "tile_cols"_a, "first_block"_a, "num_blocks"_a, "counts"_a, "index"_a,
        "before"_a, "stream"_a,
        "Puts the values of gather_undo back; counts u32[num_blocks] are of these blocks, and the "
        "device adds them up. Writes nothing outside of the blocks, whatever index holds.");
  m.def("sample_classes", &sample_classes, "data"_a, "num_units"_a, "unit_bytes"_a, "out"_a,
        "stream"_a,
        "Class fields of min(num_units, 1024) evenly spread units into out, u8; their number.");
  m.def("apply_blocks", &apply_blocks, "data"_a, "body"_a, "num_units"_a, "unit_bytes"_a, "cols"_a,
        "tile_rows"_a, "tile_cols"_a, "class_shift"_a, "class_base"_a, "has_base"_a, "digests"_a,
        "first_block"_a, "num_blocks"_a, "sections"_a, "result"_a, "scratch"_a, "stream"_a,
        "Applies the sections to data in place. result, u64[2], becomes block << 8 | error number "
        "of the first bad block, or all ones, and the units changed.");
  m.def("fill_pieces", &fill_pieces, "bucket"_a, "tensors"_a, "pieces"_a, "is_packing"_a, "rows"_a,
        "Checks pieces (offset in the tensor beside it, offset in the bucket, bytes), writes the "
        "table of move_pieces to rows, u64[n, 5] in CPU memory, and returns its tiles. Good for as "
        "long as the tensors live, for any bucket as large. Without tensors pieces are summed.");
  m.def("move_pieces", &move_pieces, "bucket"_a, "table"_a, "num_tiles"_a, "is_packing"_a,
        "digest"_a, "stream"_a,
        "Copies the pieces of a table on the device into the bucket (is_packing) or out of it, and "
        "adds their weighted sum of words to digest, u64[1].");
}
