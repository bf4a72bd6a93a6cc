from __future__ import annotations


def _wrap_ipv6(host):
    return f"[{host}]" if ":" in host else host
