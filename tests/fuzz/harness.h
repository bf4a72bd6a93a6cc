// What the fuzz targets share: bytes to cases, memory of exact size, and a loud stop.
#ifndef GYMFAST_TESTS_FUZZ_HARNESS_H_
#define GYMFAST_TESTS_FUZZ_HARNESS_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "cpu/codec.h"
#include "cpu/dispatch.h"
#include "format/digest.h"

namespace gymfast::fuzz {

// Made with its final size and never grown, so that ASan sees one byte too many.
using Bytes = std::vector<std::uint8_t>;

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "invariant broken: %s\n", what);
  std::abort();
}

// The input from its front; zeros when it is used up.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  unsigned u8() { return at_ < size_ ? data_[at_++] : 0; }
  unsigned u16() {
    const unsigned low = u8();
    return low | u8() << 8;
  }
  std::uint32_t u32() {
    const std::uint32_t low = u16();
    return low | std::uint32_t{u16()} << 16;
  }
  bool is_at_end() const { return at_ >= size_; }
  Bytes rest() {
    const Bytes bytes(data_ + at_, data_ + size_);
    at_ = size_;
    return bytes;
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

// Sizes around words (64), windows (4096) and digest rows; flat and tiled, with cut edges. Seven of
// eight choices are small, so that a fuzzer sees thousands of cases a second.
inline Geometry pick_geometry(unsigned choice, std::uint64_t unit_bytes) {
  using Shape = std::uint64_t[4];
  constexpr Shape kSmall[] = {
      {0, 0, 0, 0},      {1, 1, 1, 1},     {2, 2, 1, 2},    {3, 3, 1, 3},       {31, 31, 1, 31},
      {63, 63, 1, 63},   {64, 64, 1, 64},  {65, 65, 1, 65}, {100, 100, 1, 100}, {300, 300, 1, 300},
      {300, 300, 1, 64}, {320, 40, 3, 16}, {35, 7, 2, 3},   {6, 1, 2, 1},
  };
  constexpr Shape kLarge[] = {
      {1000, 1000, 1, 1000}, {1000, 1000, 1, 333},  {1024, 64, 4, 32},     {4095, 4095, 1, 4095},
      {4096, 4096, 1, 4096}, {4097, 4097, 1, 4097}, {8300, 8300, 1, 8300}, {4160, 65, 64, 65},
      {8192, 2048, 3, 100},  {9000, 3, 1000, 2},
  };
  const unsigned index = choice >> 3;
  const Shape& shape =
      (choice & 7) != 7 ? kSmall[index % std::size(kSmall)] : kLarge[index % std::size(kLarge)];
  return {shape[0], unit_bytes, shape[1], shape[2], shape[3]};
}

// Units as in a model, or patterns that favour one branch; the same for the same arguments.
inline void fill(std::span<std::uint8_t> bytes, std::uint64_t unit_bytes, unsigned pattern) {
  std::uint64_t state = pattern;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const std::uint64_t r = splitmix64(state++);
    const bool is_top = (i + 1) % unit_bytes == 0;
    switch (pattern & 3) {
      case 0: bytes[i] = 0; break;
      case 1: bytes[i] = static_cast<std::uint8_t>(r); break;
      case 2: bytes[i] = static_cast<std::uint8_t>(is_top ? 0x38 + (r & 0x87) : r); break;
      default: bytes[i] = static_cast<std::uint8_t>(is_top ? 0x7F : 0xFF); break;
    }
  }
}

inline const Kernels& pick_kernels(unsigned choice) {
  const auto all = available_kernels();
  return *all[choice % all.size()];
}

// Room behind the last unit of a list: Scratch::reserve gives 128, which vector stores of encode
// may use; apply looks ahead in `index` for prefetches and writes its codes by 32.
constexpr std::size_t kEncodeSpareUnits = 128;
constexpr std::size_t kApplySpareUnits = 31;

// Every list in memory of its own: in the one arena of Scratch an overflow of a list would land in
// the next and stay unseen. Filled with `garbage`: no result may depend on it.
class SplitScratch {
 public:
  SplitScratch(std::size_t num_units, std::size_t unit_bytes, std::size_t spare_units,
               std::uint8_t garbage)
      : garbage_(garbage) {
    const std::size_t lanes = num_units + spare_units;
    Scratch& s = scratch;
    s.index = reinterpret_cast<std::uint32_t*>(add(4 * (num_units + kEncodeSpareUnits)));
    for (std::uint32_t** list : {&s.rank, &s.rank_sorted, &s.gaps, &s.values, &s.exception_gaps,
                                 &s.exception_values, &s.flip_gaps}) {
      *list = reinterpret_cast<std::uint32_t*>(add(4 * lanes));
    }
    for (std::uint8_t** list : {&s.before, &s.after, &s.before_sorted, &s.after_sorted, &s.block_a,
                                &s.block_b, &s.block_c}) {
      *list = add(unit_bytes * lanes);
    }
    for (std::uint8_t** list : {&s.classes, &s.negative}) *list = add(lanes);
  }
  SplitScratch(const SplitScratch&) = delete;
  SplitScratch& operator=(const SplitScratch&) = delete;
  ~SplitScratch() {
    for (void* list : lists_) std::free(list);
  }

  Scratch scratch;

 private:
  std::uint8_t* add(std::size_t size) {
    void* list = nullptr;
    if (posix_memalign(&list, 64, size) != 0) std::abort();
    std::memset(list, garbage_, size);
    lists_.push_back(list);
    return static_cast<std::uint8_t*>(list);
  }
  std::uint8_t garbage_;
  std::vector<void*> lists_;
};

// Partial digests of all blocks by a full pass.
inline std::vector<Digest> digests_of(const Geometry& geometry, const Bytes& data) {
  std::vector<Digest> digests(static_cast<std::size_t>(geometry.num_blocks()));
  BlockRun run;
  run.geometry = geometry;
  run.num_blocks = digests.size();
  run.digests = digests.data();
  require(digest_run(run, data.data()).is_ok(), "a good geometry has digests");
  return digests;
}

inline bool are_equal(const std::vector<Digest>& a, const std::vector<Digest>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(Digest)) == 0);
}

}  // namespace gymfast::fuzz

#endif  // GYMFAST_TESTS_FUZZ_HARNESS_H_
