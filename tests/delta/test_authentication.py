"""Rule R31 and section 3.5 of docs/wire-format.md: with a key, only frames of its holder count."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from pathlib import Path

import pytest
from delta_checkpoints import frame_of, read, write
from delta_frames import END, end_body, section, u64
from golden_valid import EXAMPLE_NEW, EXAMPLE_OLD, KEY

from gymfast.delta import Encoder, State, apply, encode, inspect, restore, verify
from gymfast.delta.authentication import Tagger
from gymfast.delta.checkpoint import apply_checkpoint, apply_checkpoint_in_place
from gymfast.delta.encode_pass import Options
from gymfast.delta.frame import MAGIC
from gymfast.errors import ChecksumError, FormatError

OTHER_KEY = bytes(range(1, 17))
AUTH = 0x80
GOLDEN = Path(__file__).parents[1] / "golden" / "valid" / "v1_authenticated.gfd"
FRAME = GOLDEN.read_bytes()
PLAIN = GOLDEN.with_name("v1_example.gfd").read_bytes()


def bits_of(state: State) -> dict[str, bytes]:
    return {name: tensor.data.tobytes() for name, tensor in state.tensors.items()}


def new_state(backend) -> State:
    return State.copy_of(EXAMPLE_OLD, backend=backend.name)


def sections_of(frame: bytes) -> list[bytes]:
    """The sections of a sound frame, magic left out."""
    parts, at = [], len(MAGIC)
    while at < len(frame):
        end = at + 16 + int.from_bytes(frame[at + 2 : at + 8], "little")
        parts.append(frame[at:end])
        at = end
    return parts


def sealed(sections: list[bytes], end: bytes) -> bytes:
    """A structurally sound frame of these sections, with roots and rows of this END section."""
    roots = {"base_root": end[16:48], "new_root": end[48:80]}
    body = end_body(sections, [end[88:-8]], **roots)
    return MAGIC + b"".join(sections) + section(END, body)


def assert_refused(
    backend, frame: bytes, number: int | None = 64, key: bytes = KEY, kind: type = FormatError
) -> FormatError:
    state = new_state(backend)
    before = bits_of(state)
    with pytest.raises(kind) as caught:
        apply(state, frame, key=key)
    assert bits_of(state) == before
    assert number is None or caught.value.number == number, str(caught.value)
    with pytest.raises(kind):
        verify(frame, backend=backend.name, key=key)
    return caught.value


def test_R31_a_frame_with_the_right_key_leads_to_the_new_state(backend) -> None:
    frame = encode(EXAMPLE_OLD, EXAMPLE_NEW, profile="fast", backend=backend.name, key=KEY)
    assert frame == FRAME
    state = new_state(backend)
    assert apply(state, frame, key=KEY).num_changed == 3
    assert bits_of(state) == {name: t.data.tobytes() for name, t in EXAMPLE_NEW.items()}
    assert apply(state, frame, key=KEY).skipped == ("w",)
    info = verify(frame, backend=backend.name, key=KEY)
    assert info.authentication == inspect(frame).authentication == "hmac-sha256"


def test_the_tag_is_the_hmac_that_the_specification_describes() -> None:
    *_, auth, end = sections_of(FRAME)
    before = FRAME[: -len(auth) - len(end)]
    message = before + end[16:80] + end[88:-8] + u64(len(before))
    assert auth[:16] == section(AUTH, auth[16:])[:16]
    assert auth[16:] == b"\1" + hmac.digest(KEY, message, hashlib.sha256)


def test_a_key_adds_one_section_of_49_bytes_and_changes_no_other() -> None:
    *sections, auth, end = sections_of(FRAME)
    assert len(auth) == len(FRAME) - len(PLAIN) == 49
    assert sealed(sections, end) == PLAIN


def test_an_encoder_authenticates_every_version_section_by_section(backend) -> None:
    encoder = Encoder(new_state(backend), profile="fast", key=KEY)
    sections = list(encoder.encode(EXAMPLE_NEW))
    assert b"".join(sections) == FRAME
    assert len(sections) == len(sections_of(FRAME)) - 1  # AUTH and END leave together
    encoder.commit()
    back = b"".join(encoder.encode(EXAMPLE_OLD))
    verify(back, key=KEY)


def test_an_authenticated_anchor_restores_only_with_its_key(backend) -> None:
    anchor = encode(None, EXAMPLE_NEW, backend=backend.name, key=KEY)
    state = new_state(backend)
    before = bits_of(state)
    with pytest.raises(ChecksumError):
        restore(state, anchor, key=OTHER_KEY)
    assert bits_of(state) == before
    restore(state, anchor, key=KEY)
    assert bits_of(state) == {name: t.data.tobytes() for name, t in EXAMPLE_NEW.items()}


@pytest.mark.parametrize("in_place", [False, True])
def test_checkpoints_are_written_only_from_frames_of_the_key(tmp_path: Path, in_place) -> None:
    old = write(tmp_path / "old.safetensors", EXAMPLE_OLD)
    new = write(tmp_path / "new.safetensors", EXAMPLE_NEW)
    out = old if in_place else tmp_path / "out.safetensors"
    frame, before = frame_of(old, new, key=KEY), old.read_bytes()

    def run(frame: bytes, key: bytes | None) -> None:
        if in_place:
            apply_checkpoint_in_place(old, frame, key=key)
        else:
            apply_checkpoint(old, frame, out, key=key)

    for bad, key in ((frame, OTHER_KEY), (frame_of(old, new), KEY), (frame[:-1], KEY)):
        with pytest.raises(FormatError) as caught:
            run(bad, key)
        assert caught.value.number == 64
        assert old.read_bytes() == before
        assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, old.name]
    run(frame, KEY)
    assert {n: t.data.tobytes() for n, t in read(out).items()} == {
        n: t.data.tobytes() for n, t in EXAMPLE_NEW.items()
    }


def test_R31_a_wrong_key_is_refused_and_the_right_tag_is_not_told(backend) -> None:
    error = assert_refused(backend, FRAME, key=OTHER_KEY, kind=ChecksumError)
    shown = f"{error!r} {error}"
    other = encode(EXAMPLE_OLD, EXAMPLE_NEW, profile="fast", key=OTHER_KEY)
    for secret in (KEY, OTHER_KEY, sections_of(other)[-2][17:], sections_of(FRAME)[-2][17:]):
        assert secret.hex()[:8] not in shown
        assert repr(secret)[2:-1] not in shown


def test_R31_a_frame_without_a_tag_is_refused_with_a_key(backend) -> None:
    assert_refused(backend, PLAIN)
    *sections, _, end = sections_of(FRAME)
    assert_refused(backend, sealed(sections, end))


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_R31_a_change_of_any_byte_is_refused(backend, mask: int) -> None:
    for at in range(len(FRAME)):
        damaged = bytearray(FRAME)
        damaged[at] ^= mask
        assert_refused(backend, bytes(damaged), number=None)


def test_R31_every_prefix_is_refused(backend) -> None:
    for size in range(len(FRAME)):
        assert_refused(backend, FRAME[:size], number=64 if size >= len(MAGIC) else None)
    assert_refused(backend, FRAME + b"\0")


def test_R31_the_tag_of_another_frame_is_refused(backend) -> None:
    other = encode(EXAMPLE_NEW, EXAMPLE_OLD, profile="fast", key=KEY)
    *sections, _, end = sections_of(FRAME)
    forged = sealed([*sections, sections_of(other)[-2]], end)
    apply(new_state(backend), forged)  # nothing else is wrong with it
    assert_refused(backend, forged, kind=ChecksumError)


@pytest.mark.parametrize("at", [16, 48, 88, 89, -9])
def test_R31_roots_and_rows_of_end_are_covered(backend, at: int) -> None:
    *sections, end = sections_of(FRAME)
    forged = bytearray(end)
    forged[at] ^= 1
    assert_refused(backend, sealed(sections, bytes(forged)), kind=ChecksumError)


def test_R31_sections_that_are_added_moved_or_left_out_are_refused(backend) -> None:
    *sections, auth, end = sections_of(FRAME)
    extra = section(0x90, b"more")
    assert_refused(backend, sealed([*sections, extra, auth], end), kind=ChecksumError)
    assert_refused(backend, sealed([*sections, auth, extra], end))
    assert_refused(backend, sealed([*sections[:-1], auth], end), kind=ChecksumError)
    assert_refused(backend, sealed([*sections[:-1], auth, sections[-1]], end))


def test_R31_a_second_tag_is_refused(backend) -> None:
    *sections, auth, end = sections_of(FRAME)
    twice = sealed([*sections, auth, auth], end)
    apply(new_state(backend), twice)
    assert_refused(backend, twice, kind=ChecksumError)


@pytest.mark.parametrize("body", [b"", b"\1" + bytes(31), b"\1" + bytes(33), b"\0" + bytes(32)])
def test_R31_a_tag_of_another_size_or_algorithm_is_refused(backend, body: bytes) -> None:
    *sections, _, end = sections_of(FRAME)
    frame = sealed([*sections, section(AUTH, body)], end)
    assert_refused(backend, frame)
    assert apply(new_state(backend), frame).num_changed == 3  # skippable without a key
    assert inspect(frame).authentication == ""


def test_a_reader_without_a_key_takes_the_frame(backend, parse: Callable[[bytes], object]) -> None:
    parse(FRAME)
    assert apply(new_state(backend), FRAME).num_changed == 3
    assert verify(FRAME, backend=backend.name).new_root == inspect(PLAIN).new_root
    assert inspect(PLAIN).authentication == ""


def test_R31_nothing_is_parsed_before_the_tag_is_right(backend) -> None:
    *_, auth, end = sections_of(FRAME)
    assert_refused(backend, MAGIC + b"\xff" * 99 + auth + end, kind=ChecksumError)
    for end_bytes in (0, 1, 95, 96, len(FRAME), len(FRAME) + 1, 2**64 - 1):
        assert_refused(backend, FRAME[:-8] + u64(end_bytes))


def test_another_format_version_is_told_apart_from_a_wrong_key(backend) -> None:
    assert_refused(backend, FRAME[:7] + b"\2" + FRAME[8:], number=11)
    assert_refused(backend, b"PK\3\4" + FRAME[4:], number=10)


def test_the_place_where_the_message_is_cut_is_part_of_it() -> None:
    first, second = Tagger(KEY), Tagger(KEY)
    first.update(b"frame", b"end")
    second.update(b"frame")
    assert first.tag() != second.tag(b"end")


@pytest.mark.parametrize("call", ["encode", "encoder", "apply", "verify"])
def test_a_bad_key_is_the_mistake_of_the_caller_and_is_not_shown(call: str) -> None:
    calls = {
        "encode": lambda key: encode(EXAMPLE_OLD, EXAMPLE_NEW, key=key),
        "encoder": lambda key: Encoder(State.copy_of(EXAMPLE_OLD), key=key),
        "apply": lambda key: apply(State.copy_of(EXAMPLE_OLD), FRAME, key=key),
        "verify": lambda key: verify(FRAME, key=key),
    }
    for key, kind in ((b"", ValueError), (b"secret bytes 15", ValueError), ("s" * 16, TypeError)):
        with pytest.raises(kind) as caught:
            calls[call](key)
        assert "secret" not in str(caught.value)


def test_a_key_is_not_shown_by_what_holds_it(backend) -> None:
    assert repr(KEY) not in repr(Options(backend, 1, 0, KEY))
