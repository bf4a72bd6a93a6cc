// Apply: checks, division of the scratch memory, launches.
#include "cuda/apply.cuh"

#include "cuda/launch.cuh"

namespace gymfast::cuda {
namespace {

template <class T>
std::uint64_t divide_apply_scratch(const Run& run, void* scratch, ApplyArgs<T>* args) {
  const std::uint64_t slots = run.num_blocks * run.geometry.block_units();
  Arena arena(scratch);
  arena.take(&args->entries, run.num_blocks);
  arena.take(&args->ones, slots);
  arena.take(&args->index, slots);
  arena.take(&args->list, slots);
  arena.take(&args->values, slots);
  arena.take(&args->ranks, slots);
  arena.take(&args->class_units, run.num_blocks * chunks_per_block(run.geometry) * kNumClasses);
  arena.take(&args->codes, slots);
  arena.take(&args->sorted, slots);
  return arena.used();
}

template <class T>
CallStatus launch_apply(const Run& run, std::uint8_t* data, const ApplyBuffers& buffers,
                        cudaStream_t stream) {
  ApplyArgs<T> args;
  divide_apply_scratch(run, buffers.scratch, &args);
  args.geometry = run.geometry;
  args.params = run.params;
  args.first_block = run.first_block;
  args.num_blocks = run.num_blocks;
  args.block_units = run.geometry.block_units();
  args.chunks_per_block = chunks_per_block(run.geometry);
  args.digests = run.digests;
  args.data = data;
  args.body = buffers.body;
  args.body_bytes = buffers.body_bytes;
  args.sections = buffers.sections;
  args.num_sections = buffers.num_sections;
  args.result = buffers.result;
  Launcher run_kernel(stream);
  run_kernel(begin_apply_kernel<T>, groups(run.num_blocks, kThreads), kThreads, args);
  run_kernel(parse_tables_kernel<T>, groups(args.num_sections, kThreads), kThreads, args);
  run_kernel(apply_kernel<T>, run.num_blocks, kThreads, args);
  return run_kernel.status();
}

}  // namespace

std::uint64_t apply_scratch_bytes(const Run& run) {
  return with_unit(run.geometry.unit_bytes, [&](auto unit) {
    ApplyArgs<decltype(unit)> args;
    return divide_apply_scratch(run, nullptr, &args);
  });
}

CallStatus apply_blocks(const Run& run, std::uint8_t* data, const ApplyBuffers& buffers,
                        cudaStream_t stream) {
  CallStatus status = check_run(run);
  if (status.is_ok()) status = check_tensor(run, data);
  if (!status.is_ok()) return status;
  if (run.num_blocks == 0) return refuse("a section has at least one block", Error::kBadBlockIndex);
  if (buffers.result == nullptr || buffers.num_sections == 0 || buffers.sections == nullptr ||
      (buffers.body == nullptr && buffers.body_bytes != 0)) {
    return refuse("result, sections or body are missing");
  }
  status = check_scratch(buffers.scratch, buffers.scratch_bytes, apply_scratch_bytes(run));
  if (!status.is_ok()) return status;
  return with_unit(run.geometry.unit_bytes, [&](auto unit) {
    return launch_apply<decltype(unit)>(run, data, buffers, stream);
  });
}

}  // namespace gymfast::cuda
