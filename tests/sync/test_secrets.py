"""Keys are in no output, record, file, environment of a report, or argument of a process (I84)."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

RECORD_KEY = b"record-key-NOT-FOR-EYES-1"
RELAY_KEY = b"relay-key-NOT-FOR-EYES-2"


def forms_of(key: bytes) -> list[bytes]:
    """The key as something may show it."""
    return [key, key.hex().encode(), base64.b64encode(key).rstrip(b"="), repr(list(key)).encode()]


FORMS = [form for key in (RECORD_KEY, RELAY_KEY) for form in forms_of(key)]


def require_no_key(blob: bytes, where: str) -> None:
    for form in FORMS:
        assert form not in blob, f"{where} shows a key"


class Scene:
    """Commands of one run; all that they print, and the arguments of those that go on, is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shown = folder, b""
        (folder / "record.key").write_bytes(RECORD_KEY)
        (folder / "relay.key").write_bytes(RELAY_KEY)
        (folder / "other.key").write_bytes(b"another-key-of-some-length")
        self.env = {**os.environ, "GYMFAST_RELAY_KEY_FILE": "relay.key", "GYMFAST_TRACEBACK": "1"}

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "gymfast", "-v", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=self.folder, env=self.env)

    def run(self, *words: str) -> int:
        process = self.start(*words)
        out, err = process.communicate(timeout=240)
        self.shown += out + err
        return process.returncode


@pytest.mark.ci
def test_I84_no_key_is_in_anything_that_a_run_leaves(tmp_path: Path) -> None:
    scene, rng = Scene(tmp_path), np.random.default_rng(0)
    for version in range(2):
        weights = {"w": rng.integers(0, 999, 1000, dtype=np.uint16)}
        save_file(weights, tmp_path / f"{version}.safetensors")
    run, key = ("--run", "demo"), ("--key-file", "record.key")
    relay = scene.start("relay", "store", "--port", "0", "--key-file", "relay.key", "--json")
    try:
        assert relay.stdout is not None
        line = relay.stdout.readline()
        url = re.findall(rb"relay://[0-9.:]+", line)[0].decode()
        assert scene.run("sync", "publish", "store", "0.safetensors", *run, *key, "--json") == 0
        assert scene.run("sync", "publish", "store", "1.safetensors", *run, *key) == 0
        assert scene.run("sync", "pull", url, "replica", *run, *key, "--json") == 0
        assert scene.run("sync", "status", url, *run, *key, "--json") == 0
        assert scene.run("sync", "fsck", "store", *run, *key) == 0
        assert scene.run("sync", "pull", url, "bad", *run, "--key-file", "other.key") != 0
        scene.env["GYMFAST_RELAY_KEY_FILE"] = "other.key"
        assert scene.run("sync", "pull", url, "bad", *run, *key) != 0
        assert scene.run("env") == 0
        arguments = Path(f"/proc/{relay.pid}/cmdline")
        if arguments.exists():
            assert b"relay.key" in arguments.read_bytes()
            require_no_key(arguments.read_bytes(), "the arguments of the relay")
    finally:
        relay.kill()
        out, err = relay.communicate()
    assert b"wrong or missing key" in scene.shown
    require_no_key(line + out + err, "the relay")
    require_no_key(scene.shown, "the command line")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".key"]
    assert len(files) > 6
    for path in files:
        require_no_key(path.read_bytes(), str(path))


def test_I84_the_scan_finds_what_it_looks_for() -> None:
    for form in FORMS:
        with pytest.raises(AssertionError, match="shows a key"):
            require_no_key(b"text " + form + b" text", "it")
