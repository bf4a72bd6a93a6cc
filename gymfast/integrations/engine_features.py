"""What servers of SGLang understand, by the version that they tell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gymfast.errors import ChannelError
from gymfast.integrations.engine_http import EngineHttp

FLAT_SINCE = (0, 5, 15)
"""Oldest SGLang in whose source flattened buckets over a process group were read and run."""
_TIMEOUT_S = 30.0


def why_not_flat(urls: Sequence[Any]) -> str | None:
    """Why engines at these addresses should not get flattened buckets; None if all of them can.

    One that does not tell its version, or an older one, would wait for other broadcasts than those
    that come.
    """
    for number, url in enumerate(urls):
        if not url:
            return f"engine {number} has no address to ask"
        try:
            info = EngineHttp(url, api_key=None, timeout_s=_TIMEOUT_S).call("/server_info").body
        except ChannelError as error:
            return f"engine {number}: {error}"
        version = info.get("version") if isinstance(info, dict) else None
        found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version))
        if found is None or tuple(map(int, found.groups())) < FLAT_SINCE:
            expected = ".".join(map(str, FLAT_SINCE))
            return (
                f"engine {number} says that it is version {version}, expected {expected} or later"
            )
    return None
