"""The phases of the run; each returns what became of it and stops at its deadline."""

from __future__ import annotations

import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.device import peers, sanitizer
from benchmarks.device.backends import compare_backend
from benchmarks.device.cases import NUM_RUNS, Case, cases
from benchmarks.device.checks import Tally
from benchmarks.device.damage import compare_damaged
from benchmarks.device.deadline import Deadline
from benchmarks.device.equality import Comparison
from benchmarks.device.memory import Device
from benchmarks.device.native import NativeCodec
from benchmarks.device.results import STATES, TARGET_DENSITY, Phase, Report
from benchmarks.device.speed import NativeTimes, Settings, States, Timer, Updates
from gymfast.delta.backends import select
from gymfast.delta.frame import PROFILES
from gymfast.delta.geometry import plan_geometry
from gymfast.errors import MissingDependencyError

NO_TIME = "skipped: no time"
LARGE_S = 60.0
PROFILE_ORDER = ("fast", "small", "auto")
_TINY_UNITS = 700  # of a case that is damaged
_BACKEND_UNITS = 150_000  # at most, of a case
_SANITIZED_ELEMENTS = "100000"
_SANITIZER_S = 15  # less time than this is not worth a start


@dataclass(frozen=True)
class Options:
    """What the command line asks for, beside the settings of the rows."""

    module: str
    num_elements: int
    large_units: int  # of one tensor that is compared
    part_units: int  # of the state that slow rows are timed on
    num_flips: int
    densities: tuple[float, ...]
    backends: tuple[str, ...]


@dataclass
class Session:
    """What the phases share."""

    options: Options
    settings: Settings
    codec: NativeCodec
    report: Report

    @property
    def device(self) -> Device:
        return self.codec.device


def equality(session: Session, deadline: Deadline) -> Phase:
    """Every case under every profile, byte for byte as on the CPU."""
    tally = Tally()
    for case in cases(_case_units(session), session.settings.seed):
        for profile in range(len(PROFILES)):
            if deadline.is_over or tally.is_hopeless:
                return _checked(session, "equality", tally, is_cut=True)
            Comparison(session.codec, case, profile, tally).run()
    for mode in tally.missing_modes():
        tally.problem(f"no block of mode {mode} in any case: the cases are too small")
    return _checked(session, "equality", tally)


def large(session: Session, deadline: Deadline) -> Phase:
    """One tensor of real size, over 4 GiB on a device: all its bytes, profile fast."""
    tally, num_units = Tally(), session.options.large_units
    if deadline.left_s < LARGE_S / 2:
        return Phase("large", "cut", NO_TIME)
    updates = Updates(replace(session.settings, num_units=num_units))
    base, new = (
        np.resize(sample, 2 * num_units) for sample in (updates.old(), updates.new(TARGET_DENSITY))
    )
    case = Case("large", base, new, plan_geometry("BF16", (num_units,)))
    Comparison(session.codec, case, PROFILES.index("fast"), tally, is_large=True).run()
    return _checked(session, "large", tally)


def damage(session: Session, deadline: Deadline) -> Phase:
    """Damaged bodies are refused with the numbers of the CPU."""
    tally = Tally()
    for case in cases(_TINY_UNITS, session.settings.seed + 1):
        for profile in range(len(PROFILES)):
            if deadline.is_over or tally.is_hopeless:
                return _checked(session, "damage", tally, is_cut=True)
            compare_damaged(session.codec, case, profile, session.options.num_flips, tally)
    return _checked(session, "damage", tally)


def speed(session: Session, deadline: Deadline) -> Phase:
    """The native calls and torch over the whole state, at every density."""
    updates = Updates(session.settings)
    states = States.of(session.device, session.settings, updates.old())
    timer = Timer(states, session.report)
    for density in session.options.densities:
        if deadline.is_over:
            return Phase("speed", "cut", f"{NO_TIME}: {100 * density:g} % and what follows")
        states.update(updates.new(density), density)
        timer.measure(("bound", "device copy"), states.copy, states.reset)
        for name in PROFILE_ORDER:
            if deadline.is_over:
                return Phase("speed", "cut", f"{NO_TIME}: {name} at {100 * density:g} %")
            native = NativeTimes(session.codec, timer, PROFILES.index(name))
            native.encode((f"gymfast cuda {name}", "encode"))
            native.apply((f"gymfast cuda {name}", "apply"))
            if name == "fast":
                native.digest(("gymfast cuda", "digest"))
        peers.time_torch(timer)
    return Phase("speed")


def backends(session: Session, deadline: Deadline) -> Phase:
    """`Backend` by name on tensors of the device, on small cases."""
    notes, states = [], []
    for name in session.options.backends:
        if missing := _missing_backend(name):
            notes.append(f"{name} skipped: {missing}")
            continue
        try:
            phase = _one_backend(session, name, deadline)
        except Exception as error:  # noqa: BLE001  the next back end still runs
            traceback.print_exc()
            phase = Phase(name, "failed", repr(error))
        states.append(phase.state)
        notes.append(f"{name}: {phase.state}. {phase.note}")
    worst = max(states, key=STATES.index, default="skipped")
    return Phase("backends", worst, "; ".join(notes))


def _one_backend(session: Session, name: str, deadline: Deadline) -> Phase:
    tally = Tally()
    num_units = min(_BACKEND_UNITS, _case_units(session))
    for case in cases(num_units, session.settings.seed + 2):
        for profile in range(len(PROFILES)):
            if deadline.is_over or tally.is_hopeless:
                return _checked(session, f"backend {name}", tally, is_cut=True)
            compare_backend(name, session.device, case, profile, tally)
    return _checked(session, f"backend {name}", tally)


def other_speed(session: Session, deadline: Deadline) -> Phase:
    """Pinned snapshots, back ends, whole frames and nvCOMP, at 1 % of a part of the state."""
    num_units = min(session.options.part_units, session.settings.num_units)
    settings = replace(session.settings, num_units=num_units)
    updates = Updates(settings)
    states = States.of(session.device, settings, updates.old())
    states.update(updates.new(TARGET_DENSITY), TARGET_DENSITY)
    part = Timer(states, session.report)
    failed, notes = [], []
    for name, run, is_ours in _other_rows(session, part):
        if deadline.is_over:
            notes.append(f"{name}: {NO_TIME}")
            continue
        try:
            run()
        except ModuleNotFoundError as error:
            notes.append(f"{name} skipped: {error}")
        except Exception as error:  # noqa: BLE001  a row that fails must not cost the others
            traceback.print_exc()
            (failed if is_ours else notes).append(f"{name} failed: {error!r}")
    return Phase("other speed", "failed" if failed else "done", "; ".join(failed + notes))


Job = tuple[str, Callable[[], None], bool]


def _other_rows(session: Session, part: Timer) -> Iterator[Job]:
    """Name, work and whether it is ours."""
    yield "pinned snapshot", lambda: _time_pinned(session, part), True
    for backend in session.options.backends:
        if _missing_backend(backend):
            continue
        yield f"select({backend!r})", lambda name=backend: peers.time_backend(part, name), True
        yield f"frames {backend}", lambda name=backend: peers.time_frames(part, name), True
        if backend == "cuda":
            yield "frames cuda, pinned", lambda: peers.time_frames(part, "cuda", "pinned"), True
    if not session.device.is_host:
        for algorithm, options in peers.NVCOMP:
            yield (
                f"nvcomp {algorithm}",
                lambda a=algorithm, o=options: peers.time_nvcomp(part, a, o),
                False,
            )


def _time_pinned(session: Session, part: Timer) -> None:
    """Encode against a snapshot in pinned host memory, which the device reads and writes."""
    size, is_pinned = part.states.old.numel(), not session.device.is_host
    snapshot = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
    native = NativeTimes(session.codec, part, PROFILES.index("fast"), snapshot)
    native.encode(("gymfast cuda fast", "encode, pinned snapshot"))


def sanitized(session: Session, deadline: Deadline) -> Phase:
    """A tiny equality run of the native module and of Triton under compute-sanitizer."""
    if not sanitizer.is_there():
        return Phase("sanitizer", "skipped", f"{sanitizer.PROGRAM} is not installed")
    subjects = [["--phases", "equality"]]
    if "triton" in session.options.backends and not _missing_backend("triton"):
        subjects.append(["--phases", "backends", "--backends", "triton"])
    notes, is_wrong = [], False
    for arguments in subjects:
        for tool in sanitizer.TOOLS:
            name = f"{tool} {arguments[-1]}"
            if deadline.left_s < _SANITIZER_S:
                notes.append(f"{name}: {NO_TIME}")
                continue
            command = ["--module", session.options.module, "--elements", _SANITIZED_ELEMENTS]
            command += arguments
            try:
                found = sanitizer.sanitize(tool, command, deadline.left_s)
            except subprocess.TimeoutExpired:
                notes.append(f"{name}: not done in time")
                continue
            except OSError as error:
                notes.append(f"{name} skipped: {error}")
                continue
            is_wrong |= bool(found)
            notes.append(f"{name}: {found or 'nothing found'}")
    return Phase("sanitizer", "different" if is_wrong else "done", "; ".join(notes))


PHASES: dict[str, tuple[Callable[[Session, Deadline], Phase], float]] = {
    "equality": (equality, 90.0),  # seconds it may take
    "damage": (damage, 20.0),
    "speed": (speed, 90.0),
    "large": (large, LARGE_S),
    "backends": (backends, 60.0),
    "other speed": (other_speed, 60.0),
    "sanitizer": (sanitized, 90.0),
}


def run_phases(session: Session, names: tuple[str, ...], deadline: Deadline, out: Path) -> None:
    """Runs phases one behind the other and writes the report after each."""
    for name in names:
        run, share_s = PHASES[name]
        start_s = time.monotonic()
        phase = Phase(name, "cut", NO_TIME)
        if not deadline.is_over:
            try:
                phase = run(session, deadline.phase(share_s))
            except Exception as error:  # noqa: BLE001  the phases that follow still run
                traceback.print_exc()
                phase = Phase(name, "failed", repr(error))
        phase.seconds = round(time.monotonic() - start_s, 2)
        print(f"phase {name}: {phase.state} in {phase.seconds} s. {phase.note}", flush=True)
        session.report.phases.append(phase)
        session.report.write(out)


def _case_units(session: Session) -> int:
    return max(64, session.options.num_elements // NUM_RUNS)


def _missing_backend(name: str) -> str:
    """Why a back end is not there; empty if it is."""
    try:
        select(name)
    except (MissingDependencyError, ValueError) as error:
        return str(error)
    return ""


def _checked(
    session: Session, name: str, tally: Tally, note: str = "", *, is_cut: bool = False
) -> Phase:
    """Keeps the tally; a difference counts more than a cut."""
    session.report.checks[name] = asdict(tally)
    print(
        f"{name}: {tally.num_runs} runs over {tally.num_elements:,} elements and "
        f"{tally.num_damaged} damaged bodies ({tally.num_other_numbers} refused for another "
        f"rule), {tally.num_problems} problems; "
        f"blocks by mode: {dict(tally.blocks_by_mode)}",
        flush=True,
    )
    if tally.num_problems:
        return Phase(name, "different", f"{tally.num_problems} problems: {tally.problems[0]}")
    if is_cut:
        return Phase(name, "cut", note or f"{NO_TIME}: the cases that follow")
    return Phase(name, "done", note)
