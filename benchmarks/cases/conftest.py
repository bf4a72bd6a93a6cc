"""The driver's settings and its collector of rows, as a fixture."""

from __future__ import annotations

import pytest

from benchmarks.harness import Driver, Settings, keep_memory


def driver_of(config: pytest.Config) -> Driver:
    """The one that `python -m benchmarks` made; bare pytest gets a quick run."""
    for plugin in config.pluginmanager.get_plugins():
        if isinstance(plugin, Driver):
            return plugin
    driver = Driver(Settings.quick())
    config.pluginmanager.register(driver)
    return driver


def pytest_configure(config: pytest.Config) -> None:  # noqa: ARG001
    keep_memory()


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Driver:
    return driver_of(request.config)
