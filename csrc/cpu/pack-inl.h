// pack, unpack: split-Rice arrays and bit streams (docs/wire-format.md section 5.1).

namespace gymfast {
namespace GYMFAST_NAMESPACE {

struct SplitRice {
  const std::uint32_t* x = nullptr;
  std::uint32_t count = 0;
  unsigned low_bits = 0;
  std::uint64_t quotients = 0;  // sum of x >> low_bits

  std::uint64_t lows() const { return std::uint64_t{count} * low_bits; }
  std::uint64_t unary() const { return count + quotients; }
  std::uint64_t bits() const { return lows() + unary(); }
};

// The parameter of section 10 and the size it gives.
inline SplitRice plan_split_rice(const std::uint32_t* x, std::uint32_t count) {
  SplitRice plan;
  plan.x = x;
  plan.count = count;
  if (count == 0) return plan;
  std::uint64_t sum = 0;
  for (std::uint32_t i = 0; i < count; ++i) sum += x[i];
  const std::uint64_t target = ((sum + count) * 11) / (16 * std::uint64_t{count});
  const unsigned centre = target == 0 ? 0 : static_cast<unsigned>(std::bit_width(target)) - 1;
  const unsigned first = centre == 0 ? 0 : centre - 1;
  const unsigned last = std::min(31u, centre + 1);
  std::uint64_t quotients[3] = {0, 0, 0};
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t q = x[i] >> first;
    quotients[0] += q;
    quotients[1] += q >> 1;
    quotients[2] += q >> 2;
  }
  std::uint64_t best = ~std::uint64_t{0};
  for (unsigned l = first; l <= last; ++l) {
    const std::uint64_t bits = std::uint64_t{count} * l + quotients[l - first];
    if (bits < best) {
      best = bits;
      plan.low_bits = l;
      plan.quotients = quotients[l - first];
    }
  }
  return plan;
}

// Appends bit fields, least significant bit first. The buffer needs 8 spare bytes behind its end.
class BitWriter {
 public:
  explicit BitWriter(std::uint8_t* out) : out_(out) {}
  void put(std::uint64_t bits, unsigned count) {  // count <= 56
    pending_ |= bits << used_;
    used_ += count;
    std::memcpy(out_, &pending_, 8);
    out_ += used_ >> 3;
    pending_ >>= used_ & ~7u;
    used_ &= 7;
  }
  void put_unary(std::uint32_t quotient) {
    for (; quotient >= 48; quotient -= 48) put(0, 48);
    put(std::uint64_t{1} << quotient, quotient + 1);
  }
  std::uint8_t* finish() {
    std::memcpy(out_, &pending_, 8);
    return out_ + (used_ != 0);
  }

 private:
  std::uint8_t* out_;
  std::uint64_t pending_ = 0;
  unsigned used_ = 0;
};

inline void pack_lows(BitWriter& writer, const SplitRice& array) {
  const unsigned l = array.low_bits;
  if (l == 0) return;
  const std::uint64_t mask = (std::uint64_t{1} << l) - 1;
  std::uint32_t i = 0;
#if GYMFAST_LEVEL >= 1
  const std::uint64_t mask2 = mask << 32 | mask;
  if (l <= 14) {
    for (; i + 4 <= array.count; i += 4) {
      std::uint64_t a, b;
      std::memcpy(&a, array.x + i, 8);
      std::memcpy(&b, array.x + i + 2, 8);
      writer.put(_pext_u64(a, mask2) | _pext_u64(b, mask2) << (2 * l), 4 * l);
    }
  } else if (l <= 28) {
    for (; i + 2 <= array.count; i += 2) {
      std::uint64_t a;
      std::memcpy(&a, array.x + i, 8);
      writer.put(_pext_u64(a, mask2), 2 * l);
    }
  }
#endif
  for (; i < array.count; ++i) writer.put(array.x[i] & mask, l);
}

inline void pack_unary(BitWriter& writer, const SplitRice& array) {
  const unsigned l = array.low_bits;
  std::uint32_t i = 0;
  for (; i + 4 <= array.count; i += 4) {
    const std::uint32_t a = array.x[i] >> l, b = array.x[i + 1] >> l;
    const std::uint32_t c = array.x[i + 2] >> l, d = array.x[i + 3] >> l;
    if ((a | b | c | d) > 12) [[unlikely]] {
      for (const std::uint32_t quotient : {a, b, c, d}) writer.put_unary(quotient);
      continue;
    }
    const unsigned at_b = a + b + 1, at_c = at_b + c + 1, at_d = at_c + d + 1;
    const std::uint64_t ones = std::uint64_t{1} << a | std::uint64_t{1} << at_b |
                               std::uint64_t{1} << at_c | std::uint64_t{1} << at_d;
    writer.put(ones, at_d + 1);
  }
  for (; i < array.count; ++i) writer.put_unary(array.x[i] >> l);
}

// Reads a bounded bit stream; the memory has kPayloadPadding readable bytes behind it.
struct UnaryReader {
  const std::uint8_t* data = nullptr;
  std::uint64_t num_bits = 0;
  std::uint64_t word_index = 0;
  std::uint64_t word = 0;  // ones of the current word not consumed yet
  std::uint64_t next = 0;  // first bit of the next code

  UnaryReader(const std::uint8_t* stream, std::uint64_t size_bytes)
      : data(stream), num_bits(8 * size_bytes) {
    std::memcpy(&word, data, 8);
  }
  // Position of the next one, or false at the end of the stream.
  bool next_one(std::uint64_t* position) {
    while (word == 0) {
      ++word_index;
      if (64 * word_index >= num_bits) return false;
      std::memcpy(&word, data + 8 * word_index, 8);
    }
    *position = 64 * word_index + static_cast<unsigned>(std::countr_zero(word));
    word &= word - 1;
    return *position < num_bits;
  }
};

inline std::uint32_t low_field(const std::uint8_t* lows, std::uint64_t bit, std::uint64_t mask) {
  std::uint64_t value;
  std::memcpy(&value, lows + (bit >> 3), 8);
  return static_cast<std::uint32_t>((value >> (bit & 7)) & mask);
}

struct NoVisit {
  void operator()(std::uint64_t) const {}
};

// Decodes `count` values; with kPositions their running sums (+1 per step): ascending positions.
// Every value (position) must be below `limit`; `visit` gets each position, checked.
template <bool kPositions, class Visit = NoVisit>
inline Error unpack_split_rice(const std::uint8_t* lows, std::uint64_t* low_bit, UnaryReader& unary,
                               unsigned l, std::uint32_t count, std::uint64_t limit,
                               std::uint32_t* out, Visit&& visit = NoVisit()) {
  const std::uint64_t mask = (std::uint64_t{1} << l) - 1;
  std::uint64_t bit = *low_bit, next = unary.next, position = 0;
  std::uint64_t word = unary.word, word_index = unary.word_index;
  std::uint64_t largest = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    while (word == 0) {
      ++word_index;
      if (64 * word_index >= unary.num_bits) return Error::kStreamLength;
      std::memcpy(&word, unary.data + 8 * word_index, 8);
    }
    const std::uint64_t one = 64 * word_index + static_cast<unsigned>(std::countr_zero(word));
    word &= word - 1;
    const std::uint64_t quotient = one - next;
    if (quotient >= limit) return Error::kPositionRange;  // so that the shift below fits 64 bits
    next = one + 1;
    const std::uint64_t value = quotient << l | low_field(lows, bit, mask);
    bit += l;
    if constexpr (kPositions) {
      position += value;
      largest = position;
      out[i] = static_cast<std::uint32_t>(position);
      ++position;
      if (largest >= limit) return Error::kPositionRange;
      visit(largest);
    } else {
      largest |= value >= limit;
      out[i] = static_cast<std::uint32_t>(value);
    }
  }
  if (!kPositions && largest != 0) return Error::kPositionRange;
  if (next > unary.num_bits) return Error::kStreamLength;
  unary.word = word;
  unary.word_index = word_index;
  unary.next = next;
  *low_bit = bit;
  return Error::kOk;
}

// Writer of small header fields.
struct HeaderWriter {
  std::uint8_t bytes[kNumClasses * 24 + 16];
  std::size_t size = 0;

  void u8(unsigned value) { bytes[size++] = static_cast<std::uint8_t>(value); }
  void varint(std::uint64_t value) {
    for (; value >= 128; value >>= 7) u8(static_cast<unsigned>(value & 127) | 128u);
    u8(static_cast<unsigned>(value));
  }
};

inline unsigned varint_bytes(std::uint64_t value) {
  unsigned count = 1;
  for (; value >= 128; value >>= 7) ++count;
  return count;
}

// Reader of small header fields; the first failure sticks.
struct HeaderReader {
  const std::uint8_t* data;
  std::size_t size;
  std::size_t used = 0;
  Error error = Error::kOk;

  bool is_ok() const { return error == Error::kOk; }
  unsigned u8() {
    if (used < size) return data[used++];
    if (is_ok()) error = Error::kStreamLength;
    return 0;
  }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 70; shift += 7) {
      const unsigned byte = u8();
      if (!is_ok()) return 0;
      if ((byte == 0 && shift != 0) || (shift == 63 && byte > 1)) break;
      value |= std::uint64_t{byte & 127u} << shift;
      if (byte < 128) return value;
    }
    error = Error::kStreamLength;
    return 0;
  }
};

}  // namespace GYMFAST_NAMESPACE
}  // namespace gymfast
