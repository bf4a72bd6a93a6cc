// A stand-in for NCCL and the CUDA runtime on host memory, with their C interface: what the tests
// load through the path that finds the real ones. Ranks are threads, processes, or both.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace nccl_double {

constexpr int kMaxRanks = 16;
constexpr std::size_t kChunk = 256 << 10;
enum Result { kSuccess, kCuda, kSystem, kInternal, kArgument, kUsage, kRemote, kInProgress };

// What tests turn, by name: see double_set.
struct Knobs {
  std::atomic<int> version{23007};
  std::atomic<int> device_count{1};
  std::atomic<int> host_memory{0};               // 1: all memory is that of the host
  std::atomic<int> init_hangs[kMaxRanks]{};      // 1: the rank calls and never gets there
  std::atomic<int> async_error[kMaxRanks]{};     // what the next look at the communicator finds
  std::atomic<int> call_error[kMaxRanks]{};      // what the next broadcast returns
  std::atomic<int> abort_hangs[kMaxRanks]{};     // 1: abort does not come back
  std::atomic<int> is_silent[kMaxRanks]{};       // 1: others do not notice that the rank is gone
  std::atomic<int> alloc_error{0};               // what the next ncclMemAlloc returns
  std::atomic<int> register_error[kMaxRanks]{};  // what the next ncclCommRegister returns
  std::atomic<int> window_error[kMaxRanks]{};    // what the next window comes to
  std::atomic<int> skips_registration{0};        // 1: NCCL_LOCAL_REGISTER=0
  std::atomic<int> skips_windows{0};             // 1: NCCL_WIN_ENABLE=0
};
Knobs& knobs();

void log(const std::string& line);

// ---- streams and events (cuda.cpp)

class Stream {
 public:
  Stream();
  ~Stream();
  void add(std::function<void()> work);
  bool is_idle();

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  int num_left_ = 0;
  bool is_closing_ = false;
  std::thread thread_;
};

// ---- what the ranks of a communicator share (group.cpp)

struct Box {  // what a root shows, chunk by chunk
  std::atomic<std::uint64_t> num_bytes;
  std::atomic<std::uint64_t> num_chunks;
  std::atomic<std::uint64_t> place;  // in registered memory, from 1 on
  unsigned char data[kChunk];
};

struct Member {
  std::atomic<int> state;  // 0 not yet, 1 there, 2 gone
  std::atomic<int> pid;
  std::atomic<std::uint64_t> num_taken[kMaxRanks];  // chunks, by root
  std::atomic<std::uint64_t> num_windows;
  std::atomic<std::uint64_t> window_bytes, window_round;  // of the newest
};

struct Segment {
  std::atomic<int> num_ranks;
  std::atomic<int> num_joined;
  std::atomic<int> num_left;
  Member members[kMaxRanks];
  Box boxes[kMaxRanks];
};

class Group {
 public:
  // Throws std::runtime_error if the ranks disagree about their number.
  Group(std::string name, int num_ranks, int rank);
  ~Group();
  bool is_complete() const;

  // Moves one broadcast; false once `is_over` says so. Sizes that differ, and ranks that are gone,
  // never end by themselves; the latter are told by `on_gone`.
  // `place` counts from 1 in registered memory, 0 is other memory: the same on all ranks.
  bool broadcast(int root, unsigned char* data, std::size_t num_bytes, std::size_t place,
                 const std::function<bool()>& is_over, const std::function<void()>& on_gone);

  // All ranks make their windows in the same order, between the same rounds, as large as each
  // other.
  void begin_window(std::size_t num_bytes, std::uint64_t num_rounds);
  bool have_all_windows() const;

  const std::string name;
  const int num_ranks, rank;

 private:
  template <class Done>
  bool wait(Done&& is_done, const std::function<bool()>& is_over,
            const std::function<void()>& on_gone);
  bool is_anybody_gone() const;

  std::string path_;
  Segment* segment_;
};

}  // namespace nccl_double
