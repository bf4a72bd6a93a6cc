// Invariant: encode, apply gives exactly the new state, rollback exactly the old one, digests
// follow at every step, a body is never larger than raw, and flipped bytes never pass for another
// state.
#include "edits.h"

namespace gymfast::fuzz {
namespace {

constexpr std::uint64_t kTableBytes = 9;  // of a raw block: mode, at most 4 bytes of size, check

BlockRun make_run(const Update& u, std::vector<Digest>& digests) {
  BlockRun run;
  run.geometry = u.geometry;
  run.params = u.params;
  run.num_blocks = u.geometry.num_blocks();
  run.digests = digests.data();
  return run;
}

EncodedRun encode(const BlockRun& run, Bytes& base, const Bytes& next, bool update) {
  EncodedRun out;
  require(encode_run(run, base.data(), next.data(), update, update, &out).is_ok(),
          "a good run can be encoded");
  return out;
}

void check_apply(const Update& u, const Bytes& body) {
  std::vector<Digest> digests = digests_of(u.geometry, u.base);
  Bytes data = u.base;
  std::uint64_t num_changed = 0;
  const Status status = apply_run(make_run(u, digests), body, data.data(), &num_changed);
  require(body.empty() || status.is_ok(), "what was encoded can be applied");
  require(body.empty() ? u.base == u.next : data == u.next, "apply gives the new state");
  if (!body.empty()) {
    require(are_equal(digests, digests_of(u.geometry, u.next)), "digests of the new state");
  }
}

void check_halves(const Update& u, const Bytes& whole_body) {
  std::vector<Digest> digests = digests_of(u.geometry, u.base);
  BlockRun run = make_run(u, digests);
  Bytes base = u.base, data = u.base;
  std::vector<Digest> applied = digests;
  const std::uint64_t total = run.num_blocks;
  for (const bool is_second : {false, true}) {
    run.first_block = is_second ? total / 2 : 0;
    run.num_blocks = is_second ? total - total / 2 : total / 2;
    run.digests = digests.data();
    const EncodedRun part = encode(run, base, u.next, true);
    run.digests = applied.data();
    std::uint64_t num_changed = 0;
    if (!part.body().empty()) {
      require(apply_run(run, part.body(), data.data(), &num_changed).is_ok(), "halves apply");
    }
    require(num_changed == part.num_changed, "halves count");
  }
  require(data == u.next && base == u.next, "two runs give the same state as one");
  require(are_equal(digests, applied), "two runs give the same digests");
  require(whole_body.empty() == (u.base == u.next), "an empty body means no change");
}

void check_damage(const Update& u, Bytes body, std::uint32_t where) {
  if (body.empty()) return;
  body[where / 8 % body.size()] ^= static_cast<std::uint8_t>(1u << (where & 7));
  std::vector<Digest> digests = digests_of(u.geometry, u.base);
  Bytes data = u.base;
  std::uint64_t num_changed = 0;
  const Status status = apply_run(make_run(u, digests), body, data.data(), &num_changed);
  require(!status.is_ok() || data == u.next, "a flipped bit is refused or changes nothing");
  require(are_equal(digests, digests_of(u.geometry, data)), "digests follow after damage");
}

void run(Input& input) {
  const std::uint32_t flip = input.u16();
  const Update u = read_update(input);
  std::vector<Digest> digests = digests_of(u.geometry, u.base), untouched = digests;
  Bytes base = u.base;
  const EncodedRun kept = encode(make_run(u, digests), base, u.next, false);
  require(base == u.base, "without update the base stays");
  digests = untouched;
  const EncodedRun out = encode(make_run(u, digests), base, u.next, true);
  require(out.body() == kept.body() && out.num_changed == kept.num_changed,
          "update changes no byte");
  require(base == u.next, "with update the base becomes the new state");
  require(are_equal(digests, digests_of(u.geometry, u.next)), "digests become those of the new");
  require(out.body().size() <= u.geometry.num_bytes() + kTableBytes * u.geometry.num_blocks(),
          "a body is never larger than raw");
  require(rollback_run(u.geometry, out.undo(), base.data()).is_ok(), "undo can be applied");
  require(base == u.base, "rollback gives the old state");
  check_apply(u, out.body());
  check_halves(u, out.body());
  check_damage(u, out.body(), flip);
}

}  // namespace
}  // namespace gymfast::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  gymfast::fuzz::Input input(data, size);
  gymfast::fuzz::run(input);
  return 0;
}
