// Invariant: any bytes are refused, or give a view inside the bytes within every limit, the same
// for every digest function; what is accepted can be applied or is refused without a trace.
#include <set>
#include <string>

#include "format/frame.h"
#include "harness.h"

namespace gymfast::fuzz {
namespace {

constexpr std::size_t kMaxAppliedBytes = std::size_t{1} << 20;

std::uint64_t body_bytes(const Bytes& frame, std::size_t at) {
  std::uint64_t head;
  std::memcpy(&head, frame.data() + at, 8);
  return head >> 16;
}

// Makes all checks of a damaged frame right again, so that what lies behind them is reached.
Bytes repaired(Bytes frame, DigestFunction digest) {
  Bytes checks;
  std::size_t at = sizeof(kMagic);
  while (at < frame.size() && frame.size() - at >= kSectionHeaderBytes) {
    const std::uint64_t size = body_bytes(frame, at);
    if (size > frame.size() - at - kSectionHeaderBytes) break;
    const std::span<std::uint8_t> body(frame.data() + at + kSectionHeaderBytes,
                                       static_cast<std::size_t>(size));
    const bool is_end = frame[at] == static_cast<std::uint8_t>(SectionType::kEnd);
    if (is_end && size >= 80) {
      const std::uint64_t frame_check = check64(checks, {}, digest);
      const std::uint64_t end_bytes = kSectionHeaderBytes + size;
      std::memcpy(body.data() + 64, &frame_check, 8);
      std::memcpy(body.data() + size - 8, &end_bytes, 8);
    }
    const std::uint64_t check = check64({frame.data() + at, 8}, body, digest);
    std::memcpy(frame.data() + at + 8, &check, 8);
    checks.insert(checks.end(), frame.begin() + static_cast<std::ptrdiff_t>(at) + 8,
                  frame.begin() + static_cast<std::ptrdiff_t>(at) + 16);
    at += kSectionHeaderBytes + static_cast<std::size_t>(size);
    if (is_end) break;
  }
  return frame;
}

template <class Part>
bool is_inside(const Part& part, const Bytes& frame) {
  const auto* first = reinterpret_cast<const std::uint8_t*>(part.data());
  return part.empty() || (first >= frame.data() && part.size() <= frame.size() &&
                          first + part.size() <= frame.data() + frame.size());
}

void check_tensor(const TensorView& t, const Bytes& frame, std::size_t ordinal) {
  require(is_inside(t.name, frame) && is_inside(t.dtype, frame) && is_inside(t.target, frame),
          "texts lie in the frame");
  require(!t.name.empty() && t.name.size() <= kMaxNameBytes, "names have 1 to 1024 bytes");
  require(t.name.find('\0') == t.name.npos, "names hold no NUL");
  require(t.dims.size() <= kMaxDims && t.num_bytes <= kMaxTensorBytes, "limits of a tensor");
  require(t.unit_bytes == 1 || t.unit_bytes == 2 || t.unit_bytes == 4, "unit_bytes is 1, 2 or 4");
  const Geometry geometry{t.num_units(), t.unit_bytes, t.cols, t.tile_rows, t.tile_cols};
  require(geometry.check().is_ok(), "parser and codec accept the same geometries");
  require(geometry.num_blocks() == t.num_blocks(), "parser and codec count the same blocks");
  std::uint64_t next = 0;
  for (const BlocksView& blocks : t.blocks) {
    require(is_inside(blocks.table_and_payloads, frame), "blocks lie in the frame");
    require(blocks.tensor == ordinal, "blocks belong to their tensor");
    require(blocks.num_blocks != 0 && blocks.first_block >= next, "blocks ascend");
    next = blocks.first_block + blocks.num_blocks;
    require(next <= t.num_blocks(), "blocks are in range");
  }
}

void apply_tensor(const TensorView& t) {
  if (t.num_bytes > kMaxAppliedBytes || t.num_blocks() > kMaxAppliedBytes) return;
  BlockRun run;
  run.geometry = {t.num_units(), t.unit_bytes, t.cols, t.tile_rows, t.tile_cols};
  run.params = {Profile::kAuto, static_cast<int>(t.class_shift), static_cast<int>(t.class_base),
                t.kind == Kind::kDelta};
  Bytes data(static_cast<std::size_t>(t.num_bytes));
  std::vector<Digest> digests = digests_of(run.geometry, data);
  run.digests = digests.data();
  for (const BlocksView& blocks : t.blocks) {
    run.first_block = blocks.first_block;
    run.num_blocks = blocks.num_blocks;
    std::uint64_t num_changed = 0;
    apply_run(run, blocks.table_and_payloads, data.data(), &num_changed);
    require(num_changed <= run.geometry.num_units, "no more units change than there are");
  }
  require(are_equal(digests, digests_of(run.geometry, data)), "digests follow the data");
}

void parse(const Bytes& frame) {
  FrameView view;
  const Status status = parse_frame(frame, pick_kernels(0).digest, &view);
  for (unsigned i = 1; i < available_kernels().size(); ++i) {
    FrameView other;
    const Status again = parse_frame(frame, pick_kernels(i).digest, &other);
    require(again.error == status.error && again.where == status.where, "targets agree");
  }
  if (!status.is_ok()) return;
  require(view.profile <= 2, "profile is known");
  require(view.base_root.size() == 32 && view.new_root.size() == 32, "roots have 32 bytes");
  require(is_inside(view.base_root, frame) && is_inside(view.new_root, frame), "roots are inside");
  std::set<std::string> names;
  for (std::size_t i = 0; i < view.tensors.size(); ++i) {
    check_tensor(view.tensors[i], frame, i);
    require(names.insert(std::string(view.tensors[i].name)).second, "names are unique");
    apply_tensor(view.tensors[i]);
  }
  for (std::size_t size : {frame.size() - 1, frame.size() / 2}) {
    FrameView cut;
    require(!parse_frame({frame.data(), size}, pick_kernels(0).digest, &cut).is_ok(),
            "no prefix of a frame is a frame");
  }
}

}  // namespace
}  // namespace gymfast::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace gymfast::fuzz;
  const Bytes frame(data, data + size);
  parse(frame);
  const Bytes right = repaired(frame, pick_kernels(0).digest);
  if (right != frame) parse(right);
  return 0;
}
