#include "cpu/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace gymfast {
namespace {

std::size_t usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return static_cast<std::size_t>(std::max(1, CPU_COUNT(&set)));
  }
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

void parallel_for(std::size_t num_items, std::size_t num_threads,
                  const std::function<void(std::size_t)>& fn) {
  if (num_threads == 0) num_threads = usable_cpus();
  num_threads = std::min(num_threads, num_items);
  std::atomic<std::size_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  auto work = [&] {
    try {
      for (std::size_t item; (item = next.fetch_add(1)) < num_items;) fn(item);
    } catch (...) {
      std::lock_guard<std::mutex> lock(error_mutex);
      if (!error) error = std::current_exception();
      next.store(num_items);
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(num_threads);
  try {
    for (std::size_t i = 1; i < num_threads; ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // The system gives no more threads: those that run, this one at least, do all items.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace gymfast
