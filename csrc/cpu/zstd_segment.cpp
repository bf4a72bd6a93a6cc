#include "cpu/zstd_segment.h"

#include <algorithm>
#include <cstring>
#include <span>

namespace gymfast {
namespace {

using Bytes = std::vector<std::uint8_t>;

enum class LiteralsType : std::uint32_t { kRaw = 0, kCompressed = 2, kTreeless = 3 };

constexpr std::size_t kMaxOneStream = 1023;  // literals: more need four streams

// Codes of offsets, RFC 8878 section 3.1.1.3.2.1.1.
constexpr unsigned kRepeatedOffset = 0, kOffsetFour = 2;

// All literals and nothing else, of one value; or all zeros.
bool is_same_byte(const ZstdBlock& block) {
  if (block.num_literals == 0) return true;
  return block.num_literals == block.num_bytes &&
         std::memcmp(block.literals, block.literals + 1, block.num_bytes - 1) == 0;
}

}  // namespace

// Little-endian fields into memory that is large enough.
class ZstdSegment::Writer {
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

void append_zstd_block_header(ZstdBlockType type, std::size_t size, bool is_last, Bytes* out) {
  const std::size_t header = is_last | static_cast<std::size_t>(type) << 1 | size << 3;
  for (int shift = 0; shift < 24; shift += 8) {
    out->push_back(static_cast<std::uint8_t>(header >> shift));
  }
}

Bytes ZstdSegment::write(bool is_last_segment,
                         const std::function<void(std::size_t, std::uint8_t*)>& copy) {
  build_tables();
  Bytes out;
  for (std::size_t i = 0; i < num_blocks_; ++i) {
    const ZstdBlock& block = blocks_[i];
    const bool is_last = is_last_segment && i + 1 == num_blocks_;
    if (is_same_byte(block)) {
      append_zstd_block_header(ZstdBlockType::kSame, block.num_bytes, is_last, &out);
      out.push_back(block.num_literals == 0 ? std::uint8_t{0} : block.literals[0]);
      continue;
    }
    bool has_new_tree = false;
    const std::size_t size = write_compressed(block, &has_new_tree);
    if (size < block.num_bytes) {
      append_zstd_block_header(ZstdBlockType::kCompressed, size, is_last, &out);
      out.insert(out.end(), memory_.block.get(), memory_.block.get() + size);
      has_tree_ |= has_new_tree;
      if (block.num_sequences != 0) {
        has_tables_ = true;
        has_repeat_code_ = has_offset_;
        has_offset_ = true;
      }
      continue;
    }
    append_zstd_block_header(ZstdBlockType::kRaw, block.num_bytes, is_last, &out);
    out.resize(out.size() + block.num_bytes);
    copy(i, out.data() + out.size() - block.num_bytes);
  }
  return out;
}

void ZstdSegment::build_tables() {
  build_huffman_table(counts_.literals, &huffman_);
  const auto is_present = [](std::uint32_t count) { return count != 0; };
  if (std::none_of(counts_.match_codes, std::end(counts_.match_codes), is_present)) return;
  build_literal_length_table(counts_.literal_codes, &literal_table_);
  build_match_length_table(counts_.match_codes, &match_table_);
}

// Into memory_.block; returns the size.
std::size_t ZstdSegment::write_compressed(const ZstdBlock& block, bool* has_new_tree) const {
  Writer writer(memory_.block.get());
  *has_new_tree = write_literals(block, writer);
  write_sequences(block, writer);
  return writer.size();
}

// Returns whether the block carries the tree.
bool ZstdSegment::write_literals(const ZstdBlock& block, Writer& writer) const {
  const std::size_t n = block.num_literals;
  if (!huffman_.header.empty()) {
    const LiteralsType type = has_tree_ ? LiteralsType::kTreeless : LiteralsType::kCompressed;
    // Both sizes have 10, 14 or 18 bits.
    const unsigned size_format = n <= kMaxOneStream ? 0 : (n < 1u << 14 ? 2 : 3);
    const unsigned size_bits = n <= kMaxOneStream ? 10 : (n < 1u << 14 ? 14 : 18);
    const std::size_t header_bytes = (4 + 2 * size_bits + 7) / 8;
    Writer body(writer.at() + header_bytes);
    if (!has_tree_) body.put(huffman_.header);
    write_streams(block, body);
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

void ZstdSegment::write_streams(const ZstdBlock& block, Writer& body) const {
  const std::size_t n = block.num_literals;
  if (n <= kMaxOneStream) {
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

void ZstdSegment::write_sequences(const ZstdBlock& block, Writer& writer) const {
  const std::size_t n = block.num_sequences;
  if (n < 128) {
    writer.put(n, 1);
  } else if (n < 0x7F00) {
    writer.put((n >> 8) + 128, 1);
    writer.put(n & 0xFF, 1);
  } else {
    writer.put(255, 1);
    writer.put(n - 0x7F00, 2);
  }
  if (n == 0) return;
  const auto mode = [&](ZstdTableMode first) {
    return static_cast<unsigned>(has_tables_ ? ZstdTableMode::kRepeat : first);
  };
  const ZstdTableMode offset_mode =
      has_repeat_code_ ? ZstdTableMode::kRepeat : ZstdTableMode::kSame;
  writer.put(mode(literal_table_.mode) << 6 | static_cast<unsigned>(offset_mode) << 4 |
                 mode(match_table_.mode) << 2,
             1);
  if (!has_tables_) writer.put(literal_table_.header);
  if (!has_repeat_code_) writer.put(has_offset_ ? kRepeatedOffset : kOffsetFour, 1);
  if (!has_tables_) writer.put(match_table_.header);
  writer.move_to(kernels_.write_sequences(block.sequences, n, literal_table_.states,
                                          match_table_.states, !has_offset_, writer.at()));
}

}  // namespace gymfast
