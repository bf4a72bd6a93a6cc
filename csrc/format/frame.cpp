#include "format/frame.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace gymfast {
namespace {

using Bytes = std::span<const std::uint8_t>;

struct DtypeBits {
  std::string_view name;
  unsigned bits;
};
constexpr DtypeBits kDtypes[] = {
    {"F4", 4},          {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"BOOL", 8},    {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"I64", 64},    {"U64", 64},
    {"F64", 64},        {"C64", 64},
};

unsigned dtype_bits(std::string_view name) {
  for (const DtypeBits& entry : kDtypes) {
    if (entry.name == name) return entry.bits;
  }
  return 0;
}

// Strict UTF-8 without control characters: shortest forms, no surrogates, at most U+10FFFF.
bool is_good_name(std::string_view name) {
  if (name.empty() || name.size() > kMaxNameBytes) return false;
  for (std::size_t i = 0; i < name.size();) {
    const auto lead = static_cast<unsigned char>(name[i++]);
    if (lead < 0x80) {
      if (lead < 0x20 || lead == 0x7F) return false;
      continue;
    }
    const unsigned extra = lead >= 0xF0 ? 3 : (lead >= 0xE0 ? 2 : 1);
    if (lead < 0xC2 || lead > 0xF4 || name.size() - i < extra) return false;
    std::uint32_t point = lead & (0x3Fu >> extra);
    for (unsigned j = 0; j < extra; ++j) {
      const auto next = static_cast<unsigned char>(name[i++]);
      if ((next & 0xC0) != 0x80) return false;
      point = point << 6 | (next & 0x3Fu);
    }
    constexpr std::uint32_t kFirst[] = {0, 0x80, 0x800, 0x10000};
    if (point < kFirst[extra] || point > 0x10FFFF || (point >= 0xD800 && point < 0xE000)) {
      return false;
    }
  }
  return true;
}

// Reads the fields of one body; the first failure sticks.
class Fields {
 public:
  Fields(Bytes body, std::uint64_t where) : body_(body), where_(where) {}

  unsigned u8() {
    const Bytes bytes = take(1);
    return bytes.empty() ? 0 : bytes[0];
  }
  std::uint64_t u64() {
    const Bytes bytes = take(8);
    std::uint64_t value = 0;
    if (bytes.size() == 8) std::memcpy(&value, bytes.data(), 8);
    return value;
  }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 70; shift += 7) {
      const unsigned byte = u8();
      if (!status_.is_ok()) return 0;
      if ((shift == 63 && byte > 1) || (byte == 0 && shift != 0)) break;
      value |= std::uint64_t{byte & 127u} << shift;
      if (byte < 128) return value;
    }
    set(Error::kBadEncoding);
    return 0;
  }
  Bytes take(std::uint64_t count) {
    if (!status_.is_ok()) return {};
    if (count > body_.size() - at_) {
      set(Error::kBadEncoding, body_.size() - at_, count);
      return {};
    }
    const Bytes bytes = body_.subspan(at_, static_cast<std::size_t>(count));
    at_ += static_cast<std::size_t>(count);
    return bytes;
  }
  std::string_view text() {
    const Bytes bytes = take(varint());
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  Bytes rest() { return take(body_.size() - at_); }
  bool is_at_end() const { return at_ == body_.size(); }
  void set(Error error, std::uint64_t found = 0, std::uint64_t expected = 0) {
    if (status_.is_ok()) status_ = fail(error, where_, found, expected);
  }
  Status finish() {
    if (!is_at_end()) set(Error::kBadEncoding);
    return status_;
  }
  const Status& status() const { return status_; }

 private:
  Bytes body_;
  std::size_t at_ = 0;
  std::uint64_t where_;
  Status status_;
};

bool has_blocks(Kind kind) {
  return kind == Kind::kDelta || kind == Kind::kAdded || kind == Kind::kReplaced;
}

void check_size(const TensorView& t, Fields& fields) {
  std::uint64_t product = 1;
  const bool is_empty = std::find(t.dims.begin(), t.dims.end(), 0u) != t.dims.end();
  for (const std::uint64_t dim : t.dims) {
    if (__builtin_mul_overflow(product, dim, &product)) return fields.set(Error::kSizeOverflow);
  }
  if (is_empty) product = 0;
  const unsigned bits = dtype_bits(t.dtype);
  if (bits == 0) return fields.set(Error::kBadShape);
  std::uint64_t total_bits;
  if (__builtin_mul_overflow(product, std::uint64_t{bits}, &total_bits)) {
    return fields.set(Error::kSizeOverflow);
  }
  const std::uint64_t num_bytes = total_bits / 8 + (total_bits % 8 != 0);
  if (t.unit_bytes != 1 && t.unit_bytes != 2 && t.unit_bytes != 4) {
    return fields.set(Error::kBadShape, t.unit_bytes);
  }
  if (t.num_bytes > kMaxTensorBytes) return fields.set(Error::kLimitExceeded, t.num_bytes);
  if (num_bytes != t.num_bytes || t.num_bytes % t.unit_bytes != 0) {
    return fields.set(Error::kBadShape, t.num_bytes, num_bytes);
  }
}

void check_geometry(const TensorView& t, Fields& fields) {
  const std::uint64_t n = t.num_units();
  if (n == 0) {
    if (t.cols != 0 || t.tile_rows != 0 || t.tile_cols != 0) fields.set(Error::kBadGeometry);
    return;
  }
  if (t.cols == 0 || n % t.cols != 0 || t.tile_rows == 0 || t.tile_rows > n / t.cols ||
      t.tile_cols == 0 || t.tile_cols > t.cols) {
    return fields.set(Error::kBadGeometry);
  }
  constexpr std::uint64_t kMost = std::uint64_t{1} << 20;
  if (t.tile_rows > kMost || t.tile_cols > kMost || t.tile_rows * t.tile_cols > kMost) {
    return fields.set(Error::kLimitExceeded);
  }
  const std::uint64_t most_blocks = kMaxBlocksOfSmall + n / kUnitsPerBlock;
  if (t.num_blocks() > most_blocks) {
    fields.set(Error::kLimitExceeded, t.num_blocks(), most_blocks);
  }
}

Status parse_tensor(Bytes body, std::uint64_t where, TensorView* t) {
  Fields fields(body, where);
  t->offset = where;
  const unsigned kind = fields.u8();
  if (kind > 4) fields.set(Error::kBadEncoding, kind);
  t->kind = static_cast<Kind>(kind);
  t->unit_bytes = fields.u8();
  t->class_shift = fields.u8();
  if (t->class_shift > 7) fields.set(Error::kBadEncoding, t->class_shift);
  t->class_base = fields.u8();
  t->name = fields.text();
  if (fields.status().is_ok() && !is_good_name(t->name)) fields.set(Error::kBadName);
  t->dtype = fields.text();
  const std::uint64_t num_dims = fields.varint();
  if (num_dims > kMaxDims) fields.set(Error::kLimitExceeded, num_dims, kMaxDims);
  if (!fields.status().is_ok()) return fields.status();
  for (std::uint64_t i = 0; i < num_dims; ++i) t->dims.push_back(fields.varint());
  t->num_bytes = fields.varint();
  t->cols = fields.varint();
  t->tile_rows = fields.varint();
  t->tile_cols = fields.varint();
  if (t->kind == Kind::kAlias) {
    t->target = fields.text();
    if (fields.status().is_ok() && !is_good_name(t->target)) fields.set(Error::kBadName);
  }
  if (fields.status().is_ok()) check_size(*t, fields);
  if (fields.status().is_ok()) check_geometry(*t, fields);
  return fields.finish();
}

// The block table alone: modes and lengths; payload contents belong to the codec.
void check_block_table(const BlocksView& blocks, unsigned unit_bytes, Fields& outer,
                       bool* has_change) {
  const Bytes body = blocks.table_and_payloads;
  if (blocks.num_blocks > body.size()) {
    return outer.set(Error::kBadEncoding, body.size(), blocks.num_blocks);
  }
  Fields fields(body, blocks.offset);
  std::uint64_t sum = 0;
  for (std::uint64_t i = 0; i < blocks.num_blocks; ++i) {
    const unsigned mode = fields.u8();
    if (!fields.status().is_ok()) return outer.set(Error::kBadEncoding);
    if (mode > 5 || (mode == 4 && unit_bytes == 1)) return outer.set(Error::kBadMode, mode);
    if (mode == 0) continue;
    *has_change = true;
    const std::uint64_t size = fields.varint();
    fields.take(4);
    if (!fields.status().is_ok()) return outer.set(Error::kBadEncoding);
    if (__builtin_add_overflow(sum, size, &sum)) sum = ~std::uint64_t{0};
  }
  const std::size_t left = fields.rest().size();
  if (left != sum) outer.set(Error::kPayloadLength, left, sum);
}

class Parser {
 public:
  Parser(Bytes bytes, DigestFunction digest, FrameView* view)
      : bytes_(bytes), digest_(digest), view_(view) {}

  Status parse() {
    Status status = check_magic();
    std::size_t at = sizeof(kMagic);
    while (status.is_ok()) {
      Bytes body;
      unsigned type = 0;
      status = read_section(at, &type, &body);
      if (!status.is_ok()) break;
      const std::size_t end = at + kSectionHeaderBytes + body.size();
      if (type == static_cast<unsigned>(SectionType::kEnd)) return finish(body, at, end);
      status = take_section(type, body, at);
      checks_.insert(checks_.end(), bytes_.begin() + static_cast<std::ptrdiff_t>(at) + 8,
                     bytes_.begin() + static_cast<std::ptrdiff_t>(at) + 16);
      at = end;
    }
    return status;
  }

 private:
  Status check_magic() const {
    const std::size_t shown = std::min<std::size_t>(bytes_.size(), 7);
    if (shown != 0 && std::memcmp(bytes_.data(), kMagic, shown) != 0)
      return fail(Error::kBadMagic, 0);
    if (bytes_.size() < sizeof(kMagic)) return fail(Error::kTruncated, bytes_.size());
    if (bytes_[7] != kMagic[7]) return fail(Error::kUnsupportedVersion, 7, bytes_[7], kMagic[7]);
    return Status{};
  }

  Status read_section(std::size_t at, unsigned* type, Bytes* body) const {
    if (bytes_.size() - at < kSectionHeaderBytes) return fail(Error::kTruncated, bytes_.size());
    *type = bytes_[at];
    if ((*type == 0 || *type > 4) && *type < 0x80) return fail(Error::kUnknownSection, at, *type);
    if (bytes_[at + 1] != 0) return fail(Error::kReservedNotZero, at, bytes_[at + 1]);
    std::uint64_t head, check;
    std::memcpy(&head, bytes_.data() + at, 8);
    std::memcpy(&check, bytes_.data() + at + 8, 8);
    const std::uint64_t size = head >> 16;
    if (size > kMaxSectionBytes) return fail(Error::kLimitExceeded, at, size, kMaxSectionBytes);
    const std::size_t left = bytes_.size() - at - kSectionHeaderBytes;
    if (size > left) return fail(Error::kTruncated, at, left, size);
    *body = bytes_.subspan(at + kSectionHeaderBytes, static_cast<std::size_t>(size));
    const std::uint64_t found = check64(bytes_.subspan(at, 8), *body, digest_);
    if (found != check) return fail(Error::kSectionCheck, at, found, check);
    return Status{};
  }

  Status take_section(unsigned type, Bytes body, std::size_t at) {
    if (type == static_cast<unsigned>(SectionType::kHeader)) return take_header(body, at);
    if (!has_header_) return fail(Error::kSectionOrder, at, type);
    if (type == static_cast<unsigned>(SectionType::kTensor)) return take_tensor(body, at);
    if (type == static_cast<unsigned>(SectionType::kBlocks)) return take_blocks(body, at);
    return Status{};
  }

  Status take_header(Bytes body, std::size_t at) {
    if (has_header_) return fail(Error::kSectionOrder, at);
    has_header_ = true;
    Fields fields(body, at);
    view_->profile = fields.u8();
    if (view_->profile > 2) fields.set(Error::kBadEncoding, view_->profile);
    for (const std::uint8_t byte : fields.take(7)) {
      if (byte != 0) fields.set(Error::kReservedNotZero);
    }
    num_tensors_ = fields.u64();
    if (num_tensors_ > kMaxTensors) fields.set(Error::kLimitExceeded, num_tensors_, kMaxTensors);
    return fields.finish();
  }

  Status take_tensor(Bytes body, std::size_t at) {
    if (view_->tensors.size() == num_tensors_) {
      return fail(Error::kCountMismatch, at, num_tensors_ + 1, num_tensors_);
    }
    TensorView tensor;
    const Status status = parse_tensor(body, at, &tensor);
    if (!status.is_ok()) return status;
    if (!names_.emplace(tensor.name, view_->tensors.size()).second) {
      return fail(Error::kDuplicateName, at);
    }
    view_->tensors.push_back(std::move(tensor));
    has_change_.push_back(false);
    next_block_ = 0;
    return Status{};
  }

  Status take_blocks(Bytes body, std::size_t at) {
    Fields fields(body, at);
    BlocksView blocks;
    blocks.offset = at;
    blocks.tensor = fields.varint();
    blocks.first_block = fields.varint();
    blocks.num_blocks = fields.varint();
    if (!fields.status().is_ok()) return fields.status();
    if (view_->tensors.empty() || blocks.tensor != view_->tensors.size() - 1) {
      return fail(Error::kSectionOrder, at, blocks.tensor);
    }
    TensorView& tensor = view_->tensors.back();
    if (!has_blocks(tensor.kind)) return fail(Error::kSectionOrder, at);
    const std::uint64_t total = tensor.num_blocks();
    if (blocks.num_blocks == 0 || blocks.first_block < next_block_ || blocks.first_block > total ||
        blocks.num_blocks > total - blocks.first_block) {
      return fail(Error::kBadBlockIndex, at, blocks.first_block, next_block_);
    }
    next_block_ = blocks.first_block + blocks.num_blocks;
    blocks.table_and_payloads = fields.rest();
    bool changed = false;
    check_block_table(blocks, tensor.unit_bytes, fields, &changed);
    if (changed) has_change_.back() = true;
    tensor.blocks.push_back(blocks);
    return fields.finish();
  }

  Status check_aliases() const {
    for (const TensorView& tensor : view_->tensors) {
      if (tensor.kind != Kind::kAlias) continue;
      const auto found = names_.find(tensor.target);
      if (found == names_.end()) return fail(Error::kBadAlias, tensor.offset);
      const TensorView& target = view_->tensors[found->second];
      if (!has_blocks(target.kind) || target.dtype != tensor.dtype || target.dims != tensor.dims ||
          target.num_bytes != tensor.num_bytes) {
        return fail(Error::kBadAlias, tensor.offset);
      }
    }
    return Status{};
  }

  Status take_end(Bytes body, std::size_t at) {
    Fields fields(body, at);
    view_->base_root = fields.take(32);
    view_->new_root = fields.take(32);
    const std::uint64_t stated = fields.u64();
    const std::uint64_t found = check64(checks_, {}, digest_);
    if (fields.status().is_ok() && found != stated) fields.set(Error::kFrameCheck, found, stated);
    for (std::size_t i = 0; i < view_->tensors.size() && fields.status().is_ok(); ++i) {
      TensorView& tensor = view_->tensors[i];
      const unsigned status = fields.u8();
      const unsigned kind = static_cast<unsigned>(tensor.kind);
      const bool fits = kind == 0 ? status <= 1 : status == kind + 1;
      const bool changed = has_change_[i];
      if (fields.status().is_ok() && (!fits || (kind == 0 && changed != (status == 1)))) {
        fields.set(Error::kBadStatus, status, kind);
      }
      tensor.status = static_cast<TensorStatus>(status);
      const bool reads_base = status == 0 || status == 1 || status == 3 || status == 4;
      const bool reads_new = status == 1 || status == 2 || status == 3;
      if (reads_base) tensor.base_digest = read_digest(fields);
      if (reads_new) tensor.new_digest = read_digest(fields);
      if (status == 0) tensor.new_digest = tensor.base_digest;
    }
    const std::uint64_t end_bytes = fields.u64();
    const std::uint64_t size = kSectionHeaderBytes + body.size();
    if (fields.status().is_ok() && end_bytes != size) {
      fields.set(Error::kFrameCheck, end_bytes, size);
    }
    return fields.finish();
  }

  static Digest read_digest(Fields& fields) {
    Digest digest;
    digest.lane[0] = fields.u64();
    digest.lane[1] = fields.u64();
    return digest;
  }

  Status finish(Bytes body, std::size_t at, std::size_t end) {
    if (!has_header_) return fail(Error::kSectionOrder, at);
    if (view_->tensors.size() != num_tensors_) {
      return fail(Error::kCountMismatch, at, view_->tensors.size(), num_tensors_);
    }
    Status status = check_aliases();
    if (status.is_ok()) status = take_end(body, at);
    if (status.is_ok() && end != bytes_.size()) {
      status = fail(Error::kTrailingBytes, end, bytes_.size() - end);
    }
    return status;
  }

  Bytes bytes_;
  DigestFunction digest_;
  FrameView* view_;
  std::vector<std::uint8_t> checks_;
  std::vector<bool> has_change_;
  std::unordered_map<std::string_view, std::size_t> names_;
  std::uint64_t num_tensors_ = 0;
  std::uint64_t next_block_ = 0;
  bool has_header_ = false;
};

}  // namespace

std::uint64_t TensorView::num_blocks() const {
  const std::uint64_t n = num_units();
  if (n == 0) return 0;
  return ((n / cols - 1) / tile_rows + 1) * ((cols - 1) / tile_cols + 1);
}

std::uint64_t check64(Bytes first, Bytes second, DigestFunction digest) {
  Digest sum;
  digest(first.data(), first.size(), 0, &sum);
  digest(second.data(), second.size(), first.size(), &sum);
  return fold64(sum);
}

Status parse_frame(Bytes bytes, DigestFunction digest, FrameView* view) {
  return Parser(bytes, digest, view).parse();
}

}  // namespace gymfast
