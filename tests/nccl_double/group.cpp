#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "double.h"

namespace nccl_double {
namespace {

std::string folder() {
  const char* name = getenv("DOUBLE_SEGMENTS");
  return name == nullptr ? "/dev/shm" : name;
}

// A process that was killed and not yet waited for is gone too.
bool is_alive(int pid) {
  if (pid == getpid()) return true;
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(stat, text);
  const std::size_t end = text.rfind(')');
  return end != std::string::npos && end + 2 < text.size() && text[end + 2] != 'Z';
}

}  // namespace

Group::Group(std::string its_name, int ranks, int its_rank)
    : name(std::move(its_name)),
      num_ranks(ranks),
      rank(its_rank),
      path_(folder() + "/nccl-double-" + name) {
  const int file = open(path_.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(Segment)) != 0) throw std::runtime_error("no segment");
  void* at = mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) throw std::runtime_error("no memory for a segment");
  segment_ = static_cast<Segment*>(at);
  int before = 0;
  if (!segment_->num_ranks.compare_exchange_strong(before, ranks) && before != ranks) {
    munmap(segment_, sizeof(Segment));
    throw std::runtime_error("ranks disagree about their number");
  }
  segment_->members[rank].pid = getpid();
  segment_->members[rank].state = 1;
  ++segment_->num_joined;
}

Group::~Group() {
  segment_->members[rank].state = 2;
  if (++segment_->num_left == num_ranks) unlink(path_.c_str());
  munmap(segment_, sizeof(Segment));
}

bool Group::is_complete() const { return segment_->num_joined == num_ranks; }

void Group::begin_window(std::size_t num_bytes, std::uint64_t num_rounds) {
  Member& mine = segment_->members[rank];
  mine.window_bytes = num_bytes;
  mine.window_round = num_rounds;
  ++mine.num_windows;
}

bool Group::have_all_windows() const {
  const Member& mine = segment_->members[rank];
  for (int other = 0; other < num_ranks; ++other) {
    const Member& member = segment_->members[other];
    if (member.num_windows < mine.num_windows) return false;
    if (member.num_windows == mine.num_windows &&
        (member.window_bytes != mine.window_bytes || member.window_round != mine.window_round)) {
      log("wrong: ranks make windows of other sizes or between other rounds");
    }
  }
  return true;
}

bool Group::is_anybody_gone() const {
  for (int other = 0; other < num_ranks; ++other) {
    if (other == rank || knobs().is_silent[other] != 0) continue;
    const Member& member = segment_->members[other];
    if (member.state == 2 || (member.state == 1 && !is_alive(member.pid))) return true;
  }
  return false;
}

template <class Done>
bool Group::wait(Done&& is_done, const std::function<bool()>& is_over,
                 const std::function<void()>& on_gone) {
  bool has_told = false;
  for (int count = 0; !is_done(); ++count) {
    if (is_over()) return false;
    if (!has_told && count % 64 == 63 && is_anybody_gone()) {
      on_gone();
      has_told = true;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(count < 20 ? 5 : 100));
  }
  return true;
}

bool Group::broadcast(int root, unsigned char* data, std::size_t num_bytes, std::size_t place,
                      const std::function<bool()>& is_over, const std::function<void()>& on_gone) {
  Box& box = segment_->boxes[root];
  std::atomic<std::uint64_t>& mine = segment_->members[rank].num_taken[root];
  const auto have_all_taken = [&] {
    for (int other = 0; other < num_ranks; ++other) {
      if (other != root && segment_->members[other].num_taken[root] != box.num_chunks) return false;
    }
    return true;
  };
  for (std::size_t begin = 0; begin < num_bytes; begin += kChunk) {
    const std::size_t size = std::min(kChunk, num_bytes - begin);
    if (rank == root) {
      if (!wait(have_all_taken, is_over, on_gone)) return false;
      box.num_bytes = num_bytes;
      box.place = place;
      std::memcpy(box.data, data + begin, size);
      ++box.num_chunks;
      continue;
    }
    const auto is_shown = [&] { return box.num_chunks > mine && box.num_bytes == num_bytes; };
    if (!wait(is_shown, is_over, on_gone)) return false;
    if (box.place != place) log("wrong: registered memory and other, or at other places");
    std::memcpy(data + begin, box.data, size);
#ifdef WRONG_BYTE  // to see that it is found
    data[begin + size - 1] ^= 1;
#endif
    ++mine;
  }
  return rank != root || wait(have_all_taken, is_over, on_gone);
}

}  // namespace nccl_double
