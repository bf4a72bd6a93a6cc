"""Records: canonical bytes, strict parsing, limits, signatures (sync-protocol.md section 3)."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sync.logs import LogBuilder, changed, hex_of, sample_log

from gymfast.errors import FormatError
from gymfast.sync import manifest
from gymfast.sync.keys import RunKeys, number_of, object_of
from gymfast.sync.manifest import (
    FrameRef,
    HintRecord,
    LeaseRecord,
    ObjectRef,
    PositionRecord,
    encode,
    parse_hint,
    parse_lease,
    parse_log_record,
    parse_position,
    sign,
)

KEY = b"k" * 16


def some_records() -> list[manifest.LogRecord]:
    return sample_log(2, anchors=(1,)).records


def test_every_record_parses_to_itself():
    for record in some_records():
        assert parse_log_record(encode(record), "here") == record


def test_a_record_is_readable_json_with_its_type_first():
    for record in some_records():
        blob = encode(record)
        assert blob.endswith(b"\n")
        assert next(iter(json.loads(blob))) == "type"


def test_the_encoding_is_deterministic():
    assert [encode(r) for r in some_records()] == [encode(r) for r in some_records()]


@pytest.mark.parametrize("cut", [0, 1, 2, 50, -2, -1])
def test_a_cut_record_is_refused(cut):
    blob = encode(some_records()[1])
    with pytest.raises(FormatError, match="here"):
        parse_log_record(blob[:cut], "here")


def test_every_single_byte_flip_is_refused_or_is_another_canonical_record():
    """The chain digest, not the parser, catches a flip inside a value; here nothing may crash."""
    blob = encode(some_records()[1])
    accepted = 0
    for position in range(len(blob)):
        for bit in range(8):
            flipped = bytearray(blob)
            flipped[position] ^= 1 << bit
            try:
                record = parse_log_record(bytes(flipped), "here")
            except FormatError:
                continue
            assert encode(record) == flipped
            accepted += 1
    assert accepted < len(blob) * 8 / 2


@pytest.mark.parametrize(
    "change",
    [
        lambda blob: b" " + blob,
        lambda blob: blob + b"\n",
        lambda blob: blob[:-1],
        lambda blob: blob.replace(b":", b": ", 1),
        lambda blob: blob.replace(b'"format":1', b'"format":1.0'),
        lambda blob: blob.replace(b'"format":1', b'"format":1,"format":1'),
        lambda blob: blob.replace(b'"format":1', b'"format":2'),
        lambda blob: blob.replace(b'"format":1', b'"format":1,"extra":1'),
        lambda blob: blob.replace(b'"run":"run-a"', b'"run":"..\\/x"'),
        lambda blob: blob.replace(b'"run":"run-a"', b'"run":"run\\u002da"'),
        lambda blob: blob.replace(b'"seq":2', b'"seq":-2'),
        lambda blob: blob.replace(b'"seq":2', b'"seq":9007199254740992'),
        lambda blob: blob.replace(b'"seq":2', b'"seq":1e400'),
        lambda blob: blob.replace(b'"seq":2', b'"seq":' + b"[" * 100_000),
        lambda blob: blob.replace(b'"type":"version"', b'"type":"lease"'),
        lambda blob: blob.replace(b'"type":"version"', b'"type":["version"]'),
        lambda blob: blob.replace(b'"mac":""', b'"mac":"zz"'),
        lambda blob: b"\xff\xfe" + blob,
        lambda blob: b"null\n",
        lambda blob: b"[]\n",
    ],
)
def test_a_record_that_is_not_canonical_is_refused(change):
    blob = encode(some_records()[1])
    assert change(blob) != blob
    with pytest.raises(FormatError):
        parse_log_record(change(blob), "here")


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_with_a_format_error(blob):
    for parse in (parse_log_record, parse_hint, parse_lease, parse_position):
        with pytest.raises(FormatError):
            parse(blob, "here")


def test_a_record_over_the_limit_is_refused_before_it_is_parsed(monkeypatch):
    blob = encode(some_records()[1])
    monkeypatch.setattr(manifest, "MAX_RECORD_BYTES", len(blob) - 1)
    with pytest.raises(FormatError, match="at most"):
        parse_log_record(blob, "here")


def test_the_largest_frame_fits_a_record():
    ref = ObjectRef("0" * 64, manifest.MAX_OBJECT_BYTES)
    num_bytes = manifest.MAX_OBJECTS * manifest.MAX_OBJECT_BYTES
    frame = FrameRef(num_bytes, (ref,) * manifest.MAX_OBJECTS)
    record = changed(some_records()[1], frame=frame)
    blob = encode(record)
    assert len(blob) <= manifest.MAX_RECORD_BYTES
    assert parse_log_record(blob, "here") == record


def test_r23_a_version_of_no_tensors_is_refused():
    with pytest.raises(FormatError):
        parse_log_record(encode(changed(some_records()[1], num_tensors=0)), "here")


def test_a_frame_without_objects_or_with_another_sum_is_refused():
    record = some_records()[1]
    for frame in (
        FrameRef(10, ()),
        FrameRef(11, (ObjectRef(hex_of("x"), 10),)),
        FrameRef(0, (ObjectRef(hex_of("x"), 0),)),
        FrameRef(2**30, (ObjectRef(hex_of("x"), 2**30),)),
    ):
        with pytest.raises(FormatError):
            parse_log_record(encode(changed(record, frame=frame)), "here")


@pytest.mark.parametrize(("kind", "base"), [("anchor", 0), ("delta", 3), ("delta", -1)])
def test_a_version_on_another_base_than_the_one_before_is_refused(kind, base):
    record = changed(some_records()[2], kind=kind, base_version=base)
    with pytest.raises(FormatError, match="base"):
        parse_log_record(encode(record), "here")


def test_i33_a_delta_with_changes_cannot_look_empty():
    record = some_records()[2]
    with pytest.raises(FormatError, match="changes"):
        parse_log_record(encode(changed(record, root=record.base_root)), "here")


def test_a_signed_record_is_accepted_with_its_key_only():
    for record in some_records():
        signed = sign(record, KEY)
        assert parse_log_record(encode(signed), "here", KEY) == signed
        assert parse_log_record(encode(signed), "here") == signed
        with pytest.raises(FormatError, match="another key"):
            parse_log_record(encode(signed), "here", b"x" * 16)
        with pytest.raises(FormatError, match="not signed"):
            parse_log_record(encode(record), "here", KEY)


def test_a_signed_record_with_any_changed_field_is_refused():
    for record in some_records():
        signed = sign(record, KEY)
        for field in record.__struct_fields__:
            value = getattr(signed, field)
            if isinstance(value, int):
                other: object = value + 1
            elif field in ("nonce", "previous", "root", "base_root", "schema"):
                other = hex_of("other")[: len(value) or 64]
            elif field == "publisher":
                other = "intruder"
            elif field == "frame":
                other = FrameRef(10, (ObjectRef(hex_of("other"), 10),))
            else:
                continue
            with pytest.raises(FormatError):
                parse_log_record(encode(changed(signed, **{field: other})), "here", KEY)


def test_small_records_parse_to_themselves():
    tip = sample_log().tip.to_record()
    hint = HintRecord(1, "run", 3, -1, hex_of("x"), 5)
    lease = LeaseRecord(1, "run", "reader-1", 3, 5)
    position = PositionRecord(1, "run", "applying", tip, (tip, tip))
    assert parse_hint(encode(hint), "") == hint
    assert parse_lease(encode(lease), "") == lease
    assert parse_position(encode(position), "") == position


@pytest.mark.parametrize(
    "run", ["", ".", "..", ".hidden", "a/b", "a b", "ü", "a\n", "x" * 129, "a\0b", "../a"]
)
def test_i83_a_hostile_run_name_is_refused(run):
    with pytest.raises(ValueError, match="run"):
        RunKeys(run)


def test_keys_sort_like_their_numbers_and_tell_them():
    keys = RunKeys("r")
    numbers = [1, 9, 10, 99, 100, 2**53 - 1]
    random.Random(1).shuffle(numbers)
    assert sorted(map(keys.record, numbers)) == [keys.record(n) for n in sorted(numbers)]
    log, objects = keys.log_prefix, keys.objects_prefix
    assert [number_of(keys.record(n), log) for n in numbers] == numbers
    others = ("12", "٣" * 20, f"x/{7:020d}", f"{7:020d}/x", f"{0:020d}", f"{2**53:020d}", "9" * 20)
    assert [number_of(log + name, log) for name in others] == [None] * len(others)
    assert number_of(f"{7:020d}", log) is None
    assert object_of(keys.object(7, "ab" * 32), objects) == (7, "ab" * 32)
    for name in ("x/ab", f"x/{7:020d}/ab", f"{7:020d}", f"{7:020d}/ab/cd"):
        assert object_of(objects + name, objects) is None


def test_records_are_immutable():
    with pytest.raises(AttributeError):
        some_records()[0].seq = 5
    assert isinstance(LogBuilder().records, list)
    assert msgspec.structs.asdict(some_records()[0])["seq"] == 1
