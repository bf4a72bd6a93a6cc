"""I84: marked secrets go in through environment and key files, and come out nowhere."""

from __future__ import annotations

import base64
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from object_double import Bucket
from object_proxy import Proxy, Trouble
from safetensors.numpy import load_file, save_file

WAIT_S = 120.0


class Marks:
    """Secrets of this test, and the forms in which they could show."""

    def __init__(self) -> None:
        names = ("key_id", "secret", "session", "signing", "relay", "wrong")
        self.values = {name: f"MARK{secrets.token_hex(16)}" for name in names}

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def shown_in(self, data: bytes) -> list[str]:
        """The names of those that are in there: plain, in hex, in base64 at any offset."""
        return [name for name, value in self.values.items() if self._is_in(value.encode(), data)]

    @staticmethod
    def _is_in(value: bytes, data: bytes) -> bool:
        forms = [value, value.hex().encode(), value.hex().upper().encode()]
        # Those characters of base64 that do not depend on what stands beside.
        forms += [base64.b64encode(b"x" * n + value)[4 * (n > 0) + 4 : -4] for n in range(3)]
        return any(form in data for form in forms)


def test_the_scan_finds_a_secret_in_every_form() -> None:
    marks = Marks()
    value = marks["secret"].encode()
    shown = [value, value.hex().encode(), *(base64.b64encode(b"?" * n + value) for n in range(5))]
    assert all(marks.shown_in(b"..." + form + b"...") == ["secret"] for form in shown)
    assert marks.shown_in(b"MARK" + bytes(100)) == []


class Outputs:
    """Runs `gymfast` in processes of its own and keeps all that they print."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, list[Path]()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> tuple[subprocess.Popen[bytes], Path]:
        shown = self.folder / f"output-{len(self.files)}"
        self.files.append(shown)
        with shown.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "gymfast", "-vv", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process, shown

    def run(self, *words: str) -> tuple[int, str]:
        process, shown = self.start(*words)
        return process.wait(WAIT_S), shown.read_text()


@contextmanager
def started(folder: Path) -> Iterator[Outputs]:
    folder.mkdir()
    outputs = Outputs(folder)
    try:
        yield outputs
    finally:
        for process in outputs.processes:
            process.kill()
            process.wait()


def wait_for(shown: Path, pattern: str) -> str:
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        if found := re.search(pattern, shown.read_text()):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"'{pattern}' is not in: {shown.read_text()}")


def command_lines() -> bytes:
    """The arguments of all processes of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:  # it has ended
            continue
    return b"\n".join(found)


@pytest.mark.ci
def test_I84_marked_secrets_are_in_no_output_store_file_or_argument(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publish, pull, watch, relay, status, fsck, verify, gc and their errors, with all logs on."""
    marks = Marks()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", marks["key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", marks["secret"])
    monkeypatch.setenv("AWS_SESSION_TOKEN", marks["session"])
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("signing", "relay", "wrong"):
        (keys / name).write_text(marks[name])
    monkeypatch.setenv("GYMFAST_RELAY_KEY_FILE", str(keys / "relay"))
    place, run = "s3://bucket/a", ["--run", "demo"]
    signed = [*run, "--key-file", str(keys / "signing")]
    weights = tmp_path / "weights.safetensors"

    def save(version: int) -> np.ndarray:
        state = np.arange(20_000, dtype=np.uint16)
        state[::97] += version
        save_file({"w": state}, weights)
        return state

    lines = b""
    with started(tmp_path / "outputs") as outputs:
        save(0)
        code, text = outputs.run("sync", "publish", place, str(weights), *signed, "--json")
        assert code == 0, text
        _, relay = outputs.start(
            *("relay", place, "--port", "0", "--key-file", str(keys / "relay")),
            *("--cache-dir", str(tmp_path / "outputs")),
        )
        port = wait_for(relay, r"127\.0\.0\.1:(\d+)")
        replica = tmp_path / "outputs" / "replica.safetensors"
        site = f"relay://127.0.0.1:{port}"
        watch, watched = outputs.start("sync", "watch", site, str(replica), *signed)
        wait_for(watched, r"(version 0)")
        lines += command_lines()
        state = save(1)
        code, text = outputs.run("sync", "publish", place, str(weights), *signed)
        assert code == 0, text
        wait_for(watched, r"(version 1)")
        lines += command_lines()
        watch.send_signal(signal.SIGINT)
        watch.wait(WAIT_S)
        assert np.array_equal(load_file(replica)["w"], state)
        pulled = str(tmp_path / "outputs" / "pulled.safetensors")
        for words in (
            ["pull", place, pulled, *signed, "--json"],
            ["status", place, *signed, "--json"],
            ["fsck", place, *signed, "--json"],
            ["verify", place, pulled, *signed],
            ["gc", place, *run, "--dry-run"],
        ):
            code, text = outputs.run("sync", *words)
            assert code == 0, (words, text)
        # What fails: another key, none, a secret in the address, a relay that wants another key.
        wrong = ["--key-file", str(keys / "wrong")]
        monkeypatch.setenv("GYMFAST_RELAY_KEY_FILE", str(keys / "wrong"))
        hostile = f"s3://{marks['key_id']}:{marks['secret']}@bucket/a"
        failures = [
            ["publish", place, str(weights), *run],
            ["pull", place, pulled, *run, *wrong, "--json"],
            ["pull", site, pulled, *signed],
            ["publish", place, str(weights), *signed, "--json"],
            ["pull", place, pulled, *signed],
        ]
        repeated = " ".join(marks.values.values())
        for number, words in enumerate(failures):
            if number == 3:  # from here on the store repeats all secrets
                monkeypatch.setenv("GYMFAST_TRACEBACK", "1")
                proxy.troubles += [
                    Trouble("answer", method, "", 403, "AccessDenied", 10**6, text=repeated)
                    for method in ("GET", "HEAD", "PUT", "POST", "DELETE")
                ]
            code, text = outputs.run("sync", *words)
            assert code not in (0, 2), (words, text)
        lines += command_lines()
        shown = {path: path.read_bytes() for path in outputs.folder.rglob("*") if path.is_file()}
        # An address with a secret is an argument of the user's own: only the answer counts.
        code, text = outputs.run("sync", "pull", hostile, pulled, *signed)
        assert code != 0, text
        assert "an address carries no user or secret" in text
        shown[outputs.files[-1]] = text.encode()
    assert len(shown) > 12
    stored = b"".join(
        key.encode() + held.body + repr(held.meta).encode() for key, held in bucket.objects.items()
    )
    assert len(stored) > 1000
    found = {str(path): marks.shown_in(data) for path, data in shown.items()}
    assert {path: names for path, names in found.items() if names} == {}
    assert marks.shown_in(stored) == []
    assert marks.shown_in(lines) == []
