"""The kernel that packs, unpacks and digests a bucket, against the operations of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from channel_group import Controls as Ranks
from channel_group import in_threads
from cuda_calls import memory
from cuda_module import DEVICE, LAUNCH_FAILURE, PINNED, UNREGISTERED, Controls

from gymfast.buckets import BucketPlan, BucketTensor, Piece
from gymfast.channels import BucketTransfer, Channel, Loopback, Slot
from gymfast.channels.device_memory import DeviceMemory
from gymfast.channels.device_pieces import kernels_of

torch = pytest.importorskip("torch")

TILE, ROW = 16 << 10, 8 << 16
SIZES = {
    "tails": [*range(18), 31, 32, 33],
    "tiles": [TILE - 1, TILE, TILE + 1, 2 * TILE + 8, 0, 5],
    "rows": [ROW, 0, ROW + 8, 3, ROW - 8 + 17, 16],
    "nothing": [0, 0],
}


def laid_out(sizes: list[int], shift: int, alignment: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Pieces in a bucket, each at a multiple of the alignment, their tensors and the bucket."""
    rng = np.random.default_rng(seed)
    pieces, tensors, used = [], [], 0
    for number, size in enumerate(sizes):
        before = int(rng.integers(0, 3)) * alignment
        raw = torch.from_numpy(rng.integers(0, 256, shift + before + size + 40, dtype=np.uint8))
        tensors.append(raw[shift:])
        pieces.append(Piece(number, before, used, size))
        used += -(-size // alignment) * alignment + int(rng.integers(0, 2)) * alignment
    bucket = torch.from_numpy(np.full(used + 64, 0xA5, np.uint8))
    return pieces, tensors, bucket


@pytest.fixture
def kernels(cuda_module: ModuleType, controls: Controls) -> DeviceMemory:
    return DeviceMemory("cpu", kernels=cuda_module)


@pytest.mark.parametrize(("shift", "alignment"), [(0, 256), (0, 16), (4, 8), (1, 1), (2, 2)])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_kernel_gives_the_bytes_and_digests_of_torch(
    kernels: DeviceMemory, sizes: list[int], shift: int, alignment: int
) -> None:
    twin = DeviceMemory("cpu")
    pieces, tensors, bucket = laid_out(sizes, shift, alignment)
    expected = bucket.clone()
    digest = int(twin.pack(expected, pieces, tensors))
    assert int(kernels.pack(bucket, pieces, tensors)) == digest
    assert torch.equal(bucket, expected)
    assert int(kernels.digest(bucket, pieces)) == digest
    blank = [torch.zeros_like(tensor) for tensor in tensors]
    others = [torch.zeros_like(tensor) for tensor in tensors]
    assert int(kernels.unpack(bucket, pieces, blank)) == digest
    twin.unpack(expected, pieces, others)
    assert all(torch.equal(a, b) for a, b in zip(blank, others, strict=True))
    assert torch.equal(bucket, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("shift", "alignment"), [(0, 256), (4, 8), (1, 1)])
def test_the_kernel_on_a_gpu_gives_what_torch_gives(shift: int, alignment: int) -> None:
    memory, twin = DeviceMemory("cuda"), DeviceMemory("cuda", None)
    if not memory.has_kernels:
        pytest.skip("needs nvcc of the CUDA toolkit")
    for sizes in SIZES.values():
        pieces, tensors, bucket = laid_out(sizes, shift, alignment)
        there = [tensor.cuda() for tensor in tensors]
        buckets = [bucket.cuda(), bucket.cuda()]
        back = [torch.zeros_like(tensor) for tensor in there]
        with memory.in_use():
            found = int(memory.pack(buckets[0], pieces, there))
            assert int(memory.unpack(buckets[0], pieces, back)) == found
        with twin.in_use():
            assert int(twin.pack(buckets[1], pieces, there)) == found
        assert torch.equal(*buckets)
        for piece, sent, came in zip(pieces, there, back, strict=True):
            part = slice(piece.tensor_offset, piece.tensor_offset + piece.num_bytes)
            assert torch.equal(sent[part], came[part])


def test_any_byte_of_a_piece_changes_the_digest(kernels: DeviceMemory) -> None:
    pieces, tensors, bucket = laid_out([40, 11, 19], 0, 16)
    before = int(kernels.pack(bucket, pieces, tensors))
    inside = [p.bucket_offset + i for p in pieces for i in range(p.num_bytes)]
    for place in range(len(bucket)):
        changed = bucket.clone()
        changed[place] ^= 128
        assert (int(kernels.digest(changed, pieces)) != before) == (place in inside)


def test_a_bucket_is_one_launch_and_its_table_is_made_once(
    kernels: DeviceMemory, cuda_module: ModuleType, controls: Controls
) -> None:
    filled = []

    class Counted:
        move_pieces = staticmethod(cuda_module.move_pieces)

        @staticmethod
        def fill_pieces(*arguments: Any) -> Any:
            filled.append(len(arguments[2]))
            return cuda_module.fill_pieces(*arguments)

    counted = DeviceMemory("cpu", kernels=Counted)  # type: ignore[arg-type]
    pieces, tensors, bucket = laid_out([5000] * 40, 0, 256)
    launches = controls.num_launches()
    digests = [int(counted.pack(bucket, pieces, tensors)) for _ in range(3)]
    assert controls.num_launches() == launches + 3
    assert filled == [40]
    assert len(set(digests)) == 1
    tensors[7] = tensors[7].clone()  # elsewhere, so that the table is another one
    tensors[7][pieces[7].tensor_offset] ^= 1
    assert int(counted.pack(bucket, pieces, tensors)) != digests[0]
    assert filled == [40, 40]


def test_digests_beyond_those_that_are_cleared_at_once_are_right(kernels: DeviceMemory) -> None:
    pieces, tensors, bucket = laid_out([64], 0, 16)
    expected = int(kernels.pack(bucket, pieces, tensors))
    unread = [kernels.digest(bucket, pieces) for _ in range(1030)]
    assert {int(digest) for digest in unread} == {expected}


# ---- refusals


@pytest.fixture
def refused(cuda_module: ModuleType, controls: Controls) -> Callable[..., None]:
    def check(match: str, **change: Any) -> None:
        """`change` spoils arguments that are taken as they are."""
        arguments = {
            "bucket": memory(100),
            "tensors": [memory(50), memory(60)],
            "pieces": [(0, 0, 50), (20, 50, 40)],
            "is_packing": True,
            "rows": np.zeros((2, 5), np.uint64),
        }
        if not change:
            assert cuda_module.fill_pieces(**arguments) == 2
            return
        launches = controls.num_launches()
        with pytest.raises((ValueError, TypeError), match=match):
            cuda_module.fill_pieces(**arguments | change)
        assert controls.num_launches() == launches

    check("")
    return check


def test_pieces_that_do_not_fit_are_refused(refused: Callable[..., None]) -> None:
    refused(r"^tensors\[1\] has 60 bytes, expected 41 from 20 on", pieces=[(0, 0, 5), (20, 50, 41)])
    refused(
        r"^tensors\[0\] has 50 bytes, expected 1 from 18446744073709551615 on",
        pieces=[(2**64 - 1, 0, 1), (0, 50, 4)],
    )
    refused(
        r"^piece 1 has 51 bytes from 50 on, .* the end of the bucket, 100",
        pieces=[(0, 0, 5), (0, 50, 51)],
    )
    refused(
        r"^piece 1 has 4 bytes from 18446744073709551614", pieces=[(0, 0, 5), (0, 2**64 - 2, 4)]
    )
    refused(r"^piece 1 has 40 bytes from 49 on", pieces=[(0, 0, 50), (20, 49, 40)])
    refused(r"^tensors are 1, expected one for each of 2 pieces", tensors=[memory(50)])
    refused(r"^rows has 3 rows, expected one for each of 2", rows=np.zeros((3, 5), np.uint64))
    refused("incompatible function arguments", rows=np.zeros((2, 4), np.uint64))
    refused("incompatible function arguments", pieces=[(0, 0, -1), (0, 50, 4)])


def test_memory_that_the_kernel_cannot_use_is_refused(
    refused: Callable[..., None], controls: Controls
) -> None:
    refused(r"^tensors\[1\] has gaps", tensors=[memory(50), memory(120)[::2]])
    refused(r"^tensors\[1\] is list, expected an array", tensors=[memory(50), [1, 2]])
    whole = memory(150)
    refused(
        r"^bucket and tensors\[0\] overlap",
        bucket=whole[:100],
        tensors=[whole[99:149], memory(60)],
    )
    fixed = memory(60)
    fixed.flags.writeable = False
    refused(
        r"^tensors\[1\] is read-only, and the call writes it",
        tensors=[memory(50), fixed],
        is_packing=False,
    )
    bucket = memory(100)
    bucket.flags.writeable = False
    refused(r"^bucket is read-only, and the call writes it", bucket=bucket)
    for kind, device, words in [
        (UNREGISTERED, 0, "is CPU memory that no GPU reaches"),
        (PINNED, 0, "is pinned host memory, expected CUDA memory"),
        (DEVICE, 1, "is on CUDA device 1, bucket on 0"),
    ]:
        tensor = memory(60)
        controls.set_memory(tensor.ctypes.data, 60, kind, device)
        refused(rf"^tensors\[1\] {words}", tensors=[memory(50), tensor])


def test_a_tensor_with_gaps_is_refused_where_one_without_was_taken(kernels: DeviceMemory) -> None:
    pieces, bucket = [Piece(0, 0, 0, 50)], torch.zeros(64, dtype=torch.uint8)
    tensor = torch.arange(100, dtype=torch.uint8)
    kernels.pack(bucket, pieces, [tensor[:50]])
    with pytest.raises(ValueError, match=r"^tensors\[0\] has gaps"):
        kernels.pack(bucket, pieces, [tensor[::2]])


@pytest.mark.parametrize("is_packing", [True, False])
def test_a_piece_beyond_the_bucket_is_left_out(cuda_module: ModuleType, is_packing: bool) -> None:
    """Such as with the table of a larger bucket."""
    tensors, rows = [memory(64), memory(64)], np.zeros((2, 5), np.uint64)
    pieces = [(0, 0, 64), (0, 64, 64)]
    num_tiles = cuda_module.fill_pieces(memory(128), tensors, pieces, is_packing, rows)
    whole = memory(128)
    whole[:] = 7
    digest = np.zeros(1, np.uint64)
    cuda_module.move_pieces(whole[:120], rows, num_tiles + 5, is_packing, digest, 0)
    assert (whole[64:] == 7).all()
    assert (tensors[1] == 0xA5).all()
    assert (whole[:64] == (0xA5 if is_packing else 7)).all()
    assert digest[0] != 0


def test_a_launch_that_fails_is_an_error(kernels: DeviceMemory, controls: Controls) -> None:
    pieces, tensors, bucket = laid_out([64], 0, 16)
    controls.set_launch_error(LAUNCH_FAILURE)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        kernels.pack(bucket, pieces, tensors)


def test_the_kernels_are_for_cuda_tensors_only() -> None:
    assert kernels_of("cpu") is None


def test_without_the_module_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gymfast._cuda", None)
    assert kernels_of("cuda") is None


# ---- transfers


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    group = Ranks(3)
    yield group
    group.close()


def of_tensors(channel: Channel) -> Channel:
    """A channel for arrays that takes tensors in CPU memory."""
    begin = channel.begin
    channel.begin = lambda slots: begin(  # type: ignore[method-assign]
        [Slot(slot.root, slot.memory.numpy()) for slot in slots]
    )
    return channel


def test_ranks_with_the_kernel_and_without_agree(
    ranks: Ranks, cuda_module: ModuleType, controls: Controls
) -> None:
    """The digest of each bucket is compared: one rank packs with the kernel, another with torch."""
    sizes = [700, 5000, 0, 256, 31, 40_001]
    rng = np.random.default_rng(0)
    sent = {
        f"r{root}.{i}": torch.from_numpy(rng.integers(0, 256, n, dtype=np.uint8))
        for root in (0, 1)
        for i, n in enumerate(sizes)
    }
    shares = {
        root: [
            BucketTensor(n, "U8", (len(t),), len(t)) for n, t in sent.items() if n[1] == str(root)
        ]
        for root in (0, 1)
    }
    loopback = Loopback(3)
    transfers = [
        BucketTransfer(
            control,
            of_tensors(loopback.channel(control.rank, timeout_s=20)),
            shares,
            16384,
            memory=DeviceMemory("cpu", kernels=None if control.rank == 1 else cuda_module),
        )
        for control in ranks.all
    ]
    works = []
    own = []
    for control, transfer in zip(ranks.all, transfers, strict=True):
        own.append(
            {
                n: t.clone() if n[1] == str(control.rank) else torch.zeros_like(t)
                for n, t in sent.items()
            }
        )
        works.append(partial(transfer.run, 1, own[-1]))
    launches = controls.num_launches()
    reports = in_threads(*works)
    assert [report.failed for report in reports] == [{}] * 3, reports
    assert all(torch.equal(t, sent[n]) for memory in own for n, t in memory.items())
    # Ranks 0 and 2, one launch for each slot of each bucket, of which some hold one tensor alone.
    num_buckets = sum(BucketPlan(share, 16384).num_buckets for share in shares.values())
    assert 2 * num_buckets <= controls.num_launches() - launches < 4 * num_buckets
