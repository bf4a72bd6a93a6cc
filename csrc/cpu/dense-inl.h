// dense: exponents as ranked symbols in split-Rice form, the other bits raw (section 6).

namespace gymfast {
namespace GYMFAST_NAMESPACE {

template <class T>
struct DenseLayout {
  static constexpr unsigned kSymbolShift = sizeof(T) == 4 ? 23 : 7;
  static constexpr unsigned kSignShift = 8 * sizeof(T) - 1;
  static constexpr std::size_t kRestBytes = sizeof(T) == 4 ? 3 : 1;
  static constexpr std::uint32_t kRestMask = (1u << kSymbolShift) - 1;

  static unsigned symbol(T x) { return static_cast<unsigned>(x >> kSymbolShift) & 0xFFu; }
  static std::uint32_t rest(T x) {
    return static_cast<std::uint32_t>(x >> kSignShift) << kSymbolShift |
           (static_cast<std::uint32_t>(x) & kRestMask);
  }
  static T join(unsigned symbol, std::uint32_t rest) {
    return static_cast<T>((rest >> kSymbolShift) << kSignShift | symbol << kSymbolShift |
                          (rest & kRestMask));
  }
};

struct DensePlan {
  std::uint32_t counts[256] = {};
  std::uint8_t symbols[256];   // by index
  std::uint8_t index_of[256];  // by symbol
  unsigned num_symbols = 0;
  unsigned low_bits = 0;
  std::uint64_t unary_bits = 0;

  void choose(std::size_t n) {
    for (unsigned s = 0; s < 256; ++s) {
      if (counts[s] != 0) symbols[num_symbols++] = static_cast<std::uint8_t>(s);
    }
    std::sort(symbols, symbols + num_symbols, [this](std::uint8_t a, std::uint8_t b) {
      return counts[a] != counts[b] ? counts[a] > counts[b] : a < b;
    });
    std::uint64_t best = ~std::uint64_t{0};
    for (unsigned l = 0; l < 8; ++l) {
      std::uint64_t quotients = 0;
      for (unsigned i = 0; i < num_symbols; ++i) {
        quotients += std::uint64_t{counts[symbols[i]]} * (i >> l);
      }
      if (n * l + quotients < best) {
        best = n * l + quotients;
        low_bits = l;
        unary_bits = n + quotients;
      }
    }
    for (unsigned i = 0; i < num_symbols; ++i) {
      index_of[symbols[i]] = static_cast<std::uint8_t>(i);
    }
  }
};

// Writes the dense payload if it is smaller than `limit` and than the raw block.
template <class T>
inline bool encode_dense(const Changes<T>& changes, const T* next, std::size_t n, bool use_base,
                         std::size_t limit, Scratch& s, std::vector<std::uint8_t>* payload) {
  using Layout = DenseLayout<T>;
  std::uint8_t* symbols = s.block_a;  // one byte per unit; block_a holds whole units
  if (use_base) {
    std::memset(symbols, 0, n);
    for (std::size_t i = 0; i < changes.count; ++i) {
      symbols[changes.index[i]] = static_cast<std::uint8_t>(Layout::symbol(changes.after[i]) -
                                                            Layout::symbol(changes.before[i]));
    }
  } else {
    for (std::size_t i = 0; i < n; ++i) {
      symbols[i] = static_cast<std::uint8_t>(Layout::symbol(next[i]));
    }
  }
  DensePlan plan;
  std::uint32_t counts[4][256] = {};
  for (std::size_t i = 0; i < n; ++i) ++counts[i & 3][symbols[i]];
  for (unsigned j = 0; j < 256; ++j) {
    plan.counts[j] = counts[0][j] + counts[1][j] + counts[2][j] + counts[3][j];
  }
  plan.choose(n);
  const std::size_t head = 3 + plan.num_symbols;
  const std::size_t low_bytes = (n * plan.low_bits + 7) / 8;
  const std::size_t size = head + low_bytes + n * Layout::kRestBytes +
                           static_cast<std::size_t>((plan.unary_bits + 7) / 8);
  if (size >= limit || size > n * sizeof(T)) return false;
  payload->assign(size + 16, 0);
  std::uint8_t* out = payload->data();
  *out++ = use_base ? 1 : 0;
  *out++ = static_cast<std::uint8_t>(plan.num_symbols - 1);
  std::memcpy(out, plan.symbols, plan.num_symbols);
  out += plan.num_symbols;
  *out++ = static_cast<std::uint8_t>(plan.low_bits);
  const std::uint32_t mask = (1u << plan.low_bits) - 1;
  BitWriter lows(out);
  if (plan.low_bits != 0) {
    for (std::size_t i = 0; i < n; ++i) lows.put(plan.index_of[symbols[i]] & mask, plan.low_bits);
  }
  out = lows.finish();
  for (std::size_t i = 0; i < n; ++i, out += Layout::kRestBytes) {
    const std::uint32_t rest = Layout::rest(next[i]);
    std::memcpy(out, &rest, Layout::kRestBytes);
  }
  BitWriter unary(out);
  for (std::size_t i = 0; i < n; ++i) {
    unary.put_unary(static_cast<std::uint32_t>(plan.index_of[symbols[i]]) >> plan.low_bits);
  }
  unary.finish();
  payload->resize(size);
  return true;
}

// Decodes into `result`; nothing is written to the block itself.
template <class T>
inline Error decode_dense(const ApplyJob& job, T* result) {
  using Layout = DenseLayout<T>;
  const std::size_t n = job.num_units;
  HeaderReader header{job.payload, job.payload_bytes};
  const unsigned flags = header.u8();
  const unsigned num_symbols = header.u8() + 1;
  if (!header.is_ok() || header.used + num_symbols + 1 > header.size) return Error::kStreamLength;
  if (flags > 1) return Error::kReservedNotZero;
  std::uint8_t symbols[256];
  bool seen[256] = {};
  for (unsigned i = 0; i < num_symbols; ++i) {
    symbols[i] = static_cast<std::uint8_t>(header.u8());
    if (seen[symbols[i]]) return Error::kPositionRange;
    seen[symbols[i]] = true;
  }
  const unsigned l = header.u8();
  if (!header.is_ok()) return header.error;
  if (l > 7) return Error::kCountRange;
  const std::uint64_t low_bits = std::uint64_t{n} * l;
  const std::size_t low_bytes = static_cast<std::size_t>((low_bits + 7) / 8);
  const std::size_t fixed = header.used + low_bytes + n * Layout::kRestBytes;
  if (fixed > job.payload_bytes) return Error::kStreamLength;
  const std::uint8_t* lows = job.payload + header.used;
  const std::uint8_t* rests = lows + low_bytes;
  const std::uint8_t* unary_bytes = rests + n * Layout::kRestBytes;
  const std::size_t unary_size = job.payload_bytes - fixed;
  UnaryReader unary(unary_bytes, unary_size);
  const T* base = reinterpret_cast<const T*>(job.data);
  const std::uint64_t mask = (std::uint64_t{1} << l) - 1;
  std::uint64_t next = 0;
  for (std::size_t i = 0; i < n; ++i) {
    std::uint64_t one;
    if (!unary.next_one(&one)) return Error::kStreamLength;
    const std::uint64_t index = (one - next) << l | low_field(lows, i * l, mask);
    next = one + 1;
    if (index >= num_symbols) return Error::kPositionRange;
    std::uint32_t rest = 0;
    std::memcpy(&rest, rests + i * Layout::kRestBytes, Layout::kRestBytes);
    unsigned symbol = symbols[index];
    if (flags == 1) symbol = (symbol + Layout::symbol(base[i])) & 0xFFu;
    result[i] = Layout::join(symbol, rest);
  }
  std::uint64_t one;
  if ((next + 7) / 8 != unary_size || unary.next_one(&one)) return Error::kStreamLength;
  if ((low_bits & 7) != 0 && lows[low_bytes - 1] >> (low_bits & 7) != 0) {
    return Error::kStreamLength;
  }
  return Error::kOk;
}

}  // namespace GYMFAST_NAMESPACE
}  // namespace gymfast
