// One rank of an NCCL communicator: rounds of broadcasts on a stream, with deadlines, never
// blocking inside NCCL. Calls come from one thread; `stop` may come from any.
#ifndef GYMFAST_NCCL_COMMUNICATOR_H_
#define GYMFAST_NCCL_COMMUNICATOR_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "nccl/loader.h"

namespace gymfast::nccl {

enum class Problem : std::uint8_t {
  kNone,
  kArgument,  // `call` is one sentence
  kNccl,      // `call` of NCCL came to `result`
  kCuda,      // `call` of the CUDA runtime came to `result`
  kTimeout,   // `call` was not complete by its deadline
  kStopped,   // somebody called stop()
};

struct Status {
  Problem problem = Problem::kNone;
  int result = 0;
  const char* call = "";
  bool is_ok() const { return problem == Problem::kNone; }
};

// One broadcast of a round: memory that its root reads and all other ranks fill.
struct Slot {
  int root = 0;
  void* address = nullptr;
  std::size_t num_bytes = 0;
};

using Clock = std::chrono::steady_clock;

// How NCCL knows memory that rounds use again and again.
enum class Registration : std::uint8_t { kNone, kBuffer, kWindow };

class Communicator {
 public:
  // Without a rank until join, shrink or grow. `grace` is how long NCCL may take to abort before it
  // is left alone.
  Communicator(const Library& library, int device, std::size_t depth, Clock::duration grace);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // A stream and events. Comes before anything else.
  Status open();

  // Each begins to make the communicator; it is usable once wait_until_ready says so. max_ctas 0
  // leaves the number of thread blocks to NCCL.
  Status join(const UniqueId& id, int num_ranks, int rank, int max_ctas);
  // This rank is one of `parent` that stays; `excluded` are ranks of it.
  // Waits until NCCL is done with the parent.
  Status shrink(const std::shared_ptr<Communicator>& parent, std::span<int> excluded,
                Clock::time_point until);
  // A rank of `parent` keeps its number. `id` is that of id_to_grow on the rank that asked for it,
  // null on others.
  Status grow(const std::shared_ptr<Communicator>& parent, int num_ranks, const UniqueId* id);
  // A rank that is new; max_ctas is that of the others.
  Status grow_into(const UniqueId& id, int num_ranks, int rank, int max_ctas);
  // For one rank of this communicator, before it grows.
  Status id_to_grow(UniqueId* id);

  // kTimeout if it is not ready by then; it may be asked again.
  Status wait_until_ready(Clock::time_point until);

  // Registers memory of this communicator, once; nothing is under way. All ranks register as many
  // bytes, or none does. A window is made by all ranks together, and one that fails, or is late,
  // ends the communicator; a buffer that fails changes nothing. Without an error registration() is
  // still kNone where NCCL skips this memory.
  Status register_memory(void* address, std::size_t num_bytes, Registration how,
                         Clock::time_point until);
  // Takes it back, by itself; close() does it too, and an abort.
  void deregister();
  Registration registration() const { return registration_; }

  // Begins a round after the work that `producer` has been given so far. Its memory is taken until
  // the round is finished. Waits for the launch of the round before, not for its end.
  Status begin(std::span<const Slot> slots, Stream producer, Clock::time_point until);
  // Returns once at most `num_left` rounds are under way, oldest first.
  Status wait(std::size_t num_left, Clock::time_point until);
  std::size_t num_under_way() const { return num_under_way_; }

  // Ends all rounds, from any thread: whoever waits gets kStopped soon. With `is_kept` a library
  // that can revoke keeps the communicator, for shrink; otherwise it is aborted.
  void stop(bool is_kept);
  // Gives everything back; NCCL is asked to finalize if all went well until then. Idempotent.
  void close(Clock::time_point until);

  bool is_usable() const;  // ready, not stopped, nothing failed
  bool can_shrink() const;
  // Whether NCCL did not come back, so that it may still use the memory of unfinished rounds.
  bool is_stuck() const { return is_stuck_; }
  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }

  // A sentence with rank, call and the words of NCCL.
  std::string describe(const Status& status) const;

 private:
  struct Round {
    Event done = nullptr;
    bool is_launching = false;
  };

  Status check_new() const;
  Status started(int result, const char* call);
  Status check_memory(std::span<const Slot> slots);
  Status launch(std::span<const Slot> slots);
  Status poll();         // one look at NCCL and at the events; never waits
  Status poll_parent();  // of a communicator that comes from another
  Status poll_events();
  Status async_state(Comm comm, const char* call);
  Status settle(Clock::time_point until);
  void forget_registration();  // with the mutex, on a communicator without work
  void note_words(Comm comm);  // of NCCL about its last error
  Status nccl_failed(int result, const char* call, Comm comm);
  Status cuda_failed(int result, const char* call);
  Status keep(Status status);
  bool becomes_idle();
  template <class Done>
  Status poll_until(Done&& is_done, const char* call, Clock::time_point until);

  const Library& library_;
  const NcclTable& nccl_;
  const CudaTable& cuda_;
  const int device_;
  const std::size_t depth_;
  const Clock::duration grace_;
  Stream stream_ = nullptr;
  Event ready_ = nullptr;
  std::vector<Round> rounds_;  // a ring
  std::size_t first_ = 0;
  std::size_t num_under_way_ = 0;
  int rank_ = -1;
  int num_ranks_ = 0;
  const char* doing_ = "";                // the call that NCCL may be in
  std::shared_ptr<Communicator> parent_;  // until NCCL has made this one of it

  mutable std::mutex mutex_;  // NCCL has one thread at a time inside of a communicator
  Comm comm_ = nullptr;
  bool is_ready_ = false;
  bool is_in_progress_ = false;
  bool is_revoked_ = false;
  bool is_closed_ = false;
  std::atomic<bool> is_stuck_{false};  // NCCL did not come back within the grace
  std::atomic<bool> is_stopped_{false};
  Status failure_;        // the first; it stays
  char words_[256] = {};  // of NCCL about it
  std::atomic<Registration> registration_{Registration::kNone};
  // NCCL fills it in its own time: where it hangs, it is left to it.
  std::unique_ptr<void*> handle_ = std::make_unique<void*>(nullptr);
};

}  // namespace gymfast::nccl

#endif  // GYMFAST_NCCL_COMMUNICATOR_H_
