"""What the bytes of a key look like."""

from __future__ import annotations

import re

_PEM = re.compile(rb"-----BEGIN |-----END | KEY-----")


def is_pem(key: bytes) -> bool:
    """True for text in PEM, whole or not: no such bytes are ever a shared key."""
    return _PEM.search(key.replace(b"\0", b"")) is not None
