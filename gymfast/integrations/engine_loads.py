"""How engines load a version that they have pulled: what changed of it, or the whole checkpoint.

An SGLang server with our loader gets one message; all others reload their local checkpoint.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from gymfast.errors import ChainError, ChannelError
from gymfast.integrations.engines import Engines
from gymfast.integrations.sglang_client import FlaggedError, SGLangClient
from gymfast.integrations.sglang_messages import LOADER, LocalVersion
from gymfast.integrations.sglang_session import RefusedError, Session

_TIMEOUT_S = 1800.0  # of one call: a load of everything is one
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """The method of a handle that tells the address of its server, and where its answer has it."""

    method: str
    url: Callable[[Any], Any] = lambda answer: answer


@dataclass(frozen=True)
class LoadSettings:
    """Directories as the hosts of the engines see them, and how to find servers."""

    checkpoint: str
    source: str
    address: Address | None
    flushes_cache: bool


@dataclass
class Plan:
    """By the number of an engine: the way to its loader, or why it has to reload."""

    loaders: dict[int, tuple[SGLangClient, Session]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


class EngineLoads:
    """Has engines load versions. Not thread-safe."""

    def __init__(self, settings: LoadSettings) -> None:
        """Nothing is asked yet."""
        self._settings = settings
        self._run = secrets.token_hex(8)
        self._said: list[tuple[Any, str]] = []
        self._stopped: list[Any] = []

    def plan(self, engines: Engines) -> Plan:
        """What each engine is able to do; asked before it is paused."""
        plan = Plan()
        urls = self._urls(engines)
        with ThreadPoolExecutor(max(len(urls), 1), "gymfast-ask") as pool:
            answers = list(pool.map(self._ask, urls))
        for number, answer in enumerate(answers):
            if isinstance(answer, str):
                plan.reasons[number] = answer
            else:
                plan.loaders[number] = answer
        self._say(engines, plan)
        return plan

    def load(self, engines: Engines, plan: Plan, number: int) -> None:
        """Has paused engines load a version, all at once.

        An engine whose loader refuses, its weights as before, reloads its checkpoint. Raises
        EngineError for engines that failed.
        """
        calls = self._start_reloads(engines, plan.reasons, number)
        with ThreadPoolExecutor(max(len(plan.loaders), 1), "gymfast-load") as pool:
            jobs = {n: pool.submit(self._load, *way, number) for n, way in plan.loaders.items()}
        failures: dict[int, Exception] = {}
        refused: dict[int, str] = {}
        for engine, job in jobs.items():
            error = job.exception()
            if isinstance(error, _RefusedError) and engine in self.may_run(engines):
                _log.warning("engine %d reloads its checkpoint this time: %s", engine, error)
                refused[engine] = str(error)
            elif isinstance(error, Exception):
                failures[engine] = error
        self._stopped = [engines.handles[engine] for engine in failures]
        calls |= self._start_reloads(engines, refused, number)
        _, not_reloaded = engines.wait(calls)
        engines.require("update_weights_from_tensor", failures)
        engines.require("update_weights_from_disk", not_reloaded)

    def may_run(self, engines: Engines) -> set[int]:
        """Numbers of the engines that may generate.

        Not those whose loader failed: they are flagged, or gave no answer, and the next load heals
        them.
        """
        stopped = self._stopped
        handles = enumerate(engines.handles)
        return {n for n, handle in handles if not any(handle is one for one in stopped)}

    def _load(self, client: SGLangClient, session: Session, number: int) -> None:
        settings = self._settings
        version = LocalVersion(settings.checkpoint, settings.source, self._run, number)
        try:
            session.begin()
        except RefusedError as error:
            raise _RefusedError(str(error)) from error
        try:
            status = client.load_local(session, version, flush_cache=settings.flushes_cache)
        except FlaggedError:
            raise
        except ChainError as error:
            raise _RefusedError(str(error)) from error
        _log.info("%s loaded %d of %d tensors", client.url, status.num_loaded, status.num_tensors)

    def _start_reloads(
        self, engines: Engines, which: dict[int, str], number: int
    ) -> dict[int, Any]:
        return engines.start(
            "update_weights_from_disk",
            to=which,
            model_path=self._settings.checkpoint,
            weight_version=str(number),
        )

    def _urls(self, engines: Engines) -> list[str]:
        """The address of each server; empty where a handle does not tell."""
        address = self._settings.address
        if address is None:
            return [""] * len(engines.handles)
        able = {n for n, handle in enumerate(engines.handles) if hasattr(handle, address.method)}
        answers, _ = engines.wait(engines.start(address.method, to=able))
        urls = {number: address.url(answer) for number, answer in answers.items()}
        return [urls.get(number) or "" for number in range(len(engines.handles))]

    def _ask(self, url: str) -> tuple[SGLangClient, Session] | str:
        """The way to the loader of a server; why there is none."""
        if not url:
            return "its handle does not tell its address"
        try:
            client = SGLangClient(url, timeout_s=_TIMEOUT_S)
            session = client.session()
        except (ChannelError, ValueError) as error:
            return str(error)
        if session.has_draft:
            return f"{url} has a draft model, which the loader leaves alone"
        return client, session

    def _say(self, engines: Engines, plan: Plan) -> None:
        """One line per engine, and another one when that changes."""
        known, self._said = self._said, []
        for number, handle in enumerate(engines.handles):
            reason = plan.reasons.get(number, "")
            self._said.append((handle, reason))
            if any(one is handle and said == reason for one, said in known):
                continue
            if reason:
                _log.info("engine %d reloads its checkpoint at each update: %s", number, reason)
            else:
                _log.info("engine %d loads what changed, with %s", number, LOADER)


class _RefusedError(Exception):
    """The engine did not load, and its weights are as before."""
