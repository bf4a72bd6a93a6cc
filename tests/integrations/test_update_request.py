"""What a trainer may ask of an engine, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from safetensors.numpy import save

from gymfast.delta import encode
from gymfast.errors import ChainError, FormatError
from gymfast.integrations.canonical import CanonicalCopy
from gymfast.integrations.run_options import RunOptions
from gymfast.integrations.update_request import InitRequest, UpdateRequest
from gymfast.sync import Publisher

WEIGHTS = {"a.weight": np.arange(64, dtype=np.uint16), "b.weight": np.ones(3, np.float32)}


@pytest.mark.parametrize("given", [{}, {"version": 1, "frame": b""}, {"frame": b"", "bucket": {}}])
def test_an_update_is_exactly_one_of_three(given) -> None:
    with pytest.raises(ValueError, match="of version, frame, bucket"):
        UpdateRequest(**given)


def test_only_buckets_come_in_parts() -> None:
    with pytest.raises(ValueError, match="for buckets only"):
        UpdateRequest(version=1, is_last=False)


@pytest.mark.parametrize("given", [{"store": "memory://"}, {"run": "run"}])
def test_store_and_run_go_together(given) -> None:
    with pytest.raises(ValueError, match="name both or neither"):
        InitRequest(**given)


def test_text_that_is_no_base64_is_refused() -> None:
    with pytest.raises(FormatError, match="no base64 text"):
        UpdateRequest(frame="GF*DF").carry_out(CanonicalCopy())


def test_a_bucket_that_is_no_safetensors_file_is_refused() -> None:
    with pytest.raises(FormatError, match="no safetensors file"):
        UpdateRequest(bucket=save(WEIGHTS)[:40]).carry_out(CanonicalCopy())


def test_a_version_needs_a_run() -> None:
    with pytest.raises(ChainError, match="no run is followed"):
        UpdateRequest(version=1).carry_out(InitRequest().open())


@pytest.mark.parametrize("given", [{"frame": encode(None, WEIGHTS)}, {"bucket": WEIGHTS}])
def test_an_engine_that_follows_a_run_takes_versions_only(given, tmp_path) -> None:
    store = tmp_path.as_uri()
    Publisher(store, "run").publish(WEIGHTS)
    copy = InitRequest(store=store, run="run").open()
    with pytest.raises(ChainError, match="follows a run of a store"):
        UpdateRequest(**given).carry_out(copy)


def test_a_signed_run_needs_the_key_file(tmp_path) -> None:
    store, key = (tmp_path / "store").as_uri(), bytes(range(32))
    (tmp_path / "key").write_bytes(
        key + b"\n"
    )  # as an editor leaves it; `gymfast sync` reads it so
    Publisher(store, "run", key=key).publish(WEIGHTS)
    copy = InitRequest(store=store, run="run", key_file=str(tmp_path / "key")).open()
    UpdateRequest(version=0).carry_out(copy)
    assert copy.changed() == list(WEIGHTS)
    other = CanonicalCopy.of_run(store, "run", key=bytes(32))
    with pytest.raises(FormatError):
        other.pull(0)


def test_an_older_version_is_refused(tmp_path) -> None:
    store = tmp_path.as_uri()
    publisher = Publisher(store, "run")
    publisher.publish(WEIGHTS)
    publisher.publish(WEIGHTS | {"b.weight": np.zeros(3, np.float32)})
    copy = CanonicalCopy.of_run(store, "run")
    copy.pull(1)
    with pytest.raises(ChainError, match="older"):
        copy.pull(0)


def test_what_changed_is_told_until_it_is_loaded() -> None:
    copy = CanonicalCopy()
    copy.put_bucket(WEIGHTS, is_last=True)
    assert copy.changed() == list(WEIGHTS)
    copy.mark_loaded()
    assert copy.changed() == []
    copy.put_frame(encode(WEIGHTS, {"a.weight": WEIGHTS["a.weight"] + 1}))
    assert copy.changed() == ["a.weight", "b.weight"]  # the second was removed
    assert copy.names == ("a.weight",)


def test_engines_need_the_public_key_only(tmp_path) -> None:
    private, public, store = tmp_path / "private", tmp_path / "public", tmp_path.as_uri()
    pair = ed25519.Ed25519PrivateKey.generate()
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private.touch(0o600)
    private.write_bytes(pair.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(pair.public_key().public_bytes(pem, spki))
    keys = {"key_file": str(private), "public_key_file": str(public)}
    options = {"store": store, "run": "run", **keys}
    RunOptions.of(options, "here").publisher().publish(WEIGHTS)
    private.unlink()  # as on the machine of an engine
    copy = RunOptions.of(options, "here").follow()
    UpdateRequest(version=0).carry_out(copy)
    assert copy.changed() == list(WEIGHTS)
    with pytest.raises(ValueError, match="public keys only"):
        RunOptions.of({**options, "key_file": str(public)}, "here").publisher()
