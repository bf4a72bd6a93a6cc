// The kernels of csrc/cuda on the CPU, behind a C interface for tests/cuda_shim.py. What would be
// device memory is copied into heap memory of the exact size, so that a sanitiser sees every byte
// read or written outside of it; scratch and outputs start as garbage.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "cuda/codec.h"
#include "cuda/host_shim.h"

namespace {

using gymfast::Digest;
using gymfast::cuda::CallStatus;
using gymfast::cuda::Run;
using gymfast::cuda::Section;

// `shift` moves the start off its 256-byte alignment.
class Memory {
 public:
  explicit Memory(std::size_t size, std::size_t shift = 0) : shift_(shift) {
    if (posix_memalign(&memory_, 256, size + shift + (size + shift == 0)) != 0) std::abort();
    std::memset(memory_, 0xA5, size + shift);
  }
  ~Memory() { std::free(memory_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::uint8_t* bytes() { return static_cast<std::uint8_t*>(memory_) + shift_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(bytes());
  }

 private:
  void* memory_ = nullptr;
  std::size_t shift_;
};

std::unique_ptr<Memory> copy_of(const void* data, std::size_t size, std::size_t shift = 0) {
  auto memory = std::make_unique<Memory>(size, shift);
  if (size != 0) std::memcpy(memory->bytes(), data, size);
  return memory;
}

const char* last_problem = nullptr;

int number_of(const CallStatus& status) {
  last_problem = status.problem;
  return status.is_ok() ? 0 : static_cast<int>(status.error);
}

// Whether the undo lists of an encode, in memory of their exact size, turn a copy of the tensor it
// left back into `base`.
bool gives_back(const Run& run, void* scratch, std::uint64_t scratch_bytes,
                const std::uint8_t* tensor, const std::uint8_t* base, std::size_t shift) {
  const std::uint64_t size = run.geometry.num_bytes(), unit_bytes = run.geometry.unit_bytes;
  if (!gymfast::cuda::gather_undo(run, scratch, scratch_bytes, nullptr).is_ok()) return false;
  const gymfast::cuda::UndoOffsets at = gymfast::cuda::undo_offsets(run);
  const auto* start = static_cast<const std::uint8_t*>(scratch);
  auto counts = copy_of(start + at.counts, 4 * run.num_blocks);
  gymfast::cuda::UndoLists undo;
  for (std::uint64_t i = 0; i < run.num_blocks; ++i) {
    undo.num_records += counts->as<std::uint32_t>()[i];
  }
  auto index = copy_of(start + at.index, 4 * undo.num_records);
  auto before = copy_of(start + at.before, unit_bytes * undo.num_records);
  undo.counts = counts->as<std::uint32_t>();
  undo.index = index->as<std::uint32_t>();
  undo.before = before->bytes();
  auto copy = copy_of(tensor, size, shift);
  if (!gymfast::cuda::rollback_blocks(run, copy->bytes(), undo, nullptr).is_ok()) return false;
  return std::memcmp(copy->bytes(), base, size) == 0;
}

}  // namespace

extern "C" {

struct ShimRun {
  std::uint64_t num_units, unit_bytes, cols, tile_rows, tile_cols;
  std::uint64_t profile, class_shift, class_base, has_base;
  std::uint64_t first_block, num_blocks;
  std::uint64_t shift;  // of tensors in memory
};

static Run run_of(const ShimRun& r, Digest* digests) {
  Run run;
  run.geometry = {r.num_units, r.unit_bytes, r.cols, r.tile_rows, r.tile_cols};
  run.params = {static_cast<gymfast::cuda::Profile>(r.profile), static_cast<int>(r.class_shift),
                static_cast<int>(r.class_base), r.has_base != 0};
  run.first_block = r.first_block;
  run.num_blocks = r.num_blocks;
  run.digests = digests;
  return run;
}

__attribute__((visibility("default"))) const char* shim_problem() { return last_problem; }

__attribute__((visibility("default"))) void shim_set_descending(int is_descending) {
  gymfast::shim::set_descending(is_descending != 0);
}

// `digests` is [blocks of the tensor, 2]; rows of other blocks stay.
__attribute__((visibility("default"))) int shim_digest(const ShimRun* r, const std::uint8_t* data,
                                                       std::uint64_t* digests,
                                                       std::uint64_t digest_rows) {
  auto rows = copy_of(digests, 16 * digest_rows);
  const Run run = run_of(*r, rows->as<Digest>());
  auto tensor = copy_of(data, r->num_units * r->unit_bytes, r->shift);
  const int number = number_of(gymfast::cuda::digest_blocks(run, tensor->bytes(), nullptr));
  std::memcpy(digests, rows->bytes(), 16 * digest_rows);
  return number;
}

__attribute__((visibility("default"))) std::uint64_t shim_body_capacity(const ShimRun* r) {
  return gymfast::cuda::encode_body_capacity(run_of(*r, nullptr));
}

// Class fields of up to 1024 units of `data`; their number.
__attribute__((visibility("default"))) std::uint64_t shim_sample(const ShimRun* r,
                                                                 const std::uint8_t* data,
                                                                 std::uint8_t* out) {
  const std::uint64_t count = gymfast::cuda::num_class_samples(r->num_units);
  auto tensor = copy_of(data, r->num_units * r->unit_bytes, r->shift);
  Memory samples(count);
  const CallStatus status = gymfast::cuda::sample_classes(tensor->bytes(), r->num_units,
                                                          r->unit_bytes, samples.bytes(), nullptr);
  if (!status.is_ok()) std::abort();
  std::memcpy(out, samples.bytes(), count);
  return count;
}

// Sections are {first_block, num_blocks, offset, size, num_changed}; room for num_blocks of them.
__attribute__((visibility("default"))) int shim_encode(
    const ShimRun* r, std::uint8_t* base, const std::uint8_t* next, int update,
    std::uint64_t blocks_per_section, std::uint64_t* digests, std::uint64_t digest_rows,
    std::uint8_t* body, std::uint64_t* sections, std::uint64_t num_sections) {
  const std::uint64_t size = r->num_units * r->unit_bytes;
  auto rows = copy_of(digests, 16 * digest_rows);
  const Run run = run_of(*r, rows->as<Digest>());
  if (run.geometry.check() != gymfast::Error::kOk) {
    last_problem = "the geometry is none that the format allows";
    return static_cast<int>(run.geometry.check());
  }
  auto old_tensor = copy_of(base, size, r->shift), new_tensor = copy_of(next, size, r->shift);
  const std::uint64_t scratch_bytes = gymfast::cuda::encode_scratch_bytes(run);
  const std::uint64_t capacity = gymfast::cuda::encode_body_capacity(run);
  Memory scratch(scratch_bytes), out(capacity), table(sizeof(Section) * num_sections);
  gymfast::cuda::EncodeBuffers buffers;
  buffers.body = out.bytes();
  buffers.body_capacity = capacity;
  buffers.sections = table.as<Section>();
  buffers.scratch = scratch.bytes();
  buffers.scratch_bytes = scratch_bytes;
  const CallStatus status =
      gymfast::cuda::encode_blocks(run, old_tensor->bytes(), new_tensor->bytes(), update != 0,
                                   blocks_per_section, buffers, nullptr);
  if (!status.is_ok()) return number_of(status);
  if (!gives_back(run, scratch.bytes(), scratch_bytes, old_tensor->bytes(), base, r->shift)) {
    std::abort();
  }
  std::memcpy(base, old_tensor->bytes(), size);
  std::memcpy(digests, rows->bytes(), 16 * digest_rows);
  std::memcpy(body, out.bytes(), capacity);
  std::memcpy(sections, table.bytes(), sizeof(Section) * num_sections);
  return number_of(status);
}

__attribute__((visibility("default"))) int shim_apply(
    const ShimRun* r, std::uint8_t* data, const std::uint8_t* body, std::uint64_t body_bytes,
    const std::uint64_t* sections, std::uint64_t num_sections, std::uint64_t* digests,
    std::uint64_t digest_rows, std::uint64_t* result) {
  const std::uint64_t size = r->num_units * r->unit_bytes;
  auto rows = copy_of(digests, 16 * digest_rows);
  const Run run = run_of(*r, rows->as<Digest>());
  if (run.geometry.check() != gymfast::Error::kOk) {
    last_problem = "the geometry is none that the format allows";
    return static_cast<int>(run.geometry.check());
  }
  auto tensor = copy_of(data, size, r->shift);
  auto frame = copy_of(body, body_bytes, 1);  // frames lie anywhere
  auto table = copy_of(sections, sizeof(Section) * num_sections);
  // A count of blocks that no tensor has is refused before any memory is asked for.
  const bool is_range = run.num_blocks <= run.geometry.num_blocks();
  const std::uint64_t scratch_bytes = is_range ? gymfast::cuda::apply_scratch_bytes(run) : 0;
  Memory scratch(scratch_bytes), outcome(sizeof(gymfast::cuda::ApplyResult));
  gymfast::cuda::ApplyBuffers buffers;
  buffers.body = frame->bytes();
  buffers.body_bytes = body_bytes;
  buffers.sections = table->as<Section>();
  buffers.num_sections = num_sections;
  buffers.result = outcome.as<gymfast::cuda::ApplyResult>();
  buffers.scratch = scratch.bytes();
  buffers.scratch_bytes = scratch_bytes;
  const CallStatus status = gymfast::cuda::apply_blocks(run, tensor->bytes(), buffers, nullptr);
  if (!status.is_ok()) return number_of(status);
  if (size != 0) std::memcpy(data, tensor->bytes(), size);
  std::memcpy(digests, rows->bytes(), 16 * digest_rows);
  std::memcpy(result, outcome.bytes(), sizeof(gymfast::cuda::ApplyResult));
  return number_of(status);
}

}  // extern "C"
