#include "format/status.h"

namespace gymfast {

const char* error_text(Error error) {
  switch (error) {
    case Error::kOk: return "no error";
    case Error::kBadMagic: return "not a gymfast frame: the magic bytes are wrong";
    case Error::kUnsupportedVersion: return "format version is not supported by this release";
    case Error::kUnknownSection: return "a section type is unknown to this release";
    case Error::kReservedNotZero: return "a reserved field is not zero";
    case Error::kTruncated: return "insufficient data: the frame ends early";
    case Error::kTrailingBytes: return "bytes follow the end of the frame";
    case Error::kSectionCheck: return "a section is damaged: its check does not match its bytes";
    case Error::kSectionOrder: return "sections are out of order, repeated or missing";
    case Error::kFrameCheck: return "sections do not belong together: the frame check is wrong";
    case Error::kBadEncoding:
      return "a field is not in its shortest form or a body has extra bytes";
    case Error::kLimitExceeded: return "a limit of the format is exceeded";
    case Error::kSizeOverflow: return "a size does not fit 64 bits";
    case Error::kBadName: return "a tensor name is empty, too long, not UTF-8 or has control bytes";
    case Error::kDuplicateName: return "a tensor name occurs twice";
    case Error::kBadShape: return "dtype, shape and size of a tensor disagree";
    case Error::kBadGeometry: return "the block geometry of a tensor is not allowed";
    case Error::kBadAlias: return "an alias names no tensor of the same dtype and shape";
    case Error::kCountMismatch: return "the number of tensors differs from the header";
    case Error::kBadStatus: return "status of a tensor contradicts its kind or its blocks";
    case Error::kBadBlockIndex: return "a block number is out of range or not ascending";
    case Error::kBadMode: return "a block mode is unknown";
    case Error::kPayloadLength: return "payload lengths do not add up";
    case Error::kCountRange: return "a count of a block is out of range";
    case Error::kPositionRange: return "a position or value of a block is out of range";
    case Error::kStreamLength: return "bit streams of a block are shorter or longer than needed";
    case Error::kResultCheck: return "the block does not give the promised result on this base";
    case Error::kBadArgument: return "argument sizes do not fit each other";
  }
  return "unknown error";
}

}  // namespace gymfast
