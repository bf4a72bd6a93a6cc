"""The loaders of all engines, as rank 0 of a trainer speaks to them: over HTTP, all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gymfast.errors import ChainError, ChannelError, FormatError
from gymfast.integrations.engines import EngineError
from gymfast.integrations.sglang_client import SGLangClient
from gymfast.integrations.sglang_messages import Parts, Status
from gymfast.integrations.sglang_session import RefusedError, Session

_Engine = tuple[SGLangClient, Session]
_Kind = TypeVar("_Kind")


class PartEngines:
    """Engines that all have our loader. Not thread-safe."""

    def __init__(self, urls: Sequence[Any], timeout_s: float, *, ends_sessions: bool) -> None:
        """Asks each server what it is; `ends_sessions` False: the framework ends what it began.

        Raises ChannelError that says which engine has no loader, or cannot be told.
        """
        self._ends_sessions = ends_sessions
        self._is_begun = False
        self._held: list[Status] = []

        def find(url: Any) -> _Engine:
            if not url:
                raise ChannelError("its handle does not tell its address")
            client = SGLangClient(url, timeout_s=timeout_s)
            session = client.session()
            if session.has_draft:
                raise ChannelError(f"{url} has a draft model, which the loader leaves alone")
            return client, session

        self._engines: list[_Engine] = self._all(find, urls, "/server_info")

    def begin(self) -> str:
        """Makes the weights of paused engines loadable, and asks what they hold.

        Returns why a loader is not to be had. Raises EngineError for one that does not answer.
        """
        self._is_begun = True  # also in part
        answers = self._all(_begin, self._engines, "begin_weight_update")
        self._held = [status for status, _ in answers]
        return next((reason for _, reason in answers if reason), "")

    def why_not(self, held: Parts | None) -> str:
        """Why a delta cannot be sent; empty if all engines hold exactly this."""
        if held is None:
            return "no version was acknowledged"
        for (client, _), status in zip(self._engines, self._held, strict=True):
            if (status.version, status.root) != (held.version, held.root):
                found = f"version {status.version}" if status.version else "no version"
                return f"{client.url} holds {found}, version {held.version} was acknowledged"
        return ""

    def load(self, parts: Parts) -> str:
        """Has all engines load the parts; why not, if one refuses.

        Raises EngineError for an engine that does not answer.
        """

        def load(engine: _Engine) -> str:
            client, session = engine
            try:
                status = client.load_parts(session, parts)
            except ChainError as error:
                return str(error)
            if (status.version, status.root) != (parts.version, parts.root):
                return f"{client.url} acknowledges version {status.version}, {status.root[:16]}…"
            return ""

        answers = self._all(load, self._engines, "update_weights_from_tensor")
        return next((reason for reason in answers if reason), "")

    def end(self) -> None:
        """Makes the weights usable; engines stay paused. Raises EngineError."""
        if self._is_begun and self._ends_sessions:
            self._all(lambda engine: engine[1].end(), self._engines, "end_weight_update")
        self._is_begun = False

    def _all(self, step: Callable[[Any], _Kind], items: Sequence[Any], what: str) -> list[_Kind]:
        """What each engine answered. Raises EngineError that names the first one that did not."""
        with ThreadPoolExecutor(max(len(items), 1), "gymfast-parts") as pool:
            jobs = [pool.submit(step, item) for item in items]
        for number, job in enumerate(jobs):
            error = job.exception()
            if isinstance(error, ChannelError | ValueError):
                raise EngineError(
                    f"engine {number} of {len(jobs)} failed at {what}: {error}"
                ) from error
        return [job.result() for job in jobs]


def _begin(engine: _Engine) -> tuple[Status, str]:
    """What the loader of an engine says, and why it is not to be had."""
    client, session = engine
    try:
        session.begin()
        client.greet(session)
        status = client.status()
    except (RefusedError, FormatError) as error:
        return Status(""), f"{client.url}: {error}"
    return status, "" if status.update_id else status.error  # such as another protocol
