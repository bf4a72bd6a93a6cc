"""Records signed with Ed25519: who may sign, who is believed, what a key file may hold (3.5)."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa, x25519
from sync.harness import RUN, history, publisher, reader, records_of, zeros_like
from sync.logs import sample_log

from gymfast.errors import ConflictError, FormatError
from gymfast.key_file import read_key_file, read_shared_key_file
from gymfast.stores.memory import MemoryStore
from gymfast.sync import Compactor, collect
from gymfast.sync.fsck import fsck
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import NUMBER_MAC, encode, parse_log_record, sign
from gymfast.sync.relay import RelayCache
from gymfast.sync.signatures import Key, check_key, check_signing_key, mac_of
from gymfast.sync.status import read_status

PEM, PKCS8, PLAIN = (
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.NoEncryption(),
)
SPKI = serialization.PublicFormat.SubjectPublicKeyInfo
SHARED = b"k" * 32
HAS_OPENSSL = shutil.which("openssl") is not None


def private_pem(key: Any, encryption: Any = PLAIN) -> bytes:
    return key.private_bytes(PEM, PKCS8, encryption)


def public_pem(key: Any) -> bytes:
    return key.public_key().public_bytes(PEM, SPKI)


PAIR, OTHER = (ed25519.Ed25519PrivateKey.from_private_bytes(bytes([n] * 32)) for n in (1, 2))
PRIVATE, PUBLIC = private_pem(PAIR), public_pem(PAIR)
KINDS = {"shared": (SHARED, SHARED), "ed25519": (PRIVATE, PUBLIC)}


@pytest.fixture
def store() -> MemoryStore:
    """A run signed with the private key: versions 0 and 1."""
    made = MemoryStore()
    source = publisher(made, key=PRIVATE)
    for weights in history(1):
        source.publish(weights)
    return made


def pulled(store: Any, key: Key | None) -> int:
    with reader(store, zeros_like(history(0)[0]), key=key) as follower:
        return follower.pull().version


def test_readers_with_the_public_key_follow_a_publisher_with_the_private_one(store) -> None:
    assert pulled(store, PUBLIC) == 1
    assert pulled(store, None) == 1
    assert {record.mac[:8] for record in records_of(store)} == {"ed25519:"}
    publisher(store, key=PRIVATE).publish(history(2)[2])
    assert pulled(store, PUBLIC) == 2
    cache = RelayCache(store, max_bytes=1 << 30)
    assert pulled(cache, PUBLIC) == 2
    cache.close()
    assert read_status(store, RUN, key=PUBLIC).newest.version == 2
    assert fsck(store, RUN, key=PUBLIC).damage == ()
    collect(store, RUN, keep=1, key=PUBLIC)
    with pytest.raises(ConflictError, match="is signed"):
        publisher(store)


def other_values(value: Any) -> Iterator[Any]:
    """What a forger might write instead, of the same type and mostly a legal value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from ({**value, name: other} for other in other_values(inner))
    elif isinstance(value, list):
        yield [*value, value[0]]
        yield from ([other, *value[1:]] for other in other_values(value[0]))
    elif isinstance(value, int):
        yield from (value + 1, value - 1)
    else:
        other = {"delta": "anchor", "anchor": "delta", "version": "anchor"}.get(value)
        yield other or value[:-1] + ("1" if value.endswith("0") else "0")
        yield ""


@pytest.mark.parametrize("kind", KINDS)
def test_I82_each_changed_field_of_each_record_is_refused(kind: str) -> None:
    signing, checking = KINDS[kind]
    num_refused_for_signature = 0
    for record in sample_log(2, anchors=(1,)).records:
        signed = sign(record, check_key(signing))
        assert parse_log_record(encode(signed), "here", check_key(checking)) == signed
        fields = json.loads(encode(signed))
        for name in fields:
            for other in filter(lambda other: other != fields[name], other_values(fields[name])):
                forged = json.dumps({**fields, name: other}, separators=(",", ":")).encode() + b"\n"
                with pytest.raises(FormatError) as refused:
                    parse_log_record(forged, "here", check_key(checking))
                try:
                    parse_log_record(forged, "here")
                except FormatError:
                    continue
                assert refused.value.number == NUMBER_MAC
                num_refused_for_signature += 1
    assert num_refused_for_signature > 60  # the others break the form already


@pytest.mark.parametrize("kind", KINDS)
def test_I82_each_flipped_bit_of_a_signature_is_refused(kind: str) -> None:
    signing, checking = (check_key(key) for key in KINDS[kind])
    record = sign(sample_log(1).records[1], signing)
    blob = encode(record)
    start = blob.index(record.mac.encode())
    for place in range(start, start + len(record.mac)):
        for bit in range(8):
            forged = bytearray(blob)
            forged[place] ^= 1 << bit
            with pytest.raises(FormatError):
                parse_log_record(bytes(forged), "here", checking)


def test_the_form_of_a_signature_is_strict() -> None:
    record = sign(sample_log(1).records[1], check_key(PRIVATE))
    blob, mac = encode(record), record.mac
    digits = mac.removeprefix("ed25519:")
    wrong = (
        *("ed25519:" + digits.upper(), digits, mac + "0", mac[:-1], mac[:-2], " " + mac),
        *("ED25519:" + digits, "ed25519:", "ed25519:" + digits[:64], "hmac:" + digits[:64]),
        mac + "\\n",
    )
    for text in wrong:
        with pytest.raises(FormatError) as refused:
            parse_log_record(blob.replace(mac.encode(), text.encode()), "here")
        assert refused.value.number == 101


def test_no_reader_takes_the_other_kind_and_each_is_told_both(store) -> None:
    shared = MemoryStore()
    publisher(shared, key=SHARED).publish(history(0)[0])
    plain = MemoryStore()
    publisher(plain).publish(history(0)[0])
    cases = (
        (store, SHARED, "signed with Ed25519, but the key of this reader is for HMAC-SHA256"),
        (shared, PUBLIC, "signed with HMAC-SHA256, but the key of this reader is for Ed25519"),
        (plain, PUBLIC, "not signed, but this reader has an Ed25519 key"),
        (store, public_pem(OTHER), "another key"),
    )
    for run, key, text in cases:
        with pytest.raises(FormatError, match=text):
            pulled(run, key)
        with pytest.raises(FormatError, match=text):
            fsck(run, RUN, key=key)
        with pytest.raises(FormatError, match=text):
            read_status(run, RUN, key=key)
        held = set(run.list(""))
        with pytest.raises(FormatError, match=text):
            publisher(run, key=SHARED if key == SHARED else private_pem(OTHER))
        assert set(run.list("")) == held


def test_a_public_key_is_never_a_shared_key(store, tmp_path: Path) -> None:
    """The classic confusion: a record with an HMAC under the bytes that every reader has."""
    held = records_of(store)[-1]
    raw = PAIR.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    der = PAIR.public_key().public_bytes(serialization.Encoding.DER, SPKI)
    ssh = PAIR.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    for guess in (PUBLIC, PUBLIC[:-1], raw, raw.hex().encode(), der, ssh):
        unsigned = encode(msgspec.structs.replace(held, mac=""))
        digest = hmac.new(guess, unsigned, hashlib.sha256).hexdigest()
        forged = msgspec.structs.replace(held, mac=digest)
        store.put(RunKeys(RUN).record(held.seq), encode(forged))
        with pytest.raises(FormatError, match="signed with HMAC-SHA256"):
            pulled(store, PUBLIC)
    # Nor can a reader be given a public key in a form that would count as shared bytes.
    for name, data in (("der", der), ("ssh", ssh)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match="expected a shared key or PEM"):
            read_key_file(tmp_path / name)


def test_keys_rotate_without_a_gap(store) -> None:
    both = public_pem(PAIR) + b"# the new one\n" + public_pem(OTHER)
    assert pulled(store, both) == 1
    with pytest.raises(FormatError, match="another key"):
        publisher(store, key=private_pem(OTHER))
    successor = publisher(store, key=private_pem(OTHER) + PUBLIC)
    successor.publish(history(2)[2])
    assert pulled(store, both) == 2
    with pytest.raises(FormatError, match="another key"):
        pulled(store, PUBLIC)


def test_a_publisher_needs_the_private_key_and_says_so_before_it_writes() -> None:
    store = MemoryStore()
    with pytest.raises(ValueError, match="public keys only"):
        publisher(store, key=PUBLIC)
    assert list(store.list("")) == []
    with pytest.raises(ValueError, match="public keys only"):
        check_signing_key(PUBLIC)
    with pytest.raises(ValueError, match="public keys only"):
        mac_of(b"record", PUBLIC)


def test_a_reader_with_a_private_key_works_and_is_warned(store, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assert pulled(store, PRIVATE) == 1
    assert "was given a private key" in caplog.text
    caplog.clear()
    assert pulled(store, PUBLIC) == 1
    assert "private" not in caplog.text


EC = private_pem(ec.generate_private_key(ec.SECP256R1()))
BAD = {
    "encrypted": (
        private_pem(PAIR, serialization.BestAvailableEncryption(b"word")),
        "is encrypted",
    ),
    "rsa": (private_pem(rsa.generate_private_key(65537, 2048)), "of RSA, expected Ed25519"),
    "rsa, old form": (
        rsa.generate_private_key(65537, 2048).private_bytes(
            PEM, serialization.PrivateFormat.TraditionalOpenSSL, PLAIN
        ),
        "holds 'RSA PRIVATE KEY'",
    ),
    "ec": (EC, "of EC, expected Ed25519"),
    "ed448": (private_pem(ed448.Ed448PrivateKey.generate()), "of Ed448, expected Ed25519"),
    "x25519": (public_pem(x25519.X25519PrivateKey.generate()), "of X25519, expected Ed25519"),
    "openssh": (
        PAIR.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, PLAIN),
        "holds 'OPENSSH PRIVATE KEY'",
    ),
    "two that sign": (PRIVATE + private_pem(OTHER), "2 private keys"),
    "label of the other": (PUBLIC.replace(b"PUBLIC", b"PRIVATE"), "damaged 'PRIVATE KEY'"),
    "damaged": (PRIVATE.replace(PRIVATE[40:50], b"AAAAAAAAAA"), "damaged 'PRIVATE KEY'"),
    "no base64": (PRIVATE.replace(PRIVATE[40:50], b"!!!!!!!!!!"), "damaged 'PRIVATE KEY'"),
    "one whole, one cut": (PUBLIC + public_pem(OTHER)[:60], "cut off"),
    "utf-16": (PUBLIC.decode().encode("utf-16"), "cut off or damaged"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_key_file_that_cannot_be_used_is_one_clear_error(name: str, tmp_path: Path) -> None:
    text, problem = BAD[name]
    path = tmp_path / "key.pem"
    path.touch(0o600)
    path.write_bytes(text)
    with pytest.raises(ValueError, match=problem) as refused:
        check_key(read_key_file(path))
    hidden = [line for line in text.splitlines() if len(line) > 20 and b"-----" not in line]
    assert not any(line.decode("latin-1") in str(refused.value) for line in hidden)


def test_every_cut_of_a_key_is_an_error_and_never_a_shared_key() -> None:
    for text in (PRIVATE.strip(), PUBLIC.strip()):
        for place in range(1, len(text)):
            for part in (text[:place], text[place:]):
                if part.strip(b"-") in text and len(part) < 16:
                    continue  # too short for any key
                if b"-----" not in part and b" KEY-" not in part:
                    continue  # base64 alone has no mark of PEM
                with pytest.raises(ValueError, match=r"cut off|damaged|16|anew"):
                    check_key(part)


def test_a_private_key_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "private.pem"
    path.write_bytes(PRIVATE)
    for mode, is_refused in ((0o644, True), (0o602, True), (0o600, False), (0o440, False)):
        path.chmod(mode)
        if is_refused:
            with pytest.raises(ValueError, match=rf"mode {mode:04o}\): chmod 600"):
                read_key_file(path)
        else:
            assert check_key(read_key_file(path)).can_sign
    public = tmp_path / "public.pem"
    public.write_bytes(PUBLIC)
    public.chmod(0o644)
    assert not check_key(read_key_file(public)).can_sign
    for name in (path, public):
        with pytest.raises(ValueError, match="same secret bytes"):
            read_shared_key_file(name)


@pytest.mark.skipif(not HAS_OPENSSL, reason="needs openssl")
def test_what_openssl_writes_is_read(tmp_path: Path) -> None:
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    for words in (
        ["genpkey", "-algorithm", "ed25519", "-out", str(private)],
        ["pkey", "-in", str(private), "-pubout", "-out", str(public)],
        ["pkey", "-in", str(private), "-text", "-out", str(tmp_path / "text.pem")],
    ):
        subprocess.run(["openssl", *words], check=True, capture_output=True)
    store, weights = MemoryStore(), history(0)[0]
    publisher(store, key=read_key_file(private)).publish(weights)
    assert pulled(store, read_key_file(public)) == 0
    (tmp_path / "text.pem").chmod(0o600)
    assert check_key(read_key_file(tmp_path / "text.pem")).can_sign


def test_without_the_package_the_error_names_the_extra() -> None:
    code = (
        "import sys\n"
        "sys.modules['cryptography'] = None\n"
        "from gymfast.errors import MissingDependencyError\n"
        "from gymfast.sync.signatures import check_key\n"
        "assert check_key(bytes(16)) == bytes(16)\n"
        "try:\n    check_key(sys.stdin.buffer.read())\n"
        "except MissingDependencyError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input=PUBLIC, capture_output=True)
    assert b"pip install 'gymfast[sign]'" in done.stdout, done.stderr


def test_a_compactor_needs_the_private_key(store, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="public keys only"):
        Compactor(store, RUN, tmp_path, key=PUBLIC)


def test_a_compactor_with_the_private_key_is_not_told_to_have_less(store, tmp_path, caplog) -> None:
    with (
        caplog.at_level(logging.WARNING),
        Compactor(store, RUN, tmp_path, key=PRIVATE) as compactor,
    ):
        list(compactor.work())
    assert "private" not in caplog.text
