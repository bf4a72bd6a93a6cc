"""Many requests of one sort: several at a time where the store is far, else one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from itertools import islice
from typing import TypeVar

from gymfast.stores.base import Store
from gymfast.sync.requests import MAX_REQUESTS, Pending, Requests

_T = TypeVar("_T")


def several(store: Store, works: Iterable[Callable[[], _T]]) -> Generator[Pending[_T], None, None]:
    """The answers in the order of `works`, which are begun in this order.

    Close it if not all are wanted: it ends once nothing is under way any more.
    """
    requests, rest = Requests(store), iter(works)
    num_ahead = MAX_REQUESTS if requests.is_far else 1
    waiting: deque[Pending[_T]] = deque()
    try:
        while True:
            wanted = islice(rest, num_ahead - len(waiting))
            waiting.extend(requests.start(work) for work in wanted)
            if not waiting:
                return
            yield waiting.popleft()
    finally:
        requests.close(is_finished=True)
