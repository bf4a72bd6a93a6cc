"""The trainer's side of a vLLM server: an update is one paused session over HTTP.

See docs/integrations/vllm.md.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict
from http import HTTPStatus
from typing import Literal

from gymfast.errors import ChainError, ChannelError, DeadlineError
from gymfast.integrations.engine_http import EngineHttp
from gymfast.integrations.update_request import InitRequest

_POLL_S = 0.5


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
        that run. Raises ValueError for an address that is not http or https, or names no host.
        """
        self._http = EngineHttp(url, api_key=api_key, timeout_s=timeout_s)
        self._pause = pause

    def pull(self, follow: InitRequest, version: int, *, is_full: bool = False) -> None:
        """Has the server take a version of a run and drop what it cached of older ones.

        Raises ChainError if the server refuses or is flagged, and then stays paused; ChannelError
        if it does not answer or cannot be updated at all, or (still paused) keeps its old cache.
        """
        http = self._http
        update = {"version": version, "is_full": is_full}
        self.follow(follow)
        http.require(f"/pause?mode={self._pause}", {})
        try:
            http.call("/start_weight_update", {})  # refused where a flagged engine left one open
            http.require("/update_weights", {"update_info": update})
        except ChannelError as error:
            if self._is_flagged():
                raise ChainError(f"{http.url} is flagged and stays paused: {error}") from error
            http.require("/resume", {})
            raise ChainError(f"{http.url} goes on as before: {error}") from error
        # Requests that were kept hold blocks of the old weights, and without them nothing is reset.
        http.require("/reset_prefix_cache?reset_running_requests=true&reset_external=true", {})
        http.require("/finish_weight_update", {"weight_version": str(version)})
        http.require("/resume", {})

    def follow(self, run: InitRequest) -> None:
        """Has the server follow a run, which it may do already; nothing is paused or loaded.

        Raises ChannelError, which says what a server needs, if it cannot.
        """
        path, needs = "/init_weight_transfer_engine", ""
        answer = self._http.call(path, {"init_info": asdict(run)})
        if answer.is_success:
            return
        if answer.code == HTTPStatus.NOT_FOUND:
            needs = "VLLM_SERVER_DEV_MODE=1 in its environment and "
        raise ChannelError(
            f"{self._http.url}{path} answered {answer.code}: {answer.text}; it needs {needs}"
            f'--weight-transfer-config \'{{"backend":"gymfast"}}\', and a way to {run.store}'
        )

    def wait_until_ready(self, timeout_s: float) -> None:
        """Returns once the server is up. Raises DeadlineError."""
        end_s = time.monotonic() + timeout_s
        while not self._is_ready():
            if time.monotonic() >= end_s:
                raise DeadlineError(
                    f"{self._http.url} is not ready after {timeout_s:g} s: is a vLLM server there?"
                )
            time.sleep(_POLL_S)

    def _is_ready(self) -> bool:
        with suppress(ChannelError):
            return self._http.call("/health").is_success
        return False

    def _is_flagged(self) -> bool:
        """True if the server may hold anything; an empty update is refused then."""
        with suppress(ChannelError):
            self._http.require("/start_weight_update", {})
            self._http.require("/finish_weight_update", {})
            return False
        return True
