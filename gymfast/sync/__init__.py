"""Publish and subscribe: versions of weights in a store, committed once and followed exactly."""

from gymfast.sync.checkpoint_target import CheckpointTarget
from gymfast.sync.cleaner import CleanReport, collect
from gymfast.sync.compactor import Compactor
from gymfast.sync.fold_maker import FoldReport
from gymfast.sync.install_report import InstallReport, SubscriberStatus
from gymfast.sync.machine import State
from gymfast.sync.publish_report import PublishReport
from gymfast.sync.publisher import Publisher
from gymfast.sync.staging import Staged
from gymfast.sync.subscriber import Subscriber
from gymfast.sync.targets import GroupTarget, LiveTarget, Target

__all__ = [
    "CheckpointTarget",
    "CleanReport",
    "Compactor",
    "FoldReport",
    "GroupTarget",
    "InstallReport",
    "LiveTarget",
    "PublishReport",
    "Publisher",
    "Staged",
    "State",
    "Subscriber",
    "SubscriberStatus",
    "Target",
    "collect",
]
