"""Markers, GPU handling, and the rule that nothing is skipped without a committed reason."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from pathlib import Path

import pytest

ALLOWED_SKIPS = Path(__file__).parent / "allowed_skips.txt"
_unlisted_skips: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="a skipped gpu test is a failure")
    parser.addoption(
        "--strict-skips",
        action="store_true",
        default=os.environ.get("CI") == "true",
        help="fail on a skip whose reason is not in tests/allowed_skips.txt (on where CI=true)",
    )


def pytest_configure() -> None:
    # A shell starts background jobs with SIGINT ignored, and children inherit that: tests that
    # interrupt a process would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _num_gpus() -> int:
    """CUDA devices that the driver reports; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or config.getoption("--require-gpu") or _num_gpus():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    must_run = item.get_closest_marker("gpu") and item.config.getoption("--require-gpu")
    if must_run and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped under --require-gpu: {report.longrepr}"
    return report


def _note_skip(report: pytest.CollectReport | pytest.TestReport) -> None:
    if not report.skipped:
        return
    if hasattr(report, "wasxfail"):
        reason = report.wasxfail
    else:
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
    allowed = [line for line in ALLOWED_SKIPS.read_text().splitlines() if line and line[0] != "#"]
    if not any(re.fullmatch(pattern, reason) for pattern in allowed):
        _unlisted_skips.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_skip(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _unlisted_skips and session.config.getoption("--strict-skips") and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _unlisted_skips and terminalreporter.config.getoption("--strict-skips"):
        terminalreporter.section("skipped for a reason that tests/allowed_skips.txt does not list")
        for line in _unlisted_skips:
            terminalreporter.line(line)
