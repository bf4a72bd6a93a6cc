"""Is a checkpoint exactly the state before or after a frame? Compares digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from gymfast.errors import ChecksumError, CoverageError

if TYPE_CHECKING:
    from gymfast.delta.records import Digest, FrameInfo

_BASE_MISMATCH, _RESULT_MISMATCH, _COVERAGE, _ROOT_MISMATCH = 60, 61, 62, 63
Entry = tuple[str, str, tuple[int, ...], "Digest"]


def check_base(path: Path, info: FrameInfo, entries: Iterable[Entry]) -> bytes:
    """The root of a checkpoint that is the base of the frame.

    Raises CoverageError or ChecksumError that names the first tensor that differs.
    """
    digests = {t.name: t.base_digest for t in info.tensors}
    expected = {name: digest for name, digest in digests.items() if digest is not None}
    maybe = {t.name for t in info.tensors if t.status == "alias"}
    text = f"{path} is not the base of this frame"
    return _check(text, expected, maybe, entries, (info.base_root, _BASE_MISMATCH))


def check_result(
    path: Path, info: FrameInfo, entries: Iterable[Entry], what: str = "the result of this frame"
) -> bytes:
    """The root of a checkpoint that is the result of the frame; raises like `check_base`."""
    digests = {t.name: t.new_digest or t.base_digest for t in info.tensors}
    expected = {t.name: digests[t.target or t.name] for t in info.tensors if t.status != "removed"}
    text = f"{path} is not {what}"
    return _check(text, expected, set(), entries, (info.new_root, _RESULT_MISMATCH))


def _check(
    text: str,
    expected: Mapping[str, Digest | None],
    maybe: set[str],
    entries: Iterable[Entry],
    wanted: tuple[bytes, int],
) -> bytes:
    from gymfast.delta.records import root_of

    root, number = wanted
    seen: list[Entry] = []
    for entry in entries:
        name, _, _, digest = entry
        seen.append(entry)
        if name not in expected and name not in maybe:
            raise CoverageError(f"{text}: {_unknown(name, list(expected))}", _COVERAGE)
        if expected.get(name, digest) != digest:
            found, stated = _hex(digest), _hex(expected[name])
            raise ChecksumError(
                f"{text}: tensor {name!r} has digest {found}, the frame says {stated}", number
            )
    missing = sorted(expected.keys() - {name for name, *_ in seen})
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CoverageError(f"{text}: it has no tensor {missing[0]!r}{more}", _COVERAGE)
    found_root = root_of(seen)
    if found_root != root:
        raise ChecksumError(
            f"{text}: the bytes are equal, but dtype, shape or a tied tensor differs: root "
            f"{found_root.hex()}, the frame says {root.hex()}",
            _ROOT_MISMATCH,
        )
    return found_root


def _unknown(name: str, known: list[str]) -> str:
    nearest = get_close_matches(name, known, n=1)
    hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
    return f"it has a tensor {name!r} that the frame does not name{hint}"


def _hex(digest: Digest | None) -> str:
    return "none" if digest is None else f"{digest[0]:016x}{digest[1]:016x}"
