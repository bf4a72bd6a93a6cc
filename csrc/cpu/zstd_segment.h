// Blocks of a zstd frame with tables in common: their lists are filled first, then tables are made
// for all of them, then they are written.
#ifndef GYMFAST_CPU_ZSTD_SEGMENT_H_
#define GYMFAST_CPU_ZSTD_SEGMENT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cpu/zstd_block.h"

namespace gymfast {

// Segments know nothing of each other, so threads may write them in any order.
constexpr std::size_t kZstdSegmentBlocks = 16;
constexpr std::size_t kZstdSegmentBytes = kZstdSegmentBlocks * kZstdBlockBytes;

// Of a compressed block: raw or Huffman literals, sequences, and all headers and tables.
constexpr std::size_t kZstdMaxHeaderBytes = 1024;
constexpr std::size_t kZstdMaxBlockBytes =
    kZstdBlockBytes * kZstdMaxCodeBits / 8 +
    zstd_max_sequences(kZstdBlockBytes) * kZstdMaxSequenceBytes + kZstdMaxHeaderBytes +
    kZstdSpareBytes;

// Memory of one thread, kept and not initialised: only pages in use count.
struct ZstdMemory {
  std::unique_ptr<std::uint8_t[]> literals{new std::uint8_t[kZstdSegmentBytes + kZstdSpareBytes]};
  std::unique_ptr<ZstdSequence[]> sequences{
      new ZstdSequence[kZstdSegmentBlocks * zstd_max_sequences(kZstdBlockBytes) + kZstdSpareBytes]};
  std::unique_ptr<std::uint8_t[]> block{new std::uint8_t[kZstdMaxBlockBytes]};
};

enum class ZstdBlockType : std::uint32_t { kRaw = 0, kSame = 1, kCompressed = 2 };

void append_zstd_block_header(ZstdBlockType type, std::size_t size, bool is_last,
                              std::vector<std::uint8_t>* out);

class ZstdSegment {
 public:
  // `offset` of all matches: 1, which a decoder starts with, or 4.
  ZstdSegment(const ZstdKernels& kernels, ZstdMemory& memory, unsigned offset)
      : kernels_(kernels),
        memory_(memory),
        literals_(memory.literals.get()),
        sequences_(memory.sequences.get()),
        has_offset_(offset == 1) {}

  // `split(block, literals, sequences, counts)` fills the block, as ZstdKernels::split.
  template <class Split>
  void add_block(std::size_t num_bytes, Split&& split) {
    ZstdBlock& block = blocks_[num_blocks_++];
    block.num_bytes = num_bytes;
    split(&block, literals_, sequences_, &counts_);
    literals_ += block.num_literals;
    sequences_ += block.num_sequences;
  }

  // `copy(index, to)` writes the content of a block that no code makes smaller.
  std::vector<std::uint8_t> write(bool is_last_segment,
                                  const std::function<void(std::size_t, std::uint8_t*)>& copy);

 private:
  class Writer;
  void build_tables();
  std::size_t write_compressed(const ZstdBlock& block, bool* has_new_tree) const;
  bool write_literals(const ZstdBlock& block, Writer& writer) const;
  void write_streams(const ZstdBlock& block, Writer& body) const;
  void write_sequences(const ZstdBlock& block, Writer& writer) const;

  const ZstdKernels& kernels_;
  ZstdMemory& memory_;
  std::uint8_t* literals_;
  ZstdSequence* sequences_;
  std::size_t num_blocks_ = 0;
  std::array<ZstdBlock, kZstdSegmentBlocks> blocks_;
  ZstdCounts counts_ = {};
  ZstdHuffmanTable huffman_;
  ZstdLengthTable literal_table_, match_table_;
  // What the decoder has from the blocks so far.
  bool has_tree_ = false;
  bool has_tables_ = false;       // of the sequences
  bool has_offset_;               // as that of the last match
  bool has_repeat_code_ = false;  // the table of offsets says "that of the last match"
};

}  // namespace gymfast

#endif  // GYMFAST_CPU_ZSTD_SEGMENT_H_
