"""The trainer's side of a vLLM server: an update is one paused session over HTTP.

See docs/integrations/vllm.md.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from gymfast.errors import ChainError, ChannelError
from gymfast.integrations.engine_http import EngineHttp
from gymfast.integrations.update_request import InitRequest
from gymfast.integrations.vllm_ranks import FLAGGED


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

        Raises ChainError if the server refuses: it goes on with the version that it has, or stays
        paused if it is flagged. Raises ChannelError if it does not answer, or not as expected: what
        it holds is not known then, and it stays paused if it was reached. Repeat the call.
        """
        http = self._http
        http.require(f"/pause?mode={self._pause}", {})
        self._update(follow, {"version": version, "is_full": is_full})
        http.require("/finish_weight_update", {"weight_version": str(version)})
        # Running requests of the pause "keep" hold old keys and values: these are computed anew.
        http.require("/reset_prefix_cache?reset_running_requests=true&reset_external=true", {})
        http.require("/resume", {})

    def _update(self, follow: InitRequest, update: dict[str, object]) -> None:
        http = self._http
        answer = http.call("/init_weight_transfer_engine", {"init_info": asdict(follow)})
        if answer.is_success:
            # It fails if a trainer left an update open. From here on every rank has one open.
            start = http.call("/start_weight_update", {"is_checkpoint_format": False})  # of 0.24
            answer = http.call("/update_weights", {"update_info": update})
            if answer.is_success:
                return
            http.call("/finish_weight_update", {})  # closes what other ranks have open
            if not start.is_success:
                raise ChannelError(
                    f"{http.url} stays paused: {start.text}; then {answer.text}; if that comes "
                    "again start the server anew"
                )
        if FLAGGED in answer.text:
            raise ChainError(f"{http.url} is flagged and stays paused: {answer.text}")
        http.require("/resume", {})
        raise ChainError(f"{http.url} goes on as before: {answer.text}")
