"""What install finds, checks and says, without a framework."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

import pytest

from gymfast.errors import GymfastError
from gymfast.integrations.rebind import describe, replace_class
from gymfast.integrations.slime import install

EXPECTED = {"__init__": ("args",), "update_weights": ()}


class Found:
    def __init__(self, args: Any) -> None: ...

    def update_weights(self) -> None: ...


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package = ModuleType("frame")
    package.__path__ = []
    module = ModuleType("frame.updater")
    module.Updater = Found
    monkeypatch.setitem(sys.modules, "frame", package)
    monkeypatch.setitem(sys.modules, "frame.updater", module)
    return module


def derive(base: type) -> type:
    return type("Ours", (base,), {})


def test_the_class_is_replaced_once_with_one_line_in_the_log(
    module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = replace_class("frame.updater", "Updater", EXPECTED, derive)
    assert module.Updater is first
    assert issubclass(first, Found)
    assert replace_class("frame.updater", "Updater", EXPECTED, derive) is first
    found = describe("frame")
    text = f"gymfast replaced frame.updater.Updater of {found} (leave the flag out to have it back)"
    assert [record.message for record in caplog.records] == [text]


@pytest.mark.parametrize(
    ("where", "name", "expected", "text"),
    [
        ("frame.updater", "Other", EXPECTED, "frame.updater has no class Other"),
        ("frame.absent", "Updater", EXPECTED, "there is no module frame.absent"),
        ("absent.updater", "Updater", EXPECTED, "no absent is installed here"),
        ("frame.updater", "Updater", {"pop": ()}, r"there is no \S+Found.pop"),
        ("frame.updater", "Updater", {"__init__": ("args", "model")}, r"takes \('args',\)"),
    ],
)
def test_an_unknown_framework_is_refused_in_one_sentence(
    module: ModuleType, where: str, name: str, expected: Any, text: str
) -> None:
    with pytest.raises(GymfastError, match=text) as caught:
        replace_class(where, name, expected, derive)
    assert "leave the flag that names gymfast out" in str(caught.value)
    assert module.Updater is Found


def test_an_unknown_option_is_refused() -> None:
    args = Namespace(update_weight_mode="delta", gymfast_thread=2)
    with pytest.raises(ValueError, match="option gymfast_thread is unknown, expected one of"):
        install(args)


def test_an_unknown_place_for_the_snapshot_is_refused() -> None:
    args = Namespace(update_weight_mode="delta", gymfast_snapshot="gpu")
    with pytest.raises(ValueError, match="gymfast_snapshot is 'gpu', expected one of auto, beside"):
        install(args)
