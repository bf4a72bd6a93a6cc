"""Channels: live bytes from one rank to all others of a group."""

from gymfast.channels.base import Channel, Slot
from gymfast.channels.control import Control
from gymfast.channels.hub import Hub, connect
from gymfast.channels.loopback import Loopback
from gymfast.channels.transfer import BucketTransfer, TransferReport

__all__ = [
    "BucketTransfer",
    "Channel",
    "Control",
    "Hub",
    "Loopback",
    "Slot",
    "TransferReport",
    "connect",
]
