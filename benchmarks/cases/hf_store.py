"""Put and fetch of version directories through a store, and the sizes of the directories."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.cases.conftest import driver_of
from benchmarks.cases.delta import (
    Case,
    coded_of,
    sources,
    subject_of,
    time_bound,
    time_codec,
)
from benchmarks.harness import Driver, Settings
from benchmarks.hf_delta import HF_DELTA
from benchmarks.hf_store import HF_STORE

BOUNDS = ("memcpy",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = list(plan(driver_of(metafunc.config).settings))
    metafunc.parametrize("case", cases, ids=[str(case) for case in cases])


def plan(settings: Settings) -> Iterator[Case]:
    for source in sources(settings):
        is_for_speed = source.kind != "pairs"
        if is_for_speed:
            yield from (Case(source, None, op, 1) for op in BOUNDS)
        yield from (Case(source, codec, "size", 1) for codec in HF_DELTA)
        for codec in HF_STORE:
            if not is_for_speed:
                yield Case(source, codec, "size", 1)
                continue
            for threads in settings.threads:
                yield from (Case(source, codec, op, threads) for op in ("encode", "apply"))


@pytest.fixture(scope="session", autouse=True)
def _release() -> Iterator[None]:
    yield
    coded_of.cache_clear()
    subject_of.cache_clear()


def test_hf_store(benchmark: Any, driver: Driver, case: Case) -> None:
    subject = subject_of(case.source, driver.settings)
    benchmark.group = case.source.name
    row = (time_codec if case.codec else time_bound)(benchmark, driver.settings, subject, case)
    assert row is not None
    benchmark.extra_info.update(row.as_dict())
    driver.add(row)
