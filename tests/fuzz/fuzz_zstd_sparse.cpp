// Invariant: zstd frames of xor and overwrite are the same of all instruction sets, never larger
// than raw blocks, promise the content size, and their block headers lead exactly to their end.
// That decoders give the content back is tested in tests/delta/test_zstd_sparse.py.
#include "cpu/zstd_sparse.h"
#include "harness.h"

namespace gymfast::fuzz {
namespace {

constexpr std::size_t kMaxFrameHeader = 14;

// Pieces of zeros, of one value or of the input, until the input ends: sizes up to some blocks.
Bytes read_xor(Input& input) {
  Bytes xored;
  while (!input.is_at_end() && xored.size() < 4 * kZstdBlockBytes) {
    const unsigned kind = input.u8();
    const std::size_t size = (kind & 4) != 0 ? input.u16() : input.u8();
    switch (kind & 3) {
      case 0: xored.insert(xored.end(), size, 0); break;
      case 1: xored.insert(xored.end(), size, static_cast<std::uint8_t>(input.u8())); break;
      case 2:
        for (std::size_t i = 0; i < size; ++i) {
          xored.push_back(static_cast<std::uint8_t>(splitmix64(kind * size + i)));
        }
        break;
      default:
        for (std::size_t i = 0; i < size % 64; ++i) {
          xored.push_back(static_cast<std::uint8_t>(input.u8()));
        }
    }
  }
  return Bytes(xored);
}

using Make = decltype(&zstd_xor_frame);

Bytes frame_of(Make make, const Kernels& kernels, const Bytes& a, const Bytes& b) {
  const ZstdFrame frame = make(kernels, a.data(), b.data(), a.size(), 1);
  Bytes bytes(frame.num_bytes());
  frame.write(bytes.data());
  return bytes;
}

void check_blocks(const Bytes& frame, std::size_t content_bytes) {
  const bool is_single = (frame[4] >> 5 & 1) != 0;
  constexpr std::size_t kSizeBytes[] = {1, 2, 4, 8};
  const std::size_t size_bytes = kSizeBytes[frame[4] >> 6];
  std::size_t at = 5 + (is_single ? 0 : 1);
  std::uint64_t promised = size_bytes == 2 ? 256 : 0;
  for (std::size_t i = 0; i < size_bytes; ++i) promised += std::uint64_t{frame[at++]} << 8 * i;
  require(promised == content_bytes, "the header has the content size");
  std::size_t num_blocks = 0;
  for (bool is_last = false; !is_last; ++num_blocks) {
    require(at + 3 <= frame.size(), "a block has a header");
    const unsigned header = frame[at] | frame[at + 1] << 8 | frame[at + 2] << 16;
    is_last = (header & 1) != 0;
    const unsigned type = header >> 1 & 3;
    require(type != 3 && header >> 3 <= kZstdBlockBytes, "a block is of a known type and size");
    at += 3 + (type == 1 ? 1 : header >> 3);
  }
  require(at == frame.size(), "blocks end where the frame ends");
  require(frame.size() <= kMaxFrameHeader + 3 * num_blocks + content_bytes,
          "a frame is not larger than raw");
}

void check_targets(Make make, const Bytes& a, const Bytes& b, std::size_t content_bytes) {
  const Bytes frame = frame_of(make, pick_kernels(0), a, b);
  check_blocks(frame, content_bytes);
  for (unsigned i = 1; i < available_kernels().size(); ++i) {
    require(frame_of(make, pick_kernels(i), a, b) == frame,
            "all instruction sets write the same bytes");
  }
}

void run(Input& input) {
  const Bytes xored = read_xor(input);
  Bytes a(xored.size()), b(xored.size());
  std::size_t num_changed = 0;
  fill(a, 2, 2);
  for (std::size_t i = 0; i < a.size(); ++i) {
    b[i] = static_cast<std::uint8_t>(a[i] ^ xored[i]);
    num_changed += xored[i] != 0;
  }
  check_targets(&zstd_xor_frame, a, b, a.size());
  check_targets(&zstd_overwrite_frame, a, b, 4 + 5 * num_changed);
}

}  // namespace
}  // namespace gymfast::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gymfast::fuzz::Input input(data, size);
  gymfast::fuzz::run(input);
  return 0;
}
