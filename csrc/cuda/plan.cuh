// plan: mode, parameters, header and size of each block, by one thread block (section 10).
#ifndef GYMFAST_CUDA_PLAN_CUH_
#define GYMFAST_CUDA_PLAN_CUH_

#include "cuda/dense.cuh"
#include "cuda/diff.cuh"

namespace gymfast::cuda {

enum class ArrayKind : std::uint8_t {
  kPositions,
  kInvertedPositions,
  kValues,
  kExceptionGaps,
  kExceptionValues,
  kFlipGaps,
};

// A split-Rice array over a group of changes: what it lists, how long it is, its parameter.
struct ArrayPlan {
  ArrayKind kind;
  std::uint8_t low_bits;
  std::uint32_t first;        // first change of the group, in the order of the mode
  std::uint32_t num_changes;  // of the group
  std::uint32_t count;        // length of the array
  std::uint64_t quotients;    // sum of x >> low_bits

  __device__ std::uint64_t lows() const { return std::uint64_t{count} * low_bits; }
  __device__ std::uint64_t unary() const { return count + quotients; }
  __device__ std::uint64_t bits() const { return lows() + unary(); }
};

constexpr std::uint32_t kMaxArrays = 1 + 4 * kNumClasses;
constexpr std::uint32_t kMaxHeaderBytes = kNumClasses * 24 + 16;

struct BlockPlan {
  Mode mode;
  std::uint32_t check;
  std::uint32_t num_changed;
  std::uint32_t num_arrays;
  std::uint32_t header_bytes;
  std::uint64_t payload_bytes;
  std::uint64_t table_offset;    // in the body buffer
  std::uint64_t payload_offset;  // likewise
  DensePlan dense;
  ArrayPlan arrays[kMaxArrays];
  std::uint8_t header[kMaxHeaderBytes];

  __device__ std::uint64_t table_bytes() const {
    return mode == Mode::kUnchanged ? 1 : 5 + varint_bytes(payload_bytes);
  }
};

template <class T>
struct EncodeArgs {
  DiffArgs<T> diff;
  BlockParams params;
  const std::uint32_t* totals = nullptr;        // [blocks] changes
  const std::uint32_t* class_totals = nullptr;  // [blocks, 16] units of each class
  const std::uint32_t* class_ends = nullptr;    // [blocks, 16] changes up to each class
  std::uint32_t* exceptions = nullptr;          // [slots] indices in the group with v != 0
  std::uint32_t* flips = nullptr;               // [slots] indices in the group with a flip
  BlockPlan* plans = nullptr;                   // [blocks]
  Digest* digests = nullptr;                    // [blocks of the tensor]
  std::uint64_t num_blocks = 0;
  std::uint64_t blocks_per_section = 0;
  Section* sections = nullptr;
  std::uint64_t num_sections = 0;
  std::uint8_t* body = nullptr;
};

// The lists of one block, in the order of a mode.
template <class T>
struct BlockLists {
  const std::uint32_t* index;
  const T* before;
  const T* after;
  const std::uint32_t* rank;
  const std::uint32_t* order;
  std::uint32_t* exceptions;
  std::uint32_t* flips;
  bool is_by_class;
  bool has_ranks;

  __device__ BlockLists(const EncodeArgs<T>& args, std::uint64_t block, Mode mode) {
    const std::uint64_t first = block * args.diff.block_units;
    const Changes<T>& changes = args.diff.changes;
    index = changes.index + first;
    before = changes.before + first;
    after = changes.after + first;
    rank = changes.rank + first;
    order = changes.order + first;
    exceptions = args.exceptions + first;
    flips = args.flips + first;
    is_by_class = mode == Mode::kBalanced || mode == Mode::kSmall;
    has_ranks = mode == Mode::kSmall;
  }

  __device__ std::uint32_t change(std::uint32_t i) const { return is_by_class ? order[i] : i; }
  __device__ std::uint32_t position(std::uint32_t i) const {
    return has_ranks ? rank[order[i]] : index[i];
  }
  __device__ std::uint32_t value(std::uint32_t i) const {
    const std::uint32_t at = change(i);
    return step_of(before[at], after[at]);
  }
  __device__ bool flip(std::uint32_t i) const {
    const std::uint32_t at = change(i);
    return is_flip(before[at], after[at]);
  }
  __device__ bool negative(std::uint32_t i) const {
    const std::uint32_t at = change(i);
    return is_negative(before[at], after[at]);
  }
  // The m-th place that changes [first, first + count) leave out: found by how many places before
  // each change are left out.
  __device__ std::uint32_t hole(std::uint32_t first, std::uint32_t count, std::uint32_t m) const {
    std::uint32_t low = 0, high = count;
    while (low < high) {
      const std::uint32_t middle = (low + high) / 2;
      if (position(first + middle) - middle > m) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return m + low;
  }

  // Element i of an array.
  __device__ std::uint32_t element(const ArrayPlan& a, std::uint32_t i) const {
    switch (a.kind) {
      case ArrayKind::kPositions: {
        const std::uint32_t start = i == 0 ? 0 : position(a.first + i - 1) + 1;
        return position(a.first + i) - start;
      }
      case ArrayKind::kInvertedPositions: {
        const std::uint32_t start = i == 0 ? 0 : hole(a.first, a.num_changes, i - 1) + 1;
        return hole(a.first, a.num_changes, i) - start;
      }
      case ArrayKind::kValues: return value(a.first + i);
      case ArrayKind::kExceptionGaps: return gap(exceptions + a.first, i);
      case ArrayKind::kExceptionValues: return value(a.first + exceptions[a.first + i]) - 1;
      case ArrayKind::kFlipGaps: return gap(flips + a.first, i);
    }
    return 0;
  }

 private:
  __device__ static std::uint32_t gap(const std::uint32_t* list, std::uint32_t i) {
    return i == 0 ? list[0] : list[i] - list[i - 1] - 1;
  }
};

// The parameter of section 10 and the size it gives. All threads must call it; all get the result.
template <class T>
__device__ ArrayPlan plan_split_rice(const BlockLists<T>& lists, ArrayPlan array,
                                     GroupShared& shared) {
  array.low_bits = 0;
  array.quotients = 0;
  const std::uint32_t count = array.count;
  if (count == 0) return array;
  std::uint64_t sum = 0;
  for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) sum += lists.element(array, i);
  sum = group_sum(sum, shared);
  const std::uint64_t target = ((sum + count) * 11) / (16 * std::uint64_t{count});
  const unsigned centre =
      target == 0 ? 0 : 63u - static_cast<unsigned>(__clzll(static_cast<long long>(target)));
  const unsigned first = centre == 0 ? 0 : centre - 1;
  const unsigned last = centre + 1 < 31 ? centre + 1 : 31;
  std::uint64_t quotients[3] = {0, 0, 0};
  for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const std::uint32_t q = lists.element(array, i) >> first;
    quotients[0] += q;
    quotients[1] += q >> 1;
    quotients[2] += q >> 2;
  }
  std::uint64_t best = ~std::uint64_t{0};
#pragma unroll
  for (unsigned j = 0; j < 3; ++j) {
    const std::uint64_t q = group_sum(quotients[j], shared);
    const unsigned l = first + j;
    const std::uint64_t bits = std::uint64_t{count} * l + q;
    if (l > last || bits >= best) continue;
    best = bits;
    array.low_bits = static_cast<std::uint8_t>(l);
    array.quotients = q;
  }
  return array;
}

// Builds the header and the arrays of a sparse payload in a BlockPlan; thread 0 writes. All threads
// must make the same calls.
template <class T>
class SparsePlanner {
 public:
  __device__ SparsePlanner(const BlockLists<T>& lists, BlockPlan& plan, GroupShared& shared)
      : lists_(lists), plan_(plan), shared_(shared) {}

  __device__ void u8(std::uint32_t value) {
    if (threadIdx.x == 0) plan_.header[header_bytes_] = static_cast<std::uint8_t>(value);
    ++header_bytes_;
  }
  __device__ void varint(std::uint32_t value) {
    for (; value >= 128; value >>= 7) u8((value & 127u) | 128u);
    u8(value);
  }

  // The PosGroup of changes [first, first + count) among `limit` places.
  __device__ void positions(std::uint32_t first, std::uint32_t count, std::uint32_t limit) {
    const bool is_inverted = 2 * std::uint64_t{count} > limit;
    const ArrayKind kind = is_inverted ? ArrayKind::kInvertedPositions : ArrayKind::kPositions;
    const ArrayPlan array = plan(kind, first, count, is_inverted ? limit - count : count);
    varint(count);
    u8(array.low_bits | (is_inverted ? 32u : 0u));
    add(array);
  }

  // The ValGroup of changes [first, first + count).
  __device__ void values(std::uint32_t first, std::uint32_t count) {
    std::uint32_t num_exceptions, num_flips;
    list_values(first, count, &num_exceptions, &num_flips);
    const ArrayPlan flips = plan(ArrayKind::kFlipGaps, first, count, num_flips);
    const ArrayPlan all = plan(ArrayKind::kValues, first, count, num_exceptions == 0 ? 0 : count);
    const ArrayPlan gaps = plan(ArrayKind::kExceptionGaps, first, count, num_exceptions);
    const ArrayPlan some = plan(ArrayKind::kExceptionValues, first, count, num_exceptions);
    const std::uint64_t bits = gaps.bits() + some.bits() + 8 + 8 * varint_bytes(num_exceptions);
    const unsigned mode = num_exceptions == 0 ? 0 : bits <= all.bits() ? 1 : 2;
    const unsigned low_bits = mode == 0 ? 0 : mode == 1 ? some.low_bits : all.low_bits;
    u8(low_bits | mode << 5 | (num_flips != 0 ? 128u : 0u));
    if (mode == 1) {
      varint(num_exceptions);
      u8(gaps.low_bits);
      add(gaps);
      add(some);
    } else if (mode == 2) {
      add(all);
    }
    if (num_flips == 0) return;
    varint(num_flips);
    u8(flips.low_bits);
    add(flips);
  }

  __device__ std::uint64_t finish(Mode mode, std::uint32_t num_changes) {
    const std::uint64_t size =
        header_bytes_ + (low_bits_ + 7) / 8 + (num_changes + 7u) / 8 + (unary_bits_ + 7) / 8;
    if (threadIdx.x == 0) {
      plan_.mode = mode;
      plan_.num_arrays = num_arrays_;
      plan_.header_bytes = header_bytes_;
      plan_.payload_bytes = size;
    }
    return size;
  }

 private:
  __device__ ArrayPlan plan(ArrayKind kind, std::uint32_t first, std::uint32_t num_changes,
                            std::uint32_t count) {
    return plan_split_rice(lists_, ArrayPlan{kind, 0, first, num_changes, count, 0}, shared_);
  }

  __device__ void add(const ArrayPlan& array) {
    if (array.count == 0) return;
    if (threadIdx.x == 0) plan_.arrays[num_arrays_] = array;
    ++num_arrays_;
    low_bits_ += array.lows();
    unary_bits_ += array.unary();
  }

  // Lists of the changes of a group whose v is not 0 and of those that flip.
  __device__ void list_values(std::uint32_t first, std::uint32_t count,
                              std::uint32_t* num_exceptions, std::uint32_t* num_flips) {
    std::uint32_t exceptions = 0, flips = 0;
    for (std::uint32_t at = 0; at < count; at += kThreads) {
      const std::uint32_t i = at + threadIdx.x;
      const bool is_exception = i < count && lists_.value(first + i) != 0;
      const bool flips_sign = i < count && lists_.flip(first + i);
      // Two counts of at most 128 in one sum.
      const std::uint32_t both = (is_exception ? 1u : 0u) | (flips_sign ? 1u << 16 : 0u);
      std::uint32_t total;
      const std::uint32_t below = group_scan(both, &total, shared_);
      if (is_exception) lists_.exceptions[first + exceptions + (below & 0xFFFFu)] = i;
      if (flips_sign) lists_.flips[first + flips + (below >> 16)] = i;
      exceptions += total & 0xFFFFu;
      flips += total >> 16;
    }
    __syncthreads();  // the lists are read by other threads
    *num_exceptions = exceptions;
    *num_flips = flips;
  }

  BlockLists<T> lists_;
  BlockPlan& plan_;
  GroupShared& shared_;
  std::uint32_t header_bytes_ = 0;
  std::uint32_t num_arrays_ = 0;
  std::uint64_t low_bits_ = 0;
  std::uint64_t unary_bits_ = 0;
};

template <class T>
__device__ std::uint64_t plan_fast(const EncodeArgs<T>& args, std::uint64_t block,
                                   const Placement& place, BlockPlan& plan, GroupShared& shared) {
  const std::uint32_t k = args.totals[block];
  SparsePlanner<T> planner(BlockLists<T>(args, block, Mode::kFast), plan, shared);
  planner.positions(0, k, place.num_units);
  planner.values(0, k);
  return planner.finish(Mode::kFast, k);
}

template <class T>
__device__ std::uint64_t plan_by_class(const EncodeArgs<T>& args, std::uint64_t block,
                                       const Placement& place, Mode mode, BlockPlan& plan,
                                       GroupShared& shared) {
  const std::uint32_t k = args.totals[block];
  const std::uint32_t* ends = args.class_ends + block * kNumClasses;
  SparsePlanner<T> planner(BlockLists<T>(args, block, mode), plan, shared);
  if (mode == Mode::kBalanced) planner.positions(0, k, place.num_units);
  std::uint32_t mask = 0;
  for (std::uint32_t c = 0; c < kNumClasses; ++c) {
    mask |= static_cast<std::uint32_t>(ends[c] != (c == 0 ? 0 : ends[c - 1])) << c;
  }
  planner.u8(mask & 0xFFu);
  planner.u8(mask >> 8);
  for (std::uint32_t c = 0; c < kNumClasses; ++c) {
    const std::uint32_t first = c == 0 ? 0 : ends[c - 1], count = ends[c] - first;
    if (count == 0) continue;
    if (mode == Mode::kSmall) {
      planner.positions(first, count, args.class_totals[block * kNumClasses + c]);
    } else {
      planner.varint(count);
    }
    planner.values(first, count);
  }
  return planner.finish(mode, k);
}

// Whether a profile codes so many changes with ranks within classes (section 10).
__device__ inline bool uses_ranks(Profile profile, std::uint64_t count, std::uint64_t n) {
  return profile == Profile::kSmall || (profile == Profile::kAuto && 512 * count < n);
}

// Fast and by-class plans share lists, so a fast plan that loses is made again last if it wins.
template <class T>
__device__ std::uint64_t plan_sparse(const EncodeArgs<T>& args, std::uint64_t block,
                                     const Placement& place, BlockPlan& plan, GroupShared& shared) {
  const std::uint32_t k = args.totals[block];
  const Profile profile = args.params.profile;
  if (profile == Profile::kFast) return plan_fast(args, block, place, plan, shared);
  const Mode mode = uses_ranks(profile, k, place.num_units) ? Mode::kSmall : Mode::kBalanced;
  const std::uint64_t fast_size =
      k <= 2048 ? plan_fast(args, block, place, plan, shared) : ~std::uint64_t{0};
  const std::uint64_t size = plan_by_class(args, block, place, mode, plan, shared);
  return fast_size < size ? plan_fast(args, block, place, plan, shared) : size;
}

template <class T>
__device__ DenseSource<T> dense_source(const EncodeArgs<T>& args, std::uint64_t block) {
  const std::uint64_t first = block * args.diff.block_units;
  const Changes<T>& changes = args.diff.changes;
  return {changes.before + first, changes.after + first, args.diff.next, args.totals[block],
          args.params.has_base};
}

struct PlanShared {
  GroupShared group;
  DenseShared dense;
};

template <class T>
__global__ __launch_bounds__(kThreads, 6) void plan_kernel(EncodeArgs<T> args) {
  GYMFAST_SHARED(PlanShared, shared);
  const std::uint64_t block = blockIdx.x;
  BlockPlan& plan = args.plans[block];
  const std::uint32_t k = args.totals[block];
  const Placement place = placement_of(args.diff.geometry, args.diff.first_block + block);
  if (threadIdx.x == 0) {
    Digest& digest = args.digests[args.diff.first_block + block];
    digest.lane[0] += args.diff.deltas[2 * block];
    digest.lane[1] += args.diff.deltas[2 * block + 1];
    plan.mode = Mode::kUnchanged;
    plan.check = fold32(digest);
    plan.num_changed = k;
    plan.payload_bytes = 0;
  }
  if (k == 0) return;
  std::uint64_t size = ~std::uint64_t{0};
  if (args.params.has_base || 8 * std::uint64_t{k} < place.num_units) {
    size = plan_sparse(args, block, place, plan, shared.group);
  }
  if constexpr (sizeof(T) > 1) {
    if (4 * std::uint64_t{k} >= place.num_units) {
      const DenseSource<T> source = dense_source(args, block);
      const std::uint64_t dense_size =
          plan_dense(source, place, size, &plan.dense, plan.header, shared.dense, shared.group);
      if (dense_size < size) {
        size = dense_size;
        if (threadIdx.x == 0) {
          plan.mode = Mode::kDense;
          plan.num_arrays = 0;
          plan.header_bytes = 3 + plan.dense.num_symbols;
          plan.payload_bytes = size;
        }
      }
    }
  }
  const std::uint64_t raw_bytes = std::uint64_t{place.num_units} * sizeof(T);
  if (raw_bytes < size && threadIdx.x == 0) {
    plan.mode = Mode::kRaw;
    plan.num_arrays = 0;
    plan.header_bytes = 0;
    plan.payload_bytes = raw_bytes;
  }
}

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_PLAN_CUH_
