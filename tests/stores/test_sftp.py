"""A store on an SFTP server, over real sockets, through both clients that fsspec has for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gymfast.stores import Store, open_store
from gymfast.testing.conformance import StoreContract

pytest.importorskip("fsspec", reason="needs fsspec")
SECRET = "hunter2-not-for-eyes"


@pytest.fixture
def sftp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an SFTP server, asked through sshfs."""
    pytest.importorskip("sshfs", reason="needs sshfs")
    from ssh_server import serve_sftp, sftp_settings

    sftp_settings(monkeypatch)
    with serve_sftp(tmp_path / "root") as port:
        yield f"fsspec+sftp://127.0.0.1:{port}/runs"


@pytest.mark.ci
class TestSftp(StoreContract):
    is_shared = True
    num_kills = 2
    num_thread_rounds = 10

    @pytest.fixture
    def store(self, sftp: str) -> Store:
        return open_store(sftp)


@pytest.mark.ci
class TestSftpOfFsspec(StoreContract):
    """The same server through the client that fsspec brings, over paramiko."""

    num_thread_rounds = 10
    num_big_chunks = 4

    @pytest.fixture
    def store(self, sftp: str, monkeypatch: pytest.MonkeyPatch) -> Store:
        pytest.importorskip("paramiko", reason="needs paramiko")
        from fsspec.implementations.sftp import SFTPFileSystem
        from fsspec.registry import _registry

        monkeypatch.setitem(_registry, "sftp", SFTPFileSystem)
        return open_store(sftp)


def gymfast(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gymfast", "-v", *words], capture_output=True, text=True
    )
    return f"{done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.ci
def test_versions_are_published_and_pulled_over_sftp(
    sftp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssh_server import PASSWORD

    weights, copy = tmp_path / "w.safetensors", tmp_path / "copy.safetensors"
    outputs = []
    for version in range(2):
        state = {"w": np.arange(100_000, dtype=np.uint16)}
        state["w"][::97] += version
        save_file(state, weights)
        outputs += [
            gymfast("sync", "publish", sftp, str(weights), "--run", "demo", "--single-writer"),
            gymfast("sync", "pull", sftp, str(copy), "--run", "demo"),
        ]
        assert all(output.startswith("0\n") for output in outputs), outputs
        assert np.array_equal(load_file(copy)["w"], state["w"])
    refused = gymfast("sync", "publish", sftp, str(weights), "--run", "demo")
    assert refused.startswith("1\n"), refused
    assert "no create-only writes" in refused
    monkeypatch.setenv("FSSPEC_SFTP_PASSWORD", SECRET)
    denied = gymfast("sync", "pull", sftp, str(copy), "--run", "demo")
    assert denied.startswith("1\n"), denied
    assert "credentials are not accepted" in denied
    shown = "".join((*outputs, refused, denied))
    assert not any(secret in shown for secret in (PASSWORD, SECRET))
