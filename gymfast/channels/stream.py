"""Bytes of unknown number from one rank to all others, in buckets as they come."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import numpy as np

from gymfast.channels.base import Channel, Memory, Slot
from gymfast.errors import ChannelError

_HEAD = struct.Struct("<QQ")  # bytes of the bucket that count, and whether it is the last
MIN_BUCKET_BYTES = 4096


def send_stream(channel: Channel, parts: Iterable[bytes], bucket_bytes: int) -> int:
    """Sends parts as they are made, from this rank; returns how many bytes they had.

    Raises ValueError for a bucket that is too small, ChannelError as the channel does.
    """
    buckets = _buckets(channel.depth, bucket_bytes)
    room, number, used, total = bucket_bytes - _HEAD.size, 0, 0, 0
    for part in parts:
        view = memoryview(part)
        total += len(view)
        while view:
            if used == room:
                _begin(channel, buckets[number % channel.depth], used, is_last=False)
                number, used = number + 1, 0
                channel.finish(channel.depth - 1)
            taken = min(len(view), room - used)
            bucket = buckets[number % channel.depth]
            begin = _HEAD.size + used
            bucket[begin : begin + taken] = np.frombuffer(view[:taken], np.uint8)
            view, used = view[taken:], used + taken
    _begin(channel, buckets[number % channel.depth], used, is_last=True)
    channel.finish()
    return total


def receive_stream(channel: Channel, root: int, bucket_bytes: int) -> Iterator[memoryview]:
    """What `send_stream` sends on another rank, in parts; each is good until the next is taken.

    Raises ValueError and ChannelError as `send_stream` does.
    """
    buckets = _buckets(2, bucket_bytes)
    number, is_last = 0, False
    channel.begin([Slot(root, buckets[0])])
    while not is_last:
        channel.finish()
        bucket = buckets[number % 2]
        used, last = _HEAD.unpack_from(bucket)
        if used > bucket_bytes - _HEAD.size or last > 1:
            words = f"rank {root} says that a bucket of {bucket_bytes} bytes has {used}"
            raise ChannelError(words, (root,))
        number, is_last = number + 1, bool(last)
        if not is_last:
            channel.begin([Slot(root, buckets[number % 2])])
        yield bucket[_HEAD.size : _HEAD.size + used].data


def _begin(channel: Channel, bucket: Memory, used: int, *, is_last: bool) -> None:
    _HEAD.pack_into(bucket, 0, used, is_last)
    channel.begin([Slot(channel.rank, bucket)])


def _buckets(count: int, bucket_bytes: int) -> list[Memory]:
    if bucket_bytes < MIN_BUCKET_BYTES:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, expected {MIN_BUCKET_BYTES} or more")
    return [np.zeros(bucket_bytes, np.uint8) for _ in range(count)]
