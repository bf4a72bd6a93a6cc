"""The published per-version directory format of slime, miles and SGLang's `/pull_weights`.

Described in docs/hf-delta.md: `pull` brings a local checkpoint up to a version, `publish_delta` and
`publish_full` write versions, `verify_*` check them, `*_of_*` convert from and to gymfast frames.
"""

from gymfast.delta.hf_delta.convert import frame_of_version, version_of_frame
from gymfast.delta.hf_delta.publish import PublishReport, publish_delta, publish_full
from gymfast.delta.hf_delta.pull import PullReport, pull
from gymfast.delta.hf_delta.verify import Verified, verify_local, verify_version
from gymfast.delta.hf_delta.version import DeltaVersion, open_version

__all__ = [
    "DeltaVersion",
    "PublishReport",
    "PullReport",
    "Verified",
    "frame_of_version",
    "open_version",
    "publish_delta",
    "publish_full",
    "pull",
    "verify_local",
    "verify_version",
    "version_of_frame",
]
