"""What one rank of the NCCL run does; all ranks do it together, rank 0 tells what came of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from gymfast.buckets import ALIGNMENT, BucketPlan, BucketTensor, Piece
from gymfast.channels import BucketTransfer, Control, Slot
from gymfast.channels.base import DEFAULT_DEPTH
from gymfast.channels.device_memory import DeviceMemory
from gymfast.channels.nccl import NcclChannel, open_nccl
from gymfast.errors import ChannelError

ROUNDS = 7
MOST_PIECES = 4096  # torch takes some launches for each
PIECES = (4096, (1 << 20) + 2, 64 << 20)  # bytes; some are not aligned
WAIT_S = 60.0


@dataclass(frozen=True)
class Options:
    """Sizes are bytes; with `is_host` the library is a double on memory of the host."""

    num_ranks: int
    largest: int = 256 << 20
    is_host: bool = False
    library: str = ""
    cuda_library: str = ""
    kernels: str = ""  # path of a module in place of gymfast._cuda
    max_ctas: int = 4
    timeout_s: float = 30.0


@dataclass
class Findings:
    """What rank 0 tells: facts, rows of the table and problems."""

    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    pieces: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class RankRun:
    """The phases of one rank, in the order of PHASES."""

    def __init__(self, control: Control, options: Options) -> None:
        import torch

        self._torch, self._control, self._options = torch, control, options
        self._device = "cpu" if options.is_host else "cuda"
        self._kernels = load_kernels(options.kernels) if options.kernels else "auto"
        self._channel: NcclChannel | None = None
        self.findings = Findings()

    def open(self) -> None:
        """A communicator of all ranks."""
        begin_s = time.perf_counter()
        self._channel = self._open(None)
        self.findings.facts["open_s"] = time.perf_counter() - begin_s
        self.findings.facts |= self._channel.environment
        self._note_registration("")

    def correctness(self) -> None:
        """Broadcasts of odd sizes, from each root and from all at once."""
        self._require_all(self._wrong_broadcasts())

    def transfer(self) -> None:
        """Tensors in buckets, packed and unpacked on the device, three versions."""
        assert self._channel is not None
        sizes = [0, 1, 4096, (3 << 20) + 5, 31, 1 << 20]
        sent = {f"t{i}": self._bytes(i, n) for i, n in enumerate(sizes)}
        share = [BucketTensor(name, "U8", (len(t),), len(t)) for name, t in sent.items()]
        transfer = BucketTransfer(
            self._control,
            self._channel,
            {0: share},
            1 << 20,
            environment=self._channel.environment,
            memory=DeviceMemory(self._device, self._kernels),
            timeout_s=self._options.timeout_s,
        )
        transfer.agree()
        wrong = []
        is_root = self._control.rank == 0
        memory = sent if is_root else {n: self._torch.zeros_like(t) for n, t in sent.items()}
        for version in range(3):
            transfer.run(version, memory).require_all()
            wrong += [n for n, t in memory.items() if not self._torch.equal(t, sent[n])]
        self._require_all([f"tensor {name} came with other bytes" for name in wrong])

    def pieces(self) -> None:
        """Buckets packed and unpacked by the kernel and by torch on rank 0: the same, and how fast.

        Beside it a copy on the device of as many bytes, which reads and writes as much.
        """
        wrong: list[str] = []
        if self._control.rank == 0:
            memory = DeviceMemory(self._device, self._kernels)
            self.findings.facts["has_kernels"] = memory.has_kernels
            for piece_bytes in PIECES:
                wrong += self._wrong_pieces(memory, piece_bytes)
        self._require_all(wrong)

    def speed(self) -> None:
        """Broadcasts in memory that is registered and that is not, beside a copy on the device."""
        assert self._channel is not None
        size = 1 << 20
        while size <= self._options.largest:
            for is_registered in (False, True):
                if not is_registered or self._channel.arena is not None:
                    self._measure(size, is_registered)
            size *= 4

    def abort(self) -> None:
        """A rank that does not come: the others give up, each by itself, and all go on."""
        assert self._channel is not None
        begin_s = time.perf_counter()
        text = "it did not raise"
        if self._control.rank == 0:
            self._channel.begin([Slot(0, self._bytes(0, 1 << 20))])
            self._channel.abort("a test")
            try:
                self._channel.finish()
            except ChannelError as error:
                text = "" if "a test" in str(error) else str(error)
        else:
            self._channel.abort("a test")
            text = ""
        self.findings.facts["abort_s"] = time.perf_counter() - begin_s
        self._require_all([text] if text else [])
        self._channel = self._open(self._channel)
        self._require_all(self._wrong_broadcasts())

    def shrink(self) -> None:
        """The last rank is killed; those that are left go on without it."""
        assert self._channel is not None
        control = self._control
        if len(control.ranks) < 3:
            self.findings.facts["shrink"] = "needs three ranks"
            return
        if control.rank == control.ranks[-1]:
            os.kill(os.getpid(), signal.SIGKILL)
        if control.rank == 0:
            deadline_s = time.monotonic() + WAIT_S
            while not control.lost and time.monotonic() < deadline_s:
                time.sleep(0.05)
        control.form(2 * WAIT_S)
        could_shrink = self._channel.can_shrink
        begin_s = time.perf_counter()
        self._channel = self._open(self._channel)
        self.findings.facts["shrink_s"] = time.perf_counter() - begin_s
        self.findings.facts["could_shrink"] = could_shrink
        self._note_registration(" after a loss")
        self._require_all(self._wrong_broadcasts())

    def close(self) -> None:
        """Gives everything back."""
        if self._channel is not None:
            self._channel.close()

    def _open(self, old: NcclChannel | None) -> NcclChannel:
        options = self._options
        return open_nccl(
            self._control,
            replaces=old,
            path=options.library,
            cuda_path=options.cuda_library,
            timeout_s=options.timeout_s,
            max_ctas=options.max_ctas,
            arena_bytes=DEFAULT_DEPTH * options.largest,
        )

    def _note_registration(self, when: str) -> None:
        assert self._channel is not None
        self.findings.facts |= {
            f"registration{when}": self._channel.registration,
            f"num_failed_registrations{when}": self._channel.num_failed_registrations,
        }

    def _bytes(self, seed: int, size: int) -> Any:
        generator = self._torch.Generator().manual_seed(seed)
        made = self._torch.randint(0, 256, (size,), dtype=self._torch.uint8, generator=generator)
        return made.to(self._device)

    def _wrong_broadcasts(self) -> list[str]:
        assert self._channel is not None
        wrong = []
        rank, num_ranks = self._channel.rank, self._channel.num_ranks
        every = [[root] for root in range(num_ranks)] + [list(range(num_ranks))]
        for number, roots in enumerate(every):
            for size in (1, 255, 4097, (1 << 20) + 1):
                expected = {root: self._bytes(100 * number + root, size) for root in roots}
                slots = [
                    Slot(root, data.clone() if root == rank else self._torch.zeros_like(data))
                    for root, data in expected.items()
                ]
                self._channel.begin(slots)
                self._channel.finish()
                wrong += [
                    f"rank {rank}: {size} bytes of root {slot.root} are wrong"
                    for slot in slots
                    if not self._torch.equal(slot.memory, expected[slot.root])
                ]
        return wrong

    def _require_all(self, problems: list[str]) -> None:
        """Notes the problems of all ranks on rank 0."""
        said = self._control.gather(problems, WAIT_S)
        self.findings.problems += [text for texts in said.values() for text in texts]

    def _wrong_pieces(self, memory: DeviceMemory, piece_bytes: int) -> list[str]:
        """What the kernel does not do as torch does; rows of the table."""
        num = max(1, self._options.largest // (-(-piece_bytes // ALIGNMENT) * ALIGNMENT))
        num = min(num, MOST_PIECES)
        shares = [BucketTensor(f"t{i}", "U8", (piece_bytes,), piece_bytes) for i in range(num)]
        plan = BucketPlan(shares, -(-self._options.largest // ALIGNMENT) * ALIGNMENT)
        pieces, size = list(plan.pieces(0)), plan.bucket_size(0)
        torch, twin = self._torch, DeviceMemory(self._device, None)
        whole = self._bytes(piece_bytes, piece_bytes * num)
        tensors = [whole[i * piece_bytes : (i + 1) * piece_bytes] for i in range(len(pieces))]
        buckets = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        back = torch.zeros_like(whole)
        targets = [back[i * piece_bytes : (i + 1) * piece_bytes] for i in range(len(pieces))]
        digests, row = set(), {"piece_bytes": piece_bytes, "num_pieces": len(pieces), "size": size}
        for name, used, bucket in (("torch", twin, buckets[0]), ("kernel", memory, buckets[1])):
            back.zero_()
            with used.in_use():
                digests |= {int(used.pack(bucket, pieces, tensors))}
                digests |= {int(used.unpack(bucket, pieces, targets))}
            for piece, sent, came in zip(pieces, tensors, targets, strict=True):
                if not torch.equal(came[: piece.num_bytes], sent[: piece.num_bytes]):
                    return [f"{name}: pieces of {piece_bytes} bytes come back with other bytes"]
            row |= self._piece_speeds(name, used, bucket, pieces, (tensors, targets))
        if len(digests) != 1 or not torch.equal(*buckets):
            return [f"pieces of {piece_bytes} bytes: the kernel and torch differ"]
        copies = [self._time(lambda: buckets[0].copy_(buckets[1])) for _ in range(ROUNDS)]
        self.findings.pieces.append(row | {"copy_gbps": size / median(copies) / 1e9})
        return []

    def _piece_speeds(
        self,
        name: str,
        memory: DeviceMemory,
        bucket: Any,
        pieces: list[Piece],
        tensors: tuple[list[Any], list[Any]],
    ) -> dict[str, float]:
        """GB of pieces a second, with their digest."""
        num_bytes = sum(piece.num_bytes for piece in pieces)
        rounds = range(1 if self._options.is_host else ROUNDS)
        found = {}
        for kind, work, own in (
            ("pack", memory.pack, tensors[0]),
            ("unpack", memory.unpack, tensors[1]),
        ):
            with memory.in_use():
                seconds = [self._time(lambda: work(bucket, pieces, own)) for _ in rounds]  # noqa: B023
            found[f"{name}_{kind}_gbps"] = num_bytes / median(seconds) / 1e9
        return found

    def _measure(self, size: int, is_registered: bool) -> None:
        assert self._channel is not None
        channel, depth = self._channel, self._channel.depth
        arenas = [self._bytes(place, size) for place in range(depth)]
        if is_registered:
            assert channel.arena is not None
            whole = DeviceMemory(self._device).of_arena(channel.arena)
            assert whole is not None
            arenas = [
                whole[place * size : (place + 1) * size].copy_(data)
                for place, data in enumerate(arenas)
            ]
        num = max(depth, min(32, (1 << 30) // size))

        def broadcast() -> None:
            for number in range(num):
                channel.begin([Slot(0, arenas[number % depth])])
            channel.finish()

        def copy() -> None:
            for number in range(num):
                arenas[number % depth].copy_(arenas[(number + 1) % depth])

        seconds = []
        for number in range(ROUNDS + 1):
            own_s = self._time(broadcast) / num
            said = self._control.gather(own_s, WAIT_S)
            if number and said:
                seconds.append(max(said.values()))  # the slowest rank; the first is a warm-up
        copied = sorted(self._time(copy) / num for _ in range(ROUNDS + 1))[:-1]
        if not seconds:
            return
        time_s, copy_s = median(seconds), median(copied)
        self.findings.rows.append(
            {
                "num_ranks": channel.num_ranks,
                "size": size,
                "is_registered": is_registered,
                "type": "uint8",
                "root": 0,
                "time_us": time_s * 1e6,
                "time_min_us": min(seconds) * 1e6,
                "time_max_us": max(seconds) * 1e6,
                "algbw_gbps": size / time_s / 1e9,
                "busbw_gbps": size / time_s / 1e9,
                "copy_gbps": size / copy_s / 1e9,
                "copy_ratio": copy_s / time_s,
            }
        )

    def _time(self, work: Callable[[], None]) -> float:
        self._synchronize()
        begin_s = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - begin_s

    def _synchronize(self) -> None:
        if not self._options.is_host:
            self._torch.cuda.synchronize()


def load_kernels(path: str) -> ModuleType:
    """A module of the kernels by the path of its file, named as its file is."""
    name = Path(path).name.partition(".")[0]
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PHASES = ("open", "correctness", "transfer", "pieces", "speed", "abort", "shrink")
