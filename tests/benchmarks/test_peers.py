"""Each peer is bit exact on RL-like and on arbitrary data: its figures are those of a codec."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.ci


def peers() -> list[str]:
    return [
        "xor+zstd-1+xxh3", "coo+zstd-1+xxh3", "gap16+xor+zstd-1", "int32+bf16", "pcodec",
        "xor+blosc2", "xor+lz4",
    ]  # fmt: skip


def pair_of(kind: str):
    from benchmarks.data import arrange, generated

    if kind.startswith("generator"):
        return generated(2 << 20, 1, "dithered", float(kind.split()[1]))
    rng = np.random.default_rng(5)
    shapes = {"matrix": (300, 70), "norm": (77,), "scalar": (), "same": (40, 3), "wide": (1, 70000)}
    old = {n: rng.integers(0, 1 << 16, s).astype(np.uint16) for n, s in shapes.items()}
    new = {n: a.copy() for n, a in old.items()}
    for name in ("matrix", "norm", "wide"):
        at = rng.random(old[name].shape) < 0.01
        new[name][at] = rng.integers(0, 1 << 16, int(at.sum()))
    new["wide"][0, [0, 69999]] ^= 1
    new["matrix"][-1, -1] ^= 0x8000
    return arrange("arbitrary", old, new, speed=False)


@pytest.mark.parametrize(
    "kind", ["arbitrary", "generator 0.001", "generator 0.1", "generator 1", "generator 0"]
)
@pytest.mark.parametrize("name", peers())
def test_peer_is_bit_exact(name, kind):
    from benchmarks.codec import Buffers
    from benchmarks.peers import PEERS

    classes = {peer.name: peer for peer in PEERS}
    assert set(classes) == set(peers())
    pair = pair_of(kind)
    codec = classes[name](pair, Buffers(pair))
    for _ in range(2):  # a second time from the same buffers
        codec.check()
    assert codec.frame_bytes > 0 or pair.num_changed == 0


def test_a_codec_that_loses_a_bit_is_refused():
    from benchmarks.codec import Buffers
    from benchmarks.peers.sparse import Int32Values

    class Lossy(Int32Values):
        def apply(self) -> None:
            super().apply()
            self.work["model.embed_tokens.weight"][3] ^= 1

    pair = pair_of("generator 0.1")
    with pytest.raises(AssertionError, match=r"after apply .* 1 elements, the first at 3"):
        Lossy(pair, Buffers(pair)).check()


def test_the_head_of_a_pair_is_its_last_tensors():
    pair = pair_of("generator 0.1")
    head = pair.head(1 << 20)
    assert head.num_bytes <= 1 << 20
    assert list(head.old) == list(pair.old)[-len(head.old) :]
    first = next(iter(head.old))
    assert head.new_flat.ctypes.data == pair.new[first].ctypes.data
    assert 0.05 < head.density < 0.2
