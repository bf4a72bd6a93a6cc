// Coding of one block: modes 1..3 from lists of changes, and the choice between all modes.

namespace gymfast {
namespace GYMFAST_NAMESPACE {

// Everything that decides the size of a sparse payload; the bits are written afterwards.
struct SparsePlan {
  HeaderWriter header;
  SplitRice arrays[1 + 4 * kNumClasses];
  unsigned num_arrays = 0;
  std::uint32_t num_changes = 0;

  void add(const SplitRice& array) {
    if (array.count != 0) arrays[num_arrays++] = array;
  }
  std::uint64_t low_bits() const {
    std::uint64_t sum = 0;
    for (unsigned i = 0; i < num_arrays; ++i) sum += arrays[i].lows();
    return sum;
  }
  std::uint64_t unary_bits() const {
    std::uint64_t sum = 0;
    for (unsigned i = 0; i < num_arrays; ++i) sum += arrays[i].unary();
    return sum;
  }
  std::uint64_t size_bytes() const {
    return header.size + (low_bits() + 7) / 8 + (num_changes + 7u) / 8 + (unary_bits() + 7) / 8;
  }
};

// v of all changes and their neg bits (section 5.2). Returns whether any sign flips.
template <class T>
inline bool split_values(const T* before, const T* after, std::size_t count, std::uint32_t* values,
                         std::uint8_t* negative) {
  constexpr std::uint32_t kMask = static_cast<std::uint32_t>(T(~T{0}) >> 1);
  constexpr unsigned kSign = 8 * sizeof(T) - 1;
  std::uint32_t any_flip = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t d =
        static_cast<std::int32_t>(after[i] & kMask) - static_cast<std::int32_t>(before[i] & kMask);
    const std::uint32_t size = static_cast<std::uint32_t>(d < 0 ? -d : d);
    values[i] = (size - 1) & kMask;
    any_flip |= static_cast<std::uint32_t>(after[i] ^ before[i]);
  }
  std::size_t i = 0;
#if GYMFAST_LEVEL == 2
  if constexpr (sizeof(T) == 2) {
    const __m512i mask = _mm512_set1_epi16(kMask);
    for (; i + 32 <= count; i += 32) {
      const __m512i a = _mm512_and_si512(_mm512_loadu_si512(after + i), mask);
      const __m512i b = _mm512_and_si512(_mm512_loadu_si512(before + i), mask);
      const std::uint32_t bits = _mm512_cmplt_epi16_mask(a, b);
      std::memcpy(negative + i / 8, &bits, 4);
    }
  }
#endif
  for (; i < count; i += 64) {
    std::uint64_t bits = 0;
    const std::size_t end = std::min<std::size_t>(64, count - i);
    for (std::size_t j = 0; j < end; ++j) {
      const std::uint64_t neg = (after[i + j] & kMask) < (before[i + j] & kMask);
      bits |= neg << j;
    }
    std::memcpy(negative + i / 8, &bits, 8);
  }
  return (any_flip >> kSign & 1) != 0;
}

// Gaps between positions; returns their number.
inline std::uint32_t make_gaps(const std::uint32_t* positions, std::uint32_t count,
                               std::uint32_t* gaps) {
  if (count == 0) return 0;
  gaps[0] = positions[0];
  for (std::uint32_t i = 1; i < count; ++i) gaps[i] = positions[i] - positions[i - 1] - 1;
  return count;
}

// Gaps between the positions of 0..limit-1 that are not listed.
inline std::uint32_t make_inverted_gaps(const std::uint32_t* positions, std::uint32_t count,
                                        std::uint32_t limit, std::uint32_t* gaps) {
  std::uint32_t m = 0, run = 0, position = 0;
  for (std::uint32_t i = 0; i <= count; ++i) {
    const std::uint32_t stop = i < count ? positions[i] : limit;
    for (; position < stop; ++position) {
      gaps[m++] = run;
      run = 0;
    }
    ++run;
    ++position;
  }
  return m;
}

class SparsePlanner {
 public:
  SparsePlanner(Scratch& s, SparsePlan& plan) : scratch_(s), plan_(plan) {}

  void positions(const std::uint32_t* positions, std::uint32_t count, std::uint32_t limit) {
    std::uint32_t* gaps = scratch_.gaps + gaps_used_;
    const bool inverted = 2 * std::uint64_t{count} > limit;
    const std::uint32_t m = inverted ? make_inverted_gaps(positions, count, limit, gaps)
                                     : make_gaps(positions, count, gaps);
    const SplitRice array = plan_split_rice(gaps, m);
    plan_.header.varint(count);
    plan_.header.u8(array.low_bits | (inverted ? 32u : 0u));
    plan_.add(array);
    gaps_used_ += m;
  }

  // The ValGroup of changes [first, first + count).
  template <class T>
  void values(const T* before, const T* after, const std::uint32_t* values, std::uint32_t count,
              bool may_flip) {
    std::uint32_t* gaps = scratch_.exception_gaps + exceptions_used_;
    std::uint32_t* rest = scratch_.exception_values + exceptions_used_;
    const std::uint32_t num_exceptions = collect_exceptions(values, count, gaps, rest);
    std::uint32_t num_flips = 0;
    std::uint32_t* flips = scratch_.flip_gaps + flips_used_;
    if (may_flip) num_flips = collect_flips(before, after, count, flips);
    const SplitRice flip_array = plan_split_rice(flips, num_flips);
    SplitRice value_array, gap_array;
    unsigned mode = 0;
    if (num_exceptions != 0) {
      const SplitRice all = plan_split_rice(values, count);
      gap_array = plan_split_rice(gaps, num_exceptions);
      const SplitRice some = plan_split_rice(rest, num_exceptions);
      const std::uint64_t bits =
          gap_array.bits() + some.bits() + 8 + 8 * varint_bytes(num_exceptions);
      mode = bits <= all.bits() ? 1 : 2;
      value_array = mode == 1 ? some : all;
    }
    plan_.header.u8(value_array.low_bits | mode << 5 | (num_flips != 0 ? 128u : 0u));
    if (mode == 1) {
      plan_.header.varint(num_exceptions);
      plan_.header.u8(gap_array.low_bits);
      plan_.add(gap_array);
    }
    if (mode != 0) plan_.add(value_array);
    if (num_flips != 0) {
      plan_.header.varint(num_flips);
      plan_.header.u8(flip_array.low_bits);
      plan_.add(flip_array);
    }
    exceptions_used_ += num_exceptions;
    flips_used_ += num_flips;
  }

 private:
  static std::uint32_t collect_exceptions(const std::uint32_t* values, std::uint32_t count,
                                          std::uint32_t* gaps, std::uint32_t* rest) {
    std::uint32_t m = 0, i = 0;
#if GYMFAST_LEVEL == 2
    const __m512i one = _mm512_set1_epi32(1), step = _mm512_set1_epi32(16);
    __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (; i + 16 <= count; i += 16) {
      const __m512i v = _mm512_loadu_si512(values + i);
      const __mmask16 mask = _mm512_test_epi32_mask(v, v);
      _mm512_storeu_si512(gaps + m, _mm512_maskz_compress_epi32(mask, lane));
      _mm512_storeu_si512(rest + m, _mm512_maskz_compress_epi32(mask, _mm512_sub_epi32(v, one)));
      m += static_cast<unsigned>(_mm_popcnt_u32(mask));
      lane = _mm512_add_epi32(lane, step);
    }
#endif
    for (; i < count; ++i) {
      gaps[m] = i;
      rest[m] = values[i] - 1;
      m += values[i] != 0;
    }
    for (std::uint32_t j = m; j-- > 1;) gaps[j] -= gaps[j - 1] + 1;
    return m;
  }

  template <class T>
  static std::uint32_t collect_flips(const T* before, const T* after, std::uint32_t count,
                                     std::uint32_t* gaps) {
    constexpr unsigned kSign = 8 * sizeof(T) - 1;
    std::uint32_t m = 0, next = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      if ((static_cast<std::uint32_t>(before[i] ^ after[i]) >> kSign & 1) == 0) continue;
      gaps[m++] = i - next;
      next = i + 1;
    }
    return m;
  }

  Scratch& scratch_;
  SparsePlan& plan_;
  std::size_t gaps_used_ = 0, exceptions_used_ = 0, flips_used_ = 0;
};

template <class T>
inline void plan_fast(const Changes<T>& changes, std::size_t n, Scratch& s, SparsePlan& plan) {
  const auto k = static_cast<std::uint32_t>(changes.count);
  plan.num_changes = k;
  SparsePlanner planner(s, plan);
  planner.positions(changes.index, k, static_cast<std::uint32_t>(n));
  const bool may_flip = split_values(changes.before, changes.after, k, s.values, s.negative);
  planner.values(changes.before, changes.after, s.values, k, may_flip);
}

// Stable order by class; fills the sorted lists of the scratch. ends[c] is where class c ends.
template <class T, bool kRanks>
inline void sort_by_class(const Changes<T>& changes, const BlockParams& p, Scratch& s,
                          std::uint32_t ends[kNumClasses]) {
  // Whole words: the lists have 64 spare units.
  for (std::size_t i = 0; i < changes.count; i += 64) {
    class_bytes64(changes.before + i, p.class_shift, p.class_base, s.classes + i);
  }
  std::uint32_t counts[kNumClasses] = {};
  for (std::size_t i = 0; i < changes.count; ++i) ++counts[s.classes[i]];
  std::uint32_t next[kNumClasses], sum = 0;
  for (int c = 0; c < kNumClasses; ++c) {
    next[c] = sum;
    sum += counts[c];
    ends[c] = sum;
  }
  T* before = reinterpret_cast<T*>(s.before_sorted);
  T* after = reinterpret_cast<T*>(s.after_sorted);
  for (std::size_t i = 0; i < changes.count; ++i) {
    const std::uint32_t at = next[s.classes[i]]++;
    before[at] = changes.before[i];
    after[at] = changes.after[i];
    if constexpr (kRanks) s.rank_sorted[at] = changes.rank[i];
  }
}

template <class T>
inline void plan_by_class(const Changes<T>& changes, std::size_t n, Mode mode, const BlockParams& p,
                          Scratch& s, SparsePlan& plan) {
  plan.num_changes = static_cast<std::uint32_t>(changes.count);
  SparsePlanner planner(s, plan);
  std::uint32_t ends[kNumClasses];
  if (mode == Mode::kSmall) {
    sort_by_class<T, true>(changes, p, s, ends);
  } else {
    sort_by_class<T, false>(changes, p, s, ends);
    planner.positions(changes.index, plan.num_changes, static_cast<std::uint32_t>(n));
  }
  unsigned present = 0;
  for (int c = 0; c < kNumClasses; ++c) {
    present |= static_cast<unsigned>(ends[c] != (c == 0 ? 0 : ends[c - 1])) << c;
  }
  plan.header.u8(present & 0xFF);
  plan.header.u8(present >> 8);
  const T* before = reinterpret_cast<const T*>(s.before_sorted);
  const T* after = reinterpret_cast<const T*>(s.after_sorted);
  const bool may_flip = split_values(before, after, changes.count, s.values, s.negative);
  for (int c = 0; c < kNumClasses; ++c) {
    const std::uint32_t first = c == 0 ? 0 : ends[c - 1], count = ends[c] - first;
    if (count == 0) continue;
    if (mode == Mode::kSmall) {
      planner.positions(s.rank_sorted + first, count, changes.class_units[c]);
    } else {
      plan.header.varint(count);
    }
    planner.values(before + first, after + first, s.values + first, count, may_flip);
  }
}

inline void write_sparse(const SparsePlan& plan, const Scratch& s,
                         std::vector<std::uint8_t>* payload) {
  const std::size_t size = static_cast<std::size_t>(plan.size_bytes());
  payload->assign(size + 16, 0);
  std::uint8_t* out = payload->data();
  std::memcpy(out, plan.header.bytes, plan.header.size);
  out += plan.header.size;
  BitWriter lows(out);
  for (unsigned i = 0; i < plan.num_arrays; ++i) pack_lows(lows, plan.arrays[i]);
  out = lows.finish();
  const std::size_t sign_bytes = (plan.num_changes + 7u) / 8;
  std::memcpy(out, s.negative, sign_bytes);
  out += sign_bytes;
  BitWriter unary(out);
  for (unsigned i = 0; i < plan.num_arrays; ++i) pack_unary(unary, plan.arrays[i]);
  unary.finish();
  payload->resize(size);
}

// Whether a profile codes so many changes with ranks within classes (section 10).
inline bool uses_ranks(Profile profile, std::size_t count, std::size_t n) {
  return profile == Profile::kSmall || (profile == Profile::kAuto && 512 * count < n);
}

// Plans and writes the sparse candidate of a profile; returns its mode.
template <class T>
inline Mode encode_sparse(const Changes<T>& changes, std::size_t n, const BlockParams& p,
                          Scratch& s, std::vector<std::uint8_t>* payload) {
  SparsePlan plan;
  if (p.profile == Profile::kFast) {
    plan_fast(changes, n, s, plan);
    write_sparse(plan, s, payload);
    return Mode::kFast;
  }
  const Mode mode = uses_ranks(p.profile, changes.count, n) ? Mode::kSmall : Mode::kBalanced;
  plan_by_class(changes, n, mode, p, s, plan);
  if (changes.count <= 2048) {
    SparsePlan fast;
    plan_fast(changes, n, s, fast);
    if (fast.size_bytes() < plan.size_bytes()) {
      write_sparse(fast, s, payload);
      return Mode::kFast;
    }
    plan = SparsePlan();  // both plans use the same lists
    plan_by_class(changes, n, mode, p, s, plan);
  }
  write_sparse(plan, s, payload);
  return mode;
}

// The base of a block is gone once it was overwritten: positions and old values bring it back.
// Layout: u32 number of units or 0xFFFFFFFF for a whole block; u32 end of each page of 65,536 units
// in the lists; the low 16 bits of the positions; the old values.
template <class T>
inline void write_undo(const Changes<T>& changes, const T* next, std::size_t n,
                       std::vector<std::uint8_t>* undo) {
  const std::size_t k = changes.count;
  const std::size_t pages = (n - 1) / kUndoPageUnits + 1;
  const std::size_t list_bytes = 4 * pages + k * (2 + sizeof(T));
  const bool whole = list_bytes >= n * sizeof(T);
  const std::uint32_t head = whole ? 0xFFFFFFFFu : static_cast<std::uint32_t>(k);
  const auto append = [undo](const void* data, std::size_t size) {
    const auto* bytes = static_cast<const std::uint8_t*>(data);
    undo->insert(undo->end(), bytes, bytes + size);
  };
  undo->reserve(4 + (whole ? n * sizeof(T) : list_bytes));
  append(&head, 4);
  if (!whole) {
    for (std::size_t page = 1; page <= pages; ++page) {
      const auto* stop = std::lower_bound(changes.index, changes.index + k, page * kUndoPageUnits);
      const auto end = static_cast<std::uint32_t>(stop - changes.index);
      append(&end, 4);
    }
    std::uint16_t low[1024];
    for (std::size_t i = 0; i < k; i += 1024) {
      const std::size_t count = std::min<std::size_t>(1024, k - i);
      for (std::size_t j = 0; j < count; ++j) {
        low[j] = static_cast<std::uint16_t>(changes.index[i + j]);
      }
      append(low, 2 * count);
    }
    append(changes.before, k * sizeof(T));
    return;
  }
  append(next, n * sizeof(T));
  for (std::size_t i = 0; i < k; ++i) {
    std::memcpy(undo->data() + 4 + changes.index[i] * sizeof(T), &changes.before[i], sizeof(T));
  }
}

// The changes of a block, with ranks if its profile needs them. Profile auto does so for few
// changes only, and their number is known afterwards: the guess is that this block is like the one
// before.
template <class T>
inline Changes<T> find_changes(const EncodeJob& job, Scratch& s) {
  const std::size_t n = job.num_units;
  const Profile profile = job.params.profile;
  T* base = reinterpret_cast<T*>(job.base);
  const T* next = reinterpret_cast<const T*>(job.next);
  Changes<T> changes(s);
  if (profile == Profile::kFast || (profile == Profile::kAuto && !s.expects_ranks)) {
    diff(base, next, n, job.update, changes);
    if (changes.count == 0) return changes;
    s.expects_ranks = uses_ranks(profile, changes.count, n);
    if (!s.expects_ranks) return changes;
    for (std::size_t i = 0; job.update && i < changes.count; ++i) {
      base[changes.index[i]] = changes.before[i];
    }
    changes = Changes<T>(s);
  }
  diff_ranks(base, next, n, job.update, job.params, changes);
  if (changes.count != 0) s.expects_ranks = uses_ranks(profile, changes.count, n);
  return changes;
}

template <class T>
inline Status encode_block(const EncodeJob& job, Scratch& s, Digest& partial, EncodedBlock* out) {
  const std::size_t n = job.num_units;
  const T* next = reinterpret_cast<const T*>(job.next);
  const Changes<T> changes = find_changes<T>(job, s);
  const std::size_t k = changes.count;
  out->num_changed = k;
  out->mode = Mode::kUnchanged;
  if (k == 0) return Status{};
  if (job.undo) write_undo(changes, next, n, &out->undo);
  digest_changes(changes.index, changes.before, changes.after, k, job.placement, true, &partial);
  out->check = fold32(partial);
  const std::size_t raw_bytes = n * sizeof(T);
  bool has_payload = false;
  if (job.params.has_base || 8 * k < n) {
    out->mode = encode_sparse(changes, n, job.params, s, &out->payload);
    has_payload = true;
  }
  if constexpr (sizeof(T) > 1) {
    if (4 * k >= n) {
      const std::size_t limit = has_payload ? out->payload.size() : ~std::size_t{0};
      if (encode_dense(changes, next, n, job.params.has_base, limit, s, &out->payload)) {
        out->mode = Mode::kDense;
        has_payload = true;
      }
    }
  }
  if (!has_payload || raw_bytes < out->payload.size()) {
    out->mode = Mode::kRaw;
    out->payload.assign(job.next, job.next + raw_bytes);
  }
  return Status{};
}

}  // namespace GYMFAST_NAMESPACE
}  // namespace gymfast
