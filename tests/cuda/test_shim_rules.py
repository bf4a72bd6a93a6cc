"""The rules of payloads and the golden frames of tests/delta, on the CUDA kernels."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.usefixtures("selectable")]

# What is about parsers or files alone says nothing about a back end.
NOT_ABOUT_BACKENDS = {
    "test_every_file_is_listed_and_every_case_has_its_file",
    "test_the_parsers_alone_refuse_what_breaks_the_structure",
    "test_the_worked_example_of_the_specification_is_the_golden_frame",
    "test_golden_weights_use_every_exponent_class",
}


def _load(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "delta" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"cuda_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


for _module in (_load("test_spec_rules_payload"), _load("test_golden")):
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and _name not in NOT_ABOUT_BACKENDS:
            globals()[_name] = _test
