"""States, encoders and apply on tensors of a GPU, which is CPU memory and the shim's kernels."""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np
import pytest
import torch
from cuda_device import install, to_device
from cuda_module import LAUNCH_FAILURE
from torch._subclasses.fake_tensor import FakeTensorMode

from gymfast import delta
from gymfast.delta import Encoder, State, memory
from gymfast.delta.backends import select
from gymfast.errors import BudgetError, ChainError, FormatError, GymfastError
from gymfast.stores import MemoryStore
from gymfast.sync import LiveTarget, Publisher, Subscriber

PROFILES = ("auto", "fast", "small")
# Sections of 2^23 units are too large for the shim: a small block makes one section of each block.
BLOCK_UNITS = 512


@pytest.fixture(autouse=True)
def cuda(cuda_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        install(cuda_module, monkeypatch)


def host_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "attention": torch.randn(40, 50, generator=made).bfloat16(),
        "norm": torch.randn(33, generator=made),
        "experts": torch.randn(3, 16, 32, generator=made).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 4),
        "one": torch.ones((), dtype=torch.float16),
    }


def step(weights: dict[str, torch.Tensor], density: float, seed: int) -> dict[str, torch.Tensor]:
    """New weights in which about this share of the elements has other bits."""
    rng = np.random.default_rng(seed)
    new = {}
    for name, value in weights.items():
        units = value.clone().reshape(-1).view(torch.uint8).numpy().copy()
        units = units.view(f"u{value.element_size()}")
        where = rng.random(units.size) < density
        units[where] ^= rng.integers(1, 256, int(where.sum())).astype(units.dtype)
        flat = torch.from_numpy(units.view(np.uint8)).view(value.dtype)
        new[name] = flat.reshape(value.shape)
    return new


def on_device(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: to_device(value) for name, value in weights.items()}


def bits(weights) -> dict[str, bytes]:
    held = {name: delta.as_tensor(value) for name, value in weights.items()}
    return {
        name: bytes(t.data if isinstance(t.data, np.ndarray) else t.data.cpu().numpy())
        for name, t in held.items()
    }


def frame_of(encoder: Encoder, new) -> bytes:
    frame = b"".join(encoder.encode(new))
    encoder.commit()
    return frame


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.6])
def test_frames_from_the_device_are_those_of_the_cpu(profile, tiled, density) -> None:
    old = host_weights()
    new = step(old, density, 1)
    options = {"profile": profile, "tiled": tiled}
    expected = delta.encode(old, new, backend="cpu", **options)
    assert delta.encode(on_device(old), on_device(new), **options) == expected
    anchor = delta.encode(None, new, backend="cpu", **options)
    assert delta.encode(None, on_device(new), **options) == anchor


def snapshots():
    return pytest.mark.parametrize("snapshot", ["beside", "pinned", "own"])


def state_of(weights, snapshot: str, **options) -> State:
    """A state over a snapshot at that place; "own" is a second copy that the caller keeps."""
    if snapshot == "own":
        copy = {name: value.clone() for name, value in weights.items()}
        return State.attach(copy, **options)
    return State.copy_of(weights, snapshot=snapshot, **options)


@snapshots()
@pytest.mark.parametrize("profile", PROFILES)
def test_an_encoder_keeps_its_snapshot_up_to_date_wherever_it_lies(snapshot, profile) -> None:
    versions = [host_weights()]
    for seed, density in enumerate((0.01, 0.3, 0.0, 1.0), start=1):
        versions.append(step(versions[-1], density, seed))
    host = Encoder(State.copy_of(versions[0], block_units=BLOCK_UNITS), profile=profile)
    state = state_of(on_device(versions[0]), snapshot, block_units=BLOCK_UNITS)
    encoder = Encoder(state, profile=profile)
    for version in versions[1:]:
        assert frame_of(encoder, on_device(version)) == frame_of(host, version)
        state.verify()
        assert state.root == host.state.root
    assert bits(state.tensors) == bits(versions[-1])


@snapshots()
@pytest.mark.parametrize("taken", [0, 1, 4, None])
def test_rollback_gives_the_exact_base_after_any_number_of_sections(snapshot, taken) -> None:
    old = host_weights()
    state = state_of(on_device(old), snapshot, block_units=BLOCK_UNITS)
    root, encoder = state.root, Encoder(state)
    sections = encoder.encode(on_device(step(old, 0.2, 5)))
    for number, _ in enumerate(sections):
        if number == taken:
            break
    encoder.rollback()
    assert state.root == root
    state.verify()
    assert bits(state.tensors) == bits(old)
    new = step(old, 0.2, 6)
    host = Encoder(State.copy_of(old, block_units=BLOCK_UNITS))
    assert frame_of(encoder, on_device(new)) == frame_of(host, new)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("density", [0.01, 0.9])
def test_frames_are_applied_in_place(profile, density) -> None:
    old = host_weights()
    new = step(old, density, 2)
    frame = delta.encode(old, new, profile=profile, backend="cpu")
    live = on_device(old)
    places = {name: value.data_ptr() for name, value in live.items()}
    report = delta.apply(live, frame)
    assert report.num_changed == delta.apply(dict(old), frame).num_changed
    assert bits(live) == bits(new)
    assert {name: value.data_ptr() for name, value in live.items()} == places
    assert delta.apply(live, frame).num_changed == 0


def test_tensors_come_go_and_are_replaced_on_the_device() -> None:
    old = host_weights()
    new = step(old, 0.1, 3)
    new["fresh"] = torch.arange(70, dtype=torch.int16)
    new["norm"] = torch.ones(5)
    del new["one"]
    new["tied"] = new["fresh"]
    expected = delta.encode(old, new, backend="cpu")
    sent = on_device(new)
    sent["tied"] = sent["fresh"]
    encoder = Encoder(State.copy_of(on_device(old), snapshot="pinned"))
    assert frame_of(encoder, sent) == expected
    assert set(encoder.state.memory_bytes) == {"pinned"}
    live = on_device(old)
    delta.apply(live, expected)
    assert bits(live) == bits(new)
    assert all(value.device.type == "cuda" for value in live.values())
    assert live["tied"] is live["fresh"]


def test_restore_heals_a_half_written_state() -> None:
    old = host_weights()
    new = step(old, 0.1, 4)
    live = on_device(old)
    state = State.attach(live, block_units=BLOCK_UNITS)
    frame = delta.encode(State.copy_of(old, block_units=BLOCK_UNITS), new, profile="small")
    # What lies in the memory is not what the digests say.
    live["attention"].view(torch.int16)[39] = 0
    with pytest.raises(FormatError, match="inconsistent"):
        delta.apply(state, frame)
    assert not state.is_consistent
    with pytest.raises(ChainError, match="inconsistent"):
        delta.apply(state, frame)
    delta.restore(state, delta.encode(None, new, backend="cpu"))
    assert state.is_consistent
    assert bits(live) == bits(new)


def test_a_frame_for_another_base_is_refused_and_nothing_is_written() -> None:
    old = host_weights()
    frame = delta.encode(step(old, 0.1, 1), step(old, 0.1, 2), backend="cpu")
    live = on_device(old)
    with pytest.raises(GymfastError, match="the frame was made for"):
        delta.apply(live, frame)
    assert bits(live) == bits(old)


DOWNLOADS = ("sections", "body", "digests", "counts", "index", "before")


@snapshots()
@pytest.mark.parametrize("download", DOWNLOADS)
def test_a_failed_download_leaves_the_base_as_it_was(snapshot, download, monkeypatch) -> None:
    old = host_weights()
    state = state_of(on_device(old), snapshot, block_units=BLOCK_UNITS)
    encoder = Encoder(state, profile="fast")  # no samples of classes are downloaded
    source, calls = module_of("cuda"), []
    real = source._host

    def fails(data):
        calls.append(data)
        if len(calls) == 1 + DOWNLOADS.index(download):
            raise MemoryError("no room on the host")
        return real(data)

    root = state.root
    with monkeypatch.context() as patch:
        patch.setattr(source, "_host", fails)
        with pytest.raises(MemoryError, match="no room on the host"):
            list(encoder.encode(on_device(step(old, 0.3, 1))))
    assert len(calls) == 1 + DOWNLOADS.index(download)
    state.is_consistent = True
    state.verify()  # at once, without a rollback
    encoder.rollback()
    assert state.root == root
    assert bits(state.tensors) == bits(old)


def module_of(backend: str):
    return importlib.import_module(type(select(backend)).__module__)


def many_sections(monkeypatch) -> tuple[dict, dict]:
    """Weights of 20 sections, of one block each, that a call takes all at once."""
    monkeypatch.setattr("gymfast.delta.geometry.Geometry.section_blocks", lambda _: 1)
    monkeypatch.setattr(type(select("auto")), "sections_per_call", lambda *_: 20)
    old = {"w": torch.zeros(20 * BLOCK_UNITS, dtype=torch.int16)}
    return old, step(old, 0.05, 1)


@pytest.fixture
def limit(monkeypatch):
    """Sets the largest piece of device memory there is; lists what was refused."""
    refused, real, most = [], memory.empty, [2**40]

    def short(num_bytes: int, place: str):
        if place != "pinned" and num_bytes > most[0]:
            refused.append(num_bytes)
            raise MemoryError("CUDA out of memory")
        return real(num_bytes, place)

    def set_limit(num_bytes: int) -> list[int]:
        most[0] = num_bytes
        return refused

    monkeypatch.setattr(memory, "empty", short)
    return set_limit


def test_short_memory_makes_more_calls_and_the_same_frame(limit, monkeypatch) -> None:
    old, new = many_sections(monkeypatch)
    options = {"block_units": BLOCK_UNITS}
    expected = delta.encode(State.copy_of(old, **options, backend="cpu"), new)
    state = State.copy_of(on_device(old), **options)
    live, sent = on_device(old), on_device(new)
    target = State.attach(live, **options)
    refused = limit(90_000)
    assert frame_of(Encoder(state), sent) == expected
    assert refused
    refused.clear()
    delta.apply(target, expected)
    assert refused
    assert bits(live) == bits(new)
    limit(1000)
    encoder = Encoder(state)
    with pytest.raises(BudgetError, match=r"bytes of cuda:0 memory, which are not free"):
        list(encoder.encode(on_device(old)))
    limit(2**40)
    encoder.rollback()
    assert bits(state.tensors) == bits(new)


def test_calls_before_a_failed_one_are_taken_back_without_memory(limit, monkeypatch) -> None:
    old, new = many_sections(monkeypatch)
    state, sent = State.copy_of(on_device(old), block_units=BLOCK_UNITS), on_device(new)
    encoder, source = Encoder(state, profile="fast"), module_of("cuda")
    real, calls = source._host, []

    def fails(data):
        calls.append(data)
        if len(calls) == 2 * len(DOWNLOADS) + 2:
            limit(0)  # from here on there is none
            raise MemoryError("no room on the host")
        return real(data)

    limit(90_000)
    with monkeypatch.context() as patch:
        patch.setattr(source, "_host", fails)
        with pytest.raises(MemoryError, match="no room on the host"):
            list(encoder.encode(sent))
    limit(2**40)
    state.is_consistent = True
    state.verify()
    encoder.rollback()
    assert bits(state.tensors) == bits(old)


def test_an_apply_that_runs_short_half_way_says_inconsistent(limit) -> None:
    old = {"small": torch.ones(8), "large": torch.ones(50_000)}
    new = {name: value + 1 for name, value in old.items()}
    live = on_device(old)
    state = State.attach(live)
    limit(20_000)
    with pytest.raises(BudgetError, match=r"not free.*inconsistent"):
        delta.apply(state, delta.encode(old, new))
    limit(2**40)
    assert not state.is_consistent
    delta.restore(state, delta.encode(None, new))
    assert bits(live) == bits(new)


@pytest.mark.parametrize("snapshot", ["beside", "pinned"])
def test_a_snapshot_that_does_not_fit_is_a_budget_error(snapshot, monkeypatch) -> None:
    def no_room(num_bytes: int, place: str):
        if num_bytes:
            raise MemoryError("out of memory")
        return empty(num_bytes, place)

    device, empty = on_device(host_weights()), memory.empty
    monkeypatch.setattr(memory, "empty", no_room)
    place = "pinned" if snapshot == "pinned" else "cuda:0"
    with pytest.raises(BudgetError, match=rf"'attention' needs 4000 bytes of {place} memory"):
        State.copy_of(device, snapshot=snapshot)


@pytest.mark.parametrize("density", [0.001, 0.05, 0.07, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32], ids=str)
def test_the_way_back_takes_no_more_than_is_said(density, dtype) -> None:
    old = {"w": torch.ones(300, 700).to(dtype)}
    state = State.copy_of(on_device(old), block_units=2**17)
    encoder = Encoder(state, profile="fast")
    list(encoder.encode(on_device(step(old, density, 1))))
    size, changed = old["w"].element_size(), encoder.stats.num_changed
    head = 32 + 2 * 4 + 4 * 4  # counts of blocks and of pieces of 65,536 units
    most = min((2 + size) * changed, 2 * 2**17 // 8 + size * changed) + head
    assert 0 < encoder.undo_bytes <= most
    encoder.rollback()
    assert bits(state.tensors) == bits(old)


def test_launches_that_cannot_be_made_leave_all_as_it_was(controls) -> None:
    old = host_weights()
    state = State.copy_of(on_device(old))
    encoder, launches = Encoder(state, profile="fast"), controls.num_launches()
    controls.set_load_error(LAUNCH_FAILURE)
    with pytest.raises(RuntimeError, match="CUDA refused a launch"):
        list(encoder.encode(on_device(step(old, 0.1, 1))))
    assert controls.num_launches() == launches
    controls.set_load_error(0)
    encoder.rollback()
    state.verify()
    assert bits(state.tensors) == bits(old)


def test_a_state_may_have_tensors_on_several_places() -> None:
    old = host_weights()
    new = step(old, 0.1, 1)
    new["norm"] = torch.ones(7)
    places = {"attention": "cuda:1", "norm": "cuda:0"}
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        places["attention"] = "cuda:0"

    def placed(weights):
        return {
            n: to_device(v, places[n]) if n in places else v.clone() for n, v in weights.items()
        }

    frame = delta.encode(old, new, backend="cpu")
    live = placed(old)
    assert delta.encode(placed(old), placed(new)) == frame
    encoder = Encoder(State.copy_of(placed(old), snapshot="pinned"))
    assert frame_of(encoder, placed(new)) == frame
    assert set(encoder.state.memory_bytes) == {"cpu", "pinned"}
    delta.apply(live, frame)
    assert bits(live) == bits(new)
    assert {n: str(live[n].device) for n in places} == places
    assert live["experts"].device.type == "cpu"


@pytest.mark.parametrize("places", [("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0", "cuda:1")])
def test_tensors_tied_by_the_sender_may_lie_in_two_places(places) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        places = tuple("cuda:0" if place == "cuda:1" else place for place in places)
    old = {"a": torch.zeros(50), "b": torch.ones(50)}
    shared = torch.arange(50.0)
    frame = delta.encode(old, {"a": shared, "b": shared})
    held = zip(places, old.items(), strict=True)
    live = {n: v.clone() if place == "cpu" else to_device(v, place) for place, (n, v) in held}
    delta.apply(live, frame)
    assert bits(live) == bits({"a": shared, "b": shared})


def test_what_has_no_memory_of_its_own_is_refused() -> None:
    with FakeTensorMode():
        fake = torch.zeros(4)
    with pytest.raises(TypeError, match=r"'w' is a FakeTensor.*\.full_tensor\(\)"):
        State.copy_of({"w": fake})


@pytest.mark.parametrize("snapshot", ["beside", "pinned"])
def test_a_run_is_published_from_the_device_and_followed_on_it(snapshot) -> None:
    store = MemoryStore()
    versions = [host_weights()]
    versions += [step(versions[0], 0.02, 1)]
    versions += [step(versions[1], 0.02, 2)]
    live = on_device({name: torch.zeros_like(value) for name, value in versions[0].items()})
    publisher = Publisher(store, "run", snapshot=snapshot, anchor_every=2)
    follower = Subscriber(store, "run", LiveTarget(live))
    for version in versions:
        publisher.publish(on_device(version))
        follower.pull()
        assert bits(live) == bits(version)


def test_an_anchor_of_a_pinned_state_needs_no_gpu(limit) -> None:
    old = host_weights()
    state = State.copy_of(on_device(old), snapshot="pinned")
    limit(0)
    assert delta.encode(None, state.tensors) == delta.encode(None, old)


def test_wrong_places_are_refused_in_one_sentence(monkeypatch) -> None:
    old = host_weights()
    device, new = on_device(old), step(old, 0.1, 1)
    where = r"'attention' is in cpu memory, the state holds it in cuda:0"
    with pytest.raises(ValueError, match=where):
        delta.encode(State.copy_of(device), new)
    with pytest.raises(ValueError, match=r"is in cuda:0 memory, the state holds it in cpu memory"):
        list(Encoder(State.copy_of(old)).encode(on_device(new)))
    with pytest.raises(ValueError, match=r"cuda:0 memory, backend='cpu' works on cpu memory"):
        State.copy_of(device, backend="cpu")
    with pytest.raises(ValueError, match=r"cpu memory, backend='cuda' works on cuda or pinned"):
        State.copy_of(old, backend="cuda")
    with pytest.raises(ValueError, match="snapshot='pinned' is for weights in CUDA memory"):
        State.copy_of(old, snapshot="pinned")
    with pytest.raises(ValueError, match="snapshot 'pined', expected one of beside, pinned"):
        State.copy_of(device, snapshot="pined")
    with pytest.raises(ValueError, match="snapshot 'device', expected one of"):
        Publisher(MemoryStore(), "run", snapshot="device")
    monkeypatch.setattr(select("cuda").__class__, "kinds", ("cuda",))
    with pytest.raises(ValueError, match=r"pinned memory needs backend='cuda'"):
        State.copy_of(device, snapshot="pinned")
    with pytest.raises(ValueError, match="is not contiguous"):
        State.attach({"w": device["attention"].t()})
    with pytest.raises(TypeError, match=r"on meta, expected torch\.strided on cpu or cuda"):
        State.copy_of({"w": torch.zeros(4, device="meta")})
    flat = device["attention"].reshape(-1)
    with pytest.raises(ValueError, match="share part of their memory"):
        State.attach({"a": flat[:100], "b": flat[50:150]})


def full(weights) -> list[torch.Tensor]:
    return [value for value in weights.values() if value.numel()]


def test_memory_is_declared_by_place() -> None:
    device = on_device(host_weights())
    size = sum(value.numel() * value.element_size() for value in device.values())
    assert State.copy_of(device).memory_bytes == {"cuda:0": size}
    rounded = sum(2 ** (v.numel() * v.element_size() - 1).bit_length() for v in full(device))
    assert State.copy_of(device, snapshot="pinned").memory_bytes == {"pinned": rounded}
    assert State.attach(device).memory_bytes == {}
    assert State.copy_of(host_weights()).memory_bytes == {"cpu": size}


def test_long_bodies_come_through_pinned_memory(monkeypatch) -> None:
    old = host_weights()
    new = step(old, 0.5, 1)
    expected = delta.encode(old, new, backend="cpu")
    monkeypatch.setattr(module_of("cuda"), "_PINNED_BYTES", 64)
    assert delta.encode(on_device(old), on_device(new)) == expected
