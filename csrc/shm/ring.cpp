#include "shm/ring.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#ifdef __linux__
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "shm/stream_copy.h"

namespace gymfast {

namespace {

constexpr std::uint64_t kMagic = 0x32676e6972666d67;  // "gmfring2"
constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kStreamBytes = 128 << 10;
constexpr std::uint32_t kHere = 1;
constexpr std::uint32_t kGone = 2;
constexpr std::chrono::milliseconds kLook{50};  // between looks at who still lives

std::uint64_t pages(std::uint64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

RingStatus system_error() { return {RingError::kSystem, static_cast<std::uint64_t>(errno)}; }

}  // namespace

struct Ring::Header {
  std::uint64_t magic;
  std::uint64_t chunk_bytes;
  std::uint32_t num_chunks;
  std::uint32_t num_ranks;
  std::uint32_t writer;
  std::uint32_t head;  // chunks written, modulo 2^32; a futex
};

// Somebody who sleeps until a count reaches `wanted`, and need not be woken before.
struct Ring::Sleeper {
  std::uint32_t is_asleep;
  std::uint32_t wanted;
};

// On a cache line of its own: each reader writes its tail often.
struct alignas(64) Ring::Rank {
  std::uint32_t tail;   // chunks read, modulo 2^32; a futex
  std::uint32_t state;  // 0 before it came, then kHere, then kGone
  std::int32_t pid;
  Sleeper writer;  // which waits until this rank has read so much
  Sleeper reader;  // this rank, which waits until so much is written
};

#ifdef __linux__

namespace {

std::atomic_ref<std::uint32_t> word(std::uint32_t& value) {
  return std::atomic_ref<std::uint32_t>(value);
}

void wake(std::uint32_t& value) {
  syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Small parts are soon used again, and fit the caches.
void copy(std::uint8_t* to, const std::uint8_t* from, std::uint64_t size) {
  if (size >= kStreamBytes) {
    stream_copy(to, from, size);
  } else if (size != 0) {
    std::memcpy(to, from, size);
  }
}

// Whether one count is at least another, both modulo 2^32 and not far apart.
bool has_reached(std::uint32_t count, std::uint32_t wanted) {
  return static_cast<std::int32_t>(count - wanted) >= 0;
}

// Also true for a process that has ended and that nobody has waited for yet.
bool is_dead(std::int32_t pid) {
  if (pid <= 0) return false;
  const int process = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (process < 0) return errno == ESRCH;
  pollfd event{process, POLLIN, 0};
  const bool has_ended = poll(&event, 1, 0) == 1;
  close(process);
  return has_ended;
}

std::uint64_t layout_bytes(std::uint32_t num_ranks, std::uint64_t chunk_bytes,
                           std::uint32_t num_chunks) {
  return kPageBytes + pages(std::uint64_t{num_ranks} * 64) + pages(std::uint64_t{num_chunks} * 8) +
         num_chunks * pages(chunk_bytes);
}

}  // namespace

Ring::~Ring() {
  leave();
  if (header_ != nullptr) munmap(header_, mapped_bytes_);
  if (fd_ >= 0) close(fd_);
}

RingStatus Ring::create(std::uint32_t rank, std::uint32_t num_ranks, std::uint64_t chunk_bytes,
                        std::uint32_t num_chunks) {
  static_assert(sizeof(Rank) == 64 && sizeof(Header) <= kPageBytes);
  fd_ = memfd_create("gymfast-ring", MFD_CLOEXEC);
  if (fd_ < 0) return system_error();
  const std::uint64_t size = layout_bytes(num_ranks, chunk_bytes, num_chunks);
  if (ftruncate(fd_, static_cast<off_t>(size)) != 0) return system_error();
  if (RingStatus status = map(size); !status.is_ok()) return status;
  *header_ = Header{0, chunk_bytes, num_chunks, num_ranks, rank, 0};
  rank_ = rank;
  Rank& mine = this->rank(rank);
  mine.pid = getpid();
  word(mine.state).store(kHere);
  header_->magic = kMagic;
  return {};
}

RingStatus Ring::open(const std::string& path, std::uint32_t rank) {
  fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd_ < 0) return system_error();
  struct stat info;
  if (fstat(fd_, &info) != 0) return system_error();
  const std::uint64_t size = static_cast<std::uint64_t>(info.st_size);
  if (size < kPageBytes) return {RingError::kNotARing};
  if (RingStatus status = map(size); !status.is_ok()) return status;
  const Header header = *header_;
  if (header.magic != kMagic || rank >= header.num_ranks ||
      layout_bytes(header.num_ranks, header.chunk_bytes, header.num_chunks) != size) {
    munmap(header_, mapped_bytes_);
    header_ = nullptr;
    return {RingError::kNotARing};
  }
  rank_ = rank;
  Rank& mine = this->rank(rank);
  mine.pid = getpid();
  word(mine.state).store(kHere);
  return {};
}

RingStatus Ring::map(std::uint64_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (memory == MAP_FAILED) return system_error();
  header_ = static_cast<Header*>(memory);
  mapped_bytes_ = size;
  return {};
}

Ring::Rank& Ring::rank(std::uint32_t number) const {
  auto* begin = reinterpret_cast<std::uint8_t*>(header_) + kPageBytes;
  return reinterpret_cast<Rank*>(begin)[number];
}

// The size of the item that a chunk is of: these lie behind the ranks.
std::uint64_t& Ring::item_bytes(std::uint32_t number) const {
  auto* begin = reinterpret_cast<std::uint8_t*>(header_) + kPageBytes +
                pages(std::uint64_t{header_->num_ranks} * 64);
  return reinterpret_cast<std::uint64_t*>(begin)[number % header_->num_chunks];
}

// The chunks lie behind the sizes, each on pages of its own.
std::uint8_t* Ring::chunk(std::uint32_t number) const {
  const std::uint64_t begin = kPageBytes + pages(std::uint64_t{header_->num_ranks} * 64) +
                              pages(std::uint64_t{header_->num_chunks} * 8);
  const std::uint64_t place = number % header_->num_chunks;
  return reinterpret_cast<std::uint8_t*>(header_) + begin + place * pages(header_->chunk_bytes);
}

RingStatus Ring::write(const std::uint8_t* data, std::uint64_t size, Deadline deadline,
                       std::vector<std::uint32_t>* lost) {
  std::atomic_ref<std::uint32_t> head = word(header_->head);
  std::uint64_t done = 0;
  do {
    if (RingStatus status = make_room(deadline, lost); !status.is_ok()) return status;
    const std::uint32_t number = head.load(std::memory_order_relaxed);
    const std::uint64_t part = std::min(size - done, header_->chunk_bytes);
    item_bytes(number) = size;
    copy(chunk(number), data + done, part);
    done += part;
    head.store(number + 1);
    bool wakes = false;
    for (std::uint32_t one = 0; one < header_->num_ranks; ++one) {
      wakes |= has_enough(rank(one).reader, number + 1);
    }
    if (wakes) wake(header_->head);
  } while (done < size);
  return {};
}

RingStatus Ring::make_room(Deadline deadline, std::vector<std::uint32_t>* lost) {
  const std::uint32_t head = word(header_->head).load(std::memory_order_relaxed);
  for (std::uint32_t number = 0; number < header_->num_ranks; ++number) {
    if (number == rank_) continue;
    Rank& other = rank(number);
    while (word(other.state).load(std::memory_order_acquire) != kGone) {
      const std::uint32_t tail = word(other.tail).load(std::memory_order_acquire);
      if (head - tail < header_->num_chunks) break;
      const RingStatus status = wait(other.tail, tail, tail + half(), &other.writer, deadline);
      if (status.error == RingError::kCancelled || status.error == RingError::kSystem)
        return status;
      if (status.error == RingError::kDeadline || is_dead(other.pid)) {
        word(other.state).store(kGone);
      }
    }
    const bool is_gone = word(other.state).load() == kGone;
    if (is_gone && std::find(lost->begin(), lost->end(), number) == lost->end()) {
      lost->push_back(number);
    }
  }
  return {};
}

RingStatus Ring::read(std::uint8_t* data, std::uint64_t size, Deadline deadline) {
  Rank& mine = rank(rank_);
  Rank& writer = rank(header_->writer);
  std::uint64_t done = 0;
  do {
    const std::uint32_t tail = word(mine.tail).load(std::memory_order_relaxed);
    while (true) {
      const std::uint32_t head = word(header_->head).load(std::memory_order_acquire);
      if (head != tail) break;
      if (word(mine.state).load() == kGone) return {RingError::kDeadline};
      if (word(writer.state).load() == kGone || is_dead(writer.pid)) {
        // It may have written until it went.
        if (word(header_->head).load(std::memory_order_acquire) != tail) break;
        return {RingError::kWriterGone};
      }
      const std::uint64_t left = (size - done + header_->chunk_bytes - 1) / header_->chunk_bytes;
      const auto few = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(left, 1, half()));
      const RingStatus status = wait(header_->head, head, tail + few, &mine.reader, deadline);
      if (!status.is_ok()) return status;
    }
    const std::uint64_t found = item_bytes(tail);
    if (found != size) return {RingError::kOtherSize, found};
    const std::uint64_t part = std::min(size - done, header_->chunk_bytes);
    copy(data + done, chunk(tail), part);
    done += part;
    // A rank that was passed over may have read a chunk while it was written anew.
    if (word(mine.state).load(std::memory_order_acquire) == kGone) return {RingError::kDeadline};
    word(mine.tail).store(tail + 1);
    if (has_enough(mine.writer, tail + 1)) wake(mine.tail);
  } while (done < size);
  return {};
}

// With half a ring at a time both sides work while one wakes up, and few wake-ups are needed.
std::uint32_t Ring::half() const { return (header_->num_chunks + 1) / 2; }

bool Ring::has_enough(Sleeper& sleeper, std::uint32_t count) {
  return word(sleeper.is_asleep).load() != 0 && has_reached(count, word(sleeper.wanted).load());
}

// The sleeper is marked before the kernel compares the value, and a count is stored before its
// sleeper is looked for, all in one order: either the value differs, or the sleeper is seen.
RingStatus Ring::wait(std::uint32_t& value, std::uint32_t seen, std::uint32_t wanted,
                      Sleeper* sleeper, Deadline deadline) const {
  if (is_cancelled_.load()) return {RingError::kCancelled};
  const auto now = std::chrono::steady_clock::now();
  if (now >= deadline) return {RingError::kDeadline};
  const auto left = std::min<std::chrono::nanoseconds>(kLook, deadline - now);
  timespec time{left.count() / 1'000'000'000, left.count() % 1'000'000'000};
  word(sleeper->wanted).store(wanted);
  word(sleeper->is_asleep).store(1);
  const long result = syscall(SYS_futex, &value, FUTEX_WAIT, seen, &time, nullptr, 0);
  const int error = errno;
  word(sleeper->is_asleep).store(0);
  if (result != 0 && error != EAGAIN && error != ETIMEDOUT && error != EINTR) {
    return {RingError::kSystem, static_cast<std::uint64_t>(error)};
  }
  return {};
}

void Ring::drop(std::uint32_t number) {
  if (header_ == nullptr || number >= header_->num_ranks) return;
  Rank& other = rank(number);
  word(other.state).store(kGone);
  wake(other.tail);
  if (header_->writer == number) wake(header_->head);
}

#else

Ring::~Ring() = default;
RingStatus Ring::create(std::uint32_t, std::uint32_t, std::uint64_t, std::uint32_t) {
  return {RingError::kNotForThis};
}
RingStatus Ring::open(const std::string&, std::uint32_t) { return {RingError::kNotForThis}; }
RingStatus Ring::write(const std::uint8_t*, std::uint64_t, Deadline, std::vector<std::uint32_t>*) {
  return {RingError::kNotForThis};
}
RingStatus Ring::read(std::uint8_t*, std::uint64_t, Deadline) { return {RingError::kNotForThis}; }
void Ring::drop(std::uint32_t) {}

#endif

}  // namespace gymfast
