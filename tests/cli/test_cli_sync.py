"""`gymfast sync` from end to end: a folder as store, checkpoints as publisher and reader."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_commands import Gymfast
from safetensors.numpy import load_file, save_file

from gymfast.sync.view import View

RUN = ("--run", "demo")


@pytest.fixture
def versions(files: Path) -> list[str]:
    """Checkpoint files of versions 0 to 4, each a small step after the one before."""
    weights = load_file("old.safetensors")
    names = []
    for version in range(5):
        names.append(f"v{version}.safetensors")
        save_file(weights, names[-1])
        weights = {name: value.copy() for name, value in weights.items()}
        weights["embed.weight"].reshape(-1)[version::101] += 1
    return names


@pytest.fixture
def store(versions: list[str], gymfast: Gymfast) -> Path:
    """A store with versions 0 to 2."""
    assert gymfast("sync", "publish", "store", *versions[:3], *RUN).code == 0
    return Path("store")


def weights_of(path: str | Path) -> dict[str, bytes]:
    shards = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [path]
    return {name: w.tobytes() for shard in shards for name, w in load_file(shard).items()}


def object_of(store: Path, place: int) -> Path:
    """The first object of the record at a place of the log."""
    record = json.loads((store / f"demo/log/{place:020d}").read_text())
    digest = record["frame"]["objects"][0]["digest"]
    return store / f"demo/objects/{record['epoch']:020d}/{digest}"


def flip(path: Path) -> None:
    blob = bytearray(path.read_bytes())
    blob[len(blob) // 2] ^= 1
    path.write_bytes(blob)


def test_publish_commits_one_version_after_the_other(versions: list[str], gymfast: Gymfast) -> None:
    done = gymfast("sync", "publish", "store", *versions[:3], *RUN, "--json")
    assert done.code == 0, done
    reports = [json.loads(line) for line in done.out.splitlines()]
    assert {r["schema"] for r in reports} == {"gymfast.sync.publish/1"}
    assert [(r["version"], r["kind"]) for r in reports] == [
        (0, "anchor"),
        (1, "delta"),
        (2, "delta"),
    ]
    assert reports[1]["frame_bytes"] < reports[0]["frame_bytes"]


def test_publish_goes_on_from_a_base_with_a_delta(
    store: Path, versions: list[str], gymfast: Gymfast
) -> None:
    call = ("sync", "publish", store, versions[3], *RUN, "--json")
    report = gymfast(*call, "--base", versions[2]).json
    assert (report["version"], report["kind"]) == (3, "delta")
    report = gymfast("sync", "publish", store, versions[4], *RUN, "--json").json
    assert (report["version"], report["kind"]) == (4, "anchor")


def test_a_wrong_base_is_refused_and_fences_nobody(
    store: Path, versions: list[str], gymfast: Gymfast
) -> None:
    before = sorted(p.name for p in (store / "demo/log").iterdir())
    result = gymfast("sync", "publish", store, versions[3], *RUN, "--base", versions[0])
    assert result.code == 3
    assert "not version 2" in result.err
    assert sorted(p.name for p in (store / "demo/log").iterdir()) == before
    new_run = ("sync", "publish", store, versions[3], "--run", "other", "--base", versions[0])
    assert gymfast(*new_run).code == 5


@pytest.mark.parametrize("dest", ["replica.safetensors", "replica"])
def test_pull_brings_a_checkpoint_to_the_newest_version(
    dest: str, store: Path, versions: list[str], gymfast: Gymfast
) -> None:
    first = gymfast("sync", "pull", store, dest, *RUN, "--json").json
    assert (first["version"], first["from_version"], first["kind"]) == (2, None, "anchor")
    assert weights_of(dest) == weights_of(versions[2])
    gymfast("sync", "publish", store, versions[3], *RUN, "--base", versions[2])
    second = gymfast("sync", "pull", store, dest, *RUN, "--json").json
    assert (second["version"], second["from_version"], second["kind"]) == (3, 2, "deltas")
    assert weights_of(dest) == weights_of(versions[3])
    third = gymfast("sync", "pull", store, dest, *RUN, "--json").json
    assert (third["version"], third["kind"]) == (3, "nothing")
    assert gymfast("sync", "verify", store, dest, *RUN).code == 0


def test_pull_of_a_version_holds_exactly_that(
    store: Path, versions: list[str], gymfast: Gymfast
) -> None:
    report = gymfast("sync", "pull", store, "r.safetensors", *RUN, "--version", "1", "--json").json
    assert report["version"] == 1
    assert weights_of("r.safetensors") == weights_of(versions[1])


def test_I32_pull_refuses_to_go_back(store: Path, versions: list[str], gymfast: Gymfast) -> None:
    assert gymfast("sync", "pull", store, "r.safetensors", *RUN).code == 0
    result = gymfast("sync", "pull", store, "r.safetensors", *RUN, "--version", "1")
    assert result.code == 3
    assert weights_of("r.safetensors") == weights_of(versions[2])


def test_pull_of_what_is_not_there_is_exit_code_5(store: Path, gymfast: Gymfast) -> None:
    assert gymfast("sync", "pull", store, "r", *RUN, "--version", "9").code == 5
    assert gymfast("sync", "pull", store, "r", "--run", "other").code == 5
    assert gymfast("sync", "pull", "nowhere", "r", *RUN).code == 5
    assert not Path("r").exists()
    assert not Path("nowhere").exists()


def test_pull_that_waits_in_vain_is_exit_code_4(store: Path, gymfast: Gymfast) -> None:
    call = ("sync", "pull", store, "r", *RUN, "--version", "9", "--timeout", "0.01")
    result = gymfast(*call)
    assert result.code == 4
    assert "version 9" in result.err


def test_pull_of_a_damaged_object_is_refused_and_the_old_version_stays(
    store: Path, versions: list[str], gymfast: Gymfast
) -> None:
    gymfast("sync", "pull", store, "r.safetensors", *RUN, "--version", "1")
    flip(object_of(store, 4))
    result = gymfast("sync", "pull", store, "r.safetensors", *RUN, "--version", "2")
    assert result.code == 3, result
    assert weights_of("r.safetensors") == weights_of(versions[1])


def test_pull_over_another_model_needs_force(
    store: Path, versions: list[str], gymfast: Gymfast
) -> None:
    save_file({"other": np.ones(3, np.float32)}, "r.safetensors")
    refused = gymfast("sync", "pull", store, "r.safetensors", *RUN)
    assert refused.code == 3
    assert "--force" in refused.err
    assert list(load_file("r.safetensors")) == ["other"]
    report = gymfast("sync", "pull", store, "r.safetensors", *RUN, "--force", "--json").json
    assert report["kind"] == "anchor"
    assert weights_of("r.safetensors") == weights_of(versions[2])


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_pull_over_what_is_no_checkpoint_is_refused(
    force: list[str], store: Path, gymfast: Gymfast
) -> None:
    Path("home/papers").mkdir(parents=True)
    Path("home/thesis.txt").write_text("precious")
    Path("notes.txt").write_text("precious")
    for dest in ("home", "notes.txt"):
        result = gymfast("sync", "pull", store, dest, *RUN, *force)
        assert result.code in (3, 5), result
    assert Path("home/thesis.txt").read_text() == "precious"
    assert Path("home/papers").is_dir()
    assert Path("notes.txt").read_text() == "precious"


def test_I80_R114_pull_over_a_pickle_is_refused(store: Path, gymfast: Gymfast) -> None:
    Path("model.safetensors").write_bytes(b"\x80\x02cposix\nmkdir\nX\x01\x00\x00\x00x\x85R.")
    result = gymfast("sync", "pull", store, "model.safetensors", *RUN)
    assert result.code == 3
    assert "pickle" in result.err
    Path("weights.bin").write_bytes(b"PK\x03\x04")
    result = gymfast("sync", "publish", store, "weights.bin", *RUN)
    assert result.code == 3
    assert "torch.save" in result.err


def test_two_pulls_into_one_checkpoint_conflict(
    store: Path, gymfast: Gymfast, gymfast_process: Gymfast
) -> None:
    from gymfast.sync import CheckpointTarget

    target = CheckpointTarget("r.safetensors")
    assert gymfast_process("sync", "pull", store, "r.safetensors", *RUN).code == 6
    target.close()


def test_watch_follows_until_a_version(store: Path, versions: list[str], gymfast: Gymfast) -> None:
    result = gymfast("sync", "watch", store, "r.safetensors", *RUN, "--until", "2", "--json")
    assert result.code == 0, result
    assert result.json["schema"] == "gymfast.sync.watch/1"
    assert result.json["version"] == 2
    assert weights_of("r.safetensors") == weights_of(versions[2])
    again = gymfast("sync", "watch", store, "r.safetensors", *RUN, "--until", "2", "--json")
    assert (again.code, again.out) == (0, "")


def test_watch_reads_the_log_once_for_an_install(
    store: Path, gymfast: Gymfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[View] = []
    refresh = View.refresh
    monkeypatch.setattr(View, "refresh", lambda self: (looks.append(self), refresh(self))[1])
    assert gymfast("sync", "watch", store, "r.safetensors", *RUN, "--until", "2").code == 0
    assert len(looks) == 1


def test_watch_without_destination_lists_versions(store: Path, gymfast: Gymfast) -> None:
    result = gymfast("sync", "watch", store, *RUN, "--until", "2", "--json")
    assert [json.loads(line)["version"] for line in result.out.splitlines()] == [0, 1, 2]


def test_watch_gives_up_after_the_timeout(store: Path, gymfast: Gymfast) -> None:
    call = ("sync", "watch", store, "r", *RUN, "--timeout", "0.05", "--interval", "0.01")
    result = gymfast(*call)
    assert result.code == 4
    assert "after version 2" in result.err


def test_watch_goes_on_after_damage_and_says_so(
    store: Path, versions: list[str], gymfast: Gymfast
) -> None:
    gymfast("sync", "pull", store, "r.safetensors", *RUN, "--version", "1")
    flip(object_of(store, 4))
    call = ("sync", "watch", store, "r.safetensors", *RUN, "--interval", "0.01")
    result = gymfast(*call, "--timeout", "0.05")
    assert result.code == 4
    assert weights_of("r.safetensors") == weights_of(versions[1])
    gymfast("sync", "publish", store, versions[3], *RUN)
    assert gymfast(*call, "--until", "3").code == 0
    assert weights_of("r.safetensors") == weights_of(versions[3])


def test_interrupt_is_exit_code_130(store: Path) -> None:
    words = ["sync", "watch", str(store), *RUN, "--interval", "60", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gymfast", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        for version in range(3):
            assert json.loads(process.stdout.readline())["version"] == version
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert json.loads(out)["error"]["kind"] == "Interrupted"
    assert err == "Error: interrupted\n"


def test_status_tells_versions_publisher_and_readers(store: Path, gymfast: Gymfast) -> None:
    status = gymfast("sync", "status", store, *RUN, "--json").json
    assert [(v["version"], v["kind"]) for v in status["versions"]] == [
        (0, "anchor"),
        (1, "delta"),
        (2, "delta"),
    ]
    assert status["chain_length"] == 2
    assert status["epoch"] == 1
    text = gymfast("sync", "status", store, *RUN).out
    assert "newest version 2" in text
    assert str(os.getpid()) in text
    assert gymfast("sync", "status", store, "--run", "other").code == 5


def test_verify_names_the_tensor_that_differs(
    store: Path, versions: list[str], gymfast: Gymfast
) -> None:
    good = gymfast("sync", "verify", store, versions[1], *RUN, "--json").json
    assert (good["version"], good["newest"]) == (1, 2)
    assert gymfast("sync", "verify", store, versions[1], *RUN, "--version", "1").code == 0
    other = gymfast("sync", "verify", store, versions[1], *RUN, "--version", "2", "--json")
    assert other.code == 3
    assert "embed.weight" in other.json["error"]["message"]
    weights = load_file(versions[2])
    weights["layers.0.ids"][0] += 1
    save_file(weights, "wrong.safetensors")
    wrong = gymfast("sync", "verify", store, "wrong.safetensors", *RUN)
    assert wrong.code == 3
    assert "layers.0.ids" in wrong.err
    assert gymfast("sync", "verify", store, versions[1], *RUN, "--version", "7").code == 5


def test_fsck_of_a_sound_and_of_a_damaged_run(store: Path, gymfast: Gymfast) -> None:
    sound = gymfast("sync", "fsck", store, *RUN, "--json")
    assert (sound.code, sound.json["findings"], sound.json["restorable"]) == (0, [], 2)
    flip(object_of(store, 3))
    assert gymfast("sync", "fsck", store, *RUN, "--quick").code == 0
    damaged = gymfast("sync", "fsck", store, *RUN, "--json")
    assert damaged.code == 3
    assert (damaged.json["newest"], damaged.json["restorable"]) == (2, 0)
    (finding,) = damaged.json["findings"]
    assert finding["severity"] == "damage"
    assert "--anchor" in finding["repair"]


def test_gc_deletes_only_what_nobody_needs(
    store: Path, versions: list[str], gymfast: Gymfast
) -> None:
    gymfast("sync", "publish", store, versions[3], *RUN)
    call = ("sync", "gc", store, *RUN, "--keep", "1", "--json")
    would = gymfast(*call, "--dry-run").json
    assert would["dry_run"]
    assert would["num_objects"] == 3
    assert object_of(store, 2).exists()
    done = gymfast(*call).json
    assert done["records"] == would["records"]
    assert gymfast("sync", "pull", store, "r.safetensors", *RUN).code == 0
    assert weights_of("r.safetensors") == weights_of(versions[3])
    assert gymfast("sync", "fsck", store, *RUN).code == 0


def test_I82_a_key_signs_records_and_unsigned_or_foreign_ones_are_refused(
    versions: list[str], gymfast: Gymfast
) -> None:
    Path("key").write_bytes(b"sixteen bytes or more\n")
    Path("wrong").write_bytes(b"sixteen bytes of another\n")
    Path("short").write_bytes(b"short\n")
    signed, plain = ("sync", "publish", "signed", versions[0], *RUN), ("sync", "publish", "plain")
    assert gymfast(*signed, "--key-file", "key").code == 0
    assert gymfast(*plain, versions[0], *RUN).code == 0
    assert gymfast("sync", "pull", "signed", "r1", *RUN, "--key-file", "key").code == 0
    assert gymfast("sync", "pull", "signed", "r2", *RUN, "--key-file", "wrong").code == 3
    assert gymfast("sync", "pull", "plain", "r3", *RUN, "--key-file", "key").code == 3
    refused = gymfast("sync", "pull", "signed", "r4", *RUN, "--key-file", "short")
    assert refused.code == 1
    assert "--key-file short: the key has 5 bytes, expected at least 16" in refused.err
    assert not any(Path(name).exists() for name in ("r2", "r3", "r4"))


@pytest.mark.parametrize(
    "call", [("fsck",), ("status",), ("verify", "r1"), ("pull", "r1"), ("gc",)]
)
def test_a_key_that_fits_no_record_is_said_so_and_nothing_is_called_damaged(
    versions: list[str], gymfast: Gymfast, call: tuple[str, ...]
) -> None:
    Path("key").write_bytes(b"sixteen bytes or more\n")
    Path("wrong").write_bytes(b"another key of a length\n")
    assert gymfast("sync", "publish", "signed", versions[0], *RUN, "--key-file", "key").code == 0
    assert gymfast("sync", "pull", "signed", "r1", *RUN, "--key-file", "key").code == 0
    name, *dest = call
    found = gymfast("sync", name, "signed", *dest, *RUN, "--key-file", "wrong")
    assert found.code == 3
    assert "this key" in found.err or "another key" in found.err
    assert "damage" not in found.out
    assert "by hand" not in found.out + found.err
    assert "--anchor" not in found.out + found.err


def test_one_line_end_at_the_end_of_a_key_file_is_no_part_of_the_key(
    versions: list[str], gymfast: Gymfast
) -> None:
    key = b"\r sixteen bytes or more\n"
    call = ("sync", "publish", "signed", versions[0], *RUN)
    Path("key").write_bytes(key + b"\n")
    assert gymfast(*call, "--key-file", "key").code == 0
    for end, code in ((b"\r\n", 0), (b"", 3), (b"\n\n", 3), (b"\r", 3), (b"\n\r\n", 3), (b" ", 3)):
        Path("key").write_bytes(key + end)
        pull = gymfast("sync", "pull", "signed", f"r{end.hex()}", *RUN, "--key-file", "key")
        assert pull.code == code, end


@pytest.mark.parametrize("run", ["../escape", "", ".hidden", "a/b", "x" * 200])
def test_I83_names_of_runs_cannot_lead_outside(
    run: str, versions: list[str], gymfast: Gymfast
) -> None:
    result = gymfast("sync", "publish", "store", versions[0], "--run", run)
    assert result.code == 1
    assert "run" in result.err
    assert not Path("escape").exists()


def test_a_store_that_is_no_folder_is_one_message(versions: list[str], gymfast: Gymfast) -> None:
    Path("file").write_bytes(b"x")
    assert gymfast("sync", "publish", "file", versions[0], *RUN).code == 1
    assert gymfast("sync", "publish", "s3://bucket/x", versions[0], *RUN).code == 1
    result = gymfast("sync", "publish", "file/below", versions[0], *RUN)
    assert result.code == 1


def test_I25_a_full_store_is_one_error_and_the_run_goes_on_after_it(
    versions: list[str], small_disk: Path, gymfast: Gymfast
) -> None:
    rng = np.random.default_rng(0)
    save_file({"a": rng.integers(0, 2**16, 60_000, dtype=np.uint16)}, "big.safetensors")
    store = small_disk / "store"
    assert gymfast("sync", "publish", store, versions[0], *RUN).code == 0
    full = gymfast("sync", "publish", store, "big.safetensors", *RUN)
    assert full.code in (1, 7), full
    assert "No space left" in full.err
    assert gymfast("sync", "publish", store, versions[1], *RUN).code == 0
    assert gymfast("sync", "pull", store, "r.safetensors", *RUN).code == 0
    assert weights_of("r.safetensors") == weights_of(versions[1])
    report = gymfast("sync", "fsck", store, *RUN, "--json").json
    assert (report["newest"], report["restorable"]) == (1, 1)


def test_I25_a_full_disk_under_a_replica_leaves_it_as_it_was(
    store: Path, versions: list[str], small_disk: Path, gymfast: Gymfast
) -> None:
    dest = small_disk / "r.safetensors"
    assert gymfast("sync", "pull", store, dest, *RUN, "--version", "1").code == 0
    free = os.statvfs(small_disk)
    (small_disk / "ballast").write_bytes(bytes(free.f_bavail * free.f_bsize))
    result = gymfast("sync", "pull", store, dest, *RUN)
    assert result.code in (1, 7), result
    assert "No space left" in result.err
    assert weights_of(dest) == weights_of(versions[1])
    (small_disk / "ballast").unlink()
    assert gymfast("sync", "pull", store, dest, *RUN).code == 0
    assert weights_of(dest) == weights_of(versions[2])


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_pull_into_a_folder_of_several_checkpoints_deletes_none(
    force: list[str], store: Path, gymfast: Gymfast
) -> None:
    before = sorted(Path().rglob("*.safetensors"))
    result = gymfast("sync", "pull", store, ".", *RUN, *force)
    assert result.code in (1, 3), result
    assert sorted(Path().rglob("*.safetensors")) == before


@pytest.mark.parametrize(
    ("store", "what"), [("absent", "does not exist"), ("file", "is no folder")]
)
def test_a_run_that_is_not_there_says_so_of_its_store_too(
    store: str, what: str, versions: list[str], gymfast: Gymfast
) -> None:
    Path("file").write_bytes(b"1")
    expected = f"{Path(store).absolute()} {what}: check the path of the store"
    for command in (
        *(("status", store), ("fsck", store), ("gc", store), ("pull", store, "r")),
        *(("verify", store, versions[0]), ("publish", store, versions[1], "--base", versions[0])),
    ):
        result = gymfast("sync", *command, *RUN)
        assert (result.code, expected in result.err) == (5, True), (command, result.err)
    result = gymfast("sync", "watch", store, "r", *RUN, "--timeout", "0")
    assert (result.code, expected in result.err) == (4, True), result.err


def test_a_run_that_is_not_in_a_store_blames_no_folder(store: Path, gymfast: Gymfast) -> None:
    result = gymfast("sync", "status", store, "--run", "other")
    assert result.code == 5
    assert "check the path" not in result.err


def test_a_store_that_is_a_file_is_named_by_publish(versions: list[str], gymfast: Gymfast) -> None:
    Path("file").write_bytes(b"1")
    result = gymfast("sync", "publish", "file/below", versions[0], *RUN)
    assert result.code == 1
    assert f"{Path('file').absolute()} is a file, and a store is a folder" in result.err


def test_a_wait_that_ends_says_what_the_newest_version_is(store: Path, gymfast: Gymfast) -> None:
    result = gymfast("sync", "pull", store, "r", *RUN, "--version", "99", "--timeout", "0.01")
    assert result.code == 4
    assert "waiting for version 99 of run" in result.err and "(the newest is " in result.err


def test_a_limit_of_bandwidth_is_taken_as_rsync_and_rclone_write_it(
    versions: list[str], gymfast: Gymfast
) -> None:
    limit = ("--bwlimit", "100M")
    assert gymfast("sync", "publish", "store", versions[0], *RUN, *limit).code == 0
    for rate in ("64", "64K", "65536b", "0.5G", "0", "1m"):
        assert gymfast("sync", "pull", "store", "r", *RUN, "--bwlimit", rate).code == 0, rate
    for rate in ("10", "63K", "-1", "1X", "1MB/s", "", "1e9", "fast"):
        done = gymfast("sync", "pull", "store", "r", *RUN, "--bwlimit", rate)
        assert done.code == 2, rate
        assert "Invalid value for '--bwlimit'" in done.err
    assert "at least 2M" in gymfast("relay", "store", "--bwlimit", "1M").err
