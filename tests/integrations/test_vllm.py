"""The adapter for vLLM against a stand-in; tests/engines runs it in the real one."""

from __future__ import annotations

import base64
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from importlib.metadata import entry_points

import pytest
import torch
from integrations import vllm_stand_in as stand_in
from integrations.vllm_stand_in import Engine24, Engine32, Model, checkpoint
from safetensors.torch import save

from gymfast.delta import encode
from gymfast.errors import ChainError, FormatError, GymfastError, NotFoundError, StoreError
from gymfast.integrations import vllm as adapter
from gymfast.sync import Publisher

Q, K = "layers.1.q_proj.weight", "layers.1.k_proj.weight"
NUM_GROUPS = 3


class Worker:
    """A worker of vLLM 0.24 or 0.32 around an engine, and a run that it follows."""

    def __init__(self, engine: type, monkeypatch, folder, world_size: int = 1) -> None:
        self.is_24 = engine is Engine24
        stand_in.install(monkeypatch, engine, "0.24.0" if self.is_24 else "0.32.0")
        self.model = Model()
        arguments = stand_in.engine_arguments(engine, self.model, world_size)
        self.engine = adapter.GymfastEngine(*arguments)
        self.store = (folder / "store").as_uri()
        self.weights = checkpoint()
        self.publisher = Publisher(self.store, "run", anchor_every=3)
        self.publish()

    def follow(self) -> None:
        info = self.engine.parse_init_info({"store": self.store, "run": "run"})
        self.engine.init_transfer_engine(info)

    def publish(self, *names: str) -> int:
        for name in names:
            self.weights[name].view(-1)[::5] += 1.0
        return self.publisher.publish(self.weights).version

    def update(self, **request: object) -> None:
        """What the worker of vLLM does between a trainer's start and finish."""
        self.model.calls.clear()
        if self.is_24:
            self.engine.receive_weights(
                self.engine.parse_update_info(request), load_weights=self.model.load_weights
            )
            return
        self.engine.start_weight_update()
        self.engine.update_weights(request)
        self.engine.finish_weight_update()
        self.engine.reset_weight_update_target()

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        """Whether the live model is one that loaded these weights."""
        fresh = Model()
        fresh.load_weights(weights.items())
        pairs = zip(self.model.parameters(), fresh.parameters(), strict=True)
        return all(torch.equal(live, expected) for live, expected in pairs)


@pytest.fixture(params=[Engine24, Engine32], ids=["0.24", "0.32"])
def worker(request, monkeypatch, tmp_path) -> Worker:
    worker = Worker(request.param, monkeypatch, tmp_path)
    worker.follow()
    return worker


@pytest.fixture
def storeless(monkeypatch, tmp_path) -> Worker:
    return Worker(Engine32, monkeypatch, tmp_path)


def test_vllm_finds_the_plugin_by_its_entry_point(monkeypatch) -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="gymfast")
    factory = stand_in.install(monkeypatch, Engine32, "0.32.0")
    register = found.load()
    register()
    register()
    assert factory.registry == {"gymfast": ("gymfast.integrations.vllm", "GymfastEngine")}


def test_a_vllm_without_weight_transfer_still_starts(monkeypatch, caplog) -> None:
    stand_in.install(monkeypatch, Engine32, "0.18.0")
    monkeypatch.delattr("vllm.distributed.weight_transfer.WeightTransferEngineFactory")
    adapter.register()
    assert "found vLLM 0.18.0, gymfast knows the API of 0.24 to 0.32" in caplog.text


def test_an_unknown_constructor_is_refused(monkeypatch) -> None:
    class Engine(Engine32):
        def __init__(self, config, model, device, mesh) -> None: ...

    stand_in.install(monkeypatch, Engine, "0.40.0")
    with pytest.raises(GymfastError, match=r"'mesh'.*found vLLM 0.40.0, gymfast knows the API"):
        adapter.GymfastEngine(*stand_in.engine_arguments(Engine32, Model()))


def test_a_new_abstract_method_is_refused(monkeypatch) -> None:
    class Engine(Engine32):
        @stand_in.abstractmethod
        def commit_weights(self): ...

    stand_in.install(monkeypatch, Engine, "0.40.0")
    with pytest.raises(GymfastError, match=r"new methods \['commit_weights'\].*vLLM 0.40.0"):
        adapter.GymfastEngine(*stand_in.engine_arguments(Engine32, Model()))


def test_after_each_version_the_model_is_one_that_loaded_the_checkpoint(worker: Worker) -> None:
    worker.update(version=0)
    assert worker.holds(worker.weights)
    for names in (list(worker.weights), [Q], ["embed.weight"], ["layers.0.decay.A_log"], []):
        worker.update(version=worker.publish(*names))
        assert worker.holds(worker.weights)


def test_row_33_one_tensor_of_a_fused_layer_brings_the_whole_group(worker: Worker) -> None:
    worker.update(version=0)
    worker.update(version=worker.publish(Q))
    assert [sorted(call) for call in worker.model.calls] == [
        [n for n in sorted(worker.weights) if n.startswith("layers.1.")]
    ]
    worker.update(version=worker.publish())
    assert worker.model.calls == []


def test_row_34_a_composed_loader_transforms_each_value_once(worker: Worker) -> None:
    worker.update(version=0)
    worker.update(version=worker.publish("layers.0.decay.A_log"))
    expected = -torch.exp(worker.weights["layers.0.decay.A_log"])
    assert torch.equal(worker.model.layers[0].decay.A, expected)


def test_row_9_no_parameter_moves(worker: Worker) -> None:
    places = [parameter.data_ptr() for parameter in worker.model.parameters()]
    worker.update(version=0)
    worker.update(version=worker.publish(*worker.weights))
    assert [parameter.data_ptr() for parameter in worker.model.parameters()] == places


def test_row_4_nothing_of_torch_is_patched(worker: Worker) -> None:
    before = torch.Tensor.copy_
    load = worker.model.load_weights

    def loading(weights):
        assert torch.Tensor.copy_ is before
        return load(weights)

    worker.model.load_weights = loading
    worker.update(version=0)
    assert worker.holds(worker.weights)


def test_row_10_a_parameter_without_a_tensor_is_an_error(storeless: Worker) -> None:
    del storeless.weights["layers.0.norm.weight"]
    with pytest.raises(ChainError, match=r"1 parameters got no tensor: \['layers.0.norm"):
        storeless.update(bucket=storeless.weights)
    assert storeless.engine.failure


def test_row_33_a_partial_fused_group_is_refused(storeless: Worker) -> None:
    with pytest.raises(ChainError, match=r"'layers.1.qkv_proj' got 128 of 192 elements"):
        storeless.update(bucket={n: t for n, t in storeless.weights.items() if n != K})
    assert storeless.engine.failure
    storeless.update(bucket=storeless.weights)
    assert storeless.holds(storeless.weights)


def test_a_failed_load_flags_the_engine_until_all_was_loaded_again(worker: Worker) -> None:
    worker.update(version=0)
    places = [parameter.data_ptr() for parameter in worker.model.parameters()]
    worker.model.fails_at = 2
    with pytest.raises(ChainError, match=r"not to be used, .* RuntimeError: injected"):
        worker.update(version=worker.publish(*worker.weights))
    with pytest.raises(ChainError, match=r"not to be used, .*; now NotFoundError: version 99 "):
        worker.update(version=99)
    assert [parameter.data_ptr() for parameter in worker.model.parameters()] == places
    for refused in (
        worker.model,
        lambda: worker.model.compute_logits(torch.zeros(1)),
        worker.engine.finish_weight_update,
    ):
        with pytest.raises(ChainError, match=r"not to be used, update them again: .*injected"):
            refused()
    worker.model.fails_at = 0
    worker.update(version=worker.publish(Q))
    assert len(worker.model.calls) == NUM_GROUPS
    assert worker.holds(worker.weights)
    assert worker.model() == worker.model.embed.weight.sum()
    assert [parameter.data_ptr() for parameter in worker.model.parameters()] == places


def test_an_update_refused_before_it_touched_anything_leaves_the_old_version(
    worker: Worker,
) -> None:
    worker.update(version=0)
    with pytest.raises(NotFoundError, match="7"):
        worker.update(version=7)
    assert worker.holds(worker.weights) and worker.model() is not None
    worker.update(version=worker.publish(Q))
    assert len(worker.model.calls) == 1


RANK: ContextVar[int] = ContextVar("RANK")


class TwoRanks:
    """Two workers in threads that hold the same model, as vLLM runs ranks in processes."""

    def __init__(self, monkeypatch, tmp_path, backend: str) -> None:
        self.workers = [
            Worker(Engine32, monkeypatch, tmp_path / str(rank), world_size=2) for rank in range(2)
        ]
        for worker in self.workers:
            worker.engine.parallel_config.distributed_executor_backend = backend
        barrier, slots = threading.Barrier(2, timeout=60), [None, None]

        def gather(parts: list, value: object, group: object) -> None:
            assert group is barrier
            slots[RANK.get()] = value
            barrier.wait()
            parts[:] = slots
            barrier.wait()

        stand_in.join(monkeypatch, 2, RANK.get, barrier)
        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)

    def each(self, *calls: str, **request: object) -> list[str]:
        """What each rank raises when all are asked for it at a time; "" if it does not."""

        def work(rank: int) -> str:
            RANK.set(rank)
            worker = self.workers[rank]
            try:
                for call in calls or ("update_weights",):
                    getattr(worker.engine, call)(*([request] if request else []))
            except (GymfastError, ValueError, TypeError) as error:
                return f"{type(error).__name__}: {error}"
            return ""

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(work, range(2)))

    def follow(self) -> list[str]:
        """Each rank follows the run of the first worker."""
        return self.each("init_transfer_engine", store=self.workers[0].store, run="run")

    def hold(self, weights: dict[str, torch.Tensor]) -> bool:
        return all(worker.holds(weights) for worker in self.workers)


@pytest.fixture
def ranks(monkeypatch, tmp_path) -> TwoRanks:
    ranks = TwoRanks(monkeypatch, tmp_path, "mp")
    assert ranks.follow() == ["", ""]
    assert ranks.each(version=0) == ["", ""] and ranks.each("finish_weight_update") == ["", ""]
    return ranks


@pytest.mark.parametrize("broken", [0, 1])
def test_if_one_rank_cannot_follow_none_loads_and_the_last_one_tells(
    ranks: TwoRanks, monkeypatch, broken: int
) -> None:
    old = copy.deepcopy(ranks.workers[0].weights)
    new = ranks.workers[0].publish(*old)
    with monkeypatch.context() as patch:
        state = ranks.workers[broken].engine._copy
        patch.setattr(state, "pull", lambda version: injected())
        found = ranks.each(version=new)
    assert found[0] == "", "vLLM stops to listen at the first error"
    assert "StoreError: injected" in found[1] and "not to be used" not in found[1]
    assert ranks.hold(old) and ranks.workers[0].model() is not None
    assert ranks.each("finish_weight_update") == ["", ""]
    assert ranks.each(version=new) == ["", ""]
    assert ranks.hold(ranks.workers[0].weights)


@pytest.mark.parametrize("broken", [0, 1])
def test_if_the_load_of_one_rank_fails_all_are_flagged(ranks: TwoRanks, broken: int) -> None:
    new = ranks.workers[0].publish(Q)
    ranks.workers[broken].model.fails_at = len(ranks.workers[broken].model.calls) + 1
    found = ranks.each(version=new)
    assert found[0] == ""
    assert f"update them again: an update failed while it was loaded: rank {broken}" in found[1]
    for worker in ranks.workers:
        with pytest.raises(ChainError, match=rf"not to be used.*rank {broken}: .*injected"):
            worker.model()
    told = ranks.each("finish_weight_update")
    assert told[0] == "" and "not to be used" in told[1]
    ranks.workers[broken].model.fails_at = 0
    assert ranks.each(version=new) == ["", ""]
    assert ranks.hold(ranks.workers[0].weights)
    assert ranks.each("finish_weight_update") == ["", ""]


def test_a_run_that_one_rank_cannot_open_is_followed_by_none(ranks: TwoRanks, monkeypatch) -> None:
    found = ranks.each("init_transfer_engine", store="nowhere:///", run="run")
    assert found[0] == "" and "nowhere" in found[1]
    found = ranks.each("init_transfer_engine", stroe="a typing error")
    assert found[0] == "" and "stroe" in found[1]
    assert ranks.each(version=ranks.workers[0].publish(Q)) == ["", ""]
    assert ranks.hold(ranks.workers[0].weights)


def test_where_vllm_listens_to_every_rank_every_rank_tells(monkeypatch, tmp_path) -> None:
    ranks = TwoRanks(monkeypatch, tmp_path, "external_launcher")
    assert ranks.follow() == ["", ""]
    assert ["version 7" in text for text in ranks.each(version=7)] == [True, True]


def test_a_parallelism_that_is_not_known_is_refused(ranks: TwoRanks) -> None:
    for worker in ranks.workers:
        worker.engine.parallel_config.world_size = 4
    assert ["4 ranks hold the model, its groups have 2" in t for t in ranks.follow()] == [True] * 2


def injected() -> None:
    raise StoreError("injected")


def test_a_reload_that_vllm_0_24_began_is_closed_when_the_update_is_refused(
    monkeypatch, tmp_path
) -> None:
    worker = Worker(Engine24, monkeypatch, tmp_path)
    worker.follow()
    worker.update(version=0)
    stand_in.initialize_layerwise_reload(worker.model)  # start_weight_update() with its default
    with pytest.raises(NotFoundError):
        worker.update(version=7)
    assert worker.holds(worker.weights)


def test_a_late_joiner_needs_the_newest_anchor_and_what_follows(worker: Worker) -> None:
    for _ in range(7):
        newest = worker.publish(*worker.weights)
    worker.update(version=newest)
    assert worker.holds(worker.weights)


def test_weights_that_changed_behind_our_back_are_all_loaded_again(worker: Worker) -> None:
    worker.update(version=0)
    worker.model.embed.weight.data.zero_()  # a sleep that discards the weights
    worker.update(version=worker.publish(Q))
    assert len(worker.model.calls) == NUM_GROUPS
    assert worker.holds(worker.weights)


def test_is_full_loads_everything(worker: Worker) -> None:
    worker.update(version=0)
    worker.update(version=0, is_full=True)
    assert len(worker.model.calls) == NUM_GROUPS


def test_a_loader_that_does_not_tell_gets_everything_each_time(worker: Worker) -> None:
    worker.model.tell = False
    worker.update(version=0)
    worker.update(version=worker.publish(Q))
    assert sorted(name for call in worker.model.calls for name in call) == sorted(worker.weights)
    assert worker.holds(worker.weights)


def test_a_loader_that_fills_something_else_than_before_is_an_error(worker: Worker) -> None:
    worker.update(version=0)
    load = worker.model.load_weights
    worker.model.load_weights = lambda weights: load(weights) - {"layers.1.norm.weight"}
    with pytest.raises(ChainError, match=r"other parameters.*layers.1.norm.weight"):
        worker.update(version=worker.publish(Q))
    assert worker.engine.failure


def test_a_loader_may_keep_and_change_what_it_is_given(worker: Worker) -> None:
    load = worker.model.load_weights

    def keeping(weights):
        pairs = list(weights)
        filled = load(pairs)
        for _, tensor in pairs:
            tensor.zero_()
        return filled

    worker.model.load_weights = keeping
    worker.update(version=0)
    worker.update(version=worker.publish(Q))
    assert worker.holds(worker.weights)


def test_a_parameter_that_vllm_moved_is_an_error(worker: Worker) -> None:
    worker.update(version=0)
    load = worker.model.load_weights

    def moving(weights):
        info = stand_in.get_layerwise_info(worker.model.embed)
        info.kernel_tensors["weight"] = copy.deepcopy(info.kernel_tensors["weight"])
        return load(weights)

    worker.model.load_weights = moving
    with pytest.raises(GymfastError, match=r"moved 1 parameters.*embed.weight"):
        worker.update(version=worker.publish("embed.weight"))
    assert worker.engine.failure


@pytest.mark.parametrize("as_text", [False, True], ids=["bytes", "base64"])
def test_buckets_then_a_delta_frame_on_them(storeless: Worker, as_text: bool) -> None:
    def sent(data: bytes) -> bytes | str:
        return base64.b64encode(data).decode() if as_text else data

    names = list(storeless.weights)
    parts = [{n: storeless.weights[n] for n in part} for part in (names[:4], names[4:])]
    storeless.engine.start_weight_update()
    storeless.engine.update_weights({"bucket": sent(save(parts[0])), "is_last": False})
    assert storeless.model.calls == []
    storeless.engine.update_weights({"bucket": sent(save(parts[1]))})
    storeless.engine.finish_weight_update()
    assert storeless.holds(storeless.weights)
    new = copy.deepcopy(storeless.weights)
    new[Q] += 1
    frame = encode(storeless.weights, new)
    storeless.update(frame=sent(frame))
    assert storeless.holds(new) and len(storeless.model.calls) == 1
    storeless.update(frame=encode(None, storeless.weights))
    assert storeless.holds(storeless.weights)


def test_row_23_a_frame_for_another_base_is_refused_and_nothing_is_loaded(
    storeless: Worker,
) -> None:
    storeless.update(bucket=storeless.weights)
    frame = encode(checkpoint(seed=1), checkpoint(seed=2))
    with pytest.raises(FormatError):
        storeless.update(frame=frame)
    assert storeless.model.calls == [] and not storeless.engine.failure
    assert storeless.holds(storeless.weights)


def test_buckets_without_the_last_one_are_no_update(storeless: Worker) -> None:
    storeless.update(bucket=storeless.weights)
    storeless.engine.update_weights({"bucket": {Q: storeless.weights[Q] + 1}, "is_last": False})
    with pytest.raises(ChainError, match="1 tensors wait for a bucket with is_last"):
        storeless.engine.finish_weight_update()
    storeless.engine.start_weight_update()  # another try, without them
    storeless.engine.update_weights({"bucket": {K: storeless.weights[K]}})
    storeless.engine.finish_weight_update()
    assert storeless.holds(storeless.weights)


def test_a_bucket_does_not_stay_tied_to_the_memory_of_the_trainer(storeless: Worker) -> None:
    expected = copy.deepcopy(storeless.weights)
    storeless.update(bucket=storeless.weights)
    storeless.weights[Q].zero_()
    storeless.update(bucket={K: storeless.weights[K]})
    assert storeless.holds(expected)


def test_a_bucket_that_does_not_fit_the_model_does_not_stay(storeless: Worker) -> None:
    storeless.update(bucket=storeless.weights)
    with pytest.raises(ChainError, match="AttributeError: ModuleList"):
        storeless.update(bucket={"layers.7.norm.weight": torch.ones(8)})
    assert storeless.engine.failure
    storeless.weights[Q] += 1
    storeless.update(bucket={Q: storeless.weights[Q]})
    assert storeless.holds(storeless.weights) and not storeless.engine.failure
