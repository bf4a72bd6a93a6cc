"""I10: no damaged frame reaches live tensors, and success is never reported for wrong weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from golden_invalid import INVALID
from golden_valid import VALID, as_tensor, noisy, stepped, weights

from gymfast import _core
from gymfast.delta import State, Tensor, apply, encode, inspect
from gymfast.errors import ChainError, ChecksumError, FormatError

GOLDEN = Path(__file__).parents[1] / "golden" / "valid"
END = 4
APPLY_EVERY = 40  # so many damaged frames are also applied, the others are only parsed
RANDOM_TRIALS = 125_000
RESEALED_TRIALS = 30_000
MUST_SEE = 200_000
Bytes = dict[str, tuple[str, tuple[int, ...], bytes]]
Damage = Callable[[np.random.Generator, bytes], bytes]


@dataclass(frozen=True)
class Subject:
    """A frame, the weights it applies to and those it leads to."""

    name: str
    old: dict[str, Tensor] = field(repr=False)
    new: Bytes = field(repr=False)
    frame: bytes = field(repr=False)

    @property
    def sections(self) -> list[bytes]:
        return split(self.frame)


def bytes_of(weights: dict[str, Tensor]) -> Bytes:
    return {name: (t.dtype, t.shape, t.data.tobytes()) for name, t in weights.items()}


def split(frame: bytes) -> list[bytes]:
    """The sections of a valid frame, each with its header."""
    sections, at = [], 8
    while at < len(frame):
        end = at + 16 + int.from_bytes(frame[at + 2 : at + 8], "little")
        sections.append(frame[at:end])
        at = end
    return sections


def golden(name: str) -> Subject:
    case = VALID[name]
    frame = (GOLDEN / f"v1_{name}.gfd").read_bytes()
    return Subject(name, case.old, bytes_of(case.new), frame)


def every_mode(profile: str) -> Subject:
    """Three small tensors for each way to change them; the profiles choose the modes."""

    def changed(units: np.ndarray, i: int) -> np.ndarray:
        if i % 3 == 0:
            return noisy(units, i)
        if i % 3 == 1:
            return stepped(units, i, 20_000)
        return np.random.default_rng(i).integers(0, 256, units.nbytes, np.uint8).view(units.dtype)

    old, new = {}, {}
    for i, (dtype, unit_bytes) in enumerate((("F8_E4M3", 1), ("BF16", 2), ("F32", 4)) * 3):
        units = weights(50 + i, 150, unit_bytes)
        old[f"t{i}"] = as_tensor(dtype, (150,), units)
        new[f"t{i}"] = as_tensor(dtype, (150,), changed(units, i // 3))
    dense = weights(70, 4096, 2)  # more than 2048 changes: balanced
    old["dense"] = as_tensor("BF16", (64, 64), dense)
    new["dense"] = as_tensor("BF16", (64, 64), dense + (np.arange(4096) % 5 < 3).astype("<u2"))
    frame = encode(old, new, profile=profile, threads=1)
    return Subject(f"every_mode_{profile}", old, bytes_of(new), frame)


@cache
def small() -> tuple[Subject, ...]:
    names = ("example", "example_base", "unchanged", "kinds", "kinds_base", "lenient")
    names += ("model_a_few_auto", "model_many_fast", "model_many_small")
    return (*map(golden, names), *map(every_mode, ("auto", "fast", "small")))


@cache
def large() -> tuple[Subject, ...]:
    names = ("model", "model_every_bit", "model_noisy", "model_special_fast", "tiles")
    names += ("model_special_small", "model_most_auto", "model_most_small", "tiles_many", "kinds")
    return (*map(golden, names), golden("lenient"))


class Receiver:
    """A state that holds the base of a subject, made anew where a frame got at it."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.old = bytes_of(subject.old)
        self.reset()

    def reset(self) -> None:
        self.state = State.copy_of(self.subject.old, threads=1)

    def refuses(self, frame: bytes) -> None:
        """Asserts that a frame changes nothing and is refused before it could."""
        with pytest.raises(FormatError):
            apply(self.state, frame)
        assert self.state.is_consistent
        assert bytes_of(self.state.tensors) == self.old

    def is_never_wrong_after(self, frame: bytes) -> bool:
        """Whether a frame was applied; asserts that the weights are then those of the subject.

        A refusal leaves the weights as they were, or says that they are inconsistent.
        """
        try:
            report = apply(self.state, frame)
        except (FormatError, ChainError):
            if self.state.is_consistent:
                assert bytes_of(self.state.tensors) == self.old
            else:
                self.reset()
            return False
        assert bytes_of(self.state.tensors) == self.subject.new
        assert report.new_root == self.state.root
        self.reset()
        return True


def is_parsed(frame: bytes | bytearray) -> bool:
    try:
        _core.parse_frame(frame)
    except FormatError:
        return False
    return True


def flipped_bits(subject: Subject) -> Iterator[bytearray]:
    """The frame with one bit wrong, for every bit; it is valid again only when this returns."""
    broken = bytearray(subject.frame)
    for at in range(len(broken)):
        for bit in range(8):
            broken[at] ^= 1 << bit
            yield broken
            broken[at] ^= 1 << bit


def test_I10_the_small_frames_have_every_profile_mode_kind_and_unit() -> None:
    infos = [inspect(subject.frame) for subject in small()]
    tensors = [tensor for info in infos for tensor in info.tensors]
    assert {info.profile for info in infos} == {"auto", "fast", "small"}
    assert {t.kind for t in tensors} == {"delta", "added", "replaced", "removed", "alias"}
    modes = {mode for tensor in tensors for mode in tensor.modes}
    assert modes == {"unchanged", "fast", "balanced", "small", "dense", "raw"}
    for subject in (*small(), *large()):
        assert Receiver(subject).is_never_wrong_after(subject.frame), subject


def num_bits() -> int:
    return sum(8 * len(subject.frame) for subject in small())


def test_I10_every_flipped_bit_of_small_frames_is_seen_before_a_tensor_changes() -> None:
    undetected = []
    for subject in small():
        receiver = Receiver(subject)
        for i, broken in enumerate(flipped_bits(subject)):
            if is_parsed(broken):
                undetected.append((subject.name, i))
            elif i % APPLY_EVERY == 0:
                receiver.refuses(bytes(broken))
    assert undetected == []


def overwritten(rng: np.random.Generator, frame: bytes) -> bytes:
    """One to eight neighbouring bytes are random."""
    count = int(rng.integers(1, 9))
    at = int(rng.integers(0, len(frame) - count))
    return frame[:at] + rng.bytes(count) + frame[at + count :]


def scattered(rng: np.random.Generator, frame: bytes) -> bytes:
    """Two to sixteen bits are wrong, anywhere."""
    broken = bytearray(frame)
    for at in rng.integers(0, 8 * len(frame), int(rng.integers(2, 17))).tolist():
        broken[at >> 3] ^= 1 << (at & 7)
    return bytes(broken)


def zeroed(rng: np.random.Generator, frame: bytes) -> bytes:
    """A run of up to 4096 bytes, such as a lost page, is zeros."""
    count = int(rng.integers(1, min(4097, len(frame))))
    at = int(rng.integers(0, len(frame) - count + 1))
    return frame[:at] + bytes(count) + frame[at + count :]


def swapped(rng: np.random.Generator, frame: bytes) -> bytes:
    """Two runs of 1 to 64 bytes, words for the most part, have changed places."""
    count = int(rng.choice((1, 2, 4, 4, 4, 8, 16, 64)))
    a, b = sorted(rng.integers(0, len(frame) - 2 * count, 2).tolist())
    b = max(b, a + count)
    parts = (frame[:a], frame[b : b + count], frame[a + count : b], frame[a : a + count])
    return b"".join((*parts, frame[b + count :]))


def repeated(rng: np.random.Generator, frame: bytes) -> bytes:
    """A run stands where another one was."""
    count = int(rng.integers(1, 65))
    a, b = rng.integers(0, len(frame) - count, 2).tolist()
    return frame[:a] + frame[b : b + count] + frame[a + count :]


def truncated(rng: np.random.Generator, frame: bytes) -> bytes:
    return frame[: int(rng.integers(0, len(frame)))]


def extended(rng: np.random.Generator, frame: bytes) -> bytes:
    """Bytes follow: random ones, zeros, or the end of the frame once more."""
    count = int(rng.integers(1, 200))
    return frame + (rng.bytes(count), bytes(count), frame[-count:])[int(rng.integers(0, 3))]


def inserted(rng: np.random.Generator, frame: bytes) -> bytes:
    at = int(rng.integers(0, len(frame)))
    return frame[:at] + rng.bytes(int(rng.integers(1, 9))) + frame[at:]


def deleted(rng: np.random.Generator, frame: bytes) -> bytes:
    at = int(rng.integers(0, len(frame) - 8))
    return frame[:at] + frame[at + int(rng.integers(1, 9)) :]


def sections_swapped(rng: np.random.Generator, sections: list[bytes]) -> list[bytes]:
    a, b = rng.integers(0, len(sections), 2).tolist()
    sections[a], sections[b] = sections[b], sections[a]
    return sections


def section_repeated(rng: np.random.Generator, sections: list[bytes]) -> list[bytes]:
    a, b = rng.integers(0, len(sections), 2).tolist()
    return [*sections[:a], sections[b], *sections[a:]]


def section_dropped(rng: np.random.Generator, sections: list[bytes]) -> list[bytes]:
    at = int(rng.integers(0, len(sections)))
    return sections[:at] + sections[at + 1 :]


def section_moved(rng: np.random.Generator, sections: list[bytes]) -> list[bytes]:
    a, b = rng.integers(0, len(sections), 2).tolist()
    sections.insert(b, sections.pop(a))
    return sections


def section_of_another_frame(rng: np.random.Generator, sections: list[bytes]) -> list[bytes]:
    others = large()[int(rng.integers(0, len(large())))].sections
    at = int(rng.integers(0, len(sections)))
    sections[at] = others[int(rng.integers(0, len(others)))]
    return sections


BYTES: tuple[Damage, ...] = (overwritten, scattered, zeroed, swapped, repeated)
SIZES: tuple[Damage, ...] = (truncated, extended, inserted, deleted)
SECTIONS = (
    *(sections_swapped, section_repeated, section_dropped, section_moved),
    section_of_another_frame,
)


def damaged(rng: np.random.Generator, subject: Subject) -> bytes:
    """The frame with one random damage, which differs from the frame."""
    while True:
        kind = int(rng.integers(0, len(BYTES) + len(SIZES) + len(SECTIONS)))
        if kind < len(BYTES) + len(SIZES):
            broken = (*BYTES, *SIZES)[kind](rng, subject.frame)
        else:
            parts = SECTIONS[kind - len(BYTES) - len(SIZES)](rng, subject.sections)
            broken = subject.frame[:8] + b"".join(parts)
        if broken != subject.frame:
            return broken


def undetected_of(num_trials: int, seed: int) -> list[tuple[str, int]]:
    undetected = []
    for s, subject in enumerate(large()):
        receiver = Receiver(subject)
        rng = np.random.default_rng((seed, s))
        for i in range(-(-num_trials // len(large()))):
            broken = damaged(rng, subject)
            if is_parsed(broken):
                undetected.append((subject.name, i))
            elif i % (10 * APPLY_EVERY) == 0:
                receiver.refuses(broken)
    return undetected


def test_I10_every_random_damage_of_larger_frames_is_seen_before_a_tensor_changes() -> None:
    assert undetected_of(RANDOM_TRIALS, seed=1) == []


def test_I10_the_commit_tier_sees_at_least_200_000_damaged_frames() -> None:
    assert num_bits() + RANDOM_TRIALS >= MUST_SEE


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_I10_ten_million_random_damages_are_seen() -> None:
    assert undetected_of(10_000_000, seed=2) == []


def sealed(kind: bytes, body: bytes) -> bytes:
    """A section whose size and check are those of its body."""
    start = kind + len(body).to_bytes(6, "little")
    return start + _core.check64(start, body).to_bytes(8, "little") + body


def resealed(frame: bytes, sections: list[tuple[bytes, bytes]]) -> bytes:
    """A frame of (type and flags, body) with checks and sizes right, whatever the bodies say."""
    parts = []
    for kind, body in sections:
        if kind[0] == END and len(body) >= 80:
            frame_check = _core.check64(*(part[8:16] for part in parts)).to_bytes(8, "little")
            size = (16 + len(body)).to_bytes(8, "little")
            body = body[:64] + frame_check + body[72:-8] + size
        parts.append(sealed(kind, body))
    return frame[:8] + b"".join(parts)


def bodies(subject: Subject) -> list[tuple[bytes, bytes]]:
    return [(part[:2], part[16:]) for part in subject.sections]


@pytest.mark.parametrize("name", ["example", "kinds", "lenient", "every_mode_auto"])
def test_I10_a_flipped_bit_under_right_checks_never_gives_wrong_weights(name: str) -> None:
    subject = next(subject for subject in small() if subject.name == name)
    receiver, parts = Receiver(subject), bodies(subject)
    assert resealed(subject.frame, parts) == subject.frame
    step = 1 + sum(len(body) for _, body in parts) // 1500
    for which, (kind, body) in enumerate(parts):
        for bit in range(which % step, 8 * len(body), step):
            broken = bytearray(body)
            broken[bit >> 3] ^= 1 << (bit & 7)
            parts[which] = (kind, bytes(broken))
            frame = resealed(subject.frame, parts)
            if is_parsed(frame):
                receiver.is_never_wrong_after(frame)
        parts[which] = (kind, body)


def damaged_bodies(rng: np.random.Generator, subject: Subject) -> list[tuple[bytes, bytes]]:
    parts = bodies(subject)
    if rng.random() < 0.2:
        change = SECTIONS[int(rng.integers(0, len(SECTIONS)))]
        moved = change(rng, [kind + bytes(14) + body for kind, body in parts])
        return [(part[:2], part[16:]) for part in moved]
    for which in rng.integers(0, len(parts), int(rng.integers(1, 3))).tolist():
        kind, body = parts[which]
        if len(body) > 160:
            damage = (*BYTES, *SIZES)[int(rng.integers(0, len(BYTES) + len(SIZES)))]
            body = damage(rng, body)
        elif body:
            body = overwritten(rng, body + bytes(9))[: len(body)]
        parts[which] = (kind, body)
    return parts


def test_I10_random_damage_under_right_checks_never_gives_wrong_weights() -> None:
    num_applied = num_read = 0
    subjects = (*small(), *large())
    for s, subject in enumerate(subjects):
        receiver, rng = Receiver(subject), np.random.default_rng((3, s))
        for _ in range(-(-RESEALED_TRIALS // len(subjects))):
            frame = resealed(subject.frame, damaged_bodies(rng, subject))
            if is_parsed(frame):
                num_read += 1
                num_applied += receiver.is_never_wrong_after(frame)
    assert num_read > RESEALED_TRIALS // 20  # the damage gets as far as the payloads
    assert num_applied < num_read


def test_I10_a_digest_that_is_a_lie_under_right_checks_and_roots_is_never_success() -> None:
    receiver = Receiver(golden("example"))
    with pytest.raises(ChecksumError) as caught:
        apply(receiver.state, INVALID["R28_digest"].frame())
    assert caught.value.number == 61
    assert not receiver.state.is_consistent
    with pytest.raises(ChainError):
        apply(receiver.state, receiver.subject.frame)
