// Stable error numbers of docs/wire-format.md section 8 and the Status that carries them.
#ifndef GYMFAST_FORMAT_STATUS_H_
#define GYMFAST_FORMAT_STATUS_H_

#include <cstdint>

namespace gymfast {

enum class Error : std::uint8_t {
  kOk = 0,
  kBadMagic = 10,
  kUnsupportedVersion = 11,
  kUnknownSection = 12,
  kReservedNotZero = 13,
  kTruncated = 20,
  kTrailingBytes = 21,
  kSectionCheck = 22,
  kSectionOrder = 23,
  kFrameCheck = 24,
  kBadEncoding = 25,
  kLimitExceeded = 30,
  kSizeOverflow = 31,
  kBadName = 40,
  kDuplicateName = 41,
  kBadShape = 42,
  kBadGeometry = 43,
  kBadAlias = 44,
  kCountMismatch = 45,
  kBadStatus = 46,
  kBadBlockIndex = 50,
  kBadMode = 51,
  kPayloadLength = 52,
  kCountRange = 53,
  kPositionRange = 54,
  kStreamLength = 55,
  kResultCheck = 58,
  kBadArgument = 90,
};

// `where` is a byte offset (parser) or a block number (codec); the rest are the two values
// compared.
struct Status {
  Error error = Error::kOk;
  std::uint64_t where = 0;
  std::uint64_t found = 0;
  std::uint64_t expected = 0;
  bool is_ok() const { return error == Error::kOk; }
};

inline Status fail(Error error, std::uint64_t where, std::uint64_t found = 0,
                   std::uint64_t expected = 0) {
  return Status{error, where, found, expected};
}

// One sentence that says what the number means; never null.
const char* error_text(Error error);

}  // namespace gymfast

#endif  // GYMFAST_FORMAT_STATUS_H_
