#include "cpu/codec.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <memory>
#include <mutex>

#include "cpu/parallel.h"

namespace gymfast {
namespace {

// Scratch outlives a call: fresh pages would cost more than the work on small tensors.
class ScratchPool {
 public:
  std::unique_ptr<Scratch> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<Scratch>();
    std::unique_ptr<Scratch> scratch = std::move(free_.back());
    free_.pop_back();
    return scratch;
  }
  void give_back(std::unique_ptr<Scratch> scratch) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(scratch));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> free_;
};

ScratchPool& scratch_pool() {
  static ScratchPool pool;
  return pool;
}

class ScratchLease {
 public:
  ScratchLease(std::size_t units, std::size_t unit_bytes) : scratch_(scratch_pool().take()) {
    scratch_->reserve(units, unit_bytes);
  }
  ~ScratchLease() { scratch_pool().give_back(std::move(scratch_)); }
  Scratch& operator*() { return *scratch_; }

 private:
  std::unique_ptr<Scratch> scratch_;
};

struct Tile {
  std::uint64_t offset = 0;  // byte offset of the first unit
  std::uint64_t rows = 0;
  std::uint64_t cols = 0;
  std::uint64_t num_units() const { return rows * cols; }
};

Tile tile_of(const Geometry& g, std::uint64_t block) {
  const std::uint64_t i = block / g.blocks_per_row(), j = block % g.blocks_per_row();
  const std::uint64_t row = i * g.tile_rows, col = j * g.tile_cols;
  Tile tile;
  tile.rows = std::min(g.tile_rows, g.num_units / g.cols - row);
  tile.cols = std::min(g.tile_cols, g.cols - col);
  tile.offset = (row * g.cols + col) * g.unit_bytes;
  return tile;
}

Placement placement_of(const Geometry& g, const Tile& tile) {
  Placement place;
  place.offset = tile.offset;
  const bool is_flat = tile.rows == 1 || tile.cols == g.cols;
  place.row_units = is_flat ? tile.num_units() : tile.cols;
  place.stride_bytes = is_flat ? 0 : g.cols * g.unit_bytes;
  return place;
}

// Whether a block can be worked on where it lies: in one piece, and aligned for its unit type.
bool is_direct(const Placement& place, const void* block, std::uint64_t unit_bytes) {
  return place.stride_bytes == 0 && reinterpret_cast<std::uintptr_t>(block) % unit_bytes == 0;
}

void gather(const std::uint8_t* tensor, const Placement& place, std::uint64_t num_units,
            std::uint64_t unit_bytes, std::uint8_t* out) {
  const std::size_t line = static_cast<std::size_t>(place.row_units * unit_bytes);
  const std::uint8_t* row = tensor + place.offset;
  for (std::uint64_t i = 0; i < num_units; i += place.row_units, row += place.stride_bytes) {
    std::memcpy(out, row, line);
    out += line;
  }
}

void scatter(const std::uint8_t* block, const Placement& place, std::uint64_t num_units,
             std::uint64_t unit_bytes, std::uint8_t* tensor) {
  const std::size_t line = static_cast<std::size_t>(place.row_units * unit_bytes);
  std::uint8_t* row = tensor + place.offset;
  for (std::uint64_t i = 0; i < num_units; i += place.row_units, row += place.stride_bytes) {
    std::memcpy(row, block, line);
    block += line;
  }
}

std::size_t block_units(const Geometry& g) {
  return static_cast<std::size_t>(g.tile_rows * g.tile_cols);
}
unsigned unit_log2(const Geometry& g) {
  return static_cast<unsigned>(std::countr_zero(g.unit_bytes));
}

std::uint8_t* put_u64(std::uint8_t* out, std::uint64_t value) {
  std::memcpy(out, &value, 8);
  return out + 8;
}
std::uint64_t load_u64(const std::uint8_t* bytes) {
  std::uint64_t value;
  std::memcpy(&value, bytes, 8);
  return value;
}

// First error by block number, whatever thread saw it first.
class FirstError {
 public:
  void report(Status status, std::uint64_t block) {
    status.where = block;
    std::lock_guard<std::mutex> lock(mutex_);
    if (status_.is_ok() || block < status_.where) status_ = status;
  }
  Status get() const { return status_; }

 private:
  std::mutex mutex_;
  Status status_;
};

Status check_run(const BlockRun& run) {
  const Status status = run.geometry.check();
  if (!status.is_ok()) return status;
  const std::uint64_t total = run.geometry.num_blocks();
  if (run.first_block > total || run.num_blocks > total - run.first_block) {
    return fail(Error::kBadBlockIndex, run.first_block, run.num_blocks, total);
  }
  const BlockParams& p = run.params;
  if (p.class_shift < 0 || p.class_shift > 7 || p.class_base < 0 || p.class_base > 255) {
    return fail(Error::kBadArgument, 0);
  }
  return Status{};
}

std::uint8_t* put_bytes(std::uint8_t* out, const std::vector<std::uint8_t>& bytes) {
  if (!bytes.empty()) std::memcpy(out, bytes.data(), bytes.size());
  return out + bytes.size();
}

std::size_t varint_size(std::uint64_t value) {
  std::size_t size = 1;
  for (; value >= 128; value >>= 7) ++size;
  return size;
}

struct TableEntry {
  Mode mode = Mode::kUnchanged;
  std::uint32_t check = 0;
  std::size_t offset = 0;
  std::size_t size = 0;
};

Status parse_table(const BlockRun& run, std::span<const std::uint8_t> body,
                   std::vector<TableEntry>* table) {
  std::size_t at = 0;
  std::uint64_t sum = 0;
  if (run.num_blocks > body.size()) return fail(Error::kBadEncoding, run.first_block);
  table->resize(static_cast<std::size_t>(run.num_blocks));
  for (std::size_t i = 0; i < table->size(); ++i) {
    const std::uint64_t block = run.first_block + i;
    TableEntry& entry = (*table)[i];
    if (at >= body.size()) return fail(Error::kBadEncoding, block);
    const unsigned mode = body[at++];
    if (mode > static_cast<unsigned>(Mode::kRaw)) return fail(Error::kBadMode, block, mode);
    entry.mode = static_cast<Mode>(mode);
    if (entry.mode == Mode::kUnchanged) continue;
    std::uint64_t size = 0;
    for (unsigned shift = 0;; shift += 7) {
      if (at >= body.size() || shift > 63) return fail(Error::kBadEncoding, block);
      const unsigned byte = body[at++];
      if ((byte == 0 && shift != 0) || (shift == 63 && byte > 1)) {
        return fail(Error::kBadEncoding, block);
      }
      size |= std::uint64_t{byte & 127u} << shift;
      if (byte < 128) break;
    }
    if (body.size() - at < 4) return fail(Error::kBadEncoding, block);
    std::memcpy(&entry.check, body.data() + at, 4);
    at += 4;
    entry.size = static_cast<std::size_t>(size);
    if (__builtin_add_overflow(sum, size, &sum)) sum = ~std::uint64_t{0};
  }
  if (sum != body.size() - at) {
    return fail(Error::kPayloadLength, run.first_block, body.size() - at, sum);
  }
  for (TableEntry& entry : *table) {
    entry.offset = at;
    at += entry.size;
  }
  return Status{};
}

Digest digest_tile(const Geometry& g, std::uint64_t block, const std::uint8_t* data) {
  const Tile tile = tile_of(g, block);
  const Placement place = placement_of(g, tile);
  const std::size_t line = static_cast<std::size_t>(place.row_units * g.unit_bytes);
  const DigestFunction digest = active_kernels()->digest;
  Digest sum;
  std::uint64_t offset = tile.offset;
  for (std::uint64_t done = 0; done < tile.num_units(); done += place.row_units) {
    digest(data + offset, line, offset, &sum);
    offset += place.stride_bytes;
  }
  return sum;
}

Status apply_one(const BlockRun& run, const TableEntry& entry, const std::uint8_t* payload,
                 std::uint64_t block, std::uint8_t* data, Scratch& scratch,
                 std::uint64_t* num_changed) {
  const Geometry& g = run.geometry;
  const Tile tile = tile_of(g, block);
  ApplyJob job;
  job.num_units = static_cast<std::size_t>(tile.num_units());
  job.placement = placement_of(g, tile);
  job.params = run.params;
  job.mode = entry.mode;
  job.check = entry.check;
  scratch.payload.resize(entry.size + kPayloadPadding);
  std::memcpy(scratch.payload.data(), payload, entry.size);
  std::memset(scratch.payload.data() + entry.size, 0, kPayloadPadding);
  job.payload = scratch.payload.data();
  job.payload_bytes = entry.size;
  const bool direct = is_direct(job.placement, data + tile.offset, g.unit_bytes);
  job.data = direct ? data + tile.offset : scratch.block_b;
  if (!direct) gather(data, job.placement, job.num_units, g.unit_bytes, scratch.block_b);
  const Status status =
      active_kernels()->apply[unit_log2(g)](job, scratch, run.digests[block], num_changed);
  if (status.is_ok() && !direct) {
    scatter(scratch.block_b, job.placement, job.num_units, g.unit_bytes, data);
  }
  return status;
}

}  // namespace

void Scratch::reserve(std::size_t num_units, std::size_t unit_bytes) {
  if (num_units <= num_units_ && unit_bytes <= unit_bytes_) return;
  num_units_ = std::max(num_units, num_units_);
  unit_bytes_ = std::max(unit_bytes, unit_bytes_);
  // 64 spare units: vector stores write past the last change.
  const std::size_t lanes = num_units_ + 128;
  const std::size_t word = (lanes * 4 + 63) & ~std::size_t{63};
  const std::size_t unit = (lanes * unit_bytes_ + 63) & ~std::size_t{63};
  const std::size_t byte = (lanes + 63) & ~std::size_t{63};
  arena_.reset();
  arena_.reset(new std::uint8_t[8 * word + 7 * unit + 2 * byte + 64]);
  std::uint8_t* at = arena_.get();
  at += (64 - reinterpret_cast<std::uintptr_t>(at) % 64) % 64;
  for (std::uint32_t** list : {&index, &rank, &rank_sorted, &gaps, &values, &exception_gaps,
                               &exception_values, &flip_gaps}) {
    *list = reinterpret_cast<std::uint32_t*>(at);
    at += word;
  }
  for (std::uint8_t** list :
       {&before, &after, &before_sorted, &after_sorted, &block_a, &block_b, &block_c}) {
    *list = at;
    at += unit;
  }
  for (std::uint8_t** list : {&classes, &negative}) {
    *list = at;
    at += byte;
  }
}

std::uint64_t Geometry::num_blocks() const {
  if (num_units == 0) return 0;
  return ((num_units / cols - 1) / tile_rows + 1) * blocks_per_row();
}

Status Geometry::check() const {
  if (unit_bytes != 1 && unit_bytes != 2 && unit_bytes != 4) {
    return fail(Error::kBadShape, 0, unit_bytes);
  }
  if (num_units > (std::uint64_t{1} << 62) / unit_bytes) return fail(Error::kLimitExceeded, 0);
  if (num_units == 0) {
    return cols == 0 && tile_rows == 0 && tile_cols == 0 ? Status{} : fail(Error::kBadGeometry, 0);
  }
  if (cols == 0 || num_units % cols != 0 || tile_rows == 0 || tile_cols == 0 ||
      tile_rows > num_units / cols || tile_cols > cols) {
    return fail(Error::kBadGeometry, 0);
  }
  if (tile_rows > kMaxBlockUnits || tile_cols > kMaxBlockUnits ||
      tile_rows * tile_cols > kMaxBlockUnits) {
    return fail(Error::kLimitExceeded, 0);
  }
  return Status{};
}

std::size_t EncodedRun::body_bytes() const {
  if (num_changed == 0) return 0;
  std::size_t size = blocks.size();
  for (const EncodedBlock& block : blocks) {
    if (block.mode == Mode::kUnchanged) continue;
    size += varint_size(block.payload.size()) + 4 + block.payload.size();
  }
  return size;
}

void EncodedRun::write_body(std::uint8_t* out) const {
  for (const EncodedBlock& block : blocks) {
    *out++ = static_cast<std::uint8_t>(block.mode);
    if (block.mode == Mode::kUnchanged) continue;
    std::uint64_t rest = block.payload.size();
    for (; rest >= 128; rest >>= 7) *out++ = static_cast<std::uint8_t>(rest | 128);
    *out++ = static_cast<std::uint8_t>(rest);
    std::memcpy(out, &block.check, 4);
    out += 4;
  }
  for (const EncodedBlock& block : blocks) out = put_bytes(out, block.payload);
}

std::vector<std::uint8_t> EncodedRun::body() const {
  std::vector<std::uint8_t> bytes(body_bytes());
  if (!bytes.empty()) write_body(bytes.data());
  return bytes;
}

std::vector<std::uint8_t> EncodedRun::undo() const {
  std::vector<std::uint8_t> bytes(undo_bytes());
  if (!bytes.empty()) write_undo(bytes.data());
  return bytes;
}

std::size_t EncodedRun::undo_bytes() const {
  std::size_t size = 0;
  for (const EncodedBlock& block : blocks) size += block.undo.empty() ? 0 : 16 + block.undo.size();
  return size;
}

void EncodedRun::write_undo(std::uint8_t* out) const {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].undo.empty()) continue;
    out = put_u64(put_u64(out, first_block + i), blocks[i].undo.size());
    out = put_bytes(out, blocks[i].undo);
  }
}

Status encode_run(const BlockRun& run, std::uint8_t* base, const std::uint8_t* next, bool update,
                  bool undo, EncodedRun* out) {
  if (const Status status = check_run(run); !status.is_ok()) return status;
  const Geometry& g = run.geometry;
  const Kernels* kernels = active_kernels();
  out->first_block = run.first_block;
  out->blocks.assign(static_cast<std::size_t>(run.num_blocks), EncodedBlock());
  std::vector<EncodedBlock>& blocks = out->blocks;
  parallel_for(blocks.size(), run.num_threads, [&](std::size_t i) {
    ScratchLease lease(block_units(g), static_cast<std::size_t>(g.unit_bytes));
    Scratch& scratch = *lease;
    const std::uint64_t block = run.first_block + i;
    const Tile tile = tile_of(g, block);
    EncodeJob job;
    job.num_units = static_cast<std::size_t>(tile.num_units());
    job.placement = placement_of(g, tile);
    job.params = run.params;
    job.update = update;
    job.undo = undo;
    job.base = base + tile.offset;
    job.next = next + tile.offset;
    const bool direct = is_direct(job.placement, job.base, g.unit_bytes) &&
                        is_direct(job.placement, job.next, g.unit_bytes);
    if (!direct) {
      gather(base, job.placement, job.num_units, g.unit_bytes, scratch.block_b);
      gather(next, job.placement, job.num_units, g.unit_bytes, scratch.block_c);
      job.base = scratch.block_b;
      job.next = scratch.block_c;
    }
    kernels->encode[unit_log2(g)](job, scratch, run.digests[block], &blocks[i]);
    if (!direct && update && blocks[i].num_changed != 0) {
      scatter(scratch.block_c, job.placement, job.num_units, g.unit_bytes, base);
    }
  });
  for (const EncodedBlock& block : blocks) out->num_changed += block.num_changed;
  return Status{};
}

Status rollback_run(const Geometry& g, std::span<const std::uint8_t> undo, std::uint8_t* base) {
  const Status status = g.check();
  if (!status.is_ok()) return status;
  std::size_t at = 0;
  while (at + 16 <= undo.size()) {
    const std::uint64_t block = load_u64(undo.data() + at), size = load_u64(undo.data() + at + 8);
    at += 16;
    if (block >= g.num_blocks() || size > undo.size() - at || size < 4) {
      return fail(Error::kBadArgument, block);
    }
    const Tile tile = tile_of(g, block);
    const Placement place = placement_of(g, tile);
    const std::size_t unit = static_cast<std::size_t>(g.unit_bytes);
    std::uint32_t head;
    std::memcpy(&head, undo.data() + at, 4);
    const std::uint8_t* body = undo.data() + at + 4;
    if (head == 0xFFFFFFFFu) {
      if (size != 4 + tile.num_units() * unit) return fail(Error::kBadArgument, block);
      scatter(body, place, tile.num_units(), unit, base);
    } else {
      const std::uint64_t pages = (tile.num_units() - 1) / kUndoPageUnits + 1;
      if (size != 4 + 4 * pages + std::uint64_t{head} * (2 + unit)) {
        return fail(Error::kBadArgument, block);
      }
      const std::uint8_t* low = body + 4 * pages;
      const std::uint8_t* values = low + 2 * std::size_t{head};
      std::uint32_t i = 0;
      for (std::uint64_t page = 0; page < pages; ++page) {
        std::uint32_t end;
        std::memcpy(&end, body + 4 * page, 4);
        if (end > head) return fail(Error::kBadArgument, block);
        for (; i < end; ++i) {
          std::uint16_t low_bits;
          std::memcpy(&low_bits, low + 2 * std::size_t{i}, 2);
          const std::uint64_t position = page * kUndoPageUnits + low_bits;
          if (position >= tile.num_units()) return fail(Error::kBadArgument, block);
          const std::uint64_t offset = place.offset +
                                       position / place.row_units * place.stride_bytes +
                                       position % place.row_units * unit;
          std::memcpy(base + offset, values + i * unit, unit);
        }
      }
      if (i != head) return fail(Error::kBadArgument, block);
    }
    at += static_cast<std::size_t>(size);
  }
  return at == undo.size() ? Status{} : fail(Error::kBadArgument, 0);
}

Status apply_run(const BlockRun& run, std::span<const std::uint8_t> body, std::uint8_t* data,
                 std::uint64_t* num_changed) {
  *num_changed = 0;
  Status status = check_run(run);
  if (!status.is_ok()) return status;
  if (run.num_blocks == 0) return fail(Error::kBadBlockIndex, run.first_block);
  std::vector<TableEntry> table;
  status = parse_table(run, body, &table);
  if (!status.is_ok()) return status;
  FirstError errors;
  std::atomic<std::uint64_t> total{0};
  parallel_for(table.size(), run.num_threads, [&](std::size_t i) {
    if (table[i].mode != Mode::kUnchanged) {
      ScratchLease lease(block_units(run.geometry),
                         static_cast<std::size_t>(run.geometry.unit_bytes));
      std::uint64_t changed = 0;
      const Status result = apply_one(run, table[i], body.data() + table[i].offset,
                                      run.first_block + i, data, *lease, &changed);
      if (!result.is_ok()) errors.report(result, run.first_block + i);
      total += changed;
    }
    if (run.found) run.found[i] = digest_tile(run.geometry, run.first_block + i, data);
  });
  *num_changed = total;
  return errors.get();
}

Status digest_run(const BlockRun& run, const std::uint8_t* data) {
  if (const Status status = check_run(run); !status.is_ok()) return status;
  parallel_for(static_cast<std::size_t>(run.num_blocks), run.num_threads, [&](std::size_t i) {
    run.digests[run.first_block + i] = digest_tile(run.geometry, run.first_block + i, data);
  });
  return Status{};
}

ClassParams choose_classes(const std::uint8_t* base, std::uint64_t num_units,
                           std::uint64_t unit_bytes) {
  ClassParams params;
  const std::uint64_t samples = std::min<std::uint64_t>(num_units, 1024);
  if (samples == 0) return params;
  std::uint64_t counts[256] = {};
  for (std::uint64_t i = 0; i < samples; ++i) {
    // i < 1024, num_units < 2^62: the product needs 128 bits.
    const auto unit =
        static_cast<std::uint64_t>(static_cast<unsigned __int128>(i) * num_units / samples);
    std::uint32_t value = 0;
    std::memcpy(&value, base + unit * unit_bytes, static_cast<std::size_t>(unit_bytes));
    const std::uint32_t field = unit_bytes == 1 ? value & 127 : value >> (8 * unit_bytes - 9) & 255;
    ++counts[field];
  }
  int top = 255;
  for (std::uint64_t above = counts[255]; top > 0 && above <= samples / 512; above += counts[top]) {
    --top;
  }
  int low = 0;
  for (std::uint64_t below = counts[0]; below <= samples / 64; below += counts[low]) ++low;
  while ((top >> params.shift) - (low >> params.shift) > 12) ++params.shift;
  params.base = std::max(0, (top >> params.shift) - 15);
  return params;
}

}  // namespace gymfast
