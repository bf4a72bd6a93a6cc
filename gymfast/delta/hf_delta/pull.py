"""A local checkpoint brought up to a published version: the engine-side pull, crash-safe."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from gymfast.delta.checkpoint_stream import Meter, Progress
from gymfast.delta.files import os_errors
from gymfast.delta.hf_delta.apply import apply_version, require_tensors
from gymfast.delta.hf_delta.check import check_names, check_tensors, digest_of
from gymfast.delta.hf_delta.plan import Plan, check_run, make_plan
from gymfast.delta.hf_delta.seed import check_local, num_bytes_to_copy, open_seed, reset
from gymfast.delta.hf_delta.state import LocalState, SyncFolder
from gymfast.delta.hf_delta.version import DeltaVersion, open_version
from gymfast.delta.journal import recover
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.delta.state import num_threads
from gymfast.errors import CoverageError, FormatError, GymfastError, NotFoundError

PreReadHook = Callable[[str, int], object]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PullReport:
    """What a pull did: the version held now, the full version it began with, the deltas applied."""

    version: int
    seed: Path | None
    applied: tuple[int, ...]
    num_changed: int
    recovered: bool


def pull(
    local: Path | str,
    base: Path | str,
    source: Path | str,
    target: int,
    *,
    pre_read_hook: PreReadHook | str | None = None,
    reseed: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> PullReport:
    """Brings the checkpoint in `local` to version `target` of those published in `source`.

    A fresh directory begins with the newest full version up to the target, or with `base`, which
    is version 0; a full version newer than the one held replaces it; then the deltas follow in
    order. A target that is not above the version held changes nothing. The hook (or its import
    path) is called with source and target before anything is read. `reseed` begins again although
    a version is held. Several processes may call this for one directory: one works, the others
    wait and find nothing to do.
    A killed pull leaves a directory that the next one, of whatever target, brings to exact bytes.
    Raises ValueError for a target below 0; NotFoundError for a version that is not there,
    FormatError (also as ChecksumError, CoverageError) and ChainError for one that is damaged or
    does not fit, all before anything is written for it; GymfastError for what the system says.
    """
    local, base, source = Path(local), Path(base), Path(source)
    if target < 0:
        raise ValueError(f"target version {target}, expected 0 or more")
    if target > 0 and pre_read_hook is not None:
        _call_hook(pre_read_hook, source, target)
    folder = SyncFolder(local)
    with os_errors("pull into", local):
        local.mkdir(parents=True, exist_ok=True)
        check_local(folder, base)
    with folder.locked():
        recovered, held = (False, None) if reseed else _settle(folder)
        if held is not None:
            check_run(local, held, source, target)
        plan = make_plan(held, base, source, target)
        report = _carry_out(folder, plan, held, num_threads(threads), progress)
    return replace(report, recovered=recovered)


def load_hook(path: str) -> PreReadHook:
    """The function of an import path such as `package.module.function`.

    Raises ValueError if there is none.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"pre-read hook {path!r} has no module, expected MODULE.FUNCTION")
    try:
        hook: PreReadHook = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"pre-read hook {path!r} cannot be imported: {error}") from error
    return hook


def _call_hook(hook: PreReadHook | str, source: Path, target: int) -> None:
    function = load_hook(hook) if isinstance(hook, str) else hook
    try:
        function(str(source), target)
    except Exception as error:
        raise GymfastError(
            f"pre-read hook {hook} failed for version {target} of {source}: "
            f"{type(error).__name__}: {error}; nothing was read or changed"
        ) from error


def _carry_out(
    folder: SyncFolder,
    plan: Plan,
    held: LocalState | None,
    threads: int,
    progress: Progress | None,
) -> PullReport:
    with ExitStack() as stack:
        seed = stack.enter_context(open_seed(plan.seed)) if plan.seed is not None else None
        meter = Meter(progress, _total_bytes(seed, plan, folder))
        if seed is not None:
            for path in plan.deltas:
                with _open_delta(path) as version:
                    require_tensors(seed, version)
            check_local(folder, seed.path)
            reset(folder, seed, plan.start, plan.algorithm, meter)
            held = folder.read()
    assert held is not None
    held, num_changed = _follow(folder, held, plan, threads, meter)
    applied = tuple(range(plan.start + 1, plan.start + 1 + len(plan.deltas)))
    return PullReport(held.version, plan.seed, applied, num_changed, recovered=False)


def _settle(folder: SyncFolder) -> tuple[bool, LocalState | None]:
    """Completes what a killed pull was about; whether there was anything, and the state held."""
    recovered = recover(folder.local)
    held = folder.read()
    if held is not None:
        return recovered, held
    for staged in folder.staged():
        if _is_exactly(folder.local, staged):
            _log.info("%s holds version %d after a killed pull", folder.local, staged.version)
            folder.commit(staged.version)
            return True, staged
    return recovered, None


def _is_exactly(local: Path, state: LocalState) -> bool:
    assert state.digests is not None
    try:
        with Checkpoint.open(local) as checkpoint:
            check_names(checkpoint, state.digests, local)
            check_tensors(checkpoint, state.digests, checkpoint.names, local, Meter(None, 0))
    except (FormatError, NotFoundError) as error:
        _log.info("%s does not hold version %d: %s", local, state.version, error)
        return False
    return True


def _follow(
    folder: SyncFolder, held: LocalState, plan: Plan, threads: int, meter: Meter
) -> tuple[LocalState, int]:
    """Applies the deltas; tensors that the first one does not name are checked before it."""
    num_changed = 0
    for number, path in enumerate(plan.deltas):
        with _open_delta(path) as version:
            if number == 0 and plan.seed is None:
                held = _check_unnamed(folder, held, version, meter)
            held, count = apply_version(folder, held, version, threads, meter)
            num_changed += count
    return held, num_changed


def _check_unnamed(
    folder: SyncFolder, held: LocalState, version: DeltaVersion, meter: Meter
) -> LocalState:
    """The state with digests of all tensors but those that the version names and proves itself."""
    local = folder.local
    with Checkpoint.open(local) as checkpoint:
        require_tensors(checkpoint, version)
        unnamed = [name for name in checkpoint.names if name not in version.tensors]
        if held.digests is not None:
            check_names(checkpoint, held.digests, local)
            check_tensors(checkpoint, held.digests, unnamed, local, meter)
            return held
        _log.info("%s was written by other code: its digests are noted from here on", local)
        digests = {n: digest_of(checkpoint, n, version.algorithm, meter) for n in unnamed}
        return LocalState(held.version, digests)


def _open_delta(path: Path) -> DeltaVersion:
    version = open_version(path)
    if version is None:
        raise CoverageError(f"{path} became a full version while it was read: pull again")
    return version


def _total_bytes(seed: Checkpoint | None, plan: Plan, folder: SyncFolder) -> int:
    if seed is None and not plan.deltas:
        return 0
    if seed is not None:
        weights = sum(seed.spec(name).num_bytes for name in seed.names)
        return num_bytes_to_copy(seed) + weights * (1 + len(plan.deltas))
    with Checkpoint.open(folder.local) as held:
        return len(plan.deltas) * sum(held.spec(name).num_bytes for name in held.names)
