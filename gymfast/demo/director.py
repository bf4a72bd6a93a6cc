"""Leads a run: starts the processes, kills one, repairs the damaged object, sees all heal."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from gymfast.demo import events
from gymfast.demo.audit import Audit, OutsideRead, read_from_outside
from gymfast.demo.damage import flip_byte
from gymfast.demo.narrator import Narrator
from gymfast.demo.options import DemoOptions
from gymfast.demo.processes import Child, Children, Clock, Message
from gymfast.demo.receiver import ReceiverPlan
from gymfast.demo.result import HarmKind, Incident, Mark, MarkKind
from gymfast.errors import GymfastError

RECEIVERS = ("live", "checkpoint")
VICTIM = "checkpoint"
OUTSIDE_READ_S = 1.0


@dataclass
class Log:
    """Everything that was told and done in a run."""

    audit: Audit = field(default_factory=Audit)
    timeline: list[Mark] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    ready: events.TrainerReady | None = None
    losses: list[tuple[int, float]] = field(default_factory=list)
    refusals: list[tuple[str, events.Refused]] = field(default_factory=list)
    num_starts: dict[str, int] = field(default_factory=dict)


@dataclass
class Harm:
    """Something bad in progress: when it was done, and who has not healed yet."""

    kind: HarmKind
    version: int
    at_s: float
    waiting: set[str]
    detail: str


class Director:
    """One run, from the first process to the moment when both receivers hold the last version."""

    def __init__(
        self,
        options: DemoOptions,
        folder: Path,
        children: Children,
        clock: Clock,
        narrator: Narrator,
    ) -> None:
        self.options = replace(options, keep=None)  # the processes need no more of it
        self.folder = folder
        self.store_path = folder / "store"
        self.checkpoint_path = folder / "checkpoint" / "model.safetensors"
        self.log = Log()
        self._children = children
        self._clock = clock
        self._narrator = narrator
        self._current: dict[str, Child] = {}
        self._killed: set[Child] = set()
        self._held: dict[str, int] = {}
        self._harms: list[Harm] = []
        self._damaged: events.Damaged | None = None
        self._refused: set[str] = set()
        self._last_version: int | None = None
        self._last_read_s = 0.0

    def run(self) -> Log:
        """Everything that happened.

        Raises GymfastError if a process fails, DeadlineError if the run takes too long.
        """
        options = msgspec.json.encode(self.options).decode()
        self._start("trainer", "gymfast.demo.trainer", [options, str(self.store_path)])
        self._start_receiver("live")
        self._start_receiver("checkpoint", hold_version=self.options.kill_version)
        for message in self._children.messages(self._clock):
            if message is not None:
                self._handle(message)
            self._read_from_outside()
            self._repair(max(self.log.audit.published, default=-1))
            if self._is_over():
                self._read_from_outside(now=True)  # at rest: every run is read at least once
                return self.log
        raise AssertionError("messages never end")

    def _start(self, name: str, module: str, arguments: list[str]) -> None:
        self._current[name] = self._children.start(name, module, arguments)
        self.log.num_starts[name] = self.log.num_starts.get(name, 0) + 1
        self._mark(name, "start")

    def _start_receiver(self, name: str, *, hold_version: int = 0) -> None:
        plan = ReceiverPlan(
            name=name,
            store_path=str(self.store_path),
            checkpoint_path=str(self.checkpoint_path),
            options=self.options,
            is_restart=name in self._current,
            hold_version=hold_version,
        )
        self._start(name, "gymfast.demo.receiver", [msgspec.json.encode(plan).decode()])

    def _handle(self, message: Message) -> None:
        child, event = message.child, message.event
        if event is None:
            if child not in self._killed and self._last_version is None:
                raise GymfastError(child.failure())
            return
        self._narrator.tell(child.name, event)
        match event:
            case events.Failed():
                raise GymfastError(f"the {child.name} process failed: {event.message}")
            case events.Holding():
                self._kill(child, event)
            case events.Served():
                self._note_served(child.name, event)
            case events.Refused():
                self._note_refused(child.name, event)
            case events.Attached():
                self._note_attached(child.name, event)
            case _:
                self._handle_trainer(event)

    def _handle_trainer(self, event: events.AnyEvent) -> None:
        match event:
            case events.TrainerReady():
                self.log.ready = event
            case events.WarmupStep():
                self.log.losses.append((event.step, event.loss))
            case events.Published():
                self.log.audit.add_published(event)
                self._mark("trainer", "publish", event.version, event.at_s)
            case events.Damaged():
                self._note_damage(event)
            case events.TrainerFinished():
                self._last_version = event.last_version

    def _kill(self, child: Child, event: events.Holding) -> None:
        """SIGKILL in the middle of an apply, look at what is left on disk, start again."""
        self._killed.add(child)
        self._mark(child.name, "hold", event.version, event.at_s)
        child.kill()
        self._mark(child.name, "kill", event.version)
        self._narrator.say(child.name, "killed with SIGKILL in the middle of it", "bold red")
        detail = self._what_is_left()
        self._harms.append(
            Harm("kill", event.version, self._clock.elapsed_s(), {child.name}, detail)
        )
        self._start_receiver(child.name)

    def _what_is_left(self) -> str:
        """What the killed receiver left on disk, in words."""
        read = self._read_from_outside(now=True)
        if read is None:
            return "it left no checkpoint"
        mix = "a version" if self.log.audit.is_known(read.fingerprint) else "a mix of two versions"
        declared = "unfinished" if read.version is None else f"version {read.version}"
        return f"it left {mix} on disk, marked as {declared}"

    def _note_attached(self, name: str, event: events.Attached) -> None:
        for harm in self._harms:
            if harm.kind == "kill" and event.is_restart and name in harm.waiting:
                held = "nothing" if event.version is None else f"version {event.version} whole"
                harm.detail += f"; the restarted process had {held}"

    def _note_damage(self, event: events.Damaged) -> None:
        self._damaged = event
        self._mark("trainer", "damage", event.version, event.at_s)
        self._harms.append(
            Harm("corruption", event.version, self._clock.elapsed_s(), set(RECEIVERS), "")
        )

    def _note_refused(self, name: str, event: events.Refused) -> None:
        self.log.refusals.append((name, event))
        self._mark(name, "refuse", event.version, event.at_s)
        if self._damaged is None:
            return
        self._refused.add(name)

    def _repair(self, newest: int) -> None:
        """Restore the damaged object once both have refused it and later versions wait behind it.

        `newest` is the newest published version.
        """
        damaged = self._damaged
        if damaged and self._refused == set(RECEIVERS) and newest > damaged.version:
            flip_byte(self.store_path / damaged.key, damaged.offset)
            self._mark("trainer", "repair", damaged.version)
            text = f"both refused version {damaged.version}: its byte is flipped back"
            self._narrator.say("demo", text, "bold green")
            self._damaged = None

    def _note_served(self, name: str, event: events.Served) -> None:
        self.log.audit.add_served(name, event)
        self._held[name] = event.version
        self._mark(name, "serve", event.version, event.at_s)
        for harm in self._harms:
            if name in harm.waiting and event.version >= harm.version:
                harm.waiting.remove(name)
                if not harm.waiting:
                    self._note_healed(harm, name)
        self._harms = [harm for harm in self._harms if harm.waiting]

    def _note_healed(self, harm: Harm, name: str) -> None:
        if harm.kind == "kill":
            detail = harm.detail
        else:
            count = len(self.log.refusals)
            detail = (
                f"{count} refusals; both went on serving the version before, until the object "
                "was restored"
            )
        self.log.incidents.append(
            Incident(
                kind=harm.kind,
                receiver=name if harm.kind == "kill" else "both",
                version=harm.version,
                at_s=harm.at_s,
                healed_at_s=self._clock.elapsed_s(),
                detail=detail,
            )
        )

    def _read_from_outside(self, *, now: bool = False) -> OutsideRead | None:
        """Read the checkpoint as another program would, about once a second."""
        elapsed_s = self._clock.elapsed_s()
        if not now and elapsed_s - self._last_read_s < OUTSIDE_READ_S:
            return None
        self._last_read_s = elapsed_s
        read = read_from_outside(self.checkpoint_path)
        if read is not None:
            self.log.audit.add_outside_read(read)
        return read

    def _is_over(self) -> bool:
        last = self._last_version
        return last is not None and all(self._held.get(name) == last for name in RECEIVERS)

    def _mark(
        self, who: str, what: MarkKind, version: int | None = None, at_s: float | None = None
    ) -> None:
        moment = self._clock.elapsed_s() if at_s is None else at_s - self._clock.start_s
        self.log.timeline.append(Mark(moment, who, what, version))
