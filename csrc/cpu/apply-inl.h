// unpack and apply of one block: positions and new values first, the check next, the writes last.

namespace gymfast {
namespace GYMFAST_NAMESPACE {

// Changes ahead whose cache line is asked for; the lists have 128 spare entries, and a wrong
// address costs nothing.
constexpr std::uint32_t kPrefetchDistance = 96;

struct ValueGroup {
  std::uint32_t count = 0;
  unsigned mode = 0, low_bits = 0, gap_low_bits = 0, flip_low_bits = 0;
  std::uint32_t num_exceptions = 0, num_flips = 0;
};

struct PositionGroup {
  std::uint32_t count = 0, limit = 0, coded = 0;  // coded: length of the array
  unsigned low_bits = 0;
  bool inverted = false;
};

// A step to add modulo M in the low bits and a sign flip in the top bit.
template <class T>
inline T apply_code(T before, T code) {
  constexpr T kSign = static_cast<T>(T{1} << (8 * sizeof(T) - 1));
  constexpr T kMagnitude = static_cast<T>(kSign - 1);
  return static_cast<T>((static_cast<T>(before + code) & kMagnitude) | ((before ^ code) & kSign));
}

template <class T>
class SparseReader {
 public:
  SparseReader(const ApplyJob& job, Scratch& s)
      : job_(job), scratch_(s), header_{job.payload, job.payload_bytes} {}

  // Reads header fields of one group; `limit` is n_c.
  Error read_positions(std::uint32_t limit, PositionGroup* group) {
    const std::uint64_t k = header_.varint();
    const unsigned p = header_.u8();
    if (!header_.is_ok()) return header_.error;
    if (p >> 6 != 0) return Error::kReservedNotZero;
    if (k == 0 || k > limit) return Error::kCountRange;
    group->count = static_cast<std::uint32_t>(k);
    group->limit = limit;
    group->low_bits = p & 31;
    group->inverted = (p & 32) != 0;
    group->coded = group->inverted ? limit - group->count : group->count;
    low_bits_ += std::uint64_t{group->coded} * group->low_bits;
    return Error::kOk;
  }

  Error read_values(std::uint32_t count, ValueGroup* group) {
    const unsigned q = header_.u8();
    group->count = count;
    group->low_bits = q & 31;
    group->mode = q >> 5 & 3;
    if (group->mode == 3) return Error::kBadMode;
    if (group->mode == 0 && group->low_bits != 0) return Error::kReservedNotZero;
    if (group->mode == 1) {
      const Error error = read_list(count, &group->num_exceptions, &group->gap_low_bits);
      if (error != Error::kOk) return error;
      low_bits_ += std::uint64_t{group->num_exceptions} * (group->gap_low_bits + group->low_bits);
    } else if (group->mode == 2) {
      low_bits_ += std::uint64_t{count} * group->low_bits;
    }
    if ((q & 128) != 0) {
      const Error error = read_list(count, &group->num_flips, &group->flip_low_bits);
      if (error != Error::kOk) return error;
      low_bits_ += std::uint64_t{group->num_flips} * group->flip_low_bits;
    }
    return header_.error;
  }

  unsigned read_mask() {
    const unsigned low = header_.u8();
    return low | header_.u8() << 8;
  }
  std::uint64_t read_count() { return header_.varint(); }
  Error header_error() const { return header_.error; }
  // Looks at the coming PosGroup without reading it.
  bool is_next_inverted() const {
    HeaderReader ahead = header_;
    ahead.varint();
    return (ahead.u8() & 32) != 0;
  }

  // All headers are read: finds L, S and U.
  Error open_streams(std::uint64_t num_changes) {
    const std::uint64_t low_bytes = (low_bits_ + 7) / 8, sign_bytes = (num_changes + 7) / 8;
    const std::uint64_t left = job_.payload_bytes - header_.used;
    if (low_bytes > left || sign_bytes > left - low_bytes) {
      return Error::kStreamLength;
    }
    lows_ = job_.payload + header_.used;
    signs_ = lows_ + low_bytes;
    const std::uint8_t* unary = signs_ + sign_bytes;
    unary_bytes_ = left - low_bytes - sign_bytes;
    unary_ = UnaryReader(unary, unary_bytes_);
    const bool dirty_low = (low_bits_ & 7) != 0 && lows_[low_bytes - 1] >> (low_bits_ & 7) != 0;
    const bool dirty_sign =
        (num_changes & 7) != 0 && signs_[sign_bytes - 1] >> (num_changes & 7) != 0;
    return dirty_low || dirty_sign ? Error::kStreamLength : Error::kOk;
  }

  // Ascending positions of a group into out[0..count). Where they are positions of units of `data`
  // (not null), these are on their way to the second-level cache afterwards: prefetches into the
  // first level would wait for each other.
  Error unpack_positions(const PositionGroup& group, std::uint32_t* out, const T* data = nullptr) {
    if (!group.inverted && data != nullptr) {
      return unpack_split_rice<true>(
          lows_, &low_bit_, unary_, group.low_bits, group.count, group.limit, out,
          [data](std::uint64_t position) { __builtin_prefetch(data + position, 0, 2); });
    }
    if (!group.inverted) return unpack<true>(group.low_bits, group.count, group.limit, out);
    std::uint32_t* holes = scratch_.gaps;
    const Error error = unpack<true>(group.low_bits, group.coded, group.limit, holes);
    if (error != Error::kOk) return error;
    std::uint32_t position = 0;
    for (std::uint32_t i = 0; i <= group.coded; ++i) {
      const std::uint32_t stop = i < group.coded ? holes[i] : group.limit;
      for (; position < stop; ++position) *out++ = position;
      ++position;
    }
    return Error::kOk;
  }

  // Codes of changes [first, first + count) of the S order into codes[first ...].
  Error unpack_values(const ValueGroup& group, std::uint32_t first, T* codes) {
    constexpr std::uint64_t kM = std::uint64_t{1} << (8 * sizeof(T) - 1);
    std::uint32_t* values = scratch_.values;
    std::uint32_t* gaps = scratch_.exception_gaps;
    T* out = codes + first;
    if (group.mode == 2) {
      const Error error = unpack<false>(group.low_bits, group.count, kM, values);
      if (error != Error::kOk) return error;
      for (std::uint32_t i = 0; i < group.count; ++i) set_code(first + i, values[i], &out[i]);
    } else {
      set_unit_steps(first, group.count, out);
    }
    if (group.mode == 1) {
      Error error = unpack<true>(group.gap_low_bits, group.num_exceptions, group.count, gaps);
      if (error != Error::kOk) return error;
      error = unpack<false>(group.low_bits, group.num_exceptions, kM - 1, values);
      if (error != Error::kOk) return error;
      for (std::uint32_t i = 0; i < group.num_exceptions; ++i) {
        set_code(first + gaps[i], values[i] + 1, &out[gaps[i]]);
      }
    }
    if (group.num_flips != 0) {
      const Error error = unpack<true>(group.flip_low_bits, group.num_flips, group.count, gaps);
      if (error != Error::kOk) return error;
      for (std::uint32_t i = 0; i < group.num_flips; ++i) {
        out[gaps[i]] = static_cast<T>(out[gaps[i]] ^ static_cast<T>(kM));
      }
    }
    return Error::kOk;
  }

  // Every stream ends where its arrays end, and only zeros follow.
  Error finish() {
    std::uint64_t one;
    const bool exact = (unary_.next + 7) / 8 == unary_bytes_;
    return exact && !unary_.next_one(&one) ? Error::kOk : Error::kStreamLength;
  }

 private:
  Error read_list(std::uint32_t count, std::uint32_t* size, unsigned* low_bits) {
    const std::uint64_t m = header_.varint();
    const unsigned g = header_.u8();
    if (!header_.is_ok()) return header_.error;
    if (g >> 5 != 0) return Error::kReservedNotZero;
    if (m == 0 || m > count) return Error::kCountRange;
    *size = static_cast<std::uint32_t>(m);
    *low_bits = g;
    return Error::kOk;
  }

  template <bool kPositions>
  Error unpack(unsigned l, std::uint32_t count, std::uint64_t limit, std::uint32_t* out) {
    return unpack_split_rice<kPositions>(lows_, &low_bit_, unary_, l, count, limit, out);
  }

  void set_code(std::uint32_t change, std::uint32_t v, T* code) const {
    constexpr std::uint32_t kMask = static_cast<std::uint32_t>(T(~T{0}) >> 1);
    const std::uint32_t negative = signs_[change >> 3] >> (change & 7) & 1u;
    const std::uint32_t size = v + 1;
    *code = static_cast<T>((negative != 0 ? 0u - size : size) & kMask);
  }

  // Codes of steps of one unit in the last place: all that most changes are. Writes up to 63 more.
  void set_unit_steps(std::uint32_t first, std::uint32_t count, T* out) const {
    constexpr T kMinus = static_cast<T>(T(~T{0}) >> 1);
    for (std::uint32_t i = 0; i < count; i += 32) {
      std::uint64_t bits;
      std::memcpy(&bits, signs_ + ((first + i) >> 3), 8);
      const auto negative = static_cast<std::uint32_t>(bits >> ((first + i) & 7));
#if GYMFAST_LEVEL == 2
      if constexpr (sizeof(T) == 2) {
        _mm512_storeu_si512(out + i, _mm512_mask_blend_epi16(negative, _mm512_set1_epi16(1),
                                                             _mm512_set1_epi16(kMinus)));
        continue;
      }
#endif
      for (unsigned j = 0; j < 32; ++j) {
        out[i + j] = (negative >> j & 1) != 0 ? kMinus : T{1};
      }
    }
  }

  const ApplyJob& job_;
  Scratch& scratch_;
  HeaderReader header_;
  const std::uint8_t* lows_ = nullptr;
  const std::uint8_t* signs_ = nullptr;
  UnaryReader unary_{job_.payload, 0};
  std::uint64_t unary_bytes_ = 0;
  std::uint64_t low_bits_ = 0;  // header: length of L; then unused
  std::uint64_t low_bit_ = 0;
};

// Fills the scratch lists index (positions) and after (codes) in matching order.
template <class T>
inline Error unpack_fast(const ApplyJob& job, Scratch& s, std::uint32_t* count) {
  SparseReader<T> reader(job, s);
  PositionGroup positions;
  ValueGroup values;
  Error error = reader.read_positions(static_cast<std::uint32_t>(job.num_units), &positions);
  if (error != Error::kOk) return error;
  error = reader.read_values(positions.count, &values);
  if (error != Error::kOk) return error;
  error = reader.open_streams(positions.count);
  if (error != Error::kOk) return error;
  error = reader.unpack_positions(positions, s.index, reinterpret_cast<const T*>(job.data));
  if (error != Error::kOk) return error;
  error = reader.unpack_values(values, 0, reinterpret_cast<T*>(s.after));
  if (error != Error::kOk) return error;
  *count = positions.count;
  return reader.finish();
}

// Mask of the classes of a by-class mode; 0 means the header is wrong and *error says how.
template <class T>
inline unsigned read_class_mask(SparseReader<T>& reader, Error* error) {
  const unsigned mask = reader.read_mask();
  *error = reader.header_error();
  if (*error == Error::kOk && mask == 0) *error = Error::kCountRange;
  return *error == Error::kOk ? mask : 0;
}

// Leaves positions in s.index and codes in s.after, both by position.
template <class T>
inline Error unpack_balanced(const ApplyJob& job, Scratch& s, std::uint32_t* count) {
  SparseReader<T> reader(job, s);
  PositionGroup positions;
  Error error = reader.read_positions(static_cast<std::uint32_t>(job.num_units), &positions);
  if (error != Error::kOk) return error;
  const unsigned mask = read_class_mask(reader, &error);
  if (mask == 0) return error;
  ValueGroup groups[kNumClasses];
  std::uint32_t starts[kNumClasses + 1] = {};
  for (int c = 0; c < kNumClasses; ++c) {
    starts[c + 1] = starts[c];
    if ((mask >> c & 1) == 0) continue;
    const std::uint64_t k = reader.read_count();
    if (reader.header_error() != Error::kOk) return reader.header_error();
    if (k == 0 || k > positions.count - starts[c]) return Error::kCountRange;
    error = reader.read_values(static_cast<std::uint32_t>(k), &groups[c]);
    if (error != Error::kOk) return error;
    starts[c + 1] += static_cast<std::uint32_t>(k);
  }
  if (starts[kNumClasses] != positions.count) return Error::kCountRange;
  error = reader.open_streams(positions.count);
  if (error != Error::kOk) return error;
  const T* data = reinterpret_cast<const T*>(job.data);
  error = reader.unpack_positions(positions, s.index, data);
  if (error != Error::kOk) return error;
  T* sorted = reinterpret_cast<T*>(s.after_sorted);
  for (int c = 0; c < kNumClasses; ++c) {
    if (groups[c].count == 0) continue;
    error = reader.unpack_values(groups[c], starts[c], sorted);
    if (error != Error::kOk) return error;
  }
  error = reader.finish();
  if (error != Error::kOk) return error;
  std::uint32_t next[kNumClasses];
  std::memcpy(next, starts, sizeof(next));
  T* codes = reinterpret_cast<T*>(s.after);
  for (std::uint32_t i = 0; i < positions.count; ++i) {
    __builtin_prefetch(data + s.index[i + kPrefetchDistance], 1);
    const unsigned c = class_of(data[s.index[i]], job.params);
    // A wrong base can send more units to a class than it has codes: clamp, then refuse below.
    codes[i] = sorted[std::min(next[c], positions.count - 1)];
    ++next[c];
  }
  for (int c = 0; c < kNumClasses; ++c) {
    if (next[c] != starts[c + 1]) return Error::kCountRange;
  }
  *count = positions.count;
  return Error::kOk;
}

template <class T>
inline Error select_positions(const ApplyJob& job, Scratch& s, const std::uint32_t* starts,
                              const std::uint32_t* ranks, const T* sorted, std::uint32_t* count) {
  const T* data = reinterpret_cast<const T*>(job.data);
  T* codes = reinterpret_cast<T*>(s.after);
  ClassWindow window;
  std::uint32_t next[kNumClasses], first_rank[kNumClasses] = {}, k = 0;
  std::memcpy(next, starts, sizeof(next));
  for (std::size_t i = 0; i < job.num_units; i += 4096) {
    window.fill(data + i, std::min<std::size_t>(4096, job.num_units - i), job.params);
    for (int c = 0; c < kNumClasses; ++c) {
      const std::uint32_t stop = first_rank[c] + window.total(c);
      std::uint32_t at = next[c];
      for (; at < starts[c + 1] && ranks[at] < stop; ++at) {
        s.index[k] = static_cast<std::uint32_t>(i) + window.select(c, ranks[at] - first_rank[c]);
        codes[k++] = sorted[at];
      }
      next[c] = at;
      first_rank[c] = stop;
    }
  }
  *count = k;
  if (k == starts[kNumClasses]) return Error::kOk;
  for (int c = 0; c < kNumClasses; ++c) {  // first_rank[c] is n_c by now
    if (starts[c + 1] - starts[c] > first_rank[c]) return Error::kCountRange;
  }
  return Error::kPositionRange;
}

// Leaves positions in s.index and codes in s.after; order: by window, then class, then position.
template <class T>
inline Error unpack_small(const ApplyJob& job, Scratch& s, std::uint32_t* count) {
  const std::size_t n = job.num_units;
  const T* data = reinterpret_cast<const T*>(job.data);
  SparseReader<T> reader(job, s);
  Error error;
  const unsigned mask = read_class_mask(reader, &error);
  if (mask == 0) return error;
  // n_c is needed for inverted arrays only, and then for the length of L: counted when one comes.
  std::uint32_t units[kNumClasses];
  bool are_units_known = false;
  PositionGroup positions[kNumClasses];
  ValueGroup values[kNumClasses];
  std::uint32_t starts[kNumClasses + 1] = {};
  for (int c = 0; c < kNumClasses; ++c) {
    starts[c + 1] = starts[c];
    if ((mask >> c & 1) == 0) continue;
    if (!are_units_known && reader.is_next_inverted()) {
      count_classes(data, n, job.params, units);
      are_units_known = true;
    }
    const std::uint32_t limit = are_units_known ? units[c] : static_cast<std::uint32_t>(n);
    error = reader.read_positions(limit, &positions[c]);
    if (error != Error::kOk) return error;
    error = reader.read_values(positions[c].count, &values[c]);
    if (error != Error::kOk) return error;
    starts[c + 1] += positions[c].count;
    if (starts[c + 1] > n) return Error::kCountRange;
  }
  const std::uint32_t total = starts[kNumClasses];
  error = reader.open_streams(total);
  if (error != Error::kOk) return error;
  std::uint32_t* ranks = s.rank_sorted;
  T* sorted = reinterpret_cast<T*>(s.after_sorted);
  for (int c = 0; c < kNumClasses; ++c) {
    if (positions[c].count == 0) continue;
    error = reader.unpack_positions(positions[c], ranks + starts[c]);
    if (error != Error::kOk) return error;
    error = reader.unpack_values(values[c], starts[c], sorted);
    if (error != Error::kOk) return error;
  }
  error = reader.finish();
  if (error != Error::kOk) return error;
  return select_positions(job, s, starts, ranks, sorted, count);
}

// A whole new block in s.block_a: check, then copy.
template <class T>
inline Status apply_whole(const ApplyJob& job, const T* result, Digest& partial,
                          std::uint64_t* num_changed) {
  Digest digest;
  digest_block<T>(reinterpret_cast<const std::uint8_t*>(result), job.num_units, job.placement,
                  &digest);
  if (fold32(digest) != job.check) {
    return fail(Error::kResultCheck, 0, fold32(digest), job.check);
  }
  const T* data = reinterpret_cast<const T*>(job.data);
  std::uint64_t changed = 0;
  for (std::size_t i = 0; i < job.num_units; ++i) changed += data[i] != result[i];
  std::memcpy(job.data, result, job.num_units * sizeof(T));
  partial = digest;
  *num_changed = changed;
  return Status{};
}

template <class T>
inline Status apply_block(const ApplyJob& job, Scratch& s, Digest& partial,
                          std::uint64_t* num_changed) {
  *num_changed = 0;
  T* whole = reinterpret_cast<T*>(s.block_a);
  Error error = Error::kBadMode;
  std::uint32_t k = 0;
  switch (job.mode) {
    case Mode::kRaw:
      if (job.payload_bytes != job.num_units * sizeof(T)) return fail(Error::kStreamLength, 0);
      std::memcpy(whole, job.payload, job.payload_bytes);
      return apply_whole(job, whole, partial, num_changed);
    case Mode::kDense:
      if constexpr (sizeof(T) > 1) {
        error = decode_dense(job, whole);
        if (error != Error::kOk) return fail(error, 0);
        return apply_whole(job, whole, partial, num_changed);
      }
      return fail(Error::kBadMode, 0);
    case Mode::kFast: error = unpack_fast<T>(job, s, &k); break;
    case Mode::kBalanced: error = unpack_balanced<T>(job, s, &k); break;
    case Mode::kSmall: error = unpack_small<T>(job, s, &k); break;
    case Mode::kUnchanged: break;
  }
  if (error != Error::kOk) return fail(error, 0);
  T* data = reinterpret_cast<T*>(job.data);
  T* before = reinterpret_cast<T*>(s.before);
  T* after = reinterpret_cast<T*>(s.after);
  for (std::uint32_t i = 0; i < k; ++i) {
    __builtin_prefetch(data + s.index[i + kPrefetchDistance], 1);
    before[i] = data[s.index[i]];
    after[i] = apply_code(before[i], after[i]);
  }
  Digest digest = partial;
  digest_changes(s.index, before, after, k, job.placement, job.mode != Mode::kSmall, &digest);
  if (fold32(digest) != job.check) {
    return fail(Error::kResultCheck, 0, fold32(digest), job.check);
  }
  for (std::uint32_t i = 0; i < k; ++i) data[s.index[i]] = after[i];
  partial = digest;
  *num_changed = k;
  return Status{};
}

}  // namespace GYMFAST_NAMESPACE
}  // namespace gymfast
