// One block of fused.cpp; included once per instruction set. No include guard on purpose.

#include "cpu/simd-inl.h"
#include "cpu/digest-inl.h"
#include "cpu/diff-inl.h"

namespace gymfast {
namespace GYMFAST_NAMESPACE {

inline std::size_t fused_block(std::uint16_t* base, const std::uint16_t* next,
                               std::size_t num_units, std::uint64_t offset, Scratch& scratch,
                               Digest* sum) {
  Changes<std::uint16_t> changes(scratch);
  diff(base, next, num_units, true, changes);
  Placement place;
  place.offset = offset;
  place.row_units = num_units;
  digest_changes(changes.index, changes.before, changes.after, changes.count, place, true, sum);
  return changes.count;
}

}  // namespace GYMFAST_NAMESPACE
}  // namespace gymfast
