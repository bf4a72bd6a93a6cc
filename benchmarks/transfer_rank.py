"""One rank of a measured transfer, as a process: reads its orders on stdin, answers on stdout.

Rank 0 says where it listens, then what it measured; see benchmarks/ranks.py, which starts it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import keep_memory
from benchmarks.ranks import Job, Orders, Sample
from gymfast.buckets import BucketTensor
from gymfast.channels import BucketTransfer, Channel, Control, Hub, Slot, connect

Bytes = NDArray[np.uint8]
Run = Callable[[], dict[str, float]]  # one repetition, which returns its stages
_TIMEOUT_S = 120.0


def main() -> None:
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    keep_memory()
    found = run_rank(orders, listening=lambda port: _say({"port": port}))
    if orders.rank == 0:
        _say({"samples": found})


def run_rank(orders: Orders, *, listening: Callable[[int], None]) -> list[list[Sample]]:
    """Takes part in all jobs; on rank 0, which is told the port it has, what was measured."""
    key = bytes.fromhex(orders.key) or None
    if orders.rank == 0:
        hub = Hub(host=orders.host, port=orders.root_port, key=key)
        listening(hub.port)
        control, close = hub.control, hub.close
        control.wait_for(orders.num_ranks, _TIMEOUT_S)
    else:
        address = (orders.root_host, orders.root_port)
        control = connect(address, orders.rank, key=key, timeout_s=_TIMEOUT_S)
        close = control.close
    control.form(_TIMEOUT_S)
    found = [_measure(control, orders, job) for job in orders.jobs]
    close()
    return found


def _measure(control: Control, orders: Orders, job: Job) -> list[Sample]:
    """All repetitions of a job; on rank 0 with the stages of the slowest rank and all errors."""
    subject = _SUBJECTS[job.kind](control, orders, job)
    samples = []
    for number in range(job.warm_up + job.rounds):
        subject.reset(number)
        _barrier(control)
        begin_s = time.perf_counter()
        stages = subject.run()
        seconds = time.perf_counter() - begin_s
        said = control.gather([seconds, stages, subject.num_wrong()], _TIMEOUT_S)
        if number >= job.warm_up and control.rank == 0:
            slowest = max(said.values(), key=lambda one: one[0])
            wrong = sum(one[2] for one in said.values())
            by_rank = {str(rank): one[1] for rank, one in said.items()}
            samples.append(Sample(slowest[0], by_rank, wrong, subject.sent_bytes))
        elif any(one[2] for one in said.values()):
            raise RuntimeError(f"{job.kind} over {job.channel} delivers wrong bytes: {said}")
    subject.close()
    return samples


class _Subject:
    """What is repeated: memory, a channel, and how wrong bytes are found."""

    def __init__(self, control: Control, orders: Orders, job: Job) -> None:
        self.control, self.job, self.rank = control, job, control.rank
        self.channel = self._open(orders)
        self.sent_bytes = 0
        self.tensors = [BucketTensor(*one) for one in job.tensors]
        self.memory: dict[str, Bytes] = {}
        self._expected = _noise(sum(t.num_bytes for t in self.tensors), job.seed)
        self._flat = self._expected if self.rank == 0 else np.empty_like(self._expected)
        begin = 0
        for tensor in self.tensors:
            self.memory[tensor.name] = self._flat[begin : begin + tensor.num_bytes]
            begin += tensor.num_bytes

    def reset(self, number: int) -> None:
        """Makes sure that bytes which do not come are noticed."""
        if self.rank != 0:
            self._flat[:] = number & 0xFF

    def run(self) -> dict[str, float]:
        raise NotImplementedError

    def num_wrong(self) -> int:
        """Bytes that are not what the root sent."""
        if self.rank == 0 or np.array_equal(self._flat, self._expected):
            return 0
        return int(np.count_nonzero(self._flat != self._expected))

    def close(self) -> None:
        if self.channel is not None:
            _barrier(self.control)
            self.channel.close()

    def _open(self, orders: Orders) -> Channel | None:
        job, control = self.job, self.control
        if job.channel == "tcp":
            from gymfast.channels.tcp import open_tcp

            key = bytes.fromhex(orders.key) or None
            return open_tcp(
                control, host=orders.host, fanout=job.fanout, streams=job.streams, key=key,
                depth=job.depth, timeout_s=_TIMEOUT_S,
            )  # fmt: skip
        if job.channel == "gloo":
            from gymfast.channels.gloo import open_gloo

            return open_gloo(control, host=orders.host, depth=job.depth, timeout_s=_TIMEOUT_S)
        if job.channel == "shm":
            from gymfast.channels.shm import open_shm

            shm: Channel = open_shm(control, depth=job.depth, timeout_s=_TIMEOUT_S)
            return shm
        return None


class _Rounds(_Subject):
    """The channel alone: all bytes in rounds of one bucket each, no digest, no copy."""

    def run(self) -> dict[str, float]:
        assert self.channel is not None
        begin_s, size = time.perf_counter(), self.job.bucket_bytes
        for begin in range(0, len(self._flat), size):
            self.channel.begin([Slot(0, self._flat[begin : begin + size])])
        self.channel.finish()
        self.sent_bytes = len(self._flat)
        return {"wire": time.perf_counter() - begin_s}


class _Copy(_Subject):
    """The memcpy of libc, by NumPy, on rank 0 while the others wait; both blocks are in memory."""

    def __init__(self, control: Control, orders: Orders, job: Job) -> None:
        super().__init__(control, orders, job)
        self._to = np.zeros_like(self._expected)
        np.copyto(self._to, self._expected)

    def run(self) -> dict[str, float]:
        if self.rank == 0:
            np.copyto(self._to, self._expected)
            self.sent_bytes = len(self._to)
        return {}

    def num_wrong(self) -> int:
        return int(np.count_nonzero(self._to != self._expected))


class _Transfer(_Subject):
    """Tensors in buckets: packed, sent, unpacked, digests compared, acknowledged."""

    def __init__(self, control: Control, orders: Orders, job: Job) -> None:
        super().__init__(control, orders, job)
        assert self.channel is not None
        shares = {0: self.tensors}
        self._transfer = BucketTransfer(
            control, self.channel, shares, job.bucket_bytes, timeout_s=_TIMEOUT_S
        )
        self._transfer.agree()
        self._version = 0

    def run(self) -> dict[str, float]:
        self._version += 1
        report = self._transfer.run(self._version, self.memory)
        report.require_all()
        self.sent_bytes = self._transfer.num_bytes
        return dict(vars(report.seconds))


class _PerTensor(_Subject):
    """One `torch.distributed.broadcast` for each tensor, as trainers that do not flatten do it."""

    def __init__(self, control: Control, orders: Orders, job: Job) -> None:
        import torch
        import torch.distributed as dist

        super().__init__(control, orders, job)
        timeout = timedelta(seconds=_TIMEOUT_S)
        store = None
        if self.rank == 0:
            options = {"is_master": True, "wait_for_workers": False, "timeout": timeout}
            store = dist.TCPStore(orders.host, 0, **options)
        host, port = control.share([orders.host, store.port] if store else None, _TIMEOUT_S)
        store = store or dist.TCPStore(host, port, timeout=timeout)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=len(control.ranks), timeout=timeout
        )
        self._views = [torch.from_numpy(one) for one in self.memory.values() if len(one)]
        self._dist = dist

    def run(self) -> dict[str, float]:
        begin_s = time.perf_counter()
        for view in self._views:
            self._dist.broadcast(view, 0)
        self._dist.barrier()
        self.sent_bytes = len(self._flat)
        return {"wire": time.perf_counter() - begin_s}

    def close(self) -> None:
        self._dist.destroy_process_group()


class _Live:
    """Versions of RL-like weights, by `gymfast.sync.live`: encode, send, apply, verify."""

    def __init__(self, control: Control, orders: Orders, job: Job) -> None:
        from gymfast.sync.live import LivePublisher, LiveSubscriber

        opened = _Subject(control, orders, msgspec.structs.replace(job, tensors=[]))
        self.channel, self.rank, self.control, self.job = opened.channel, control.rank, control, job
        assert self.channel is not None
        self.sent_bytes = 0
        self._states = _states(job.size_bytes, job.density, job.seed)
        self._number = 0
        bucket = {"bucket_bytes": job.bucket_bytes} if job.bucket_bytes else {}
        self._side: LivePublisher | LiveSubscriber
        if self.rank == 0:
            self._side = LivePublisher(
                control, self.channel, profile=job.profile, max_density=job.max_density,
                timeout_s=_TIMEOUT_S, **bucket,
            )  # fmt: skip
        else:
            self._here = {name: np.zeros_like(one) for name, one in self._states[0].items()}
            self._side = LiveSubscriber(control, self.channel, self._here, timeout_s=_TIMEOUT_S)

    def reset(self, number: int) -> None:
        """The other of two states: what changes is the same each time."""
        self._number = number

    def run(self) -> dict[str, float]:
        from gymfast.sync.live import LivePublisher

        if isinstance(self._side, LivePublisher):
            report = self._side.publish(self._states[self._number % 2])
        else:
            report = self._side.receive()
        report.require_all()
        self.sent_bytes = report.sent_bytes
        return report.seconds

    def num_wrong(self) -> int:
        if self.rank == 0:
            return 0
        expected = self._states[self._number % 2]
        return sum(int(np.count_nonzero(self._here[n] != expected[n])) for n in expected)

    def close(self) -> None:
        _barrier(self.control)
        assert self.channel is not None
        self.channel.close()


@cache
def _states(size_bytes: int, density: float, seed: int) -> list[dict[str, Any]]:
    """RL-like weights before and after a step; the same on every rank."""
    from gymfast.testing.weights import rl_like_update, rl_like_weights

    first = rl_like_weights(size_bytes, seed)
    return [first, rl_like_update(first, density, seed)]


_SUBJECTS: dict[str, Any] = {
    "channel": _Rounds,
    "transfer": _Transfer,
    "per tensor": _PerTensor,
    "copy": _Copy,
    "live": _Live,
}


def _barrier(control: Control) -> None:
    control.gather(None, _TIMEOUT_S)
    control.share(None, _TIMEOUT_S)


def _noise(num_bytes: int, seed: int) -> Bytes:
    """Bytes that every rank makes alike; a block of 16 MiB, repeated."""
    block = np.random.default_rng(seed).integers(0, 256, min(num_bytes, 16 << 20), np.uint8)
    return np.resize(block, num_bytes)


def _say(value: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
