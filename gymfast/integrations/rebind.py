"""Classes of a framework that are replaced in place: found, checked, bound."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from gymfast.errors import GymfastError

Signatures = Mapping[str, tuple[str, ...]]
_NOT_ASKED = ("self", "_ray_trace_ctx")  # the second is added by ray.remote
_log = logging.getLogger(__name__)


def replace_class(
    module_name: str, name: str, expected: Signatures, make: Callable[[type], Any]
) -> Any:
    """Binds the name in the module to what `make` derives from its class; returns the new class.

    Does nothing the second time. Raises what `require_class` raises.
    """
    found = require_class(module_name, name, expected)
    if getattr(found, "gymfast_replaces", None) is not None:
        return found
    replacement = make(found)
    replacement.gymfast_replaces = found
    setattr(importlib.import_module(module_name), name, replacement)
    where = f"{module_name}.{name} of {describe(module_name.partition('.')[0])}"
    _log.info("gymfast replaced %s (leave the flag out to have it back)", where)
    return replacement


def require_class(module_name: str, name: str, expected: Signatures) -> Any:
    """The class of a framework, also one that Ray made an actor of, or what replaced it.

    Raises GymfastError, with what was found and expected, if module, class or one of its methods
    is not there or has other parameters.
    """
    framework, _, _ = module_name.partition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # the framework is there, something that it needs is not
        raise _unknown(framework, f"there is no module {error.name}", f"{module_name}") from error
    found = getattr(module, name, None)
    if getattr(found, "gymfast_replaces", None) is not None:
        return found
    found = getattr(found, "__ray_actor_class__", found)
    if not isinstance(found, type):
        raise _unknown(framework, f"{module_name} has no class {name}", "that class")
    for method, parameters in expected.items():
        _check_method(framework, found, method, parameters)
    return found


def describe(framework: str) -> str:
    """Name, version and, for a checkout, commit of an imported framework."""
    module = importlib.import_module(framework)
    try:
        version = metadata.version(framework)
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    folder = _folder_of(module)
    commit = commit_of(folder) if folder else ""
    return f"{framework} {version}{commit} at {folder or 'an unknown place'}"


def _check_method(framework: str, found: type, method: str, parameters: tuple[str, ...]) -> None:
    function = getattr(found, method, None)
    where = f"{found.__module__}.{found.__name__}.{method}"
    if function is None:
        raise _unknown(framework, f"there is no {where}", "that method")
    names = tuple(p for p in inspect.signature(function).parameters if p not in _NOT_ASKED)
    if names != parameters:
        raise _unknown(framework, f"{where} takes {names}", f"{parameters}")


def _unknown(framework: str, found: str, expected: str) -> GymfastError:
    try:
        what = describe(framework)
    except ModuleNotFoundError:
        what = f"no {framework} is installed here"
    return GymfastError(
        f"{what}: {found}, expected {expected}: this version is not known to gymfast; leave the "
        f"flag that names gymfast out to run without it, or see docs/integrations/{framework}.md "
        "for the versions that work"
    )


def _folder_of(module: ModuleType) -> Path | None:
    places = list(getattr(module, "__path__", []))
    return Path(places[0]).parent if places else None


def commit_of(folder: Path) -> str:
    """The commit of a checkout, as far as plain files tell."""
    head = folder / ".git" / "HEAD"
    if not head.is_file():
        return ""
    text = head.read_text().strip()
    reference = folder / ".git" / text.removeprefix("ref: ")
    if text.startswith("ref: ") and reference.is_file():
        text = reference.read_text().strip()
    return f" (commit {text[:9]})"
