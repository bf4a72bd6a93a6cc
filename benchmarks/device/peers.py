"""What is timed beside the native calls: torch alone, nvCOMP, back ends, whole frames."""

from __future__ import annotations

import torch

from benchmarks.device.native import runs_of
from benchmarks.device.speed import Timer, pieces_of
from gymfast.delta.apply import apply as delta_apply
from gymfast.delta.backends import BlockParams, select
from gymfast.delta.encode import Encoder
from gymfast.delta.encode import encode as delta_encode
from gymfast.delta.state import SnapshotPlace, State

NVCOMP = (("LZ4", {}), ("Bitcomp", {"algorithm_type": 1}), ("Zstd", {}))  # 1: for sparse data
_FAST = BlockParams(1, 0, 0, has_base=True)


def time_torch(timer: Timer) -> None:
    """Positions and values of what changed by ne, nonzero and gather; no digest, nothing packed."""
    states = timer.states
    live, new = pieces_of(states.live), pieces_of(states.new)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def encode() -> None:
        found.clear()
        for before, after in zip(live, new, strict=True):
            index = (before != after).nonzero().view(-1)
            values = after[index]
            before[index] = values
            found.append((index, values))

    def apply() -> None:
        for before, (index, values) in zip(live, found, strict=True):
            before[index] = values

    states.reset()
    encode()
    states.require_new("torch encode", states.live)
    size = sum(part.nbytes for pair in found for part in pair)
    timer.measure(("torch sparse", "encode"), encode, states.reset, body_bytes=size)
    states.reset()
    apply()
    states.require_new("torch apply", states.live)
    timer.measure(("torch sparse", "apply"), apply, states.reset, body_bytes=size)


def time_nvcomp(timer: Timer, algorithm: str, options: dict[str, int]) -> None:
    """XOR of the states, coded by nvCOMP, and the snapshot copied; no digest."""
    from nvidia import nvcomp

    states = timer.states
    codec = nvcomp.Codec(algorithm=algorithm, **options)
    xored = states.device.bytes(states.old.numel())
    coded = []

    def encode() -> None:
        torch.bitwise_xor(states.live, states.new, out=xored)
        torch.cuda.synchronize()  # nvCOMP has a stream of its own
        coded[:] = [codec.encode(nvcomp.as_array(xored))]
        states.live.copy_(states.new)

    def apply() -> None:
        plain = torch.from_dlpack(codec.decode(coded[0], data_type="|u1"))
        torch.cuda.synchronize()
        states.live.bitwise_xor_(plain)

    name = f"xor+nvcomp {algorithm.lower()}"
    states.reset()
    encode()
    size = coded[0].buffer_size
    states.reset()
    apply()
    states.require_new(name, states.live)
    timer.measure((name, "encode"), encode, states.reset, body_bytes=size, waits=True)
    timer.measure((name, "apply"), apply, states.reset, body_bytes=size, waits=True)


def time_backend(timer: Timer, name: str) -> None:
    """`Backend` section by section: every body goes to the host, and comes back for apply."""
    states, backend = timer.states, select(name)
    runs = list(runs_of(states.geometry, _FAST, 1))
    old_rows = backend.digest_blocks(states.old, states.geometry, 1)
    rows = old_rows.copy()
    bodies: list[bytes] = []

    def encode() -> None:
        bodies.clear()
        for run in runs:
            encoded = backend.encode_blocks(
                *(states.live, states.new, states.geometry, _FAST, rows),
                *(run.first_block, run.num_blocks),
                update=True,
                undo=False,
                threads=1,
            )
            bodies.append(encoded.body)

    def apply() -> None:
        for run, body in zip(runs, bodies, strict=True):
            if body:
                backend.apply_blocks(
                    *(states.live, body, states.geometry, _FAST, rows),
                    *(run.first_block, run.num_blocks, 1),
                )

    def reset() -> None:
        states.reset()
        rows[:] = old_rows

    codec = f"select({name!r}) fast"
    reset()
    encode()
    states.require_new(codec, states.live)
    size = sum(map(len, bodies))
    timer.measure((codec, "encode"), encode, reset, body_bytes=size, waits=True)
    reset()
    apply()
    states.require_new(codec, states.live)
    timer.measure((codec, "apply"), apply, reset, body_bytes=size, waits=True)


def time_frames(timer: Timer, name: str, snapshot: SnapshotPlace = "beside") -> None:
    """The whole Python path: Encoder with undo log, frames with roots, apply on a State."""
    states = timer.states
    live = {"weights": states.live.view(torch.bfloat16)}
    new = {"weights": states.new.view(torch.bfloat16)}
    old = {"weights": states.old.view(torch.bfloat16)}
    states.reset()
    publisher = State.copy_of(live, backend=name, snapshot=snapshot)
    receiver = State.attach(live, backend=name)
    encoder = Encoder(publisher, profile="fast")
    frame = b"".join(encoder.encode(new))
    encoder.rollback()
    way_back = delta_encode(new, old, profile="fast", backend=name)

    def encode() -> None:
        b"".join(encoder.encode(new))

    codec = f"frames {name} fast, snapshot {snapshot}"
    delta_apply(receiver, frame)
    states.require_new(codec, states.live)
    size = len(frame)
    timer.measure((codec, "encode"), encode, encoder.rollback, body_bytes=size, waits=True)

    def reset_apply() -> None:
        if torch.equal(states.live, states.new):
            delta_apply(receiver, way_back)

    timer.measure(
        (codec, "apply"),
        lambda: delta_apply(receiver, frame),
        reset_apply,
        body_bytes=size,
        waits=True,
    )
