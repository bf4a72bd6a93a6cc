"""The process group of a trainer rank and all engines, made and left by a deadline."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any

from gymfast.integrations.bucket_broadcast import EngineGroup, acquire, release
from gymfast.integrations.engine_answers import Answers, Deadline
from gymfast.integrations.engine_features import why_not_flat
from gymfast.integrations.flat_bucket import Bucket, flat_bucket, single_tensors

_JOIN, _LEAVE = "init_weights_update_group", "destroy_weights_update_group"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupSettings:
    """How a framework makes groups.

    `is_flat` None: engines get flattened buckets if all of them say that they read them.
    """

    init_process_group: Callable[..., Any]
    backend: str
    wrap_host: Callable[[str], str]  # of an address of IPv6
    gpu_counts: Sequence[int]
    is_flat: bool | None
    urls: Callable[[], Sequence[Any]]


class EngineLink:
    """What a rank that sends shares with all engines; calls and ranks are those of slime."""

    def __init__(self, group: EngineGroup, settings: GroupSettings) -> None:
        """A link that is not joined."""
        self.group = group
        self._settings = settings
        self._packs_flat = self._is_joined = False

    @property
    def is_joined(self) -> bool:
        """True between join and leave."""
        return self._is_joined

    def pack(self, chunk: Sequence[tuple[str, Any]], *, is_many: bool) -> Bucket:
        """A bucket as these engines read it; a large tensor alone is not copied into one."""
        return flat_bucket(chunk) if self._packs_flat and is_many else single_tensors(chunk)

    def join(self, timeout_s: float) -> None:
        """Makes the group. Raises EngineError that names who refused or did not come.

        Under the lock: two stages at once could enter the engines in two orders, and wait for ever.
        """
        acquire(self.group.lock, self.group.ray, timeout_s)
        try:
            self._join(timeout_s)
        finally:
            release(self.group.lock, self.group.ray, timeout_s)
        is_flat = self._settings.is_flat
        self._packs_flat = self._ask() if is_flat is None else is_flat

    def leave(self, timeout_s: float) -> None:
        """Destroys the group on both sides; an engine that is gone or never had it is no error."""
        if not self._is_joined:
            return
        self._is_joined, group = False, self.group
        calls = [handle.destroy_weights_update_group.remote(group.name) for handle in group.handles]
        group.drop()
        answers, deadline = Answers(_LEAVE, calls, group.ray), Deadline(timeout_s)
        while deadline.left_s and not answers.are_complete:
            answers.take(deadline.left_s)

    def _join(self, timeout_s: float) -> None:
        ray, name, settings = self.group.ray, self.group.name, self._settings
        address = ray._private.services.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        offsets = list(accumulate(settings.gpu_counts, initial=1))
        calls = [
            handle.init_weights_update_group.remote(
                master_address=address,
                master_port=port,
                rank_offset=offset,
                world_size=offsets[-1],
                group_name=name,
                backend=settings.backend,
            )
            for handle, offset in zip(self.group.handles, offsets, strict=False)
        ]
        deadline, answers = Deadline(timeout_s), Answers(_JOIN, calls, ray)
        late = f"no answer within {timeout_s:g} s"
        try:
            self.group.process_group = settings.init_process_group(
                backend=settings.backend,
                init_method=f"tcp://{settings.wrap_host(address)}:{port}",
                # It ends what cannot be aborted, and has to come after our own deadline.
                timeout=timedelta(seconds=1.25 * timeout_s),
                world_size=offsets[-1],
                rank=0,
                group_name=name,
            )
        except RuntimeError as error:  # of torch, also for a rank that does not come
            answers.take(0)
            raise answers.error(answers.suspects(), f"{late}: {error}") from error
        self._is_joined = True
        answers.take_all(deadline)
        if answers.have_failed or not answers.are_complete:
            suspects = answers.suspects()
            self.leave(timeout_s)
            raise answers.error(suspects, late)

    def _ask(self) -> bool:
        reason = why_not_flat(self._settings.urls())
        if reason is not None:
            _log.warning("every tensor is a broadcast of its own, as in the framework: %s", reason)
        return reason is None
