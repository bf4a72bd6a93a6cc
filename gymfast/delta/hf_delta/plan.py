"""What a pull is to do, decided before anything is changed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from gymfast.delta.hf_delta.check import RESEED
from gymfast.delta.hf_delta.digests import DEFAULT_ALGORITHM
from gymfast.delta.hf_delta.state import LocalState
from gymfast.delta.hf_delta.version import open_version, version_name
from gymfast.errors import ChainError, FormatError, NotFoundError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """The full version to begin with, if any, its number, and the deltas that follow it."""

    seed: Path | None
    start: int
    deltas: tuple[Path, ...]
    algorithm: str


def make_plan(held: LocalState | None, base: Path, source: Path, target: int) -> Plan:
    """The plan that leads to the target: the newest full version that helps, then all deltas.

    Every delta version on the way is opened and checked, but for its frames. Raises NotFoundError,
    FormatError, ChainError.
    """
    floor = 0 if held is None else held.version
    start, deltas, algorithm = target, [], DEFAULT_ALGORITHM
    while start > floor:
        path = source / version_name(start)
        version = open_version(path)
        if version is None:
            break
        with version:
            algorithm = version.algorithm
        deltas.append(path)
        start -= 1
    seed = None
    if held is None or start > floor:
        seed = source / version_name(start) if start > 0 else base
    else:
        start = floor
    return Plan(seed, start, tuple(reversed(deltas)), algorithm)


def check_run(local: Path, held: LocalState, source: Path, target: int) -> None:
    """Raises ChainError if the version held is not the one of that number in the source.

    A run that began again with the same directories would otherwise find nothing to do.
    """
    if target < held.version:
        _log.warning(
            "%s holds version %d, so a pull of %d changes nothing; if the run began again, reseed",
            local,
            held.version,
            target,
        )
    path = source / version_name(held.version)
    if held.digests is None or not path.is_dir():
        return
    try:
        version = open_version(path)
    except (FormatError, NotFoundError) as error:  # being removed: it is not needed any more
        _log.info("%s is not compared with version %d held: %s", path, held.version, error)
        return
    if version is None:
        return
    with version:
        for tensor in version.tensors.values():
            found = held.digests.get(tensor.name)
            if found is None or (
                found.startswith(f"{version.algorithm}:")
                and found != f"{version.algorithm}:{tensor.digest}"
            ):
                raise ChainError(
                    f"{local} holds another version {held.version} than {path}: tensor "
                    f"{tensor.name!r} has digest {found}, there {tensor.digest}: the run began "
                    f"again, or published it anew; {RESEED}"
                )
