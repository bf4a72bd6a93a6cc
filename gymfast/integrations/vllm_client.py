"""The trainer's side of a vLLM server: an update is one paused session over HTTP.

See docs/integrations/vllm.md.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import Literal, NoReturn

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
            self._start()
        except ChannelError as error:
            self._give_up(error)
        answer = http.call("/update_weights", {"update_info": update})
        failure = ChannelError(f"{http.url}/update_weights answered {answer.code}: {answer.text}")
        if answer.code > 500:  # a proxy: it may have loaded, as after no answer
            raise failure
        if not answer.is_success:
            self._give_up(failure)
        # From here on it cannot go on as before. Requests that run (pause "keep") are computed
        # again: what they hold was computed with the old weights.
        http.require("/reset_prefix_cache?reset_running_requests=true", {})
        http.require("/finish_weight_update", {"weight_version": str(version)})
        http.require("/resume", {})

    def _start(self) -> None:
        """Opens an update; one that was not finished is open on some ranks, and then on all."""
        begun = self._http.call("/start_weight_update", {})
        if not begun.is_success and "already active" not in begun.text:
            raise ChannelError(f"/start_weight_update answered {begun.code}: {begun.text}")

    def _give_up(self, error: ChannelError) -> NoReturn:
        """Lets a server go on that loaded nothing."""
        url = self._http.url
        if self._is_flagged():
            raise ChainError(f"{url} is flagged and stays paused: {error}") from error
        self._http.require("/resume", {})
        raise ChainError(f"{url} goes on as before: {error}") from error

    def _is_flagged(self) -> bool:
        """True if the server may hold anything; an empty update is refused then."""
        with suppress(ChannelError):
            self._start()
            self._http.require("/finish_weight_update", {})
            return False
        return True
