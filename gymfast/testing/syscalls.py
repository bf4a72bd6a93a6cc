"""Fails or kills a function at each of its system calls in turn (Linux, strace).

    with SyscallFaults(Path(__file__), "work") as faults:
        for call in faults.trace(folder):
            outcome = faults.run(folder, fault=call.killed())

The file is imported once in a helper process; each run is a fork of it, so a point costs tens of
milliseconds. The function takes strings and returns None or text. Calls are counted per thread:
keep the function to one thread.
Source: reliability.md section 7 (strace 6.1 `inject`).
"""

from __future__ import annotations

import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn

# What touches files; "?" lets strace skip names that this processor does not have.
_TRACED = re.findall(
    r"\w+",
    "open openat creat close read pread64 readv preadv write writev pwrite64 pwritev fsync "
    "fdatasync sync_file_range rename renameat renameat2 link linkat symlink unlink unlinkat mkdir "
    "mkdirat rmdir stat fstat lstat newfstatat statx getdents64 statfs fstatfs truncate ftruncate "
    "fallocate fcntl flock lseek readlink readlinkat access faccessat faccessat2 utimensat chmod "
    "fchmod copy_file_range sendfile",
)
_MARK = "getppid"  # brackets the function in the trace; never a point
_LINE = re.compile(r"(?:\d+ +)?(\w+)\((.*)\) += (.*)")


@dataclass(frozen=True)
class Fault:
    """What strace does: `inject` expressions."""

    name: str
    injections: tuple[str, ...]


@dataclass(frozen=True)
class Syscall:
    """The `occurrence`-th call (from 1) of that name in the function, after `before` others."""

    name: str
    occurrence: int
    arguments: str
    before: tuple[tuple[str, int], ...]

    def killed(self) -> Fault:
        """SIGKILL when the call is entered: it has no effect."""
        return Fault(f"kill at {self}", (f"{self.name}:signal=KILL:when={self.occurrence}",))

    def failed(self, error: str) -> Fault:
        """The error once, without effect."""
        return Fault(f"{error} at {self}", (f"{self.name}:error={error}:when={self.occurrence}",))

    def failed_from_here(self, error: str) -> Fault:
        """The error from this call on, in every call that touches files."""
        counts = dict(self.before)
        return Fault(
            f"{error} from {self}",
            tuple(f"?{name}:error={error}:when={counts.get(name, 0) + 1}+" for name in _TRACED),
        )

    def __str__(self) -> str:
        return f"{self.name} #{self.occurrence} ({self.arguments})"


@dataclass(frozen=True)
class Outcome:
    """How a run ended: killed, or `error` (class name and text), or `result`."""

    was_killed: bool = False
    error: tuple[str, str] | None = None
    result: str | None = None


class SyscallFaults:
    """Runs `function` of `file` in fresh processes with a fault at one system call."""

    def __init__(self, file: Path, function: str) -> None:
        self._command = [sys.executable, "-m", __spec__.name, str(file), function]
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> SyscallFaults:
        self._server = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.communicate()

    def trace(self, *arguments: str) -> list[Syscall]:
        """The calls of a run without fault; RuntimeError if that run fails."""
        with tempfile.NamedTemporaryFile("r") as log:
            outcome = self._run(arguments, ["-y", "-s", "64", "-o", log.name])
            lines = log.read().splitlines()
        if outcome.error or outcome.was_killed:
            raise RuntimeError(f"the function fails without a fault: {outcome}")
        return _between_marks(lines)

    def run(self, *arguments: str, fault: Fault) -> Outcome:
        """The outcome of one run with that fault."""
        options = [f"--inject={injection}" for injection in fault.injections]
        return self._run(arguments, ["-o", os.devnull, *options])

    def _run(self, arguments: tuple[str, ...], options: list[str]) -> Outcome:
        pid = int(self._ask(json.dumps(arguments)))
        names = ",".join(f"?{name}" for name in [*_TRACED, _MARK])
        command = ["strace", "-f", "-p", str(pid), f"--trace={names}", *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr is not None
            said = strace.stderr.readline()
            answer = json.loads(self._ask("go" if "attached" in said else "stop"))
            said += strace.stderr.read()
        if "attached" not in said:
            raise RuntimeError(f"strace could not attach: {said.strip()}")
        error = answer["error"]
        return Outcome(answer["was_killed"], tuple(error) if error else None, answer["result"])

    def _ask(self, line: str) -> str:
        assert self._server is not None, "use it in a with statement"
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(line + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the helper process died: {' '.join(self._command)}")
        return answer


def _between_marks(lines: list[str]) -> list[Syscall]:
    counts: Counter[str] = Counter()
    calls: list[Syscall] = []
    is_inside = False
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        name = match[1]
        if name == _MARK:
            is_inside = not is_inside
            continue
        before = tuple(counts.items())
        counts[name] += 1
        if is_inside:
            calls.append(Syscall(name, counts[name], match[2], before))
    return calls


def _serve(file: str, function: str, commands: IO[str]) -> None:
    """Answers each line of arguments with a process id, and "go" with how that process ended."""
    work = runpy.run_path(file)[function]
    for line in commands:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _run_child(work, json.loads(line), theirs)
        theirs.close()
        with ours, ours.makefile("r") as answers:
            answers.readline()
            _answer(str(pid))
            if next(commands, "").strip() == "go":
                ours.sendall(b"g")
            else:
                ours.shutdown(socket.SHUT_WR)
            ended = answers.readline().strip()
        os.waitpid(pid, 0)
        _answer(ended or json.dumps({"was_killed": True, "error": None, "result": None}))


def _run_child(
    work: Callable[..., str | None], arguments: list[str], parent: socket.socket
) -> NoReturn:
    """Talks by socket only: sends and receives are not traced, so no fault hits them."""
    ended: dict[str, object] = {"was_killed": False, "error": None, "result": None}
    parent.sendall(b"ready\n")
    if not parent.recv(1):
        os._exit(1)
    os.getppid()
    try:
        ended["result"] = work(*arguments)
    except BaseException as error:  # noqa: BLE001 - every outcome is reported, whatever it is
        ended["error"] = (type(error).__name__, str(error))
    os.getppid()
    parent.sendall(json.dumps(ended).encode() + b"\n")
    os._exit(0)


def _answer(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], sys.stdin)
