"""Groups of ranks in threads, for tests of channels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gymfast.channels import Control, Hub, connect


def in_threads(*works: Callable[[], Any], timeout_s: float = 60) -> list[Any]:
    """What each work returned, or the exception it raised."""
    results: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except Exception as error:  # noqa: BLE001
            results[number] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a rank hangs"
    return results


class Controls:
    """Control planes of some ranks in this process, formed."""

    def __init__(self, num_ranks: int, **options: Any) -> None:
        self.hub = Hub(**options)
        key = options.get("key")
        address = ("127.0.0.1", self.hub.port)
        others = in_threads(
            *(lambda r=rank: connect(address, r, key=key) for rank in range(1, num_ranks))
        )
        self.all: list[Control] = [self.hub.control, *others]
        self.hub.control.wait_for(num_ranks, 10)
        self.form()

    def form(self) -> list[Any]:
        return in_threads(*(lambda c=control: c.form(10) for control in self.all))

    def close(self) -> None:
        for control in self.all[1:]:
            control.close()
        self.hub.close()
