"""The trainer's side of an SGLang server: an update is one paused session over HTTP.

See docs/integrations/sglang.md.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

from msgspec import structs

from gymfast.errors import ChainError, ChannelError
from gymfast.integrations.sglang_http import SGLangHttp
from gymfast.integrations.sglang_messages import (
    STATUS,
    Confirm,
    Piece,
    Status,
    Update,
    from_numbers,
    pack,
)
from gymfast.integrations.update_request import InitRequest

LOADER = "gymfast.integrations.sglang.load"
_MAX_STATUS_BYTES = 1 << 20


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
        self._http = SGLangHttp(url, api_key=api_key, timeout_s=timeout_s)
        self._pause, self._piece_bytes = pause, piece_bytes

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

    def status(self) -> Status:
        """What became of the newest update; with data-parallel attention each group tells it.

        Raises ChannelError, FormatError if none is told.
        """
        query = {"name": STATUS, "truncate_size": _MAX_STATUS_BYTES}
        answer = self._http.require("/get_weights_by_name", query)
        is_nested = isinstance(answer, list) and any(isinstance(part, list) for part in answer)
        statuses = [from_numbers(part) for part in (answer if is_nested else [answer])]
        return next((status for status in statuses if status.error), statuses[0])

    def _update(self, update: Update, weight_version: str, frame: bytes) -> Status:
        session = Session(self._http, self._pause)
        update_id = secrets.token_hex(8)
        session.open()
        for offset in range(0, len(frame), self._piece_bytes):
            piece = frame[offset : offset + self._piece_bytes]
            session.send(pack(update_id, Piece(offset), piece))
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
            session.send(confirm, flush_cache=True, weight_version=weight_version)
        if not status.is_flagged:  # what is flagged must neither be packed nor run
            session.close()
        if status.error:
            outcome = "is flagged and stays paused" if status.is_flagged else "goes on as before"
            raise ChainError(f"{self._http.url} {outcome}: {status.error}")
        return status


class Session:
    """From pause to resume; how SGLang wants it depends on its version, which is found out."""

    def __init__(self, http: SGLangHttp, pause: str) -> None:
        """Asks the server what it is. Raises ChannelError for one that cannot be updated."""
        self._http, self._pause = http, pause
        self._protocol: Literal["session", "post_process", "plain"] = "plain"
        info = http.require("/server_info")
        self._num_ranks = _num_ranks(http.url, info)

    @property
    def is_restored(self) -> bool:
        """True if the server unpacked what it had packed."""
        return self._protocol != "plain"

    def open(self) -> None:
        """Pauses the server and makes its weights loadable.

        Raises ChannelError for a version that cannot do that; the server then goes on.
        """
        self._http.require("/pause_generation", {"mode": self._pause})
        begun = self._http.call("/begin_weight_update", {"selector": "target"})
        if begun.is_success or "already open" in begun.text:  # left open by an update that failed
            self._protocol = "session"
            return
        if begun.code == 404:
            begun = self._http.call("/post_process_weights", _post_process(is_before=True))
            if begun.is_success:
                self._protocol = "post_process"
                return
            if begun.code == 404:  # the loader refuses if there is anything to unpack
                return
        self._http.require("/continue_generation", {})
        raise ChannelError(
            f"{self._http.url} cannot make its weights loadable, the answer was {begun.code}: "
            f"{begun.text}; gymfast knows SGLang 0.5.12 to 0.5.23"
        )

    def send(self, payload: bytes, **more: object) -> None:
        """One message to all ranks. Raises ChannelError for an answer of failure."""
        fields: dict[str, object] = {
            "serialized_named_tensors": [payload] * self._num_ranks,
            "load_format": LOADER,
            "flush_cache": False,
        }
        # A draft model has other tensors than the run.
        if self._protocol == "session":
            fields["selector"] = "target"
        else:
            fields["disable_draft_model"] = True
        self._http.require("/update_weights_from_tensor", fields | more)

    def close(self) -> None:
        """Makes the weights usable and lets the server go on. Raises ChannelError."""
        if self._protocol == "session":
            self._http.require("/end_weight_update", {})
        elif self._protocol == "post_process":
            self._http.require("/post_process_weights", _post_process(is_before=False))
        self._http.require("/continue_generation", {})


def _post_process(*, is_before: bool) -> dict[str, object]:
    return {"restore_weights_before_load": is_before, "post_process_quantization": not is_before}


def _num_ranks(url: str, info: Any) -> int:
    """Ranks that share the model. Raises ChannelError for a server that cannot be updated."""
    try:
        num_ranks, loaders = int(info["tp_size"]), info["custom_weight_loader"] or []
        parallel = {name: int(info[name]) for name in ("dp_size", "pp_size")}
    except (KeyError, TypeError, ValueError) as error:
        raise ChannelError(
            f"{url}/server_info is not that of an SGLang known here: {error!r}; gymfast knows "
            "0.5.12 to 0.5.23"
        ) from error
    if LOADER not in loaders:
        raise ChannelError(f"{url} was started without --custom-weight-loader {LOADER}: add it")
    for name, size in parallel.items():
        if size != 1:
            raise ChannelError(f"{url} has {name} {size}: gymfast updates servers with 1 only")
    return num_ranks
