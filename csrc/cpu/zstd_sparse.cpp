#include "cpu/zstd_sparse.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <span>

#include "cpu/parallel.h"

namespace gymfast {
namespace {

using Bytes = std::vector<std::uint8_t>;

// Blocks with tables in common. Segments know nothing of each other, so threads may write them in
// any order.
constexpr std::size_t kSegmentBlocks = 16;
constexpr std::size_t kSegmentBytes = kSegmentBlocks * kZstdBlockBytes;

enum class BlockType : std::uint32_t { kRaw = 0, kSame = 1, kCompressed = 2 };
enum class LiteralsType : std::uint32_t { kRaw = 0, kCompressed = 2, kTreeless = 3 };

// Of a compressed block: raw or Huffman literals, a table description, sequences, headers.
constexpr std::size_t kMaxHeaderBytes = 1024;
constexpr std::size_t kMaxBlockBytes = kZstdBlockBytes * kZstdMaxCodeBits / 8 +
                                       zstd_max_sequences(kZstdBlockBytes) * kZstdMaxSequenceBytes +
                                       kMaxHeaderBytes + kZstdSpareBytes;

constexpr std::size_t kMaxOneStream = 1023;  // literals: more need four streams
constexpr unsigned kOffsetTable = 0;         // offset code 0: the offset of the last match, first 1
constexpr unsigned kWindowLog = 17;
constexpr std::uint32_t kMagic = 0xFD2FB528;

// Little-endian fields into memory that is large enough.
class Writer {
 public:
  explicit Writer(std::uint8_t* out) : begin_(out), at_(out) {}

  void put(std::uint64_t value, std::size_t num_bytes) {
    for (std::size_t i = 0; i < num_bytes; ++i) *at_++ = static_cast<std::uint8_t>(value >> 8 * i);
  }
  void put(std::span<const std::uint8_t> bytes) {
    if (!bytes.empty()) std::memcpy(at_, bytes.data(), bytes.size());
    at_ += bytes.size();
  }
  std::uint8_t* at() const { return at_; }
  void move_to(std::uint8_t* at) { at_ = at; }
  std::size_t size() const { return static_cast<std::size_t>(at_ - begin_); }

 private:
  std::uint8_t* begin_;
  std::uint8_t* at_;
};

// Memory of one thread, kept: only pages in use count.
struct Memory {
  std::unique_ptr<std::uint8_t[]> literals{new std::uint8_t[kSegmentBytes + kZstdSpareBytes]};
  std::unique_ptr<ZstdSequence[]> sequences{
      new ZstdSequence[kSegmentBlocks * zstd_max_sequences(kZstdBlockBytes) + 1]};
  std::unique_ptr<std::uint8_t[]> block{new std::uint8_t[kMaxBlockBytes]};
};

void append(std::span<const std::uint8_t> bytes, Bytes* out) {
  out->insert(out->end(), bytes.begin(), bytes.end());
}

void append_block_header(BlockType type, std::size_t size, bool is_last, Bytes* out) {
  std::array<std::uint8_t, 3> header;
  Writer(header.data()).put(is_last | static_cast<std::uint32_t>(type) << 1 | size << 3, 3);
  append(header, out);
}

Bytes frame_header(std::uint64_t num_bytes) {
  std::array<std::uint8_t, 16> header;
  Writer writer(header.data());
  writer.put(kMagic, 4);
  // Small content is one segment: the window is the content and has no field.
  const bool is_single = num_bytes <= kZstdBlockBytes;
  const std::uint64_t single = is_single ? 1u << 5 : 0u;
  const unsigned window = (kWindowLog - 10) << 3;
  if (is_single && num_bytes < 256) {
    writer.put(single, 1);
    writer.put(num_bytes, 1);
  } else if (is_single && num_bytes < 256 + 65536) {
    writer.put(single | 1u << 6, 1);
    writer.put(num_bytes - 256, 2);
  } else {
    const bool is_large = num_bytes > UINT32_MAX;
    writer.put(single | (is_large ? 3u : 2u) << 6, 1);
    if (!is_single) writer.put(window, 1);
    writer.put(num_bytes, is_large ? 8 : 4);
  }
  return Bytes(header.data(), writer.at());
}

// Reads all blocks of a segment, makes their tables, writes them.
class SegmentWriter {
 public:
  SegmentWriter(const ZstdKernels& kernels, Memory& memory, const std::uint8_t* old_bytes,
                const std::uint8_t* new_bytes, std::size_t num_bytes)
      : kernels_(kernels), memory_(memory), old_(old_bytes), new_(new_bytes) {
    std::uint8_t* literals = memory.literals.get();
    ZstdSequence* sequences = memory.sequences.get();
    for (std::size_t start = 0; start < num_bytes; start += kZstdBlockBytes) {
      ZstdBlock& block = blocks_[num_blocks_++];
      block.num_bytes = std::min(kZstdBlockBytes, num_bytes - start);
      kernels.split(old_bytes + start, new_bytes + start, &block, literals, sequences, &counts_);
      literals += block.num_literals;
      sequences += block.num_sequences;
    }
    build_tables();
  }

  Bytes write(bool is_last_segment) {
    Bytes out;
    for (std::size_t i = 0; i < num_blocks_; ++i) {
      write_block(i, is_last_segment && i + 1 == num_blocks_, &out);
    }
    return out;
  }

 private:
  void build_tables() {
    build_huffman_table(counts_.literals, &huffman_);
    const auto has_any = [](auto& counts) {
      return std::any_of(std::begin(counts), std::end(counts), [](auto c) { return c != 0; });
    };
    if (!has_any(counts_.match_codes)) return;
    build_literal_length_table(counts_.literal_codes, &literal_table_);
    build_match_length_table(counts_.match_codes, &match_table_);
  }

  void write_block(std::size_t index, bool is_last, Bytes* out) {
    const ZstdBlock& block = blocks_[index];
    const std::uint8_t* a = old_ + index * kZstdBlockBytes;
    const std::uint8_t* b = new_ + index * kZstdBlockBytes;
    if (is_same_byte(block)) {
      append_block_header(BlockType::kSame, block.num_bytes, is_last, out);
      out->push_back(static_cast<std::uint8_t>(a[0] ^ b[0]));
      return;
    }
    Writer writer(memory_.block.get());
    const bool has_new_tree = write_literals(block, writer);
    write_sequences(block, writer);
    if (writer.size() < block.num_bytes) {
      append_block_header(BlockType::kCompressed, writer.size(), is_last, out);
      append({memory_.block.get(), writer.size()}, out);
      has_tree_ |= has_new_tree;
      has_tables_ |= block.num_sequences != 0;
      return;
    }
    append_block_header(BlockType::kRaw, block.num_bytes, is_last, out);
    out->reserve(out->size() + block.num_bytes);
    for (std::size_t i = 0; i < block.num_bytes; ++i) {
      out->push_back(static_cast<std::uint8_t>(a[i] ^ b[i]));
    }
  }

  static bool is_same_byte(const ZstdBlock& block) {
    if (block.num_nonzero == 0) return true;
    const std::uint8_t* bytes = block.literals;
    return block.num_nonzero == block.num_bytes &&
           std::memcmp(bytes, bytes + 1, block.num_bytes - 1) == 0;
  }

  // Returns whether the block carries the tree.
  bool write_literals(const ZstdBlock& block, Writer& writer) const {
    const std::size_t n = block.num_literals;
    const bool is_one_stream = n <= kMaxOneStream;
    if (!huffman_.header.empty()) {
      const LiteralsType type = has_tree_ ? LiteralsType::kTreeless : LiteralsType::kCompressed;
      // Both sizes have 10, 14 or 18 bits.
      const unsigned size_bits = is_one_stream ? 10 : (n < 1u << 14 ? 14 : 18);
      const unsigned size_format = is_one_stream ? 0 : (n < 1u << 14 ? 2 : 3);
      const std::size_t header_bytes = (4 + 2 * size_bits + 7) / 8;
      Writer body(writer.at() + header_bytes);
      if (!has_tree_) body.put(huffman_.header);
      write_streams(block, is_one_stream, body);
      if (body.size() + header_bytes < n) {
        writer.put(static_cast<std::uint32_t>(type) | size_format << 2 | std::uint64_t{n} << 4 |
                       std::uint64_t{body.size()} << (4 + size_bits),
                   header_bytes);
        writer.move_to(body.at());
        return !has_tree_;
      }
    }
    if (n < 1u << 5) {
      writer.put(n << 3, 1);
    } else if (n < 1u << 12) {
      writer.put(n << 4 | 1u << 2, 2);
    } else {
      writer.put(n << 4 | 3u << 2, 3);
    }
    writer.put({block.literals, n});
    return false;
  }

  void write_streams(const ZstdBlock& block, bool is_one_stream, Writer& body) const {
    const std::size_t n = block.num_literals;
    if (is_one_stream) {
      body.move_to(kernels_.write_literals(block.literals, n, huffman_.codes, body.at()));
      return;
    }
    const std::size_t quarter = (n + 3) / 4;
    Writer sizes(body.at());
    body.move_to(body.at() + 6);
    for (std::size_t start = 0; start < n; start += quarter) {
      std::uint8_t* begin = body.at();
      body.move_to(kernels_.write_literals(block.literals + start, std::min(quarter, n - start),
                                           huffman_.codes, begin));
      if (start + quarter < n) sizes.put(static_cast<std::size_t>(body.at() - begin), 2);
    }
  }

  void write_sequences(const ZstdBlock& block, Writer& writer) const {
    const std::size_t n = block.num_sequences;
    static_assert(zstd_max_sequences(kZstdBlockBytes) < 0x7F00);  // more would need three bytes
    if (n < 128) {
      writer.put(n, 1);
    } else {
      writer.put((n >> 8) + 128, 1);
      writer.put(n & 0xFF, 1);
    }
    if (n == 0) return;
    const auto mode = [&](ZstdTableMode first) {
      return static_cast<unsigned>(has_tables_ ? ZstdTableMode::kRepeat : first);
    };
    writer.put(mode(literal_table_.mode) << 6 | mode(ZstdTableMode::kSame) << 4 |
                   mode(match_table_.mode) << 2,
               1);
    if (!has_tables_) {
      writer.put(literal_table_.header);
      writer.put(kOffsetTable, 1);
      writer.put(match_table_.header);
    }
    writer.move_to(kernels_.write_sequences(block.sequences, n, literal_table_.states,
                                            match_table_.states, writer.at()));
  }

  const ZstdKernels& kernels_;
  Memory& memory_;
  const std::uint8_t* old_;
  const std::uint8_t* new_;
  std::size_t num_blocks_ = 0;
  std::array<ZstdBlock, kSegmentBlocks> blocks_;
  ZstdCounts counts_ = {};
  ZstdHuffmanTable huffman_;
  ZstdLengthTable literal_table_, match_table_;
  bool has_tree_ = false;    // the decoder has the Huffman tree
  bool has_tables_ = false;  // the decoder has the tables of the sequences
};

}  // namespace

std::size_t ZstdFrame::num_bytes() const {
  std::size_t sum = 0;
  for (const Bytes& part : parts) sum += part.size();
  return sum;
}

void ZstdFrame::write(std::uint8_t* out) const {
  Writer writer(out);
  for (const Bytes& part : parts) writer.put(part);
}

ZstdFrame zstd_xor_frame(const Kernels& kernels, const std::uint8_t* old_bytes,
                         const std::uint8_t* new_bytes, std::size_t num_bytes,
                         std::size_t num_threads) {
  ZstdFrame frame;
  const std::size_t num_segments = (num_bytes + kSegmentBytes - 1) / kSegmentBytes;
  frame.parts.resize(1 + std::max<std::size_t>(num_segments, 1));
  frame.parts[0] = frame_header(num_bytes);
  if (num_segments == 0) append_block_header(BlockType::kRaw, 0, true, &frame.parts[1]);
  parallel_for(num_segments, num_threads, [&](std::size_t i) {
    thread_local Memory memory;
    const std::size_t start = i * kSegmentBytes;
    SegmentWriter writer(kernels.zstd, memory, old_bytes + start, new_bytes + start,
                         std::min(kSegmentBytes, num_bytes - start));
    frame.parts[1 + i] = writer.write(i + 1 == num_segments);
  });
  return frame;
}

}  // namespace gymfast
