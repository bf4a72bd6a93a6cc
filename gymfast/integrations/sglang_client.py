"""The trainer's side of an SGLang server: an update is one paused session over HTTP.

See docs/integrations/sglang.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from msgspec import structs

from gymfast.errors import ChainError, ChannelError
from gymfast.integrations.engine_http import EngineHttp
from gymfast.integrations.sglang_messages import (
    STATUS,
    Confirm,
    LocalVersion,
    Parts,
    Piece,
    Status,
    Update,
    from_numbers,
    named_tensors,
    pack,
)
from gymfast.integrations.sglang_session import Group, Session
from gymfast.integrations.update_request import InitRequest

_MAX_STATUS_BYTES = 1 << 20


class FlaggedError(ChainError):
    """The engine is flagged: it must not run, and the next update has to load everything."""


class SGLangClient:
    """One SGLang server that was started with our loader. Not thread-safe.

    Whatever fails here, the publisher and its run are as before. The same call may be repeated.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        pause: Literal["retract", "abort", "in_place"] = "retract",
        piece_bytes: int = 64 << 20,
    ) -> None:
        """A client of the server at `url`; nothing is sent yet.

        `timeout_s` bounds each call, so each load too. `pause` is what SGLang does with requests
        that run. A frame is sent in pieces of `piece_bytes`, each once for every rank.
        Raises ValueError for an address that is not http or https, or pieces of nothing.
        """
        if piece_bytes < 1:
            raise ValueError(f"piece_bytes is {piece_bytes}, expected 1 or more")
        self._http = EngineHttp(url, api_key=api_key, timeout_s=timeout_s)
        self._pause, self._piece_bytes = pause, piece_bytes

    @property
    def url(self) -> str:
        """The address of the server."""
        return self._http.url

    def pull(self, follow: InitRequest, version: int, *, is_full: bool = False) -> Status:
        """What the engine did to take a version of a run; `is_full` heals a flagged engine.

        Raises ChainError if the engine refuses or is flagged, ChannelError if it does not answer
        or cannot be updated at all.
        """
        update = Update(follow=follow, version=version, is_full=is_full)
        return self._update(update, str(version), b"")

    def send(self, frame: bytes, *, weight_version: str, is_full: bool = False) -> Status:
        """What the engine did to take a frame: an anchor, which heals it too, or a delta.

        Raises what `pull` raises.
        """
        update = Update(frame_bytes=len(frame), is_full=is_full)
        return self._update(update, weight_version, frame)

    def broadcast(
        self, frame: bytes, group: Group, *, weight_version: str, is_full: bool = False
    ) -> Status:
        """The same as `send`; the frame goes to all ranks at once over a process group.

        Needs SGLang 0.5.21 or newer. An engine that refuses a piece before it receives it leaves
        the group waiting: make a new one. Raises what `pull` raises, and what the group raises.
        """
        update = Update(frame_bytes=len(frame), is_full=is_full)
        return self._update(update, weight_version, frame, group)

    def session(self) -> Session:
        """What the server is, asked before it is paused; for `load_local`.

        Raises ChannelError for one that cannot be updated.
        """
        return Session(self._http)

    def load_local(
        self, session: Session, version: LocalVersion, *, flush_cache: bool = True
    ) -> Status:
        """What the engine did to load what its host has pulled.

        The caller has paused the server and begun the session, and lets the server go on.
        Raises FlaggedError, ChannelError if it must stay paused, another ChainError if the engine
        refuses and its weights are as before.
        """
        update_id, update = secrets.token_hex(8), Update(local=version)
        finish = _Finish(session.end, str(version.number), flush_cache)
        return self._carry_out(session, update_id, update, finish)

    def greet(self, session: Session) -> None:
        """Has the loader there stand by for parts. Raises ChannelError."""
        session.send(pack(secrets.token_hex(8), Confirm()))

    def load_parts(self, session: Session, parts: Parts) -> Status:
        """What the engine did with parts that it has got, all of them; flushes no cache.

        The caller has paused the server and begun the session, and ends both. Raises what
        `load_local` raises.
        """
        update_id, update = secrets.token_hex(8), Update(parts=parts)
        finish = _Finish(lambda: None, parts.version, flush_cache=False)
        return self._carry_out(session, update_id, update, finish)

    def status(self) -> Status:
        """What became of the newest update; with data-parallel attention each group tells it.

        Raises ChannelError, FormatError if none is told.
        """
        query = {"name": STATUS, "truncate_size": _MAX_STATUS_BYTES}
        answer = self._http.require("/get_weights_by_name", query)
        is_nested = isinstance(answer, list) and any(isinstance(part, list) for part in answer)
        statuses = [from_numbers(part) for part in (answer if is_nested else [answer])]
        return next((status for status in statuses if status.error), statuses[0])

    def _update(
        self, update: Update, weight_version: str, frame: bytes, group: Group | None = None
    ) -> Status:
        session = Session(self._http)
        session.open(self._pause)
        update_id = secrets.token_hex(8)
        for offset in range(0, len(frame), self._piece_bytes):
            piece = frame[offset : offset + self._piece_bytes]
            if group is None:
                session.send(pack(update_id, Piece(offset), piece))
            else:
                session.broadcast(named_tensors(update_id, Piece(offset), piece), group)
        finish = _Finish(session.close, weight_version)
        return self._carry_out(session, update_id, update, finish)

    def _carry_out(
        self, session: Session, update_id: str, update: Update, finish: _Finish
    ) -> Status:
        update = structs.replace(update, is_restored=session.is_restored)
        session.send(pack(update_id, update))
        status = self.status()
        if status.update_id not in (update_id, ""):  # "": the message could not be read
            raise ChannelError(
                f"{self._http.url} tells of another update: somebody else updates it too, or it "
                "restarted; repeat the update"
            )
        if not status.error:
            confirm = pack(update_id, Confirm())
            session.send(
                confirm, flush_cache=finish.flush_cache, weight_version=finish.weight_version
            )
        if status.is_flagged:  # it must neither be packed nor run
            raise FlaggedError(f"{self._http.url} is flagged and stays paused: {status.error}")
        finish.close()
        if status.error:
            raise ChainError(f"{self._http.url} goes on as before: {status.error}")
        return status


@dataclass(frozen=True)
class _Finish:
    """How an update ends that worked, or left the weights as they were."""

    close: Callable[[], None]
    weight_version: str
    flush_cache: bool = True
