"""A framework as it is installed here, found without importing it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from gymfast.integrations.rebind import commit_of

_ASSIGNED = re.compile(r"""(?:^|[\s(,])(?:__version__|version)\s*=\s*["'](\d[^"']*)["']""")
_PARTS = re.compile(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", re.MULTILINE)  # of NeMo-RL
_NUMBER = re.compile(r"\d+(?:\.\d+)+")
_VERSION_FILES = (
    *("../pyproject.toml", "../setup.py", "../version.txt", "../VERSION"),
    *("VERSION", "version/version", "_version.py", "version.py", "package_info.py", "__init__.py"),
)


@dataclass(frozen=True)
class Installed:
    """A package that an import would find; an empty text is what is not known."""

    folder: Path
    version: str
    commit: str

    @property
    def release(self) -> tuple[int, ...]:
        """The numbers of the version; empty if it is not known."""
        found = _NUMBER.match(self.version)
        return tuple(int(part) for part in found[0].split(".")) if found else ()


def find_installed(package: str, distributions: Sequence[str]) -> Installed | None:
    """The package as an import would find it, None if it would find none.

    The version is that of the folder if it is a checkout, else that of the distribution. A folder
    of that name without an __init__.py is no package.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0])
    is_checkout = any((folder.parent / n).exists() for n in ("pyproject.toml", "setup.py", ".git"))
    texts = [_version_of_distribution(distributions), _version_in(folder)]
    version = next(filter(None, reversed(texts) if is_checkout else texts), "")
    return Installed(folder, version, commit_of(folder.parent))


def _version_of_distribution(names: Sequence[str]) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _version_in(folder: Path) -> str:
    for name in _VERSION_FILES:
        file = folder / name
        if file.is_file() and (version := _version_of_text(file.name, file.read_text())):
            return version
    return ""


def _version_of_text(name: str, text: str) -> str:
    if name.endswith(".toml"):
        version = tomllib.loads(text).get("project", {}).get("version", "")
        return version if isinstance(version, str) else ""
    if not name.endswith(".py"):
        return text.strip() if _NUMBER.match(text.strip()) else ""
    if found := _ASSIGNED.search(text):
        return found[1]
    parts = dict(_PARTS.findall(text))
    return ".".join(parts[part] for part in ("MAJOR", "MINOR", "PATCH")) if len(parts) == 3 else ""
