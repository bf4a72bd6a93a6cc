"""What an engine serves, from the calls that update it: they pass through its HTTP server.

See docs/serving.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from gymfast.integrations.admission_rules import Served
from gymfast.integrations.engine_calls import (
    CHECKER,
    END,
    FINISH,
    LOADS,
    NAME,
    NOT_SEEN,
    PAUSES,
    RESUMES,
    START,
    changes_at_start,
    is_denied,
    is_flagged,
    is_ours,
    resets,
    text_of,
    version_in,
)
from gymfast.sync import State
from gymfast.sync.machine import Event, after


@dataclass(frozen=True)
class Call:
    """A call under way; `is_first`: it began the pause, or the update."""

    path: str
    is_first: bool


@dataclass
class _Update:
    """What is known of an update that is not over."""

    version: int | None = None
    is_seen: bool = False  # the engine has taken a call of it
    is_loaded: bool = False
    is_ours: bool = True
    is_in_doubt: bool = False  # a load of ours had no answer, or was refused half way
    has_finish: bool = False  # vLLM: it ends with a call of its own


class EngineWatch:
    """The state of the weights of one engine, as its calls and their answers tell it.

    An engine that has just started serves weights of no known version. Not thread-safe: all calls
    come from one event loop.
    """

    def __init__(
        self,
        freshness_s: float | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `freshness_s`, a version that came longer ago is stale."""
        self._freshness_s, self._monotonic_s = freshness_s, monotonic_s
        self._state, self._error = State.EMPTY, ""
        self._version: int | None = None
        self._since_s = 0.0
        self._num_changes = self._num_loads = 0
        self._is_paused = False
        self._is_spoilt = False  # an update broke, and calls that belong to it may still come
        self._update = _Update()

    @property
    def served(self) -> Served:
        """What the engine serves now."""
        age_s = None if self._version is None else self._monotonic_s() - self._since_s
        limit_s = self._freshness_s
        return Served(
            self._state,
            self._version,
            self._is_paused,
            is_stale=limit_s is not None and age_s is not None and age_s > limit_s,
            age_s=age_s,
            error=self._error,
            num_changes=self._num_changes,
        )

    def begin(self, path: str) -> Call:
        """A call has come; the engine has not seen it yet."""
        is_first = (path in PAUSES and not self._is_paused) or (
            path in LOADS and not self._is_moving
        )
        if path in PAUSES:
            self._is_paused = True
            self._is_spoilt &= self._num_loads > 0
        elif path in LOADS:
            self._is_spoilt &= self._num_loads > 0 or self._is_paused
            self._num_loads += 1
            if is_first:
                self._begin_update()
        return Call(path, is_first)

    def end(self, call: Call, request: bytes, status: int | None, answer: bytes) -> None:
        """The call was answered; `status` is None if it was not."""
        path, is_done = call.path, status == HTTPStatus.OK and not is_denied(answer)
        if path in LOADS:
            self._num_loads -= 1
            self._end_load(path, request, status, answer, is_done=is_done)
        elif path in PAUSES and call.is_first and status is not None and 400 <= status < 500:
            self._is_paused = False
        elif path in RESUMES and is_done:
            self._is_paused = False
            self._is_spoilt &= self._num_loads > 0
            self._settle()
        elif path == START and is_done:
            self._start(request)
        elif path in (FINISH, END):
            self._end_finish(path, request, status, answer, is_done=is_done)
        elif path == NAME and is_done:
            self._name(version_in(request))
        elif path == CHECKER and resets(request) and status not in NOT_SEEN:
            self._break("the weights were overwritten by a check of them")

    @property
    def _is_moving(self) -> bool:
        return self._state in (State.APPLYING, State.FILLING, State.HEALING)

    def _begin_update(self) -> None:
        self._state = after(self._state, Event.BEGIN_ANCHOR)
        self._update = _Update()

    def _start(self, request: bytes) -> None:
        if changes_at_start(request):
            if not self._is_moving:
                self._begin_update()
            self._update.is_seen = self._update.has_finish = True
            self._update.is_ours = False

    def _end_load(
        self, path: str, request: bytes, status: int | None, answer: bytes, *, is_done: bool
    ) -> None:
        update, ours, is_vllm = self._update, is_ours(path, request), path == "/update_weights"
        if not self._is_moving:  # another call of the same update has broken it
            return
        if status in NOT_SEEN and not is_flagged(answer):
            self._end_unseen()
        elif is_vllm and ours and not is_done and status is not None:
            if is_flagged(answer):
                self._break(f"an update failed: {text_of(answer)}")
            elif update.is_ours and not self._num_loads:  # nothing was loaded
                self._state = after(self._state, Event.UNTOUCHED)
        elif self._is_spoilt and (not ours or self._num_loads):
            self._break(self._error)
        elif not is_done and not ours:
            self._break(f"an update ended with {status or 'no answer'}: {text_of(answer)}")
        else:
            self._take(path, request, ours=ours, is_done=is_done)

    def _end_unseen(self) -> None:
        """A call that the server refused says nothing about an update that others have made."""
        if self._num_loads:
            return
        if not self._update.is_seen:
            self._state = after(self._state, Event.UNTOUCHED)
        elif not self._is_paused and not self._update.has_finish:
            self._settle()

    def _take(self, path: str, request: bytes, *, ours: bool, is_done: bool) -> None:
        """Weights came, or those of our loader may have come half."""
        update, is_vllm = self._update, path == "/update_weights"
        update.is_seen = True
        update.is_ours &= ours
        update.has_finish |= is_vllm
        if not is_done:
            update.is_in_doubt = True
            return
        version = None if is_vllm else version_in(request)
        if ours:  # our loader has checked the whole of what it confirms
            self._is_spoilt = False
            update.is_in_doubt &= version is None
        if version is not None:
            update.version = version
        update.is_loaded |= version is not None or is_vllm or not ours
        if not self._is_paused and not is_vllm:
            self._settle()

    def _end_finish(
        self, path: str, request: bytes, status: int | None, answer: bytes, *, is_done: bool
    ) -> None:
        if is_flagged(answer):
            self._break(f"an update failed: {text_of(answer)}")
        elif not self._is_moving or status in NOT_SEEN:
            return
        elif not is_done:
            said = f"{status or 'no answer'}: {text_of(answer)}"
            self._break(f"the end of an update was answered with {said}")
        elif path == FINISH and self._update.is_loaded:
            self._update.version = version_in(request)
            if not self._num_loads:
                self._serve(self._update.version)

    def _settle(self) -> None:
        """No more calls of an update are to come: it has ended, one way or the other."""
        if not self._is_moving or self._num_loads:
            return
        if self._update.is_in_doubt:
            self._break("an update had no answer, or was refused half way")
        elif self._update.is_ours and not self._update.is_loaded:
            self._state = after(self._state, Event.UNTOUCHED)  # our loader refused it
        else:
            self._serve(self._update.version)

    def _name(self, version: int | None) -> None:
        if not self._is_moving and self._state is not State.INCONSISTENT:
            self._serve(version)
        elif self._is_moving and self._update.is_loaded:
            self._update.version = version
            if not self._is_paused:
                self._settle()

    def _serve(self, version: int | None) -> None:
        """From here on the engine serves that version, or weights that nobody named."""
        self._state = State.EMPTY if version is None else State.CLEAN
        self._version, self._error, self._since_s = version, "", self._monotonic_s()
        self._num_changes += 1

    def _break(self, error: str) -> None:
        self._state, self._error = after(self._state, Event.BROKEN), error
        self._is_spoilt = True
        self._num_changes += 1
