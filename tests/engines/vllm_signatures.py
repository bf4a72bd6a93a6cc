"""The stand-in of tests/integrations against the vLLM that is installed: `make test-engines`."""

from __future__ import annotations

from dataclasses import fields
from inspect import getsource, signature

import pytest
import torch
import vllm
from integrations import vllm_stand_in as stand_in
from vllm.config import ParallelConfig
from vllm.device_allocator import cumem
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.reload import layerwise

from gymfast.integrations.catalogue import INTEGRATIONS, Status, check, find
from gymfast.integrations.vllm import GymfastEngine, check_api
from gymfast.integrations.vllm_ranks import GROUPS

IS_24 = vllm.__version__.startswith("0.24.")
ENGINE = stand_in.Engine24 if IS_24 else stand_in.Engine32


def parameters(function: object) -> list[str]:
    return list(signature(function).parameters)


def test_the_api_is_known() -> None:
    check_api()


def test_the_list_of_frameworks_says_so() -> None:
    (integration,) = [found for found in INTEGRATIONS if found.package == "vllm"]
    for finding in (find(integration), check(integration)):
        assert (finding.status, finding.version) == (Status.READY, vllm.__version__)


def test_the_engine_has_the_constructor_and_the_methods_of_the_real_one() -> None:
    real = WeightTransferEngine
    assert parameters(ENGINE.__init__) == parameters(real.__init__)
    only_trainers = {"trainer_send_weights"}  # abstract until 0.26
    assert ENGINE.__abstractmethods__ - only_trainers == real.__abstractmethods__ - only_trainers
    for name in ENGINE.__abstractmethods__ - only_trainers:
        assert parameters(getattr(ENGINE, name)) == parameters(getattr(real, name))
        if not (IS_24 and name in ("start_weight_update", "finish_weight_update")):
            taken = parameters(getattr(GymfastEngine, name))
            assert taken[: len(parameters(getattr(real, name)))] == parameters(getattr(real, name))


def test_the_factory_registers_the_same_way() -> None:
    real, ours = WeightTransferEngineFactory.register_engine, stand_in.Factory().register_engine
    assert parameters(ours) == parameters(real)


@pytest.mark.parametrize("name", ["initialize_layerwise_reload", "finalize_layerwise_reload"])
def test_the_reload_is_called_the_same_way(name: str) -> None:
    real = reload.finalize_layerwise_processing if "finalize" in name else getattr(reload, name)
    assert parameters(getattr(stand_in, name)) == parameters(real)


def test_ranks_find_each_other() -> None:
    for name in GROUPS:
        assert not signature(getattr(parallel_state, name)).parameters
    assert {"world_size", "distributed_executor_backend"} <= {
        f.name for f in fields(ParallelConfig)
    }


def test_the_record_of_a_module_has_the_same_fields() -> None:
    real = layerwise.get_layerwise_info(torch.nn.Module())
    assert vars(stand_in.LayerInfo()).keys() <= vars(real).keys()
    assert not real.can_load() and not stand_in.LayerInfo().can_load()


def test_the_allocator_shows_what_sleeps() -> None:
    assert hasattr(cumem.CuMemAllocator, "instance")
    assert "self.pointer_to_data" in getsource(cumem.CuMemAllocator.__init__)
    fields = parameters(cumem.AllocationData)
    assert {"tag", "cpu_backup_tensor"} <= set(fields)
    assert ("is_asleep" in fields) != IS_24
