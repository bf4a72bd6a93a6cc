"""An engine of scripted runs whose server is another process, with the loader of gymfast in it.

Its handle does over HTTP what the engine actors of slime and miles do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from integrations.sglang_process import Server
from slime_engine import METHODS, digest_of_bytes
from slime_stubs import Method

_FIELDS = {"pull_weights": ("target_version",)}  # what is not given by name


class ServerEngine:
    """As slime_engine.Engine; `loads` has the names of each load since the last time."""

    def __init__(self, base: Path, source: Path, local: Path, slime_source: Path | None) -> None:
        self.local, self.source = local, source
        self.options: dict[str, Any] = {"model_path": str(base)}
        if slime_source:
            self.options["slime_source"] = str(slime_source)
        self.server = Server("")
        self.calls: list[str] = []
        self.failures: list[tuple[str, str]] = []
        self.pauses: list[str] = []
        self.restart()
        methods = {name: Method(self._method(name)) for name in METHODS}
        methods["get_url"] = Method(lambda: self.server.url)
        methods["get_topology_info"] = Method(lambda: {"url": self.server.url})
        self.handle = type("Handle", (), methods)()

    def restart(self, **options: Any) -> None:
        self.server.reset(**self.options | options)

    def break_after(self, num_tensors: int | None) -> None:
        self.server.seen(break_after=num_tensors)

    def note(self) -> dict[str, Any]:
        """What the server did since the last time, and what it serves."""
        seen = self.server.seen()
        bits = {name: np.array(value, np.int16) for name, value in seen["weights"].items()}
        return {
            "calls": list(self.calls),
            "requests": seen["calls"],
            "loads": seen["loads"],
            "served": digest_of_bytes({name: value.tobytes() for name, value in bits.items()}),
            "is_paused": seen["is_paused"],
            "pauses": self.pauses,
            "version": self.server.weight_version,
        }

    def _method(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **fields: Any) -> Any:
            self.calls.append(name)
            fields |= dict(zip(_FIELDS.get(name, ()), given, strict=False))
            if name == "pull_weights":
                fields["local_checkpoint_dir"] = str(self.local)
                fields["source_dir"] = str(self.source)
            return self.server.http.require(f"/{name}", fields)

        return call
