"""Times on links, against what was measured on a shaped one."""

from __future__ import annotations

import pytest

from gymfast.cost import Link, cold_tcp_s, warm_tcp_s, wire_s

WAN = Link(1, rtt_s=0.06)


def test_line_rate_is_bits_over_bits_per_second() -> None:
    assert wire_s(125_000_000, Link(1)) == 1.0


def test_a_warm_connection_takes_what_was_measured() -> None:
    """32.8 MB at 1 Gb/s and 60 ms took 0.323 s."""
    assert warm_tcp_s(32.8e6, WAN) == pytest.approx(0.323, rel=0.01)


def test_a_cold_connection_is_an_estimate_from_above() -> None:
    """The same transfer took 0.716 s: slow start by doubling is 12 % above it."""
    assert 0.716 < cold_tcp_s(32.8e6, WAN) < 0.716 * 1.15


def test_cold_is_warm_where_the_first_window_does() -> None:
    assert cold_tcp_s(14_600, WAN) == warm_tcp_s(14_600, WAN)
    assert cold_tcp_s(1e9, Link(1)) == warm_tcp_s(1e9, Link(1)) == wire_s(1e9, Link(1))


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate_gbps is"):
        Link(rate)
