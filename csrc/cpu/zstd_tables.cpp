#include "cpu/zstd_tables.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>

namespace gymfast {
namespace {

constexpr unsigned kMinTableBits = 5;        // RFC 8878 section 4.1.1
constexpr unsigned kMaxWeightTableBits = 6;  // section 4.2.1.2
constexpr std::size_t kMaxDirectWeights = 128;
constexpr unsigned kDirectWeights = 127;  // header byte: this plus the number of weights

// RFC 8878 section 3.1.1.3.2.2. -1 is "less than 1": one state, at the end of the table.
constexpr std::int16_t kLiteralLengthShares[kZstdNumLiteralCodes] = {
    4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1,  1,  2,  2,
    2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
constexpr std::int16_t kMatchLengthShares[kZstdNumMatchCodes] = {
    1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,  1,  1,  1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};
constexpr unsigned kPredefinedTableBits = 6;

unsigned bit_width(std::uint64_t x) { return static_cast<unsigned>(std::bit_width(x)); }

class BitWriter {
 public:
  explicit BitWriter(std::vector<std::uint8_t>* out) : out_(out) {}

  void write(std::uint32_t value, unsigned num_bits) {
    pending_ |= std::uint64_t{value} << count_;
    for (count_ += num_bits; count_ >= 8; count_ -= 8, pending_ >>= 8) {
      out_->push_back(static_cast<std::uint8_t>(pending_));
    }
  }
  void pad() {
    if (count_ != 0) write(0, 8 - count_);
  }
  // Decoders read such a stream from its end, which a 1 marks.
  void end_backward_stream() {
    write(1, 1);
    pad();
  }

 private:
  std::vector<std::uint8_t>* out_;
  std::uint64_t pending_ = 0;
  unsigned count_ = 0;
};

// 256 * log2(x), rounded down, of all shares: the cost of a symbol is in 1/256 bits.
constexpr auto kLog2 = [] {
  std::array<std::uint16_t, (1u << kZstdMaxTableBits) + 1> table{};
  for (std::uint64_t x = 1; x < table.size(); ++x) {
    const auto whole = static_cast<unsigned>(std::bit_width(x)) - 1;
    std::uint64_t mantissa = (x << 31) >> whole, fraction = 0;  // [1, 2) as 1.31 bits
    for (int i = 0; i < 8; ++i) {
      mantissa = mantissa * mantissa >> 31;
      fraction = 2 * fraction + (mantissa >> 32);
      mantissa >>= mantissa >> 32;
    }
    table[x] = static_cast<std::uint16_t>(256 * whole + fraction);
  }
  return table;
}();

std::uint64_t sum_of(std::span<const std::uint32_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

std::size_t num_present(std::span<const std::uint32_t> counts) {
  return counts.size() -
         static_cast<std::size_t>(std::count(counts.begin(), counts.end(), std::uint32_t{0}));
}

// Few symbols need no precise table, whose header would cost more than it saves.
unsigned choose_table_bits(std::span<const std::uint32_t> counts, unsigned max_bits) {
  const unsigned wanted = bit_width(sum_of(counts)) - std::min(bit_width(sum_of(counts)), 2u);
  const unsigned needed = bit_width(num_present(counts));  // each present symbol has a state
  return std::min(std::max({wanted, needed, kMinTableBits}), max_bits);
}

// Shares of the 2^table_bits states, in proportion to the counts; a present symbol has at least 1.
std::vector<std::int16_t> share_states(std::span<const std::uint32_t> counts, unsigned table_bits) {
  const std::uint64_t total = sum_of(counts);
  std::vector<std::int16_t> shares(counts.size());
  int left = 1 << table_bits;
  for (std::size_t s = 0; s < counts.size(); ++s) {
    const std::uint64_t share = ((std::uint64_t{counts[s]} << table_bits) + total / 2) / total;
    shares[s] = static_cast<std::int16_t>(counts[s] == 0 ? 0 : std::max<std::uint64_t>(share, 1));
    left -= shares[s];
  }
  // What rounding left over costs least at the largest share.
  while (left != 0) {
    const int step = left > 0 ? 1 : -1;
    std::int16_t& largest = *std::max_element(shares.begin(), shares.end());
    largest = static_cast<std::int16_t>(largest + step);
    left -= step;
  }
  return shares;
}

// 1/256 bits for all symbols; the state is in the table, so a share of 1 costs table_bits.
std::uint64_t cost_of(std::span<const std::uint32_t> counts, std::span<const std::int16_t> shares,
                      unsigned table_bits) {
  std::uint64_t cost = 0;
  for (std::size_t s = 0; s < counts.size(); ++s) {
    if (counts[s] == 0) continue;
    const auto share = static_cast<std::size_t>(std::max<int>(shares[s], 1));
    cost += counts[s] * std::uint64_t{256 * table_bits - kLog2[share]};
  }
  return cost;
}

// RFC 8878 section 4.1.1. The shares are not negative here.
std::vector<std::uint8_t> shares_header(std::span<const std::int16_t> shares, unsigned table_bits) {
  std::vector<std::uint8_t> header;
  BitWriter writer(&header);
  writer.write(table_bits - kMinTableBits, 4);
  std::uint32_t left = 1u << table_bits;
  for (std::size_t s = 0; left != 0; ++s) {
    // A value is share + 1; those that the states left cannot reach shorten the small ones.
    const std::uint32_t value = static_cast<std::uint32_t>(shares[s]) + 1, limit = left + 1;
    const unsigned num_bits = bit_width(limit);
    const std::uint32_t num_short = (1u << num_bits) - 1 - limit;
    if (value < num_short) {
      writer.write(value, num_bits - 1);
    } else {
      writer.write(value < 1u << (num_bits - 1) ? value : value + num_short, num_bits);
    }
    left -= static_cast<std::uint32_t>(shares[s]);
    if (shares[s] != 0) continue;
    std::size_t zeros = 0;
    while (shares[s + 1 + zeros] == 0) ++zeros;
    s += zeros;
    for (; zeros >= 3; zeros -= 3) writer.write(3, 2);
    writer.write(static_cast<std::uint32_t>(zeros), 2);
  }
  writer.pad();
  return header;
}

// RFC 8878 section 4.1.1, "from normalized distribution to decoding tables", turned around.
void build_state_table(std::span<const std::int16_t> shares, unsigned table_bits,
                       ZstdStateTable* table) {
  const std::uint32_t size = 1u << table_bits;
  std::array<std::uint8_t, 1u << kZstdMaxTableBits> symbol_at;
  std::uint32_t end = size;
  for (std::size_t s = 0; s < shares.size(); ++s) {
    if (shares[s] < 0) symbol_at[--end] = static_cast<std::uint8_t>(s);
  }
  std::uint32_t position = 0;
  for (std::size_t s = 0; s < shares.size(); ++s) {
    for (int i = 0; i < shares[s]; ++i) {
      symbol_at[position] = static_cast<std::uint8_t>(s);
      do {
        position = (position + (size >> 1) + (size >> 3) + 3) & (size - 1);
      } while (position >= end);
    }
  }
  std::array<std::uint32_t, 64> next{};  // where the next state of a symbol goes
  std::uint32_t start = 0;
  for (std::size_t s = 0; s < shares.size(); ++s) {
    next[s] = start;
    start += static_cast<std::uint32_t>(shares[s] < 0 ? 1 : shares[s]);
  }
  for (std::uint32_t i = 0; i < size; ++i) {
    table->next_states[next[symbol_at[i]]++] = static_cast<std::uint16_t>(size + i);
  }
  table->table_bits = table_bits;
  for (std::size_t s = 0; s < shares.size(); ++s) {
    if (shares[s] == 0) continue;
    const std::uint32_t share = static_cast<std::uint32_t>(shares[s] < 0 ? 1 : shares[s]);
    const std::uint32_t first = next[s] - share;
    const unsigned max_bits = table_bits - bit_width(share - 1) + (share == 1 ? 0 : 1);
    const unsigned bits = share == 1 ? table_bits : max_bits;
    table->symbols[s] = {std::int64_t{first} - std::int64_t{share}, (bits << 16) - (share << bits),
                         table->next_states[first]};
  }
}

// Always the same symbol: no bits at all.
void build_same_table(std::size_t symbol, ZstdStateTable* table) {
  table->table_bits = 0;
  table->next_states[0] = 1;
  table->symbols[symbol] = {-1, 0, 1};
}

void build_length_table(std::span<const std::uint32_t> counts,
                        std::span<const std::int16_t> predefined, ZstdLengthTable* table) {
  if (num_present(counts) == 1) {
    const auto found = std::find_if(counts.begin(), counts.end(), [](auto c) { return c != 0; });
    const auto symbol = static_cast<std::size_t>(found - counts.begin());
    table->mode = ZstdTableMode::kSame;
    table->header = {static_cast<std::uint8_t>(symbol)};
    build_same_table(symbol, &table->states);
    return;
  }
  const unsigned table_bits = choose_table_bits(counts, kZstdMaxTableBits);
  const std::vector<std::int16_t> shares = share_states(counts, table_bits);
  table->header = shares_header(shares, table_bits);
  if (cost_of(counts, shares, table_bits) + 8 * 256 * table->header.size() <
      cost_of(counts, predefined, kPredefinedTableBits)) {
    table->mode = ZstdTableMode::kCompressed;
    build_state_table(shares, table_bits, &table->states);
    return;
  }
  table->mode = ZstdTableMode::kPredefined;
  table->header.clear();
  build_state_table(predefined, kPredefinedTableBits, &table->states);
}

// Depth of each leaf of a Huffman tree over ascending counts: two queues, leaves and inner nodes.
std::vector<unsigned> depths_of(std::span<const std::uint32_t> counts) {
  const std::size_t n = counts.size();
  std::vector<std::uint64_t> weight(counts.begin(), counts.end());
  std::vector<std::size_t> parent(2 * n - 1);
  std::size_t leaf = 0, inner = n;
  auto take_smallest = [&] {
    return leaf < n && (inner == weight.size() || weight[leaf] <= weight[inner]) ? leaf++ : inner++;
  };
  for (std::size_t node = n; node < 2 * n - 1; ++node) {
    const std::size_t a = take_smallest(), b = take_smallest();
    parent[a] = parent[b] = node;
    weight.push_back(weight[a] + weight[b]);
  }
  std::vector<unsigned> depth(2 * n - 1, 0);
  for (std::size_t node = 2 * n - 2; node-- > 0;) depth[node] = depth[parent[node]] + 1;
  depth.resize(n);
  return depth;
}

// Code lengths of symbols in ascending order of counts: longest first, none over the limit.
std::vector<unsigned> limited_lengths(std::span<const std::uint32_t> counts) {
  std::array<unsigned, kZstdMaxCodeBits + 1> num{};  // codes of each length
  for (const unsigned depth : depths_of(counts)) ++num[std::min(depth, kZstdMaxCodeBits)];
  std::uint32_t used = 0;  // of the code space, in units of the longest code
  for (unsigned l = 1; l <= kZstdMaxCodeBits; ++l) used += num[l] << (kZstdMaxCodeBits - l);
  for (; used > 1u << kZstdMaxCodeBits; --used) {
    // One longest code moves below a shorter one, which becomes two of a bit more.
    unsigned l = kZstdMaxCodeBits - 1;
    while (num[l] == 0) --l;
    --num[kZstdMaxCodeBits];
    --num[l];
    num[l + 1] += 2;
  }
  std::vector<unsigned> lengths;
  for (unsigned l = kZstdMaxCodeBits; l > 0; --l) lengths.insert(lengths.end(), num[l], l);
  return lengths;
}

// RFC 8878 section 4.2.1.2: two states take turns, the first of them has symbol 0.
std::vector<std::uint8_t> weights_by_states(std::span<const std::uint8_t> weights) {
  std::array<std::uint32_t, kZstdMaxCodeBits + 1> counts{};
  for (const std::uint8_t weight : weights) ++counts[weight];
  if (weights.size() < 2 || num_present(counts) == 1) return {};
  const unsigned table_bits = choose_table_bits(counts, kMaxWeightTableBits);
  const std::vector<std::int16_t> shares = share_states(counts, table_bits);
  ZstdStateTable table;
  build_state_table(shares, table_bits, &table);
  std::vector<std::uint8_t> out = shares_header(shares, table_bits);
  BitWriter writer(&out);
  std::uint32_t states[2];
  for (std::size_t i = weights.size(); i-- > 0;) {
    const ZstdStateTable::Symbol& symbol = table.symbols[weights[i]];
    std::uint32_t& state = states[i & 1];
    if (i + 2 >= weights.size()) {
      state = symbol.first_state;
      continue;
    }
    const unsigned num_bits = (state + symbol.delta_bits) >> 16;
    writer.write(state & ((1u << num_bits) - 1), num_bits);
    state = table.next_states[static_cast<std::int64_t>(state >> num_bits) + symbol.delta_state];
  }
  for (const std::uint32_t state : {states[1], states[0]}) {
    writer.write(state - (1u << table_bits), table_bits);
  }
  writer.end_backward_stream();
  return out;
}

// RFC 8878 section 4.2.1. Empty if the weights fit neither form.
std::vector<std::uint8_t> weights_header(std::span<const std::uint8_t> weights) {
  std::vector<std::uint8_t> header = weights_by_states(weights);
  const std::size_t direct_bytes = (weights.size() + 1) / 2;
  const bool fits = !header.empty() && header.size() <= kDirectWeights;
  if (weights.size() > kMaxDirectWeights || (fits && header.size() < direct_bytes)) {
    if (!fits) return {};
    header.insert(header.begin(), static_cast<std::uint8_t>(header.size()));
    return header;
  }
  header = {static_cast<std::uint8_t>(kDirectWeights + weights.size())};
  for (std::size_t i = 0; i < weights.size(); i += 2) {
    const unsigned second = i + 1 < weights.size() ? weights[i + 1] : 0u;
    header.push_back(static_cast<std::uint8_t>(weights[i] << 4 | second));
  }
  return header;
}

}  // namespace

void build_huffman_table(std::span<const std::uint32_t, 256> counts, ZstdHuffmanTable* table) {
  table->header.clear();
  std::vector<std::uint64_t> order;  // count << 8 | symbol, ascending
  for (std::size_t s = 0; s < 256; ++s) {
    if (counts[s] != 0) order.push_back(std::uint64_t{counts[s]} << 8 | s);
  }
  if (order.size() < 2) return;
  const std::size_t last = order.back() & 0xFF;
  std::sort(order.begin(), order.end());
  std::vector<std::uint32_t> ascending;
  for (const std::uint64_t key : order) ascending.push_back(static_cast<std::uint32_t>(key >> 8));
  const std::vector<unsigned> lengths = limited_lengths(ascending);
  const unsigned longest = lengths.front();
  std::uint64_t coded_bits = 0;
  std::array<std::uint8_t, 256> weights{};
  std::array<std::uint32_t, kZstdMaxCodeBits + 2> start{};  // of the codes of each weight
  for (std::size_t i = 0; i < order.size(); ++i) {
    const unsigned weight = longest + 1 - lengths[i];
    weights[order[i] & 0xFF] = static_cast<std::uint8_t>(weight);
    start[weight + 1] += 1u << (weight - 1);
    coded_bits += std::uint64_t{ascending[i]} * lengths[i];
  }
  // The last weight follows from the others.
  std::vector<std::uint8_t> header = weights_header(std::span(weights).first(last));
  if (header.empty() || header.size() + coded_bits / 8 >= sum_of(counts)) return;
  table->header = std::move(header);
  // Codes ascend from the longest, in units of it; those of one length with their symbols.
  std::partial_sum(start.begin(), start.end(), start.begin());
  for (std::size_t s = 0; s <= last; ++s) {
    const unsigned weight = weights[s];
    if (weight == 0) continue;
    table->codes[s] = {static_cast<std::uint16_t>(start[weight] >> (weight - 1)),
                       static_cast<std::uint16_t>(longest + 1 - weight)};
    start[weight] += 1u << (weight - 1);
  }
}

void build_literal_length_table(std::span<const std::uint32_t, kZstdNumLiteralCodes> counts,
                                ZstdLengthTable* table) {
  build_length_table(counts, kLiteralLengthShares, table);
}

void build_match_length_table(std::span<const std::uint32_t, kZstdNumMatchCodes> counts,
                              ZstdLengthTable* table) {
  build_length_table(counts, kMatchLengthShares, table);
}

}  // namespace gymfast
