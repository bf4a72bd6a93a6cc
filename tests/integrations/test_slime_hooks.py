"""slime's two visibility hooks: trainer and engine hosts share a store and no directory."""

from __future__ import annotations

import threading
from argparse import Namespace
from pathlib import Path

import pytest
from safetensors.torch import save_file
from slime_engine import apply_version, pull, read_tensors
from slime_run import weights_at

from gymfast.delta.hf_delta import publish_delta
from gymfast.errors import FormatError, GymfastError, NotFoundError
from gymfast.integrations.slime import post_write, pre_read


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints `c0` to `c3`, and the environment of both hooks."""
    monkeypatch.setenv("GYMFAST_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("GYMFAST_RUN", "run-1")
    for step in range(4):
        (tmp_path / f"c{step}").mkdir()
        save_file(weights_at(step), tmp_path / f"c{step}" / "model.safetensors")
    post_write(Namespace(), str(tmp_path / "trainer"), [])
    return tmp_path


def publish(run: Path, number: int) -> Path:
    old, new = run / f"c{number - 1}", run / f"c{number}"
    path = publish_delta(run / "trainer", number, old, new).path
    post_write(Namespace(), str(path), [])
    return path


def test_an_engine_host_gets_the_directories_that_the_trainer_wrote(run: Path) -> None:
    paths = [publish(run, number) for number in (1, 2)]
    pre_read(str(run / "host"), 2)
    for path in paths:
        fetched = run / "host" / path.name
        assert {f.name: f.read_bytes() for f in fetched.iterdir()} == {
            f.name: f.read_bytes() for f in path.iterdir()
        }
    pull(str(run / "local"), str(run / "c0"), str(run / "host"), 2)
    assert read_tensors(run / "local") == read_tensors(run / "c2")


def test_all_ranks_of_a_host_may_call_at_once(run: Path) -> None:
    for number in (1, 2, 3):
        publish(run, number)
    threads = [threading.Thread(target=pre_read, args=(str(run / "host"), 3)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = read_tensors(run / "c0")
    for number in (1, 2, 3):
        state |= apply_version(run / "host" / f"weight_v{number:06d}", number, state)
    assert state == read_tensors(run / "c3")


def test_R34_directories_of_an_earlier_run_are_not_taken_for_new_ones(run: Path) -> None:
    publish(run, 1)
    pre_read(str(run / "host"), 1)
    before = (run / "host" / "weight_v000001" / "model-00000-of-00001.safetensors").read_bytes()
    post_write(Namespace(), str(run / "other"), [])
    path = publish_delta(run / "other", 1, run / "c0", run / "c3").path
    post_write(Namespace(), str(path), [])
    pre_read(str(run / "host"), 1)
    after = (run / "host" / "weight_v000001" / "model-00000-of-00001.safetensors").read_bytes()
    assert before != after == (path / "model-00000-of-00001.safetensors").read_bytes()


def test_a_version_that_is_not_there_leaves_no_directory(run: Path) -> None:
    publish(run, 1)
    with pytest.raises(NotFoundError, match="weight_v000002"):
        pre_read(str(run / "host"), 2)
    assert not (run / "host" / "weight_v000002").exists()
    publish(run, 2)
    pre_read(str(run / "host"), 2)
    assert (run / "host" / "weight_v000002").is_dir()


def test_damage_in_the_store_is_found_before_the_engine_reads(run: Path) -> None:
    publish(run, 1)
    (file,) = (run / "store").rglob("model-*.frame")
    blob = bytearray(file.read_bytes())
    blob[len(blob) // 2] ^= 1
    file.write_bytes(blob)
    with pytest.raises(FormatError):
        pre_read(str(run / "host"), 1)
    assert not (run / "host" / "weight_v000001").exists()


@pytest.mark.parametrize("name", ["GYMFAST_STORE", "GYMFAST_RUN"])
def test_a_missing_variable_is_named(run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(GymfastError, match=f"{name} is not set"):
        pre_read(str(run / "host"), 1)
    with pytest.raises(GymfastError, match=f"{name} is not set"):
        post_write(Namespace(), str(run / "trainer"), [])
