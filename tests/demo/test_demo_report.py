"""The report and the tables, from a made-up result."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET

import pytest
from demo_runs import sample_result
from rich.console import Console

from gymfast.demo.report import render_report
from gymfast.demo.svg import Scale, spread
from gymfast.demo.table import print_tables

MAX_REPORT_BYTES = 300_000


@pytest.mark.parametrize(
    ("num_versions", "zstd"), [(20, "zstandard"), (6, None), (200, "zstandard")]
)
def test_report_is_one_small_file_without_network(num_versions, zstd):
    page = render_report(sample_result(num_versions, zstd))
    assert len(page.encode()) < MAX_REPORT_BYTES
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?:|//[a-z]""", page)
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert "$" not in page


def test_report_has_light_dark_and_print_styles():
    page = render_report(sample_result())
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_report_has_four_plots_of_well_formed_svg():
    plots = re.findall(r"<svg.*?</svg>", render_report(sample_result()), re.DOTALL)
    assert len(plots) == 4
    for plot in plots:
        root = ET.fromstring(plot)
        assert root.attrib["aria-label"]
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for element in root.iter():
            for name, limit in (("x", width), ("cx", width), ("y", height), ("cy", height)):
                assert 0 <= float(element.attrib.get(name, 0)) <= limit


def test_report_escapes_what_the_machine_says():
    page = render_report(sample_result())
    assert "A &lt;CPU&gt; &amp; more" in page
    assert "A <CPU>" not in page


def test_report_names_kill_and_damage_and_labels_the_published_figures():
    page = render_report(sample_result())
    for text in ("SIGKILL in mid-apply", "stored object damaged", "5.73 (FP8)", "0.26 (BF16)"):
        assert text in page
    assert "INT4 weights change far less" in page


def test_report_says_so_when_something_wrong_was_served():
    page = render_report(sample_result(num_wrong=1))
    assert 'class="verdict wrong"' in page
    assert "live served rubbish" in page


@pytest.mark.parametrize("zstd", ["zstandard", None])
def test_tables_fit_80_columns(zstd):
    console = Console(width=80, record=True, file=io.StringIO())

    print_tables(sample_result(zstd=zstd), console)
    text = console.export_text()
    assert "…" not in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    assert ("not installed" in text) == (zstd is None)


def test_ticks_are_round_and_inside_the_range():
    assert Scale(0, 3.1, 0, 1).ticks(4) == [0, 1, 2, 3]
    assert Scale(150, 3000, 0, 1, is_log=True).ticks() == [200, 500, 1000, 2000]


def test_spread_keeps_order_gap_and_range():
    placed = spread([5, 4, 100, 99.5], 10, 0, 100)
    assert placed == [14, 4, 100, 90]
