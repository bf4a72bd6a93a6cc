// apply: block tables, decoding of every mode, check, and only then the writes. One thread block a
// block; within it nothing is decoded serially but headers.
#ifndef GYMFAST_CUDA_APPLY_CUH_
#define GYMFAST_CUDA_APPLY_CUH_

#include "cuda/dense.cuh"
#include "cuda/select.cuh"

namespace gymfast::cuda {

// Every block unchanged until a table says otherwise.
template <class T>
__global__ __launch_bounds__(kThreads) void begin_apply_kernel(ApplyArgs<T> args) {
  const std::uint64_t block = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (block < args.num_blocks) args.entries[block].mode = Mode::kUnchanged;
  if (block != 0) return;
  args.result->first_error = kNoError;
  args.result->num_changed = 0;
}

template <class T>
__device__ inline void report_block(const ApplyArgs<T>& args, std::uint64_t block, Error error) {
  atomic_min(&args.result->first_error, block << 8 | static_cast<std::uint64_t>(error));
}

// One entry of a block table; moves *at.
__device__ inline Error parse_entry(const std::uint8_t* body, std::uint64_t end, std::uint64_t* at,
                                    BlockEntry* entry) {
  if (*at >= end) return Error::kBadEncoding;
  const unsigned mode = body[(*at)++];
  if (mode > static_cast<unsigned>(Mode::kRaw)) return Error::kBadMode;
  *entry = BlockEntry{0, 0, 0, static_cast<Mode>(mode)};
  if (entry->mode == Mode::kUnchanged) return Error::kOk;
  for (unsigned shift = 0;; shift += 7) {
    if (*at >= end || shift > 63) return Error::kBadEncoding;
    const unsigned byte = body[(*at)++];
    if ((byte == 0 && shift != 0) || (shift == 63 && byte > 1)) return Error::kBadEncoding;
    entry->size |= std::uint64_t{byte & 127u} << shift;
    if (byte < 128) break;
  }
  if (end - *at < 4) return Error::kBadEncoding;
  for (unsigned i = 0; i < 4; ++i) entry->check |= std::uint32_t{body[(*at)++]} << (8 * i);
  return Error::kOk;
}

// The table of one section. Its entries stay without a payload if anything is wrong.
template <class T>
__device__ Error parse_table(const ApplyArgs<T>& args, const Section& section, BlockEntry* entries,
                             std::uint64_t* bad_block) {
  *bad_block = section.first_block;
  if (section.size > args.body_bytes || section.offset > args.body_bytes - section.size) {
    return Error::kPayloadLength;
  }
  if (section.num_blocks > section.size) return Error::kBadEncoding;
  const std::uint64_t end = section.offset + section.size;
  std::uint64_t at = section.offset, sum = 0;
  bool overflows = false;
  for (std::uint64_t i = 0; i < section.num_blocks; ++i) {
    const Error error = parse_entry(args.body, end, &at, &entries[i]);
    if (error != Error::kOk) {
      *bad_block += i;
      return error;
    }
    sum += entries[i].size;
    overflows = overflows || sum < entries[i].size;
  }
  if (overflows || sum != end - at) return Error::kPayloadLength;
  for (std::uint64_t i = 0; i < section.num_blocks; ++i) {
    entries[i].offset = at;
    at += entries[i].size;
  }
  return Error::kOk;
}

// One thread a section: a table is a few hundred bytes.
template <class T>
__global__ __launch_bounds__(kThreads) void parse_tables_kernel(ApplyArgs<T> args) {
  const std::uint64_t i = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.num_sections) return;
  const Section section = args.sections[i];
  const std::uint64_t skipped = section.first_block - args.first_block;
  if (section.first_block < args.first_block || skipped > args.num_blocks ||
      section.num_blocks > args.num_blocks - skipped || section.num_blocks == 0) {
    return report_block(args, section.first_block, Error::kBadBlockIndex);
  }
  BlockEntry* entries = args.entries + skipped;
  std::uint64_t bad_block;
  const Error error = parse_table(args, section, entries, &bad_block);
  if (error == Error::kOk) return;
  report_block(args, bad_block, error);
  for (std::uint64_t j = 0; j < section.num_blocks; ++j) entries[j].mode = Mode::kUnchanged;
}

// The codes of the changes of a group into codes[first ..], in the order of S.
template <class T>
__device__ Error unpack_codes(const BlockScratch<T>& scratch, Streams& streams,
                              const ValueGroup& group, std::uint32_t first, T* codes,
                              UnpackShared& shared) {
  constexpr std::uint64_t kM = std::uint64_t{1} << kSignShift<T>;
  T* out = codes + first;
  if (group.mode == 2) {
    const Error error = unpack_values(streams, group.low_bits, group.count, kM, scratch.ones,
                                      scratch.values, shared);
    if (error != Error::kOk) return error;
  }
  for (std::uint32_t i = threadIdx.x; i < group.count; i += kThreads) {
    out[i] = code_of<T>(group.mode == 2 ? scratch.values[i] : 0, streams.sign(first + i) != 0);
  }
  __syncthreads();
  if (group.mode == 1) {
    const std::uint32_t count = group.num_exceptions;
    Error error = unpack_positions(streams, group.gap_low_bits, count, group.count, scratch.ones,
                                   scratch.list, shared);
    if (error != Error::kOk) return error;
    error =
        unpack_values(streams, group.low_bits, count, kM - 1, scratch.ones, scratch.values, shared);
    if (error != Error::kOk) return error;
    for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const std::uint32_t at = scratch.list[i];
      out[at] = code_of<T>(scratch.values[i] + 1, streams.sign(first + at) != 0);
    }
    __syncthreads();
  }
  if (group.num_flips == 0) return Error::kOk;
  const Error error = unpack_positions(streams, group.flip_low_bits, group.num_flips, group.count,
                                       scratch.ones, scratch.list, shared);
  if (error != Error::kOk) return error;
  for (std::uint32_t i = threadIdx.x; i < group.num_flips; i += kThreads) {
    out[scratch.list[i]] = static_cast<T>(out[scratch.list[i]] ^ static_cast<T>(kM));
  }
  __syncthreads();
  return Error::kOk;
}

// Headers of modes 1 to 3, by thread 0.
template <class T>
__device__ void read_header(const BlockJob<T>& job, DecodeShared& shared) {
  HeaderReader reader{job.payload, job.payload_bytes};
  shared.num_groups = 0;
  const std::uint32_t n = job.place.num_units;
  std::uint32_t mask = 1, changes = 0;
  if (job.mode != Mode::kSmall) reader.positions(n, &shared.positions[0]);
  if (reader.is_ok() && job.mode != Mode::kFast) mask = reader.class_mask();
  bool are_units_known = false;
  for (std::uint32_t c = 0; c < kNumClasses && reader.is_ok(); ++c) {
    shared.starts[c] = changes;
    if ((mask >> c & 1) == 0) continue;
    const std::uint32_t group = shared.num_groups++;
    std::uint64_t count = shared.positions[0].count;
    if (job.mode == Mode::kSmall) {
      // n_c counts for inverted arrays only; until one comes, the limit is that of the CPU decoder.
      HeaderReader ahead = reader;
      ahead.varint();
      are_units_known = are_units_known || (ahead.u8() & 32) != 0;
      if (!reader.positions(are_units_known ? shared.units[c] : n, &shared.positions[group])) break;
      count = shared.positions[group].count;
      if (changes + count > n) reader.fail(Error::kCountRange);
    } else if (job.mode == Mode::kBalanced) {
      count = reader.varint();
      if (reader.is_ok() && (count == 0 || count > shared.positions[0].count - changes)) {
        reader.fail(Error::kCountRange);
      }
    }
    if (!reader.is_ok()) break;
    reader.values(static_cast<std::uint32_t>(count), &shared.values[group]);
    changes += static_cast<std::uint32_t>(count);
  }
  shared.starts[kNumClasses] = changes;
  if (reader.is_ok() && job.mode == Mode::kBalanced && changes != shared.positions[0].count) {
    reader.fail(Error::kCountRange);
  }
  shared.num_changes = changes;
  shared.header_bytes = reader.used;
  shared.low_bits = reader.low_bits;
  shared.error = reader.error;
}

// Leaves the positions of k changes in scratch.index and their codes in scratch.codes.
template <class T>
__device__ Error decode_sparse(const BlockJob<T>& job, DecodeShared& shared) {
  if (job.mode == Mode::kSmall) count_classes(job, shared);
  if (threadIdx.x == 0) read_header(job, shared);
  __syncthreads();
  if (shared.error != Error::kOk) return shared.error;
  const BlockScratch<T>& scratch = job.scratch;
  const std::uint32_t k = shared.num_changes;
  Streams streams;
  Error error = streams.open(job.payload, job.payload_bytes, shared.header_bytes, shared.low_bits,
                             (k + 7u) / 8);
  if (error != Error::kOk) return error;
  if (Streams::has_dirty_padding(streams.lows, streams.low_bits) ||
      Streams::has_dirty_padding(streams.middle, k)) {
    return Error::kStreamLength;
  }
  T* codes = job.mode == Mode::kBalanced ? scratch.sorted : scratch.codes;
  if (job.mode != Mode::kSmall) {
    error = unpack_places(streams, shared.positions[0], scratch.ones, scratch.list, scratch.index,
                          shared.unpack);
  }
  std::uint32_t first = 0;
  for (std::uint32_t group = 0; group < shared.num_groups && error == Error::kOk; ++group) {
    if (job.mode == Mode::kSmall) {
      error = unpack_places(streams, shared.positions[group], scratch.ones, scratch.list,
                            scratch.ranks + first, shared.unpack);
    }
    if (error != Error::kOk) return error;
    error = unpack_codes(scratch, streams, shared.values[group], first, codes, shared.unpack);
    first += shared.values[group].count;
  }
  if (error == Error::kOk) error = streams.finish();
  if (error != Error::kOk) return error;
  if (job.mode == Mode::kBalanced) return order_codes(job, shared);
  if (job.mode == Mode::kSmall) return select_positions(job, shared);
  return Error::kOk;
}

// The partial digest of a block, if it matches the check; otherwise the error.
struct Sums {
  std::uint64_t lane[2];
};

__device__ inline Error compare_check(const Sums& sums, std::uint32_t check) {
  Digest digest;
  digest.lane[0] = sums.lane[0];
  digest.lane[1] = sums.lane[1];
  return fold32(digest) == check ? Error::kOk : Error::kResultCheck;
}

template <class T>
__device__ void finish_block(const ApplyArgs<T>& args, std::uint64_t block, const Sums& sums,
                             std::uint64_t num_changed) {
  if (threadIdx.x != 0) return;
  args.digests[block].lane[0] = sums.lane[0];
  args.digests[block].lane[1] = sums.lane[1];
  atomic_add(&args.result->num_changed, num_changed);
}

template <class T>
__device__ Error apply_sparse(const ApplyArgs<T>& args, const BlockJob<T>& job,
                              DecodeShared& shared) {
  const Error error = decode_sparse(job, shared);
  if (error != Error::kOk) return error;
  const std::uint32_t k = shared.num_changes;
  const BlockScratch<T>& scratch = job.scratch;
  RowDigest digest;
  for (std::uint32_t i = threadIdx.x; i < k; i += kThreads) {
    const std::uint64_t offset = byte_of<T>(job.place, scratch.index[i]);
    const T before = *reinterpret_cast<const T*>(args.data + offset);
    const T after = apply_code(before, scratch.codes[i]);
    digest.add(std::uint64_t{after} - std::uint64_t{before}, offset);
  }
  const Digest& old = args.digests[job.block];
  Sums sums;
  for (unsigned lane = 0; lane < 2; ++lane) {
    sums.lane[lane] = old.lane[lane] + group_sum(digest.finish(lane), shared.unpack.group);
  }
  if (compare_check(sums, job.check) != Error::kOk) return Error::kResultCheck;
  for (std::uint32_t i = threadIdx.x; i < k; i += kThreads) {
    auto* unit = reinterpret_cast<T*>(args.data + byte_of<T>(job.place, scratch.index[i]));
    *unit = apply_code(*unit, scratch.codes[i]);
  }
  finish_block(args, job.block, sums, k);
  return Error::kOk;
}

// A whole new block whose units `unit_at` gives: check, then write.
template <class T, class UnitAt>
__device__ Error apply_whole(const ApplyArgs<T>& args, const BlockJob<T>& job, DecodeShared& shared,
                             const UnitAt& unit_at) {
  RowDigest digest;
  std::uint64_t changed = 0;
  for (std::uint32_t i = threadIdx.x; i < job.place.num_units; i += kThreads) {
    const std::uint64_t offset = byte_of<T>(job.place, i);
    const T unit = unit_at(i);
    changed += unit != *reinterpret_cast<const T*>(args.data + offset);
    digest.add(unit, offset);
  }
  Sums sums;
  for (unsigned lane = 0; lane < 2; ++lane) {
    sums.lane[lane] = group_sum(digest.finish(lane), shared.unpack.group);
  }
  changed = group_sum(changed, shared.unpack.group);
  if (compare_check(sums, job.check) != Error::kOk) return Error::kResultCheck;
  for (std::uint32_t i = threadIdx.x; i < job.place.num_units; i += kThreads) {
    store_unit<T>(args.data, job.place, i, unit_at(i));
  }
  finish_block(args, job.block, sums, changed);
  return Error::kOk;
}

template <class T>
__device__ Error apply_raw(const ApplyArgs<T>& args, const BlockJob<T>& job, DecodeShared& shared) {
  if (job.payload_bytes != std::uint64_t{job.place.num_units} * sizeof(T)) {
    return Error::kStreamLength;
  }
  return apply_whole(args, job, shared, [&](std::uint32_t i) {
    std::uint32_t unit = 0;  // a payload begins anywhere
    for (std::uint32_t j = 0; j < sizeof(T); ++j) {
      unit |= std::uint32_t{job.payload[std::uint64_t{i} * sizeof(T) + j]} << (8 * j);
    }
    return static_cast<T>(unit);
  });
}

// The header of a dense payload, by thread 0: the symbols go to shared memory.
template <class T>
__device__ void read_dense_header(const BlockJob<T>& job, DecodeShared& shared) {
  HeaderReader reader{job.payload, job.payload_bytes};
  const std::uint32_t flags = reader.u8();
  const std::uint32_t num_symbols = reader.u8() + 1;
  if (reader.used + num_symbols + 1 > reader.size) reader.fail(Error::kStreamLength);
  if (flags > 1) reader.fail(Error::kReservedNotZero);
  std::uint32_t seen[8] = {};
  for (std::uint32_t i = 0; i < num_symbols && reader.is_ok(); ++i) {
    const std::uint32_t symbol = reader.u8();
    if ((seen[symbol / 32] >> (symbol % 32) & 1u) != 0) reader.fail(Error::kPositionRange);
    seen[symbol / 32] |= 1u << (symbol % 32);
    shared.symbols[i] = static_cast<std::uint8_t>(symbol);
  }
  const std::uint32_t l = reader.is_ok() ? reader.u8() : 0;
  if (reader.is_ok() && l > 7) reader.fail(Error::kCountRange);
  shared.use_base = flags == 1;
  shared.num_symbols = num_symbols;
  shared.dense_low_bits = l;
  shared.header_bytes = reader.used;
  shared.error = reader.error;
}

template <class T>
__device__ Error apply_dense(const ApplyArgs<T>& args, const BlockJob<T>& job,
                             DecodeShared& shared) {
  using Layout = DenseLayout<T>;
  if (threadIdx.x == 0) read_dense_header(job, shared);
  __syncthreads();
  if (shared.error != Error::kOk) return shared.error;
  const std::uint32_t n = job.place.num_units, l = shared.dense_low_bits;
  Streams streams;
  Error error = streams.open(job.payload, job.payload_bytes, shared.header_bytes,
                             std::uint64_t{n} * l, std::uint64_t{n} * Layout::kRestBytes);
  if (error != Error::kOk) return error;
  error = unpack_values(streams, l, n, shared.num_symbols, job.scratch.ones, job.scratch.values,
                        shared.unpack);
  if (error == Error::kOk) error = streams.finish();
  if (error != Error::kOk) return error;
  if (Streams::has_dirty_padding(streams.lows, streams.low_bits)) return Error::kStreamLength;
  for (std::uint32_t i = threadIdx.x; i < n; i += kThreads) {
    std::uint32_t rest = 0;
    for (std::uint32_t j = 0; j < Layout::kRestBytes; ++j) {
      const std::uint64_t at = std::uint64_t{i} * Layout::kRestBytes + j;
      rest |= std::uint32_t{streams.middle[at]} << (8 * j);
    }
    std::uint32_t symbol = shared.symbols[job.scratch.values[i]];
    if (shared.use_base) {
      symbol += Layout::symbol(load_unit<T>(args.data, job.place, i));
    }
    job.scratch.codes[i] = Layout::join(symbol & 0xFFu, rest);
  }
  __syncthreads();
  return apply_whole(args, job, shared, [&](std::uint32_t i) { return job.scratch.codes[i]; });
}

template <class T>
struct ApplyShared {
  BlockJob<T> job;
  DecodeShared decode;
};

template <class T>
__global__ __launch_bounds__(kThreads, 6) void apply_kernel(ApplyArgs<T> args) {
  GYMFAST_SHARED(ApplyShared<T>, shared);
  const Mode mode = args.entries[blockIdx.x].mode;
  if (mode == Mode::kUnchanged) return;
  if (threadIdx.x == 0) shared.job.fill(args, args.entries[blockIdx.x], blockIdx.x);
  __syncthreads();
  Error error = Error::kBadMode;
  if (mode == Mode::kRaw) {
    error = apply_raw(args, shared.job, shared.decode);
  } else if (mode != Mode::kDense) {
    error = apply_sparse(args, shared.job, shared.decode);
  } else if constexpr (sizeof(T) > 1) {
    error = apply_dense(args, shared.job, shared.decode);
  }
  if (error != Error::kOk && threadIdx.x == 0) report_block(args, shared.job.block, error);
}

}  // namespace gymfast::cuda

#endif  // GYMFAST_CUDA_APPLY_CUH_
