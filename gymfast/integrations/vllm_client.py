"""The trainer's side of a vLLM server: an update is one paused session over HTTP.

See docs/integrations/vllm.md.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import Literal

from gymfast.errors import ChainError, ChannelError
from gymfast.integrations.engine_http import EngineHttp
from gymfast.integrations.update_request import InitRequest


class VLLMClient:
    """One vLLM server with our weight transfer engine and VLLM_SERVER_DEV_MODE=1. Not thread-safe.

    Whatever fails here, the publisher and its run are as before. The same call may be repeated.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        pause: Literal["wait", "abort", "keep"] = "wait",
    ) -> None:
        """A client of the server at `url`; nothing is sent yet.

        `timeout_s` bounds each call, so each load too. `pause` is what vLLM does with requests
        that run. Raises ValueError for an address that is not http or https.
        """
        self._http = EngineHttp(url, api_key=api_key, timeout_s=timeout_s)
        self._pause = pause

    def pull(self, follow: InitRequest, version: int, *, is_full: bool = False) -> None:
        """Has the server take a version of a run and drop what it cached of older ones.

        Raises ChainError if the server refuses or is flagged, and then stays paused; ChannelError
        if it does not answer or cannot be updated at all.
        """
        http = self._http
        update = {"version": version, "is_full": is_full}
        http.require(f"/pause?mode={self._pause}", {})
        try:
            http.require("/init_weight_transfer_engine", {"init_info": asdict(follow)})
            http.require("/start_weight_update", {})
            http.require("/update_weights", {"update_info": update})
            http.require("/finish_weight_update", {"weight_version": str(version)})
            http.require("/reset_prefix_cache", {})
        except ChannelError as error:
            if self._is_flagged():
                raise ChainError(f"{http.url} is flagged and stays paused: {error}") from error
            http.require("/resume", {})
            raise ChainError(f"{http.url} goes on as before: {error}") from error
        http.require("/resume", {})

    def _is_flagged(self) -> bool:
        """True if the server may hold anything; an empty update is refused then."""
        with suppress(ChannelError):
            self._http.require("/start_weight_update", {})
            self._http.require("/finish_weight_update", {})
            return False
        return True
