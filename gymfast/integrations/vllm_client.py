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
from gymfast.integrations.engine_http import Answer, EngineHttp
from gymfast.integrations.update_request import InitRequest
from gymfast.integrations.vllm_ranks import FLAGGED

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
        that run. Raises ValueError for an address that is not http or https.
        """
        self._http = EngineHttp(url, api_key=api_key, timeout_s=timeout_s)
        self._pause = pause

    def pull(self, follow: InitRequest, version: int, *, is_full: bool = False) -> None:
        """Has the server take a version of a run and drop what it cached of older ones.

        Raises what `follow` raises, ChainError if the server refuses: it goes on with the version
        that it has, or stays paused if it is flagged. Raises ChannelError if it does not answer, or
        not as expected: what it holds is not known then, and it stays paused if it was reached.
        """
        http = self._http
        self.follow(follow)
        http.require(f"/pause?mode={self._pause}", {})
        update = {"version": version, "is_full": is_full}
        was_open = self._start()
        answer = http.call("/update_weights", {"update_info": update})
        if not answer.is_success:
            http.call("/finish_weight_update", {})  # closes what other ranks have open
            self._give_up(answer, is_known=not was_open)
        # Requests that run (pause "keep") hold old keys and values: they are computed anew.
        http.require("/reset_prefix_cache?reset_running_requests=true&reset_external=true", {})
        http.require("/finish_weight_update", {"weight_version": str(version)})
        http.require("/resume", {})

    def follow(self, run: InitRequest) -> None:
        """Has the server follow a run, which it may do already; nothing is paused or loaded.

        Raises ChannelError, which says what a server needs, if it cannot.
        """
        path, needs = f"{self._http.url}/init_weight_transfer_engine", ""
        answer = self._http.call("/init_weight_transfer_engine", {"init_info": asdict(run)})
        if answer.is_success:
            return
        if answer.code == HTTPStatus.NOT_FOUND:
            needs = "VLLM_SERVER_DEV_MODE=1 in its environment and "
        raise ChannelError(
            f"{path} answered {answer.code}: {answer.text}; the server needs {needs}"
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

    def _start(self) -> bool:
        """Opens an update on all ranks; True if a trainer that is gone left one open on some."""
        begun = self._http.call("/start_weight_update", {"is_checkpoint_format": False})  # of 0.24
        was_open = "already active" in begun.text
        if not begun.is_success and not was_open:
            self._give_up(begun, is_known=True)
        return was_open

    def _give_up(self, answer: Answer, *, is_known: bool) -> None:
        """Lets a server go on that loaded nothing, as far as its answers can be trusted."""
        url, text = self._http.url, answer.text
        if FLAGGED in text:
            raise ChainError(f"{url} is flagged and stays paused: {text}")
        if not is_known or answer.code > HTTPStatus.INTERNAL_SERVER_ERROR:  # that of a proxy
            raise ChannelError(
                f"{url} stays paused, what it holds is not known, the answer was {answer.code}: "
                f"{text}; repeat the update, and if that does not help start the server anew"
            )
        self._http.require("/resume", {})
        raise ChainError(f"{url} goes on as before: {text}")
