// The block functions of one instruction set; included once per target by foreach_target.h.
// No include guard on purpose, here and in the files below.

#include "cpu/simd-inl.h"
#include "cpu/digest-inl.h"
#include "cpu/diff-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/dense-inl.h"
#include "cpu/encode-inl.h"
#include "cpu/select-inl.h"
#include "cpu/apply-inl.h"
#include "cpu/zstd_codes-inl.h"
#include "cpu/zstd_wide-inl.h"
#include "cpu/zstd-inl.h"

namespace gymfast {
namespace GYMFAST_NAMESPACE {

#define GYMFAST_TEXT2(x) #x
#define GYMFAST_TEXT(x) GYMFAST_TEXT2(x)

const Kernels kKernels = {
    &GYMFAST_TEXT(GYMFAST_NAMESPACE)[sizeof("target_") - 1],
    digest,
    {encode_block<std::uint8_t>, encode_block<std::uint16_t>, encode_block<std::uint32_t>},
    {apply_block<std::uint8_t>, apply_block<std::uint16_t>, apply_block<std::uint32_t>},
    {list_units<std::uint8_t>, list_units<std::uint16_t>, list_units<std::uint32_t>},
    {zstd_list, zstd_split, zstd_split_words, zstd_write_literals, zstd_write_sequences},
};

#undef GYMFAST_TEXT2
#undef GYMFAST_TEXT

}  // namespace GYMFAST_NAMESPACE
}  // namespace gymfast
