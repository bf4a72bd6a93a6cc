// Two states of a tensor from fuzz input: a pattern, then edits with the shapes that updates have.
#ifndef GYMFAST_TESTS_FUZZ_EDITS_H_
#define GYMFAST_TESTS_FUZZ_EDITS_H_

#include "harness.h"

namespace gymfast::fuzz {

struct Update {
  Geometry geometry;
  BlockParams params;
  Bytes base;
  Bytes next;
};

inline std::uint32_t load_unit(const Bytes& bytes, std::size_t i, std::size_t unit_bytes) {
  std::uint32_t unit = 0;
  std::memcpy(&unit, bytes.data() + i * unit_bytes, unit_bytes);
  return unit;
}
inline void store_unit(Bytes& bytes, std::size_t i, std::size_t unit_bytes, std::uint32_t unit) {
  std::memcpy(bytes.data() + i * unit_bytes, &unit, unit_bytes);
}

// One edit: a unit set, steps of one at a stride, sign flips at a stride, or noise of a density.
inline void edit(Input& input, std::size_t num_units, std::size_t unit_bytes, Bytes& next) {
  const unsigned what = input.u8();
  const std::size_t first = input.u16() % num_units;
  const std::size_t stride = 1 + input.u8();
  const std::uint32_t value = (what & 4) != 0 ? input.u32() : 1;
  const std::uint32_t sign = std::uint32_t{1} << (8 * unit_bytes - 1);
  for (std::size_t i = first, steps = 0; i < num_units; i += stride, ++steps) {
    const std::uint32_t old = load_unit(next, i, unit_bytes);
    switch (what & 3) {
      case 0: store_unit(next, i, unit_bytes, value); return;
      case 1: store_unit(next, i, unit_bytes, (what & 8) != 0 ? old - value : old + value); break;
      case 2: store_unit(next, i, unit_bytes, old ^ sign); break;
      default: {
        const auto noise = static_cast<std::uint32_t>(splitmix64(value + i));
        store_unit(next, i, unit_bytes, (what & 8) != 0 ? noise : old ^ (noise & 3));
      }
    }
  }
}

inline Update read_update(Input& input) {
  Update u;
  const unsigned first = input.u8();
  const std::uint64_t unit_bytes = std::uint64_t{1} << (first & 3) % 3;
  u.geometry = pick_geometry(input.u8(), unit_bytes);
  const bool has_base = (first & 4) == 0;
  const unsigned pattern = input.u8();
  u.base = Bytes(static_cast<std::size_t>(u.geometry.num_bytes()));
  if (has_base) fill(u.base, unit_bytes, pattern);
  const ClassParams classes =
      has_base ? choose_classes(u.base.data(), u.geometry.num_units, unit_bytes) : ClassParams{};
  require(classes.shift >= 0 && classes.shift <= 7, "class_shift is 0..7");
  require(classes.base >= 0 && classes.base <= 255, "class_base is 0..255");
  u.params = {static_cast<Profile>((first >> 3) % 3), classes.shift, classes.base, has_base};
  u.next = u.base;
  const auto num_units = static_cast<std::size_t>(u.geometry.num_units);
  for (int edits = 0; edits < 16 && num_units != 0 && !input.is_at_end(); ++edits) {
    edit(input, num_units, static_cast<std::size_t>(unit_bytes), u.next);
  }
  return u;
}

}  // namespace gymfast::fuzz

#endif  // GYMFAST_TESTS_FUZZ_EDITS_H_
