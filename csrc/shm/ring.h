// A ring of chunks in memory that several processes share: one writes, all others read everything.
// Whoever has to wait sleeps in a futex; nobody spins.
#ifndef GYMFAST_SHM_RING_H_
#define GYMFAST_SHM_RING_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gymfast {

enum class RingError : int {
  kOk = 0,
  kDeadline = 1,    // the others did not come in time
  kCancelled = 2,   // cancel() was called here
  kWriterGone = 3,  // the writer left or died
  kOtherSize = 4,   // the writer sends an item of another size
  kSystem = 5,      // a system call failed: see errno
  kNotARing = 6,    // the file is no ring of this version
  kNotForThis = 7,  // no futexes on this system
};

struct RingStatus {
  RingError error = RingError::kOk;
  std::uint64_t found = 0;  // bytes of the writer's item, or errno

  bool is_ok() const { return error == RingError::kOk; }
};

// One process's view of a ring. The writer is the rank that created it. Methods of one object are
// called from one thread, but for cancel(), leave() and drop().
class Ring {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring();

  // Makes a ring for num_ranks ranks, this one being `rank`, in memory that has no name.
  RingStatus create(std::uint32_t rank, std::uint32_t num_ranks, std::uint64_t chunk_bytes,
                    std::uint32_t num_chunks);
  // Opens the ring of another process by a path such as /proc/PID/fd/FD.
  RingStatus open(const std::string& path, std::uint32_t rank);

  // Puts an item into the ring as there is room; ranks that left, died or are late are passed over
  // from then on, and added to `lost`.
  RingStatus write(const std::uint8_t* data, std::uint64_t size, Deadline deadline,
                   std::vector<std::uint32_t>* lost);
  // Takes the next item, whose size has to be `size`.
  RingStatus read(std::uint8_t* data, std::uint64_t size, Deadline deadline);

  // This rank takes part no more; whoever waits for it is woken.
  void leave() { drop(rank_); }
  // The same for any rank that is known to be gone.
  void drop(std::uint32_t number);
  // Ends the waits of this object soon; called from any thread.
  void cancel() { is_cancelled_.store(true); }
  int fd() const { return fd_; }

 private:
  struct Header;
  struct Rank;
  struct Sleeper;

  RingStatus map(std::uint64_t size);
  Rank& rank(std::uint32_t number) const;
  std::uint64_t& item_bytes(std::uint32_t number) const;
  std::uint8_t* chunk(std::uint32_t number) const;
  RingStatus make_room(Deadline deadline, std::vector<std::uint32_t>* lost);
  std::uint32_t half() const;
  static bool has_enough(Sleeper& sleeper, std::uint32_t count);
  // Sleeps while value is `seen`, until it is `wanted` or a moment has passed.
  RingStatus wait(std::uint32_t& value, std::uint32_t seen, std::uint32_t wanted, Sleeper* sleeper,
                  Deadline deadline) const;

  Header* header_ = nullptr;
  std::uint64_t mapped_bytes_ = 0;
  int fd_ = -1;
  std::uint32_t rank_ = 0;
  std::atomic<bool> is_cancelled_{false};
};

}  // namespace gymfast

#endif  // GYMFAST_SHM_RING_H_
