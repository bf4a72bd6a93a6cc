"""The calls that update an engine over HTTP, and what their bodies say.

Those of vLLM 0.24 to 0.32 and SGLang 0.5.12 to 0.5.23. See docs/serving.md.
"""

from __future__ import annotations

import re

from gymfast.integrations.sglang_messages import LOADER
from gymfast.integrations.vllm_ranks import FLAGGED

PAUSES = frozenset({"/pause", "/pause_generation"})
RESUMES = frozenset({"/resume", "/continue_generation"})
START, FINISH, NAME = "/start_weight_update", "/finish_weight_update", "/update_weight_version"
END, CHECKER = "/end_weight_update", "/weights_checker"
LOADS = frozenset(
    {
        "/update_weights",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/update_weights_from_disk",
        "/update_weights_from_ipc",
    }
)
CALLS = PAUSES | RESUMES | LOADS | {START, FINISH, NAME, END, CHECKER}
"""The calls to watch: POST, and GET too for the one that checks weights."""

NOT_SEEN = (401, 403, 404, 405, 422)
"""Answers of a server that refused the call itself: the engine has not seen it."""

_WHOLE = ("/update_weights", "/update_weights_from_tensor")
"""Calls by which our loaders change nothing before they change everything; not so over a group."""
_END_BYTES = 64 << 10
_VERSION = re.compile(rb'"(?:weight_version|new_version)"\s*:\s*"([0-9]{1,16})"')
_REFUSED = re.compile(rb'"success"\s*:\s*false')
_KEPT = re.compile(rb'"is_checkpoint_format"\s*:\s*false')
_RESET = re.compile(rb'"action"\s*:\s*"reset')
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


def is_watched(path: str, method: str) -> bool:
    """True for a call that may change what is served."""
    return path in CALLS and (method == "POST" or (path == CHECKER and method == "GET"))


def is_ours(path: str, request: bytes) -> bool:
    """True for weights that a loader of ours takes, all of them or none."""
    return path in _WHOLE and _OURS.search(request) is not None


def changes_at_start(request: bytes) -> bool:
    """True if the start of an update itself may take the weights out of the model."""
    return _KEPT.search(request) is None


def resets(request: bytes) -> bool:
    """True if the check of weights overwrites them."""
    return _RESET.search(request) is not None


def version_in(request: bytes) -> int | None:
    """The version that a call names, None if it names none that is a number."""
    found = _VERSION.findall(request)
    return int(found[-1]) if found else None


def is_denied(answer: bytes) -> bool:
    """True if an answer denies the success that its status states."""
    return _REFUSED.search(answer) is not None


def is_flagged(answer: bytes) -> bool:
    """True if our loader says that the weights may be anything."""
    return FLAGGED.encode() in answer


def text_of(answer: bytes) -> str:
    """The begin of an answer as one line that is safe to show."""
    text = " ".join(answer[:500].decode(errors="replace").split())
    return "".join(char if char.isprintable() else "?" for char in text)
