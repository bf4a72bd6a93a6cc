"""The receiver of version directories: what it does, takes over, finds and refuses."""

from __future__ import annotations

import fcntl
import json
import shutil
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from delta_checkpoints import read, write, write_sharded
from delta_weights import changed, random_tensor
from hf_delta_data import (
    CHAINS,
    NUM_VERSIONS,
    expected_of,
    golden_chain,
    write_file,
    write_index,
    write_version,
)

from gymfast.delta import Tensor
from gymfast.delta.hf_delta.pull import pull
from gymfast.delta.safetensors_files import Checkpoint
from gymfast.errors import (
    BudgetError,
    ChainError,
    ChecksumError,
    CoverageError,
    FormatError,
    GymfastError,
    NotFoundError,
)
from gymfast.testing.compare import assert_bits_equal

NUM_OWN = 4


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with `base`, `versions` 1 to 4 of xor deltas and `expected-N`."""
    rng = np.random.default_rng(3)
    old = {
        "embed": random_tensor("BF16", (64, 40), rng),
        "norm": random_tensor("F32", (33,), rng),
        "frozen": random_tensor("F16", (50,), rng),
        "packed": random_tensor("U8", (77,), rng),
    }
    write_sharded(tmp_path / "base", old)
    for number in range(1, NUM_OWN + 1):
        density = {"embed": 0.05, "norm": 0.5 if number % 2 else 0.0, "packed": 1.0, "frozen": 0.0}
        new = {name: changed(tensor, density[name], rng) for name, tensor in old.items()}
        write_version(tmp_path / "versions", number, old, new)
        write_sharded(tmp_path / f"expected-{number}", new)
        old = new
    return tmp_path


def pull_to(run: Path, target: int, **options):
    return pull(run / "local", run / "base", run / "versions", target, **options)


def assert_holds(run: Path, number: int) -> None:
    expected = run / (f"expected-{number}" if number else "base")
    assert_bits_equal(read(run / "local"), read(expected))
    assert state(run)["version"] == f"{number:06d}"
    assert not list((run / "local").glob("*gymfast*"))


def state(run: Path) -> dict:
    return json.loads((run / "local" / ".weight_sync" / "state.json").read_text())


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def flip_in(folder: Path, name: str) -> Path:
    """Flips a bit of a tensor of a checkpoint; the file it is in."""
    with Checkpoint.open(folder) as checkpoint:
        spec = checkpoint.spec(name)
        path = checkpoint.shards[spec.shard].path
    flip(path, spec.start + 3)
    return path


def make_full(run: Path, number: int) -> None:
    """Version `number` as a full checkpoint instead of a delta."""
    path = run / "versions" / f"weight_v{number:06d}"
    shutil.rmtree(path)
    shutil.copytree(run / f"expected-{number}", path)


def make_held_by_stock_code(run: Path, number: int) -> None:
    """A local directory as the stock code leaves it: no digests beside the state."""
    shutil.copytree(run / f"expected-{number}", run / "local")
    (run / "local" / ".weight_sync").mkdir()
    path = run / "local" / ".weight_sync" / "state.json"
    path.write_text(json.dumps({"version": f"{number:06d}"}))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("steps", [[0, 1, 2, 3, 4, 5], [5], [2, 5]])
def test_golden_chains_end_with_the_expected_tensors(name, steps, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("gymfast.delta.hf_delta.apply.WINDOW_BYTES", 4096)
    chain = golden_chain(name)
    for target in steps:
        report = pull(tmp_path / "local", chain / "base", chain / "versions", target)
        assert report.version == target
        expected = expected_of(chain, target) if target else chain / "base"
        assert_bits_equal(read(tmp_path / "local"), read(expected))
    assert steps[-1] == NUM_VERSIONS


def test_the_base_is_version_0_and_its_other_files_go_along(run: Path) -> None:
    report = pull_to(run, 0)
    assert (report.version, report.seed, report.applied) == (0, run / "base", ())
    assert_holds(run, 0)
    assert (run / "local" / "config.json").read_text() == "{}"


def test_a_held_version_follows_its_chain_and_a_late_one_replays_it(run: Path) -> None:
    assert pull_to(run, 1).applied == (1,)
    assert pull_to(run, 3).applied == (2, 3)
    assert_holds(run, 3)
    shutil.rmtree(run / "local")
    assert pull_to(run, 4).applied == (1, 2, 3, 4)
    assert_holds(run, 4)


@pytest.mark.parametrize("target", [0, 2, 3])
def test_a_target_that_is_not_above_the_version_held_changes_nothing(run, target) -> None:
    pull_to(run, 3)
    report = pull_to(run, target)
    assert (report.version, report.seed, report.applied) == (3, None, ())
    assert_holds(run, 3)


def test_the_newest_full_version_resets_the_chain_and_prunes(run: Path) -> None:
    pull_to(run, 1)
    make_full(run, 3)
    shutil.rmtree(run / "versions" / "weight_v000002")  # not needed any more
    (run / "local" / "model-00009-of-00009.safetensors").write_bytes(b"an old shard")
    report = pull_to(run, 4)
    assert report.seed == run / "versions" / "weight_v000003"
    assert report.applied == (4,)
    assert_holds(run, 4)
    assert not (run / "local" / "model-00009-of-00009.safetensors").exists()


def test_a_full_version_at_or_below_the_version_held_is_not_read(run: Path) -> None:
    pull_to(run, 3)
    make_full(run, 3)
    assert pull_to(run, 4).seed is None
    assert_holds(run, 4)


def test_reseed_begins_again_even_with_an_older_target(run: Path) -> None:
    pull_to(run, 3)
    assert pull_to(run, 2, reseed=True).seed == run / "base"
    assert_holds(run, 2)


def test_a_directory_of_the_stock_code_is_taken_over_and_left_readable_for_it(run: Path) -> None:
    make_held_by_stock_code(run, 1)
    assert pull_to(run, 2).seed is None
    assert_holds(run, 2)
    assert int(state(run)["version"]) == 2  # as the stock code reads it
    flip_in(run / "local", "frozen")  # noted when it was taken over
    with pytest.raises(ChecksumError, match="frozen"):
        pull_to(run, 3)


def test_a_state_that_the_stock_code_advanced_is_not_compared_with_old_digests(run: Path) -> None:
    pull_to(run, 1)
    for path in (run / "expected-2").glob("*.safetensors"):
        shutil.copy(path, run / "local" / path.name)
    path = run / "local" / ".weight_sync" / "state.json"
    path.write_text(json.dumps({"version": "000002"}))
    pull_to(run, 3)
    assert_holds(run, 3)


@pytest.mark.parametrize("tensor", ["frozen", "embed"])
def test_rot_is_found_named_and_healed_by_reseed(run: Path, tensor: str) -> None:
    """`frozen` is in no delta: the stock code would not look at it."""
    pull_to(run, 1)
    with_rot = flip_in(run / "local", tensor)
    before = with_rot.read_bytes()
    with pytest.raises(ChecksumError, match=rf"{tensor}.*changed on this disk.*reseed"):
        pull_to(run, 2)
    assert with_rot.read_bytes() == before
    assert state(run)["version"] == "000001"
    pull_to(run, 2, reseed=True)
    assert_holds(run, 2)


def test_a_damaged_version_is_refused_and_a_good_one_then_applies(run: Path) -> None:
    """reports.md R52: recovery after a failed apply needs no restart and no reseed."""
    pull_to(run, 1)
    damaged = next((run / "versions" / "weight_v000002").glob("*.safetensors"))
    whole = damaged.read_bytes()
    for at in range(-40, 0):
        flip(damaged, at)
        with pytest.raises(FormatError, match="weight_v000002"):
            pull_to(run, 3)
        assert_holds(run, 1)
        damaged.write_bytes(whole)
    pull_to(run, 3)
    assert_holds(run, 3)


def test_a_wrong_digest_tells_that_the_version_is_damaged(run: Path) -> None:
    pull_to(run, 1)
    path = next((run / "versions" / "weight_v000002").glob("*.safetensors"))
    text = path.read_bytes()
    at = text.index(b'"embed":"') + len(b'"embed":"')
    path.write_bytes(text[:at] + (b"0" if text[at : at + 1] != b"0" else b"1") + text[at + 1 :])
    with pytest.raises(ChecksumError, match="old bytes are as noted, so the version is damaged"):
        pull_to(run, 2)
    assert_holds(run, 1)


def test_another_base_is_refused_with_the_checkpoint_as_it_was(run: Path) -> None:
    """reports.md R33: the base differs by one byte."""
    flip_in(run / "base", "embed")
    with pytest.raises(ChecksumError, match=r"'embed' of the result.*made from another base"):
        pull_to(run, 1)
    assert state(run)["version"] == "000000"


def test_a_missing_version_is_told_before_anything_is_applied(run: Path) -> None:
    """reports.md R35."""
    pull_to(run, 1)
    shutil.move(run / "versions" / "weight_v000003", run / "gone")
    with pytest.raises(NotFoundError, match="weight_v000003: there is no such version"):
        pull_to(run, 4)
    assert_holds(run, 1)
    shutil.move(run / "gone", run / "versions" / "weight_v000003")
    pull_to(run, 4)
    assert_holds(run, 4)


def test_a_version_of_another_checkpoint_names_the_tensor(run: Path) -> None:
    new = {"other.weight": Tensor("U8", (4,), np.arange(4, dtype=np.uint8))}
    shutil.rmtree(run / "versions" / "weight_v000001")
    old = {"other.weight": Tensor("U8", (4,), np.zeros(4, np.uint8))}
    write_version(run / "versions", 1, old, new)
    with pytest.raises(CoverageError, match=r"other\.weight.*is not in"):
        pull_to(run, 1)
    assert not list((run / "local").glob("*.safetensors"))  # told before the base was copied


def test_a_delta_whose_index_is_not_there_yet_is_no_full_version(run: Path) -> None:
    """The stock code copies the delta files over the checkpoint and removes everything else."""
    pull_to(run, 1)
    (run / "versions" / "weight_v000002" / "model.safetensors.index.json").unlink()
    with pytest.raises(FormatError, match=r"delta version but no model\.safetensors"):
        pull_to(run, 2)
    assert_holds(run, 1)


def test_an_empty_version_directory_is_refused(run: Path) -> None:
    pull_to(run, 1)
    (run / "versions" / "weight_v000005").mkdir()
    with pytest.raises(NotFoundError, match="weight_v000005"):
        pull_to(run, 5)
    assert_holds(run, 1)


def test_tensors_that_two_ranks_publish_are_applied_once(run: Path) -> None:
    """gym.md S2: the stock code applies an xor of both, which gives the old bytes."""
    path = run / "versions" / "weight_v000001"
    file = next(path.glob("*.safetensors"))
    shutil.copy(file, path / "model-00001-of-00002.safetensors")
    pull_to(run, 1)
    assert_holds(run, 1)


def test_two_different_states_of_one_tensor_are_refused(run: Path) -> None:
    old = read(run / "base")
    path = run / "versions" / "weight_v000001"
    frame = b"never read"
    write_file(path / "model-00001-of-00002.safetensors", {"embed": frame}, {"embed": "ab" * 16})
    with pytest.raises(FormatError, match="two ranks published different states"):
        pull_to(run, 1)
    assert old.keys() == read(run / "base").keys()


def test_the_pre_read_hook_is_called_before_anything_is_read(run: Path) -> None:
    seen = []

    def hook(source: str, target: int) -> None:
        seen.append((source, target))
        shutil.move(run / "elsewhere", run / "versions")

    shutil.move(run / "versions", run / "elsewhere")
    pull_to(run, 2, pre_read_hook=hook)
    assert seen == [(str(run / "versions"), 2)]
    assert_holds(run, 2)


def test_a_hook_that_raises_is_named_and_nothing_changes(run: Path) -> None:
    with pytest.raises(GymfastError, match=r"pre-read hook shutil\.move failed for version 2"):
        pull_to(run, 2, pre_read_hook="shutil.move")
    assert not (run / "local").exists()
    with pytest.raises(ValueError, match="cannot be imported"):
        pull_to(run, 2, pre_read_hook="no.such.hook")
    pull_to(run, 0, pre_read_hook="no.such.hook")  # as in the stock code: not for the base


def _pull_in_process(run: str, counts) -> None:
    counts.put(len(pull_to(Path(run), 4).applied))


def test_of_several_processes_one_works_and_the_others_wait(run: Path) -> None:
    context = get_context("spawn")
    counts = context.SimpleQueue()
    workers = [context.Process(target=_pull_in_process, args=(str(run), counts)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert sorted(counts.get() for _ in workers) == [0, 0, 4]
    assert_holds(run, 4)


def test_the_lock_is_the_one_of_the_stock_code(run: Path) -> None:
    pull_to(run, 0)
    context = get_context("spawn")
    counts = context.SimpleQueue()
    with (run / "local" / ".weight_sync" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        worker = context.Process(target=_pull_in_process, args=(str(run), counts))
        worker.start()
        worker.join(2.0)
        assert worker.is_alive()
        assert counts.empty()
    worker.join()
    assert counts.get() == 4


def test_a_directory_of_something_else_is_not_emptied(run: Path) -> None:
    (run / "local").mkdir()
    (run / "local" / "thesis.tex").write_text("years of work")
    with pytest.raises(GymfastError, match=r"thesis\.tex.*choose an empty or a new directory"):
        pull_to(run, 1)
    assert (run / "local" / "thesis.tex").read_text() == "years of work"
    with pytest.raises(GymfastError, match="is the full version itself"):
        pull(run / "base", run / "base", run / "versions", 1)


def test_a_disk_that_is_too_small_is_told_before_the_copy(run: Path, monkeypatch) -> None:
    pull_to(run, 1)

    class Full:
        f_bavail = 0
        f_frsize = 4096

    make_full(run, 2)
    write(run / "versions" / "weight_v000002" / "big.safetensors", read(run / "base"))
    monkeypatch.setattr("os.statvfs", lambda path: Full)
    with pytest.raises(BudgetError, match="make room"):
        pull_to(run, 2)
    assert_holds(run, 1)


def test_a_damaged_state_file_is_told_and_healed_by_reseed(run: Path) -> None:
    pull_to(run, 1)
    path = run / "local" / ".weight_sync" / "state.json"
    for text in ("", "{}", '{"version": "x"}', "[]"):
        path.write_text(text)
        with pytest.raises(FormatError, match=r"state\.json"):
            pull_to(run, 2)
    pull_to(run, 2, reseed=True)
    assert_holds(run, 2)


def test_a_version_without_changes_moves_the_state_only(run: Path) -> None:
    pull_to(run, 4)
    write_index(_new_version(run, 5), 5, {}, "xor", "adler32")
    report = pull_to(run, 5)
    assert (report.applied, report.num_changed, report.version) == ((5,), 0, 5)
    assert_bits_equal(read(run / "local"), read(run / "expected-4"))


def _new_version(run: Path, number: int) -> Path:
    path = run / "versions" / f"weight_v{number:06d}"
    path.mkdir()
    return path


def test_a_version_in_a_directory_of_another_number_is_refused(run: Path) -> None:
    pull_to(run, 4)
    shutil.copytree(run / "versions" / "weight_v000004", run / "versions" / "weight_v000005")
    with pytest.raises(ChainError, match="version 4, but the directory is weight_v000005"):
        pull_to(run, 5)


def test_a_negative_target_is_the_callers_mistake(run: Path) -> None:
    with pytest.raises(ValueError, match="expected 0 or more"):
        pull_to(run, -1)


def test_algorithms_may_change_along_the_chain(run: Path) -> None:
    pull_to(run, 4)
    old = read(run / "expected-4")
    new = {n: changed(t, 0.1, np.random.default_rng(5)) for n, t in old.items()}
    write_version(run / "versions", 5, old, new, "overwrite", "blake3")
    pull_to(run, 5)
    assert_bits_equal(read(run / "local"), new)
    flip_in(run / "local", "embed")
    write_index(_new_version(run, 6), 6, {}, "xor", "adler32")
    with pytest.raises(ChecksumError, match="blake3:"):
        pull_to(run, 6)


def test_a_damaged_journal_is_told_and_healed_by_reseed(run: Path) -> None:
    pull_to(run, 2)
    (run / "local" / ".gymfast-journal").write_bytes(b"GFJRNL1\n" + bytes(100))
    with pytest.raises(GymfastError, match="gymfast-journal"):
        pull_to(run, 3)
    pull_to(run, 3, reseed=True)
    assert_holds(run, 3)


def test_links_in_the_local_checkpoint_are_not_written_through(run: Path) -> None:
    pull_to(run, 1)
    shard = next((run / "local").glob("*.safetensors"))
    shard.rename(run / "local" / "blob.safetensors")
    shard.symlink_to("blob.safetensors")
    with pytest.raises(GymfastError, match=r"is a symbolic link.*reseed"):
        pull_to(run, 2)
    pull_to(run, 2, reseed=True)
    assert_holds(run, 2)
    assert not shard.is_symlink()


def test_a_full_version_that_is_not_all_there_yet_is_refused(run: Path) -> None:
    """Without an index one shard would pass for the whole: the stock code removes the others."""
    pull_to(run, 1)
    make_full(run, 2)
    for name in ("model.safetensors.index.json", "model-00002-of-00002.safetensors"):
        (run / "versions" / "weight_v000002" / name).unlink()
    with pytest.raises(FormatError, match="has one file of 2 but no model"):
        pull_to(run, 2)
    assert_holds(run, 1)


def test_a_run_that_began_again_in_the_same_directories_is_noticed(run: Path, caplog) -> None:
    """reports.md R34: the stock code finds version 2 held, and goes on with that of the old run."""
    pull_to(run, 2)
    shutil.rmtree(run / "versions")
    old, rng = read(run / "base"), np.random.default_rng(99)
    new = {name: changed(tensor, 0.1, rng) for name, tensor in old.items()}
    write_version(run / "versions", 1, old, new)
    pull_to(run, 1)
    assert "if the run began again, reseed" in caplog.text
    newer = {name: changed(tensor, 0.1, rng) for name, tensor in new.items()}
    write_version(run / "versions", 2, new, newer)
    with pytest.raises(ChainError, match=r"holds another version 2 than .*reseed"):
        pull_to(run, 2)
    assert pull_to(run, 2, reseed=True).version == 2
    assert_bits_equal(read(run / "local"), newer)


def test_a_held_version_that_is_being_removed_from_the_source_is_not_needed(run: Path) -> None:
    pull_to(run, 2)
    next((run / "versions" / "weight_v000002").glob("*.safetensors")).unlink()
    pull_to(run, 3)
    assert_holds(run, 3)
