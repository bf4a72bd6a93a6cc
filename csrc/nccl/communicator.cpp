#include "nccl/communicator.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <optional>
#include <thread>

#include "nccl/on_device.h"

namespace gymfast::nccl {
namespace {

using std::chrono::microseconds;

constexpr microseconds kFirstPause{10};
constexpr microseconds kLongestPause{500};

Status refuse(const char* sentence) { return {Problem::kArgument, 0, sentence}; }

// What a call came to that may hang inside NCCL, or nothing after `grace`; its thread is left then.
std::optional<int> call_aside(std::function<int()> call, Clock::duration grace) {
  struct Outcome {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<int> result;
  };
  auto outcome = std::make_shared<Outcome>();
  std::thread([outcome, call = std::move(call)] {
    const int result = call();
    const std::lock_guard<std::mutex> lock(outcome->mutex);
    outcome->result = result;
    outcome->changed.notify_all();
  }).detach();
  std::unique_lock<std::mutex> lock(outcome->mutex);
  outcome->changed.wait_for(lock, grace, [&] { return outcome->result.has_value(); });
  return outcome->result;
}

bool has_begun(int result) { return result == kNcclSuccess || result == kNcclInProgress; }

}  // namespace

Communicator::Communicator(const Library& library, int device, std::size_t depth,
                           Clock::duration grace)
    : library_(library),
      nccl_(library.nccl),
      cuda_(library.cuda),
      device_(device),
      depth_(depth),
      grace_(grace),
      rounds_(depth) {}

Communicator::~Communicator() {
  close(Clock::now());
  if (is_stuck_) static_cast<void>(handle_.release());
}

Status Communicator::open() {
  const OnDevice on(cuda_, device_);
  if (on.result() != kCudaSuccess) return cuda_failed(on.result(), "cudaSetDevice");
  int result = cuda_.stream_create_with_flags(&stream_, kStreamNonBlocking);
  if (result != kCudaSuccess) return cuda_failed(result, "cudaStreamCreateWithFlags");
  result = cuda_.event_create_with_flags(&ready_, kEventDisableTiming);
  for (Round& round : rounds_) {
    if (result != kCudaSuccess) break;
    result = cuda_.event_create_with_flags(&round.done, kEventDisableTiming);
  }
  return result == kCudaSuccess ? Status{} : cuda_failed(result, "cudaEventCreateWithFlags");
}

Status Communicator::join(const UniqueId& id, int num_ranks, int rank, int max_ctas) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (Status status = check_new(); !status.is_ok()) return status;
  const OnDevice on(cuda_, device_);
  if (on.result() != kCudaSuccess) return cuda_failed(on.result(), "cudaSetDevice");
  rank_ = rank;
  num_ranks_ = num_ranks;
  Config config;
  if (max_ctas > 0) config.max_ctas = max_ctas;
  return started(nccl_.comm_init_rank_config(&comm_, num_ranks, id, rank, &config),
                 "ncclCommInitRankConfig");
}

Status Communicator::shrink(const std::shared_ptr<Communicator>& parent, std::span<int> excluded,
                            Clock::time_point until) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (Status status = check_new(); !status.is_ok()) return status;
  if (!library_.has_shrink()) return refuse("this NCCL cannot shrink a communicator");
  const auto is_before = [&](int other) { return other < parent->rank_; };
  rank_ = parent->rank_ - static_cast<int>(std::ranges::count_if(excluded, is_before));
  num_ranks_ = parent->num_ranks_ - static_cast<int>(excluded.size());
  const Status settled = parent->settle(until);
  const std::lock_guard<std::mutex> parent_lock(parent->mutex_);
  if (!settled.is_ok()) {
    std::copy(std::begin(parent->words_), std::end(parent->words_), words_);
    return keep(settled);
  }
  if (parent->comm_ == nullptr) return refuse("the communicator to shrink was aborted");
  parent_ = parent;
  return started(
      nccl_.comm_shrink(parent->comm_, excluded.data(), static_cast<int>(excluded.size()), &comm_,
                        nullptr, kShrinkDefault),
      "ncclCommShrink");
}

Status Communicator::grow(const std::shared_ptr<Communicator>& parent, int num_ranks,
                          const UniqueId* id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (Status status = check_new(); !status.is_ok()) return status;
  if (!library_.has_grow()) return refuse("this NCCL cannot grow a communicator");
  const std::lock_guard<std::mutex> parent_lock(parent->mutex_);
  if (parent->comm_ == nullptr) return refuse("the communicator to grow was aborted");
  rank_ = parent->rank_;
  num_ranks_ = num_ranks;
  return started(nccl_.comm_grow(parent->comm_, num_ranks, id, -1, &comm_, nullptr),
                 "ncclCommGrow");
}

Status Communicator::grow_into(const UniqueId& id, int num_ranks, int rank, int max_ctas) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (Status status = check_new(); !status.is_ok()) return status;
  if (!library_.has_grow()) return refuse("this NCCL cannot grow a communicator");
  const OnDevice on(cuda_, device_);
  if (on.result() != kCudaSuccess) return cuda_failed(on.result(), "cudaSetDevice");
  rank_ = rank;
  num_ranks_ = num_ranks;
  Config config;
  if (max_ctas > 0) config.max_ctas = max_ctas;
  return started(nccl_.comm_grow(nullptr, num_ranks, &id, rank, &comm_, &config), "ncclCommGrow");
}

Status Communicator::id_to_grow(UniqueId* id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!library_.has_grow()) return refuse("this NCCL cannot grow a communicator");
  if (comm_ == nullptr) return refuse("the communicator to grow was aborted");
  const int result = nccl_.comm_get_unique_id(comm_, id);
  return result == kNcclSuccess ? Status{} : nccl_failed(result, "ncclCommGetUniqueId", comm_);
}

Status Communicator::wait_until_ready(Clock::time_point until) {
  return poll_until([this] { return is_ready_; }, doing_, until);
}

Status Communicator::register_memory(void* address, std::size_t num_bytes, Registration how,
                                     Clock::time_point until) {
  const bool is_window = how == Registration::kWindow;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopped_) return {Problem::kStopped, 0, "ncclCommRegister"};
    if (!failure_.is_ok()) return failure_;
    if (!is_ready_ || comm_ == nullptr) return refuse("the communicator is not ready");
    if (num_under_way_ != 0) return refuse("memory is registered before the first round");
    if (*handle_ != nullptr) return refuse("the communicator has memory registered already");
    if (!(is_window ? library_.has_windows() : library_.has_registration())) {
      return refuse("this NCCL does not register memory in this way");
    }
    const OnDevice on(cuda_, device_);
    if (on.result() != kCudaSuccess) return cuda_failed(on.result(), "cudaSetDevice");
    if (!is_window) {
      const int result = nccl_.comm_register(comm_, address, num_bytes, handle_.get());
      if (result != kNcclSuccess) {
        *handle_ = nullptr;
        note_words(comm_);
        return {Problem::kNccl, result, "ncclCommRegister"};
      }
      if (*handle_ != nullptr) registration_ = how;
      return {};
    }
    doing_ = "ncclCommWindowRegister";
    const int result =
        nccl_.comm_window_register(comm_, address, num_bytes, handle_.get(), kWindowSymmetric);
    if (!has_begun(result)) return nccl_failed(result, doing_, comm_);
  }
  const Status status =
      poll_until([this] { return !is_in_progress_; }, "ncclCommWindowRegister", until);
  if (status.is_ok() && *handle_ != nullptr) registration_ = how;
  return status;
}

void Communicator::deregister() {
  const std::lock_guard<std::mutex> lock(mutex_);
  forget_registration();
}

// An abort takes registrations along, and a communicator that failed is aborted.
void Communicator::forget_registration() {
  const Registration how = registration_.exchange(Registration::kNone);
  if (how == Registration::kNone || comm_ == nullptr || is_stopped_) return;
  const OnDevice on(cuda_, device_);
  if (how == Registration::kWindow) {
    nccl_.comm_window_deregister(comm_, *handle_);
  } else {
    nccl_.comm_deregister(comm_, *handle_);
  }
  *handle_ = nullptr;
}

Status Communicator::begin(std::span<const Slot> slots, Stream producer, Clock::time_point until) {
  const auto is_launched = [this] {
    return num_under_way_ == 0 || !rounds_[(first_ + num_under_way_ - 1) % depth_].is_launching;
  };
  if (Status status = poll_until(is_launched, "ncclGroupEnd", until); !status.is_ok()) {
    return status;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_stopped_) return {Problem::kStopped, 0, "begin"};
  if (!failure_.is_ok()) return failure_;
  if (!is_ready_ || comm_ == nullptr) return refuse("the communicator is not ready");
  if (num_under_way_ == depth_) return refuse("as many rounds are under way as there may be");
  const OnDevice on(cuda_, device_);
  if (on.result() != kCudaSuccess) return cuda_failed(on.result(), "cudaSetDevice");
  if (Status status = check_memory(slots); !status.is_ok()) return status;
  int result = cuda_.event_record(ready_, producer);
  if (result != kCudaSuccess) return cuda_failed(result, "cudaEventRecord");
  result = cuda_.stream_wait_event(stream_, ready_, 0);
  if (result != kCudaSuccess) return cuda_failed(result, "cudaStreamWaitEvent");
  return launch(slots);
}

Status Communicator::check_memory(std::span<const Slot> slots) {
  for (const Slot& slot : slots) {
    if (slot.root < 0 || slot.root >= num_ranks_) return refuse("a root is not in the group");
    if (slot.num_bytes == 0) continue;
    PointerAttributes found;
    const int result = cuda_.pointer_get_attributes(&found, slot.address);
    if (result != kCudaSuccess) return cuda_failed(result, "cudaPointerGetAttributes");
    if (found.type != kMemoryDevice && found.type != kMemoryManaged) {
      return refuse("memory of a round is not on a GPU");
    }
  }
  return {};
}

// One group: at most one bucket of each root, which NCCL then moves side by side.
Status Communicator::launch(std::span<const Slot> slots) {
  const auto is_empty = [](const Slot& slot) { return slot.num_bytes == 0; };
  if (!std::ranges::all_of(slots, is_empty)) {
    int result = nccl_.group_start();
    if (result != kNcclSuccess) return nccl_failed(result, "ncclGroupStart", comm_);
    const char* call = "ncclBroadcast";
    for (const Slot& slot : slots) {
      if (is_empty(slot) || !has_begun(result)) continue;
      result = nccl_.broadcast(slot.address, slot.address, slot.num_bytes, kNcclUint8, slot.root,
                               comm_, stream_);
    }
    // A group that was begun has to end, whatever became of it.
    const int ended = nccl_.group_end();
    if (has_begun(result)) {
      result = ended;
      call = "ncclGroupEnd";
    }
    if (!has_begun(result)) return nccl_failed(result, call, comm_);
  }
  rounds_[(first_ + num_under_way_) % depth_].is_launching = true;
  ++num_under_way_;
  return poll();
}

Status Communicator::wait(std::size_t num_left, Clock::time_point until) {
  return poll_until([&] { return num_under_way_ <= num_left; }, "ncclBroadcast", until);
}

void Communicator::stop(bool is_kept) {
  is_stopped_ = true;
  std::unique_lock<std::mutex> lock(mutex_);
  if (is_kept && is_revoked_) return;
  const bool is_revocable = is_kept && is_ready_ && library_.has_revoke();
  const Comm comm = comm_;
  const std::shared_ptr<Communicator> parent = std::move(parent_);
  // Nobody else goes into NCCL with it from here on.
  comm_ = nullptr;
  registration_ = Registration::kNone;
  lock.unlock();
  // NCCL writes to comm_ while it makes this of the parent, which therefore ends first.
  if (parent != nullptr) parent->stop(/*is_kept=*/false);
  if (comm == nullptr) return;
  const auto& nccl = nccl_;
  if (is_revocable) {
    const auto revoke = [&nccl, comm] { return nccl.comm_revoke(comm, kRevokeDefault); };
    const std::optional<int> result = call_aside(revoke, grace_);
    lock.lock();
    is_revoked_ = result.has_value() && has_begun(*result);
    is_stuck_ = !result.has_value();
    if (is_revoked_) comm_ = comm;
    if (is_revoked_ || is_stuck_) return;
    lock.unlock();
  }
  const auto abort = [&nccl, comm] { return nccl.comm_abort(comm); };
  if (!call_aside(abort, grace_).has_value()) is_stuck_ = true;
}

void Communicator::close(Clock::time_point until) {
  const bool is_idle = num_under_way_ == 0 && is_usable();
  if (is_idle) {
    std::unique_lock<std::mutex> lock(mutex_);
    forget_registration();
    const bool is_final = has_begun(nccl_.comm_finalize(comm_));
    lock.unlock();
    const auto is_done = [this] { return !is_in_progress_; };
    if (is_final && poll_until(is_done, "ncclCommFinalize", until).is_ok()) {
      lock.lock();
      nccl_.comm_destroy(comm_);
      comm_ = nullptr;
    }
  }
  stop(/*is_kept=*/false);
  const std::lock_guard<std::mutex> lock(mutex_);
  // Work of an NCCL that hangs may be on the stream for ever: it is left there, and said.
  if (is_closed_ || is_stuck_ || !becomes_idle()) return;
  is_closed_ = true;
  for (Round& round : rounds_) {
    if (round.done != nullptr) cuda_.event_destroy(round.done);
  }
  if (ready_ != nullptr) cuda_.event_destroy(ready_);
  if (stream_ != nullptr) cuda_.stream_destroy(stream_);
}

// Whether the stream is done, and with it the memory of all rounds; is_stuck_ if not in time.
bool Communicator::becomes_idle() {
  const Clock::time_point until = Clock::now() + grace_;
  while (stream_ != nullptr && cuda_.stream_query(stream_) == kCudaNotReady) {
    if (Clock::now() >= until) {
      is_stuck_ = true;
      return false;
    }
    std::this_thread::sleep_for(kLongestPause);
  }
  return true;
}

bool Communicator::is_usable() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_ready_ && !is_stopped_ && failure_.is_ok() && comm_ != nullptr;
}

bool Communicator::can_shrink() const {
  const bool is_whole = is_usable();
  const std::lock_guard<std::mutex> lock(mutex_);
  return library_.has_shrink() && comm_ != nullptr && (is_whole || is_revoked_);
}

Status Communicator::check_new() const {
  if (ready_ == nullptr) return refuse("the communicator is not open");
  if (comm_ != nullptr || rank_ >= 0) return refuse("the communicator has a rank already");
  if (is_stopped_) return {Problem::kStopped, 0, "ncclCommInitRankConfig"};
  return {};
}

Status Communicator::started(int result, const char* call) {
  doing_ = call;
  return has_begun(result) ? Status{} : nccl_failed(result, call, comm_);
}

template <class Done>
Status Communicator::poll_until(Done&& is_done, const char* call, Clock::time_point until) {
  microseconds pause = kFirstPause;
  while (true) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (is_stopped_) return {Problem::kStopped, 0, call};
      if (!failure_.is_ok()) return failure_;
      if (Status status = poll(); !status.is_ok()) return status;
      if (is_done()) return {};
    }
    if (Clock::now() >= until) return {Problem::kTimeout, 0, call};
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

Status Communicator::poll() {
  is_in_progress_ = false;
  if (parent_ != nullptr) {
    if (Status status = poll_parent(); !status.is_ok() || is_in_progress_) return status;
  }
  if (comm_ == nullptr) return refuse("the communicator has no rank");
  if (Status status = async_state(comm_, doing_); !status.is_ok()) return status;
  if (is_in_progress_) return {};
  is_ready_ = true;
  doing_ = "ncclBroadcast";
  if (num_under_way_ == 0) return {};
  Round& newest = rounds_[(first_ + num_under_way_ - 1) % depth_];
  if (newest.is_launching) {
    // Only now has NCCL put its work on the stream.
    const OnDevice on(cuda_, device_);
    const int result = cuda_.event_record(newest.done, stream_);
    if (result != kCudaSuccess) return cuda_failed(result, "cudaEventRecord");
    newest.is_launching = false;
  }
  return poll_events();
}

Status Communicator::poll_events() {
  while (num_under_way_ > 0 && !rounds_[first_].is_launching) {
    const int result = cuda_.event_query(rounds_[first_].done);
    if (result == kCudaNotReady) return {};
    if (result != kCudaSuccess) return cuda_failed(result, "cudaEventQuery");
    first_ = (first_ + 1) % depth_;
    --num_under_way_;
  }
  return {};
}

Status Communicator::poll_parent() {
  {
    const std::lock_guard<std::mutex> parent_lock(parent_->mutex_);
    if (parent_->comm_ == nullptr) return {Problem::kStopped, 0, doing_};
    if (Status status = async_state(parent_->comm_, doing_); !status.is_ok() || is_in_progress_) {
      return status;
    }
  }
  parent_.reset();
  return comm_ == nullptr ? nccl_failed(kNcclInternalError, doing_, nullptr) : Status{};
}

// Into is_in_progress_; other states are failures.
Status Communicator::async_state(Comm comm, const char* call) {
  int state = kNcclSuccess;
  const int result = nccl_.comm_get_async_error(comm, &state);
  if (result != kNcclSuccess) return nccl_failed(result, "ncclCommGetAsyncError", comm);
  is_in_progress_ = state == kNcclInProgress;
  if (has_begun(state)) return {};
  return nccl_failed(state, call, comm);
}

// After revoke or before anything else is made of this communicator: NCCL is done with it.
Status Communicator::settle(Clock::time_point until) {
  microseconds pause = kFirstPause;
  while (true) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (comm_ == nullptr) return {Problem::kStopped, 0, "ncclCommRevoke"};
      if (Status status = async_state(comm_, "ncclCommRevoke"); !status.is_ok()) return status;
      if (!is_in_progress_) return {};
    }
    if (Clock::now() >= until) return {Problem::kTimeout, 0, "ncclCommRevoke"};
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

void Communicator::note_words(Comm comm) {
  const char* words = nccl_.get_last_error(comm);
  std::snprintf(words_, sizeof(words_), "%s", words == nullptr ? "" : words);
}

Status Communicator::nccl_failed(int result, const char* call, Comm comm) {
  note_words(comm);
  return keep({Problem::kNccl, result, call});
}

Status Communicator::cuda_failed(int result, const char* call) {
  return keep({Problem::kCuda, result, call});
}

Status Communicator::keep(Status status) {
  if (failure_.is_ok()) failure_ = status;
  return status;
}

std::string Communicator::describe(const Status& status) const {
  const std::string who = rank_ < 0 ? "" : "rank " + std::to_string(rank_) + ": ";
  const std::string call = who + status.call;
  const std::string number = " (result " + std::to_string(status.result) + ")";
  switch (status.problem) {
    case Problem::kNone: return who + "no problem";
    case Problem::kArgument: return call;
    case Problem::kTimeout: return call + " was not complete by its deadline";
    case Problem::kStopped: return call + " was stopped";
    case Problem::kCuda: return call + ": " + cuda_.get_error_string(status.result) + number;
    case Problem::kNccl: break;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::string words = words_[0] == 0 ? "" : std::string(": ") + words_;
  return call + ": " + nccl_.get_error_string(status.result) + number + words;
}

}  // namespace gymfast::nccl
