"""Buckets for a group of engines: call, broadcast and answers under one lock and one deadline."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gymfast.errors import ChannelError
from gymfast.integrations.engine_answers import Answers, Deadline
from gymfast.integrations.engines import EngineError
from gymfast.integrations.flat_bucket import Bucket
from gymfast.integrations.phases import Phases

METHOD = "update_weights_from_distributed"
_LOCK_S = 0.005  # between looks at the lock
_LOOK_S = 0.05  # between looks at the answers while a broadcast runs
_NAP_S = 0.0002, 0.002  # between looks at a broadcast: first, longest


@dataclass
class EngineGroup:
    """Engines, the lock on all of them, and the process group that they share with this rank.

    Nothing else may keep the process group, nor work in it: back ends close connections, on which
    engines may wait, only once both are gone.
    """

    name: str
    handles: Sequence[Any]
    lock: Any
    ray: Any
    call: Callable[[Any, str, Bucket, str | None], Any]  # handle, name, bucket, weight version
    process_group: Any = None

    def drop(self) -> None:
        """Destroys this side of the process group, if there is one."""
        import torch.distributed as dist

        if self.process_group is not None:
            dist.destroy_process_group(self.process_group)
            self.process_group = None


def acquire(lock: Any, ray: Any, timeout_s: float) -> None:
    """Takes the framework's lock, without which two stages could enter engines in two orders.

    Raises ChannelError if another rank has it for longer than one that finds out, in `timeout_s`,
    that an engine is silent.
    """
    patience = Deadline(2 * timeout_s + 5)
    try:
        while not ray.get(lock.acquire.remote(), timeout=patience.left_s):
            if not patience.left_s:
                raise ChannelError(
                    f"the lock on the engines was not free for {patience.timeout_s:g} s: another "
                    "rank waits for an engine, or has died with it"
                )
            time.sleep(_LOCK_S)
    except TimeoutError as error:
        raise ChannelError(
            f"the lock on the engines gave no answer within {patience.timeout_s:g} s: is the "
            "process that holds it stopped?"
        ) from error


def release(lock: Any, ray: Any, timeout_s: float) -> None:
    """Gives the framework's lock back. Raises ChannelError if it gives no answer."""
    try:
        ray.get(lock.release.remote(), timeout=timeout_s)
    except TimeoutError as error:
        raise ChannelError(
            f"the lock on the engines gave no answer within {timeout_s:g} s"
        ) from error


class BucketBroadcast:
    """Sends buckets, one at a time. After an error the process group is broken and was aborted."""

    def __init__(self, group: EngineGroup, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self.phases = Phases()
        self.num_buckets = self.num_broadcasts = self.wire_bytes = 0
        self.is_broken = False

    def send(self, bucket: Bucket, weight_version: str | None) -> None:
        """Returns once every engine has loaded the bucket.

        Raises EngineError that names who refused, died or was silent until the deadline.
        """
        group = self._group
        with self.phases("lock"):
            acquire(group.lock, group.ray, self._timeout_s)
        try:
            self._send(bucket, weight_version)
        finally:
            release(group.lock, group.ray, self._timeout_s)

    def _send(self, bucket: Bucket, weight_version: str | None) -> None:
        import torch.distributed as dist

        group, deadline = self._group, Deadline(self._timeout_s)
        calls = [group.call(handle, group.name, bucket, weight_version) for handle in group.handles]
        answers = Answers(METHOD, calls, group.ray)
        works: list[Any] = []
        try:
            with self.phases("send"), bucket.on_its_stream():
                works += [
                    dist.broadcast(buffer, 0, group=group.process_group, async_op=True)
                    for buffer in bucket.buffers
                ]
                self._wait(works, answers, deadline)
        except RuntimeError as error:  # of torch: the group is broken
            traceback.clear_frames(error.__traceback__)
            raise self._failed(works, answers, f"{type(error).__name__}: {error}") from error
        with self.phases("load"):
            answers.take_all(deadline)
        if answers.have_failed or not answers.are_complete:
            raise self._failed(works, answers, f"no answer within {self._timeout_s:g} s")
        self.num_buckets += 1
        self.num_broadcasts += len(works)
        self.wire_bytes += bucket.size_bytes

    def _wait(self, works: Sequence[Any], answers: Answers, deadline: Deadline) -> None:
        """Waits for the broadcasts, as long as no engine fails; raises what they raise."""
        nap_s, look = _NAP_S[0], Deadline(_LOOK_S)
        for work in works:
            while not work.is_completed():
                if not deadline.left_s or answers.have_failed:
                    return
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, _NAP_S[1])
                if not look.left_s:
                    answers.take(0)
                    look = Deadline(_LOOK_S)
            work.wait()

    def _failed(self, works: list[Any], answers: Answers, otherwise: str) -> EngineError:
        """Leaves the process group, for all who wait in it; the error names who is to blame."""
        self.is_broken = True
        answers.take(0)
        suspects = answers.suspects()
        abort(self._group.process_group)
        # Some back ends have no abort: their broadcasts end with the time-out of the group.
        late = Deadline(1.5 * self._timeout_s)
        while late.left_s and not all(work.is_completed() for work in works):
            time.sleep(_LOOK_S)
        works.clear()
        self._group.drop()
        grace = Deadline(self._timeout_s / 2 + 1)
        while grace.left_s and not answers.are_complete:
            answers.take(grace.left_s)
        return answers.error(suspects, otherwise)


def abort(process_group: Any) -> None:
    """Ends what runs in a process group, as far as torch and the back end can."""
    if hasattr(process_group, "abort"):
        process_group.abort()
