"""`--key-file` of `gymfast sync` with keys of Ed25519 in PEM."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_commands import Gymfast
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

RUN = ("--run", "demo")
PEM = serialization.Encoding.PEM


@pytest.fixture
def signed(files: Path, gymfast: Gymfast) -> str:
    """A run signed with `private.pem`; readers have `public.pem`, others `other.pem`."""
    for name, number in (("private.pem", 1), ("other.pem", 2)):
        key = Ed25519PrivateKey.from_private_bytes(bytes([number] * 32))
        (files / name).touch(0o600)
        (files / name).write_bytes(
            key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        public = key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        (files / name.replace("private", "public")).write_bytes(public) if number == 1 else None
    done = gymfast(
        *("sync", "publish", "store", "old.safetensors", *RUN, "--key-file", "private.pem")
    )
    assert done.code == 0, done
    return "store"


def test_every_command_of_a_reader_takes_the_public_key(signed: str, gymfast: Gymfast) -> None:
    key = ("--key-file", "public.pem")
    assert gymfast("sync", "pull", signed, "r", *RUN, *key).code == 0
    assert gymfast("sync", "watch", signed, "w", *RUN, *key, "--until", "0").code == 0
    for name, *dest in (("fsck",), ("status",), ("verify", "r"), ("gc",)):
        done = gymfast("sync", name, signed, *dest, *RUN, *key)
        assert done.code == 0, done
    base = ("--base", "old.safetensors", "--key-file", "private.pem")
    assert gymfast("sync", "publish", signed, "new.safetensors", *RUN, *base).code == 0
    assert gymfast("sync", "pull", signed, "r", *RUN, *key).code == 0


def test_the_wrong_sort_of_key_is_one_sentence(signed: str, gymfast: Gymfast) -> None:
    Path("shared").write_bytes(b"sixteen bytes or more\n")
    Path("open.pem").write_bytes(Path("private.pem").read_bytes())
    Path("open.pem").chmod(0o644)
    Path("cut.pem").write_bytes(Path("public.pem").read_bytes()[:50])
    publish, pull = ("sync", "publish", signed, "new.safetensors"), ("sync", "pull", signed, "r")
    for call, key, code, text in (
        (publish, "public.pem", 1, "holds public keys only"),
        (publish, "shared", 3, "signed with Ed25519, but the key of this reader is for HMAC"),
        (publish, "other.pem", 3, "another key"),
        (pull, "shared", 3, "signed with Ed25519, but the key of this reader is for HMAC"),
        (pull, "other.pem", 3, "another key"),
        (pull, "open.pem", 1, "--key-file open.pem: open.pem holds a private key, and every"),
        (pull, "cut.pem", 1, "--key-file cut.pem: the PEM text of the key is cut off"),
    ):
        done = gymfast(*call, *RUN, "--key-file", key)
        assert done.code == code, done
        assert text in done.err
    assert not Path("r").exists()
    assert gymfast("sync", "pull", signed, "r", *RUN, "--key-file", "public.pem").code == 0


@pytest.mark.parametrize("call", [("relay", "store"), ("serve-pull", "--base", "old")])
@pytest.mark.parametrize("key", [b"short", b"\xff" * 32], ids=["short", "bytes"])
def test_the_hint_of_a_key_for_a_header_gives_one_that_it_carries(
    key: bytes, call: tuple[str, ...], files: Path, gymfast: Gymfast
) -> None:
    Path("a.key").write_bytes(key)
    done = gymfast(*call, "--key-file", "a.key")
    told = " ".join(done.err.split())
    assert done.code == (2 if key == b"short" else 1), done
    assert "as openssl rand -hex 32 gives" in told
    assert "urandom" not in told


@pytest.mark.parametrize("name", ["private.pem", "public.pem"])
def test_where_both_sides_need_a_secret_pem_is_a_usage_error(
    name: str, signed: str, gymfast: Gymfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = ("delta", "encode", "old.safetensors", "new.safetensors", "-o", "step.gfd")
    for call in (encode, ("relay", signed)):
        done = gymfast(*call, "--key-file", name)
        assert done.code == 2
        assert "the same secret bytes" in done.err
    monkeypatch.setenv("GYMFAST_RELAY_KEY_FILE", name)
    done = gymfast("sync", "pull", "relay://127.0.0.1:1", "r", *RUN)
    assert done.code == 1
    assert "the same secret bytes" in done.err
