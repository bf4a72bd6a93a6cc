// pack: the layout of the sections and the bytes of every block.
#ifndef GYMFAST_CUDA_PACK_CUH_
#define GYMFAST_CUDA_PACK_CUH_

#include "cuda/plan.cuh"

namespace gymfast::cuda {

struct BlockRange {
  std::uint64_t first;
  std::uint64_t end;
};

template <class T>
__device__ inline BlockRange blocks_of(const EncodeArgs<T>& args, std::uint64_t section) {
  const std::uint64_t first = section * args.blocks_per_section;
  return {first, smaller(first + args.blocks_per_section, args.num_blocks)};
}

// One thread block a section: how large it is. A section without a change has no bytes.
template <class T>
__global__ __launch_bounds__(kThreads) void size_sections_kernel(EncodeArgs<T> args) {
  GYMFAST_SHARED(GroupShared, shared);
  const BlockRange range = blocks_of(args, blockIdx.x);
  std::uint64_t size = 0, changed = 0;
  for (std::uint64_t i = range.first + threadIdx.x; i < range.end; i += kThreads) {
    const BlockPlan& plan = args.plans[i];
    size += plan.table_bytes() + plan.payload_bytes;
    changed += plan.num_changed;
  }
  size = group_sum(size, shared);
  changed = group_sum(changed, shared);
  if (threadIdx.x != 0) return;
  Section& section = args.sections[blockIdx.x];
  section.first_block = args.diff.first_block + range.first;
  section.num_blocks = range.end - range.first;
  section.size = changed == 0 ? 0 : size;
  section.num_changed = changed;
}

// One thread block a section: where it and the table entries and payloads of its blocks begin.
template <class T>
__global__ __launch_bounds__(kThreads) void place_sections_kernel(EncodeArgs<T> args) {
  GYMFAST_SHARED(GroupShared, shared);
  std::uint64_t offset = 0;
  for (std::uint64_t i = threadIdx.x; i < blockIdx.x; i += kThreads) {
    offset += args.sections[i].size;
  }
  offset = group_sum(offset, shared);
  if (threadIdx.x == 0) args.sections[blockIdx.x].offset = offset;
  const BlockRange range = blocks_of(args, blockIdx.x);
  std::uint64_t table_bytes = 0;
  for (std::uint64_t i = range.first + threadIdx.x; i < range.end; i += kThreads) {
    table_bytes += args.plans[i].table_bytes();
  }
  std::uint64_t table = offset, payload = offset + group_sum(table_bytes, shared);
  for (std::uint64_t at = range.first; at < range.end; at += kThreads) {
    const std::uint64_t i = at + threadIdx.x;
    const bool is_block = i < range.end;
    std::uint64_t tables, payloads;
    const std::uint64_t entry = is_block ? args.plans[i].table_bytes() : 0;
    const std::uint64_t size = is_block ? args.plans[i].payload_bytes : 0;
    const std::uint64_t entries_below = group_scan(entry, &tables, shared);
    const std::uint64_t sizes_below = group_scan(size, &payloads, shared);
    if (is_block) {
      args.plans[i].table_offset = table + entries_below;
      args.plans[i].payload_offset = payload + sizes_below;
    }
    table += tables;
    payload += payloads;
  }
}

// Zeros under the sections: all bits are ORed in.
template <class T>
__global__ __launch_bounds__(kThreads) void clear_body_kernel(EncodeArgs<T> args,
                                                              std::uint64_t num_groups) {
  const Section& last = args.sections[args.num_sections - 1];
  const std::uint64_t num_words = (last.offset + last.size + 3) / 4;
  auto* words = reinterpret_cast<std::uint32_t*>(args.body);
  const std::uint64_t first = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (std::uint64_t i = first; i < num_words; i += num_groups * kThreads) words[i] = 0;
}

// Lows and unary codes of `count` values of at most 20 bits each; moves both cursors.
template <class Element>
__device__ void pack_split_rice(const BitSink& sink, std::uint32_t count, std::uint32_t low_bits,
                                std::uint64_t* low_bit, std::uint64_t* unary_bit,
                                GroupShared& shared, const Element& element) {
  const std::uint32_t mask = (1u << low_bits) - 1;
  for (std::uint32_t at = 0; at < count; at += kThreads) {
    const std::uint32_t i = at + threadIdx.x;
    const bool is_element = i < count;
    const std::uint32_t x = is_element ? element(i) : 0;
    const std::uint32_t length = is_element ? (x >> low_bits) + 1 : 0;
    std::uint32_t total;
    const std::uint32_t below = group_scan(length, &total, shared);
    if (is_element) {
      if (low_bits != 0) sink.put(*low_bit + std::uint64_t{i} * low_bits, x & mask);
      sink.put(*unary_bit + below + length - 1, 1);
    }
    *unary_bit += total;
  }
  *low_bit += std::uint64_t{count} * low_bits;
}

template <class T>
__device__ void pack_sparse(const EncodeArgs<T>& args, std::uint64_t block, const BlockPlan& plan,
                            const BitSink& sink, GroupShared& shared) {
  const BlockLists<T> lists(args, block, plan.mode);
  std::uint64_t low_bits = 0;
  for (std::uint32_t a = 0; a < plan.num_arrays; ++a) low_bits += plan.arrays[a].lows();
  const std::uint32_t k = plan.num_changed;
  const std::uint64_t lows_at = plan.payload_offset + plan.header_bytes;
  const std::uint64_t signs_at = lows_at + (low_bits + 7) / 8;
  const std::uint64_t unary_at = signs_at + (k + 7u) / 8;
  for (std::uint32_t at = 0; at < k; at += kThreads) {
    const std::uint32_t i = at + threadIdx.x;
    const std::uint32_t bits = __ballot_sync(kFullMask, i < k && lists.negative(i));
    if (lane_id() == 0) sink.put(8 * signs_at + i, bits);
  }
  std::uint64_t low_bit = 8 * lows_at, unary_bit = 8 * unary_at;
  for (std::uint32_t a = 0; a < plan.num_arrays; ++a) {
    const ArrayPlan array = plan.arrays[a];
    pack_split_rice(sink, array.count, array.low_bits, &low_bit, &unary_bit, shared,
                    [&](std::uint32_t i) { return lists.element(array, i); });
  }
}

template <class T>
__device__ void pack_dense(const EncodeArgs<T>& args, std::uint64_t block, const Placement& place,
                           const BlockPlan& plan, const BitSink& sink, GroupShared& shared) {
  using Layout = DenseLayout<T>;
  const std::uint64_t slots = block * args.diff.block_units;
  const DenseSource<T> source = dense_source(args, block);
  // One byte a unit; the lists of exceptions are of no use to a dense block.
  auto* symbols = reinterpret_cast<std::uint8_t*>(args.exceptions + slots);
  const std::uint32_t n = place.num_units;
  for (std::uint32_t i = threadIdx.x; i < n; i += kThreads) {
    symbols[i] =
        source.use_base
            ? 0
            : static_cast<std::uint8_t>(Layout::symbol(load_unit<T>(source.next, place, i)));
  }
  __syncthreads();
  const std::uint32_t* index = args.diff.changes.index + slots;
  for (std::uint32_t i = threadIdx.x; source.use_base && i < plan.num_changed; i += kThreads) {
    symbols[index[i]] = static_cast<std::uint8_t>(source.changed_symbol(i));
  }
  __syncthreads();
  const std::uint64_t lows_at = plan.payload_offset + plan.header_bytes;
  const std::uint64_t rests_at = lows_at + (std::uint64_t{n} * plan.dense.low_bits + 7) / 8;
  for (std::uint32_t i = threadIdx.x; i < n; i += kThreads) {
    sink.put(8 * (rests_at + std::uint64_t{i} * Layout::kRestBytes),
             Layout::rest(load_unit<T>(source.next, place, i)));
  }
  std::uint64_t low_bit = 8 * lows_at;
  std::uint64_t unary_bit = 8 * (rests_at + std::uint64_t{n} * Layout::kRestBytes);
  pack_split_rice(
      sink, n, plan.dense.low_bits, &low_bit, &unary_bit, shared,
      [&](std::uint32_t i) -> std::uint32_t { return plan.dense.index_of[symbols[i]]; });
}

// Whole words where the payload owns them, an OR at its two ends.
template <class T>
__device__ void pack_raw(const std::uint8_t* next, const Placement& place, const BlockPlan& plan,
                         const BitSink& sink) {
  const std::uint64_t begin = plan.payload_offset, end = begin + plan.payload_bytes;
  for (std::uint64_t word = begin / 4 + threadIdx.x; word < (end + 3) / 4; word += kThreads) {
    std::uint32_t value = 0;
    for (std::uint32_t j = 0; j < 4; ++j) {
      const std::uint64_t at = 4 * word + j;
      if (at < begin || at >= end) continue;
      const auto byte = static_cast<std::uint32_t>(at - begin);
      const T unit = load_unit<T>(next, place, byte / sizeof(T));
      value |= (static_cast<std::uint32_t>(unit) >> (8 * (byte % sizeof(T))) & 0xFFu) << (8 * j);
    }
    if (4 * word >= begin && 4 * word + 4 <= end) {
      sink.words[word] = value;
    } else {
      atomicOr(sink.words + word, value);
    }
  }
}

__device__ inline void pack_table_entry(const BlockPlan& plan, const BitSink& sink) {
  std::uint64_t at = plan.table_offset;
  sink.put_byte(at++, static_cast<std::uint32_t>(plan.mode));
  if (plan.mode == Mode::kUnchanged) return;
  std::uint64_t rest = plan.payload_bytes;
  for (; rest >= 128; rest >>= 7) {
    sink.put_byte(at++, static_cast<std::uint32_t>(rest & 127u) | 128u);
  }
  sink.put_byte(at++, static_cast<std::uint32_t>(rest));
  sink.put(8 * at, plan.check);
}

template <class T>
__global__ __launch_bounds__(kThreads) void pack_kernel(EncodeArgs<T> args) {
  GYMFAST_SHARED(GroupShared, shared);
  const std::uint64_t block = blockIdx.x;
  if (args.sections[block / args.blocks_per_section].size == 0) return;
  const BlockPlan& plan = args.plans[block];
  const BitSink sink{reinterpret_cast<std::uint32_t*>(args.body)};
  if (threadIdx.x == 0) pack_table_entry(plan, sink);
  if (plan.mode == Mode::kUnchanged) return;
  for (std::uint32_t i = threadIdx.x; i < plan.header_bytes; i += kThreads) {
    sink.put_byte(plan.payload_offset + i, plan.header[i]);
  }
  const Placement place = placement_of(args.diff.geometry, args.diff.first_block + block);
  if (plan.mode == Mode::kRaw) return pack_raw<T>(args.diff.next, place, plan, sink);
  if (plan.mode != Mode::kDense) return pack_sparse(args, block, plan, sink, shared);
  if constexpr (sizeof(T) > 1) pack_dense(args, block, place, plan, sink, shared);
}

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_PACK_CUH_
