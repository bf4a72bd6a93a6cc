"""`gymfast hf-delta`: publish, pull, inspect, verify, convert, and what they refuse."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from cli_commands import Gymfast
from delta_checkpoints import read, write_sharded
from delta_weights import changed, random_tensor

from gymfast.testing.compare import assert_bits_equal


@pytest.fixture
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Checkpoints `state-0` to `state-2` in the working directory."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    weights = {
        "embed": random_tensor("BF16", (40, 64), rng),
        "norm": random_tensor("F32", (64,), rng),
        "frozen": random_tensor("U8", (30,), rng),
    }
    paths = []
    for number in range(3):
        paths.append(write_sharded(Path(f"state-{number}"), weights))
        weights = {n: changed(t, 0.0 if n == "frozen" else 0.1, rng) for n, t in weights.items()}
    return paths


@pytest.fixture
def versions(states: list[Path], gymfast: Gymfast) -> Path:
    for number in (1, 2):
        publish(gymfast, states[number], "--old", states[number - 1], number)
    return Path("versions")


def publish(gymfast: Gymfast, new: Path, *options: object) -> dict:
    *rest, number = options
    words = ["hf-delta", "publish", new, *rest, "--source", "versions", "--version", number]
    result = gymfast(*map(str, words), "--json")
    assert result.code == 0, result.err
    return result.json


def pull(gymfast: Gymfast, target: int, *options: str):
    words = ["--base", "state-0", "--source", "versions", "--local", "replica"]
    return gymfast("hf-delta", "pull", *words, "--target", str(target), *options)


def test_versions_are_published_and_pulled(versions: Path, gymfast: Gymfast) -> None:
    result = pull(gymfast, 1, "--json").json
    assert result["schema"] == "gymfast.hf-delta.pull/1"
    assert (result["version"], result["seed"], result["applied"]) == (1, "state-0", [1])
    text = pull(gymfast, 2).out
    assert "replica: version 2\napplied version 2, " in text
    assert_bits_equal(read(Path("replica")), read(Path("state-2")))
    assert pull(gymfast, 2).out == "replica: version 2\n"
    assert pull(gymfast, 1, "--reseed", "--json").json["version"] == 1


def test_a_missing_version_is_exit_code_5_and_a_damaged_one_3(versions, gymfast) -> None:
    assert pull(gymfast, 3).code == 5
    file = next((versions / "weight_v000002").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    result = pull(gymfast, 2, "--json")
    assert (result.code, result.json["error"]["kind"]) == (3, "FormatError")
    assert "truncated" in result.err


def test_a_version_that_is_there_is_exit_code_6(versions, states, gymfast) -> None:
    words = ["hf-delta", "publish", states[2], "--full", "--source", versions, "--version", "2"]
    assert gymfast(*words).code == 6


def test_a_full_version_is_published_and_resets(states, gymfast) -> None:
    report = publish(gymfast, states[2], "--full", 4)
    assert report["is_full"]
    result = pull(gymfast, 4, "--json").json
    assert result["seed"] == "versions/weight_v000004"
    assert_bits_equal(read(Path("replica")), read(states[2]))


def test_inspect_shows_tensors_and_metadata(versions, states, gymfast) -> None:
    result = gymfast("hf-delta", "inspect", versions / "weight_v000002", "--json").json
    assert (result["version"], result["base_version"]) == (2, 1)
    assert (result["encoding"], result["checksum"]) == ("xor", "xxh3-128")
    assert {t["name"] for t in result["tensors"]} == {"embed", "norm"}
    assert result["stored_bytes"] == sum(t["stored_bytes"] for t in result["tensors"])
    text = gymfast("hf-delta", "inspect", versions / "weight_v000002").out
    assert "version 2 on 1, xor: 2 changed tensors" in text
    assert "a full version of 3 tensors" in gymfast("hf-delta", "inspect", states[0]).out


def test_verify_checks_versions_and_local_checkpoints(versions, states, gymfast) -> None:
    path = versions / "weight_v000001"
    assert "a sound version 1 of 2 changed tensors" in gymfast("hf-delta", "verify", path).out
    right = gymfast("hf-delta", "verify", path, "--base", states[0], "--json").json
    assert right["digests_compared"] == 2
    wrong = gymfast("hf-delta", "verify", path, "--base", states[1])
    assert wrong.code == 3
    assert "of the result: digest" in wrong.err
    pull(gymfast, 2)
    assert "holds version 2, 3 tensors as noted" in gymfast("hf-delta", "verify", "replica").out
    shutil.copy(states[0] / "model-00001-of-00002.safetensors", "replica")
    rotten = gymfast("hf-delta", "verify", "replica", "--json")
    assert (rotten.code, rotten.json["error"]["kind"]) == (3, "ChecksumError")
    assert gymfast("hf-delta", "verify", "replica", "--base", states[0]).code == 2


def test_a_local_checkpoint_of_the_stock_code_has_no_digests_to_verify(versions, gymfast) -> None:
    pull(gymfast, 1)
    path = Path("replica/.weight_sync/state.json")
    path.write_text(json.dumps({"version": "000001"}))
    result = gymfast("hf-delta", "verify", "replica")
    assert result.code == 5
    assert "pulled by other code" in result.err
    path.unlink()
    assert "holds no version" in gymfast("hf-delta", "verify", "replica").err


@pytest.mark.parametrize(
    ("encoding", "checksum"), [("xor", "xxh3-128"), ("xor", "adler32"), ("overwrite", "blake3")]
)
def test_convert_to_a_frame_and_back_loses_nothing(states, gymfast, encoding, checksum) -> None:
    options = ["--encoding", encoding, "--checksum", checksum]
    publish(gymfast, states[1], "--old", states[0], *options, 1)
    original = Path("versions").rename("original") / "weight_v000001"
    frame = gymfast("hf-delta", "convert", original, "--base", states[0], "-o", "f.gfd", "--json")
    assert frame.json["frame_bytes"] == Path("f.gfd").stat().st_size
    gymfast("delta", "apply", states[0], "f.gfd", "-o", "applied")
    assert_bits_equal(read(Path("applied")), read(states[1]))
    words = ["hf-delta", "convert", "f.gfd", "--base", states[0], "--source", "versions"]
    assert gymfast(*words, "--version", "1", *options).code == 0
    back = Path("versions/weight_v000001")
    assert {p.name: p.read_bytes() for p in back.iterdir()} == {
        p.name: p.read_bytes() for p in original.iterdir()
    }
    left = {path.name for path in Path().iterdir()} | {p.name for p in Path("versions").iterdir()}
    assert not [name for name in left if "gymfast" in name]


def test_convert_of_a_full_version_gives_a_frame_too(states, gymfast) -> None:
    publish(gymfast, states[1], "--full", 1)
    path = "versions/weight_v000001"
    assert gymfast("hf-delta", "convert", path, "--base", states[0], "-o", "f.gfd").code == 0
    words = ["hf-delta", "convert", "f.gfd", "--base", states[0], "--source", "versions"]
    assert gymfast(*words, "--version", "2", "--full", "--json").json["is_full"]
    assert_bits_equal(read(Path("versions/weight_v000002")), read(states[1]))


def test_a_version_of_another_base_makes_no_frame(versions, states, gymfast) -> None:
    path = versions / "weight_v000002"
    result = gymfast("hf-delta", "convert", path, "--base", states[0], "-o", "f.gfd")
    assert result.code == 3
    assert not Path("f.gfd").exists()
    assert not list(Path().glob(".*gymfast*"))


@pytest.mark.parametrize(
    "words",
    [
        ["publish", "state-1", "--source", "versions", "--version", "1"],
        ["publish", "state-1", "--old", "state-0", "--full", "--source", "v", "--version", "1"],
        ["publish", "state-1", "--full", "--source", "versions"],
        ["convert", "state-1", "--base", "state-0"],
        ["convert", "state-1", "--base", "state-0", "-o", "f", "--source", "versions"],
        ["pull", "--base", "state-0", "--source", "v", "--local", "l", "--target", "-1"],
        ["pull", "--base", "nothing", "--source", "v", "--local", "l", "--target", "1"],
    ],
)
def test_wrong_usage_is_exit_code_2(states, gymfast, words: list[str]) -> None:
    assert gymfast("hf-delta", *words).code == 2


def test_the_pull_endpoint_is_served_until_it_is_interrupted(versions, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gymfast", "serve-pull", "--base", "state-0", "--port", "0"]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as server:
        url = json.loads(server.stdout.readline())["url"]
        fields = {"local_checkpoint_dir": "replica", "source_dir": "versions", "target_version": 2}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(fields).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer) == {"success": True, "message": "Success."}
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 130
    assert_bits_equal(read(tmp_path / "replica"), read(tmp_path / "state-2"))


def test_serving_other_hosts_needs_a_key(states, gymfast: Gymfast) -> None:
    words = ["serve-pull", "--base", "state-0", "--host", "0.0.0.0", "--port", "0"]
    result = gymfast(*words, "--json")
    assert result.code == 1
    assert "--key-file" in result.err


def test_a_wrong_source_and_a_hook_without_a_module_are_named(
    states: list[Path], gymfast: Gymfast
) -> None:
    result = pull(gymfast, 1)
    assert result.code == 5
    assert "versions: there is no such folder, expected that of the published" in result.err
    result = pull(gymfast, 1, "--pre-read-hook", "hook")
    assert result.code == 1
    assert "pre-read hook 'hook' has no module, expected MODULE.FUNCTION" in result.err
