// Runs independent items on threads: the only file of the CPU codec that starts any.
#ifndef GYMFAST_CPU_PARALLEL_H_
#define GYMFAST_CPU_PARALLEL_H_

#include <cstddef>
#include <functional>

namespace gymfast {

// Calls fn(item) once for each item of 0..num_items-1, on at most num_threads threads (this one
// included); 0 means one per CPU this process may use. Returns when all calls have returned. If one
// throws, the first exception is thrown again here after the others have ended.
void parallel_for(std::size_t num_items, std::size_t num_threads,
                  const std::function<void(std::size_t)>& fn);

}  // namespace gymfast

#endif  // GYMFAST_CPU_PARALLEL_H_
