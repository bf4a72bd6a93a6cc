"""What an engine serves, from the calls that update it: they pass through its HTTP server.

Knows the calls of vLLM 0.24 to 0.32 and SGLang 0.5.12 to 0.5.23. See docs/serving.md.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from gymfast.integrations.admission_rules import Served
from gymfast.integrations.sglang_messages import LOADER
from gymfast.integrations.vllm_ranks import FLAGGED
from gymfast.sync import State
from gymfast.sync.machine import Event, after

PAUSES = frozenset({"/pause", "/pause_generation"})
RESUMES = frozenset({"/resume", "/continue_generation"})
FINISH, NAME = "/finish_weight_update", "/update_weight_version"
LOADS = frozenset(
    {
        "/update_weights",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/update_weights_from_disk",
        "/update_weights_from_ipc",
    }
)
CALLS = PAUSES | RESUMES | LOADS | {FINISH, NAME}
"""The calls to watch, all of them POST."""

_WHOLE = ("/update_weights", "/update_weights_from_tensor")
"""Calls by which our loaders change nothing before they change everything; not so over a group."""
_END_BYTES = 64 << 10
_NOT_SEEN = (401, 403, 404, 405, 422)  # the server refused the call itself
_VERSION = re.compile(rb'"(?:weight_version|new_version)"\s*:\s*"([0-9]{1,16})"')
_REFUSED = re.compile(rb'"success"\s*:\s*false')
_OURS = re.compile(
    rb'"update_info"\s*:\s*\{\s*"(?:version|frame|bucket|is_last|is_full)"|'
    + f'"{re.escape(LOADER)}"'.encode()
)


class Ends:
    """The first and the last 64 KiB of a body: what is between them are weights."""

    def __init__(self) -> None:
        self._head, self._tail = bytearray(), bytearray()

    def add(self, part: bytes) -> None:
        """Takes the next part of the body."""
        room = _END_BYTES - len(self._head)
        self._head += part[:room]
        self._tail = (self._tail + part[room:])[-_END_BYTES:]

    @property
    def data(self) -> bytes:
        """What was kept."""
        return bytes(self._head + self._tail)


@dataclass(frozen=True)
class Call:
    """A call under way; `is_first`: it began the pause, or the update."""

    path: str
    is_first: bool


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
        self._is_paused = self._is_loaded = self._is_broken = False
        self._is_ours = True

    @property
    def served(self) -> Served:
        """What the engine serves now."""
        age_s = None if self._version is None else self._monotonic_s() - self._since_s
        limit_s = self._freshness_s
        is_stale = limit_s is not None and age_s is not None and age_s > limit_s
        return Served(
            self._state, self._version, self._is_paused, is_stale, age_s, error=self._error
        )

    def begin(self, path: str) -> Call:
        """A call has come; the engine has not seen it yet."""
        is_first = (path in PAUSES and not self._is_paused) or (
            path in LOADS and not self._is_moving
        )
        if path in PAUSES:
            self._is_paused = True
        elif is_first:
            self._state = after(self._state, Event.BEGIN_ANCHOR)
            self._is_loaded = self._is_broken = False
            self._is_ours = True
        return Call(path, is_first)

    def end(self, call: Call, request: bytes, status: int | None, answer: bytes) -> None:
        """The call was answered; `status` is None if it was not."""
        path, is_done = call.path, status == HTTPStatus.OK and not _REFUSED.search(answer)
        if path in LOADS:
            self._end_load(call, request, status, answer, is_done=is_done)
        elif path in PAUSES and call.is_first and status is not None and 400 <= status < 500:
            self._is_paused = False
        elif path in RESUMES and is_done:
            self._end_pause()
        elif path == FINISH:
            self._end_finish(request, answer, is_done=is_done)
        elif path == NAME and is_done:
            self._name(_version_in(request))

    @property
    def _is_moving(self) -> bool:
        return self._state in (State.APPLYING, State.FILLING, State.HEALING)

    def _end_load(
        self, call: Call, request: bytes, status: int | None, answer: bytes, *, is_done: bool
    ) -> None:
        is_vllm = call.path == "/update_weights"
        is_ours = call.path in _WHOLE and _OURS.search(request) is not None
        if not self._is_moving:  # another call of the same update has ended it
            return
        is_refused = status is not None and call.is_first and status in _NOT_SEEN
        if is_refused or (is_vllm and is_ours and not is_done and status is not None):
            if FLAGGED.encode() in answer:
                self._break(f"an update failed: {_text(answer)}")
            else:  # nothing was loaded
                self._state = after(self._state, Event.UNTOUCHED)
            return
        self._is_ours &= is_ours
        version = None if is_vllm else _version_in(request)
        if not is_done and not is_ours:
            self._break(f"an update ended with {status or 'no answer'}: {_text(answer)}")
        elif not is_done:
            self._is_broken = True
        elif version is not None:
            self._serve(version)
        else:
            self._is_loaded |= is_vllm or not is_ours
            if not self._is_paused and not is_vllm:
                self._end_pause()

    def _end_finish(self, request: bytes, answer: bytes, *, is_done: bool) -> None:
        if FLAGGED.encode() in answer:
            self._break(f"an update failed: {_text(answer)}")
        elif is_done and self._is_moving and self._is_loaded:
            self._serve(_version_in(request))

    def _end_pause(self) -> None:
        """The engine goes on: an update that named no version has ended, one way or the other."""
        self._is_paused = False
        if not self._is_moving:
            return
        if self._is_broken:
            self._break("an update had no answer, or was refused half way")
        elif self._is_ours and not self._is_loaded:  # refused: our loader left everything as it was
            self._state = after(self._state, Event.UNTOUCHED)
        else:
            self._serve(None)

    def _name(self, version: int | None) -> None:
        if self._state is State.CLEAN or self._state is State.EMPTY or self._is_loaded:
            self._serve(version)

    def _serve(self, version: int | None) -> None:
        """From here on the engine serves that version, or weights that nobody named."""
        self._state = State.EMPTY if version is None else State.CLEAN
        self._version, self._error, self._since_s = version, "", self._monotonic_s()
        self._is_loaded = False

    def _break(self, error: str) -> None:
        self._state, self._error = after(self._state, Event.BROKEN), error


def _version_in(request: bytes) -> int | None:
    found = _VERSION.findall(request)
    return int(found[-1]) if found else None


def _text(answer: bytes) -> str:
    text = " ".join(answer[:500].decode(errors="replace").split())
    return "".join(char if char.isprintable() else "?" for char in text)
