"""Child processes of the demo: events in, an end for all of them whatever happens."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import msgspec

from gymfast.demo.events import AnyEvent, parse
from gymfast.errors import DeadlineError

END_WAIT_S = 5.0
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""torch's threads share the cores with the receivers: they must not spin while they wait."""


@dataclass(frozen=True)
class Message:
    """An event and the child it came from; None as event: the child has ended."""

    child: Child
    event: AnyEvent | None


class Child:
    """One process of the demo; it ends itself when this one, which holds its stdin, is gone."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        inbox: queue.Queue[Message],
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env={**ENVIRONMENT, **os.environ},
            )
        self._reader = threading.Thread(target=self._read, args=(inbox,), daemon=True)
        self._reader.start()

    def kill(self) -> None:
        """SIGKILL: nothing of the process runs any further."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Close its stdin, wait a moment, then kill."""
        if self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join(END_WAIT_S)
        if self.process.stdout:
            self.process.stdout.close()

    def failure(self) -> str:
        """Why it ended, with the last line of what it wrote to stderr."""
        code = self.process.poll()
        reason = (
            f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        )
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
        return (
            f"the {self.name} process ended with {reason}: {last} "
            "(run again with --keep DIR to see its whole log)"
        )

    def _read(self, inbox: queue.Queue[Message]) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed while reading: the demo is ending
            for line in self.process.stdout:
                with contextlib.suppress(msgspec.DecodeError):  # cut short by a SIGKILL
                    inbox.put(Message(self, parse(line)))
        self.process.wait()
        inbox.put(Message(self, None))


class Children:
    """All processes of one run; leaving the block ends them."""

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._inbox: queue.Queue[Message] = queue.Queue()
        self._children: list[Child] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with uninterrupted():
            for child in self._children:
                child.end()

    def start(self, name: str, module: str, arguments: Sequence[str]) -> Child:
        """Start `python -m module arguments`."""
        log = self._log_folder / f"{name}.log"
        with uninterrupted():
            child = Child(name, module, arguments, log, self._inbox)
            self._children.append(child)
        return child

    def messages(self, clock: Clock) -> Iterator[Message | None]:
        """What the children tell, as it comes; None at least every 100 ms.

        Raises DeadlineError when the clock has run out.
        """
        while True:
            clock.check()
            try:
                yield self._inbox.get(timeout=0.1)
            except queue.Empty:
                yield None


class Clock:
    """Seconds since the start of the run, and the moment when it has to be over."""

    def __init__(self, limit_s: float) -> None:
        self.start_s = time.monotonic()
        self.limit_s = limit_s

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start_s

    def check(self) -> None:
        """Raises DeadlineError if the limit has passed."""
        if self.elapsed_s() > self.limit_s:
            raise DeadlineError(
                f"the demo did not end within {self.limit_s:.0f} s: the machine is very busy, "
                "or something hangs; run it again with --keep DIR and look at the logs there"
            )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back until the block has ended, so that no process is lost in the middle."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Ctrl-C never arrives here
        return
    num_interrupts = 0

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signal's
        nonlocal num_interrupts
        num_interrupts += 1

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if num_interrupts:
        raise KeyboardInterrupt


def end_with_parent() -> None:
    """End this process as soon as its stdin is closed, which its parent's death does as well."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait, daemon=True).start()
