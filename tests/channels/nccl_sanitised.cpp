// Three ranks in threads on the double of NCCL, for builds with sanitisers: rounds, an error, a
// stop from another thread, a shrink, a grow, registered memory, an abort while a communicator is
// made. Prints what came. Usage: nccl_sanitised PATH_OF_THE_DOUBLE
#include <dlfcn.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "nccl/arena.h"
#include "nccl/communicator.h"

namespace {

using namespace gymfast::nccl;
using std::chrono::seconds;
using Ranks = std::vector<std::shared_ptr<Communicator>>;

int num_wrong = 0;

void expect(bool is_right, const std::string& what) {
  if (is_right) return;
  std::printf("wrong: %s\n", what.c_str());
  ++num_wrong;
}

Clock::time_point soon() { return Clock::now() + seconds(10); }

void in_threads(std::size_t num, const std::function<void(std::size_t)>& work) {
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < num; ++i) threads.emplace_back([&, i] { work(i); });
  for (std::thread& thread : threads) thread.join();
}

std::shared_ptr<Communicator> make(const Library& library) {
  auto one = std::make_shared<Communicator>(library, 0, 2, seconds(5));
  expect(one->open().is_ok(), "open");
  return one;
}

Ranks joined(const Library& library, int num_ranks) {
  UniqueId id;
  library.nccl.get_unique_id(&id);
  Ranks ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.push_back(make(library));
    expect(ranks.back()->join(id, num_ranks, rank, 4).is_ok(), "join");
  }
  for (const auto& one : ranks) expect(one->wait_until_ready(soon()).is_ok(), "ready");
  return ranks;
}

// Each root sends its own bytes, round after round.
void exchange(const Ranks& ranks) {
  const std::size_t num = ranks.size();
  in_threads(num, [&](std::size_t place) {
    Communicator& one = *ranks[place];
    const auto rank = static_cast<unsigned char>(one.rank());
    std::vector<std::vector<unsigned char>> memory(num);
    for (unsigned char round = 0; round < 20; ++round) {
      std::vector<Slot> slots;
      for (std::size_t root = 0; root < num; ++root) {
        memory[root].assign(300'000, root == rank ? round ^ rank : 255);
        slots.push_back({static_cast<int>(root), memory[root].data(), memory[root].size()});
      }
      expect(one.begin(slots, nullptr, soon()).is_ok(), "begin");
      expect(one.wait(0, soon()).is_ok(), "wait");
      for (std::size_t root = 0; root < num; ++root) {
        const auto value = static_cast<unsigned char>(round ^ root);
        const std::vector<unsigned char> all(300'000, value);
        expect(memory[root] == all, "bytes");
      }
    }
  });
}

void close(Ranks* ranks) {
  in_threads(ranks->size(), [&](std::size_t place) { (*ranks)[place]->close(soon()); });
  ranks->clear();
}

void stop_while_waiting(const Library& library) {
  Ranks ranks = joined(library, 2);
  std::vector<unsigned char> memory(1000);
  const Slot slot{1, memory.data(), memory.size()};
  expect(ranks[0]->begin({&slot, 1}, nullptr, soon()).is_ok(), "begin");
  std::thread other([&] { ranks[0]->stop(false); });
  expect(ranks[0]->wait(0, soon()).problem == Problem::kStopped, "stopped");
  other.join();
  close(&ranks);
}

void shrink_and_grow(const Library& library) {
  Ranks ranks = joined(library, 3);
  ranks[1]->close(Clock::now());
  for (const int rank : {0, 2}) ranks[rank]->stop(true);
  Ranks two = {make(library), make(library)};
  int excluded[] = {1};
  expect(two[0]->shrink(ranks[0], excluded, soon()).is_ok(), "shrink");
  expect(two[1]->shrink(ranks[2], excluded, soon()).is_ok(), "shrink");
  for (const auto& one : two) expect(one->wait_until_ready(soon()).is_ok(), "shrunk");
  close(&ranks);
  exchange(two);
  UniqueId id;
  expect(two[0]->id_to_grow(&id).is_ok(), "id");
  Ranks three = {make(library), make(library), make(library)};
  expect(three[0]->grow(two[0], 3, &id).is_ok(), "grow");
  expect(three[1]->grow(two[1], 3, nullptr).is_ok(), "grow");
  expect(three[2]->grow_into(id, 3, 2, 4).is_ok(), "grow_into");
  for (const auto& one : three) expect(one->wait_until_ready(soon()).is_ok(), "grown");
  close(&two);
  exchange(three);
  close(&three);
}

// A rank that is alone in a shrink, and one that is alone in a new communicator.
void abort_while_making(const Library& library) {
  Ranks ranks = joined(library, 3);
  for (const auto& one : ranks) one->stop(true);
  auto alone = make(library);
  int excluded[] = {1};
  expect(alone->shrink(ranks[0], excluded, soon()).is_ok(), "shrink");
  const Status late = alone->wait_until_ready(Clock::now() + std::chrono::milliseconds(20));
  expect(late.problem == Problem::kTimeout, "late");
  std::printf("%s\n", alone->describe(late).c_str());
  alone->close(Clock::now());
  close(&ranks);
  auto first = make(library);
  UniqueId id;
  library.nccl.get_unique_id(&id);
  expect(first->join(id, 2, 0, 0).is_ok(), "join");
  first->close(Clock::now());
}

// Windows of all ranks, then one that a rank waits for alone until another thread stops it.
void register_windows(const Library& library) {
  constexpr std::size_t kBytes = 8192;
  for (const Registration how : {Registration::kWindow, Registration::kBuffer}) {
    Ranks ranks = joined(library, 3);
    std::vector<std::unique_ptr<Arena>> memory;
    for (std::size_t rank = 0; rank < 3; ++rank) {
      memory.push_back(std::make_unique<Arena>(library, 0));
      expect(memory.back()->allocate(kBytes).empty(), "allocate");
    }
    in_threads(3, [&](std::size_t rank) {
      Communicator& one = *ranks[rank];
      expect(one.register_memory(memory[rank]->address(), kBytes, how, soon()).is_ok(), "register");
      expect(one.registration() == how, "registration");
      const Slot slot{1, memory[rank]->address(), kBytes};
      expect(one.begin({&slot, 1}, nullptr, soon()).is_ok(), "begin");
      expect(one.wait(0, soon()).is_ok(), "wait");
    });
    close(&ranks);
  }
  Ranks ranks = joined(library, 2);
  Arena memory(library, 0);
  expect(memory.allocate(kBytes).empty(), "allocate");
  std::thread other([&] { ranks[0]->stop(false); });
  const Status status =
      ranks[0]->register_memory(memory.address(), kBytes, Registration::kWindow, soon());
  expect(status.problem == Problem::kStopped, "stopped");
  expect(ranks[0]->registration() == Registration::kNone, "no registration");
  other.join();
  close(&ranks);
}

void fail(const Library& library, void (*set)(const char*, int, int)) {
  Ranks ranks = joined(library, 1);
  set("async_error", 0, 2);
  const Status status = ranks[0]->wait(0, soon());
  expect(status.problem == Problem::kNccl && status.result == 2, "error");
  std::printf("%s\n", ranks[0]->describe(status).c_str());
  close(&ranks);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const Loaded loaded = load({argv[1], {}}, {argv[1], {}});
  if (loaded.library == nullptr) {
    std::printf("%s\n", loaded.problem.c_str());
    return 2;
  }
  void* handle = dlopen(argv[1], RTLD_NOW);
  const auto set = reinterpret_cast<void (*)(const char*, int, int)>(dlsym(handle, "double_set"));
  Ranks ranks = joined(*loaded.library, 3);
  exchange(ranks);
  close(&ranks);
  stop_while_waiting(*loaded.library);
  shrink_and_grow(*loaded.library);
  abort_while_making(*loaded.library);
  register_windows(*loaded.library);
  fail(*loaded.library, set);
  std::printf("%d wrong\n", num_wrong);
  return num_wrong == 0 ? 0 : 1;
}
