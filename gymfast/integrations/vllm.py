"""The weight transfer engine of vLLM: `--weight-transfer-config '{"backend":"gymfast"}'`.

vLLM finds it by the entry point `vllm.general_plugins`. See docs/integrations/vllm.md.
"""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

from gymfast.errors import ChainError, GymfastError
from gymfast.integrations.canonical import CanonicalCopy
from gymfast.integrations.live_model import Sample, guard, moved, sample_of
from gymfast.integrations.load_groups import LoadGroup, first_groups, merge, touched
from gymfast.integrations.update_request import InitRequest, UpdateRequest
from gymfast.integrations.vllm_reload import LayerwiseReload

BACKEND = "gymfast"
_ARGUMENTS = (
    ("config", "parallel_config", "model"),  # 0.24
    ("config", "vllm_config", "device", "model"),  # 0.25 and later
)
_log = logging.getLogger(__name__)


def register() -> None:
    """Makes the engine known to vLLM, which calls this in each of its processes."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError as error:
        _log.warning("the weight transfer backend 'gymfast' is not there: %s; %s", error, _known())
        return
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "GymfastEngine")
    except ValueError as error:  # a second call in one process
        _log.info("%s", error)


def check_api() -> None:
    """Raises GymfastError if the weight transfer API of this vLLM is not one of those known."""
    from vllm.distributed.weight_transfer import base

    engine = base.WeightTransferEngine
    arguments = tuple(inspect.signature(engine.__init__).parameters)[1:]
    if arguments not in _ARGUMENTS:
        raise GymfastError(f"WeightTransferEngine takes {arguments}, not {_ARGUMENTS}: {_known()}")
    methods = engine.__abstractmethods__ - {"trainer_send_weights"}  # the trainer's, until 0.26
    if unknown := sorted(name for name in methods if not hasattr(GymfastEngine, name)):
        raise GymfastError(f"WeightTransferEngine has the new methods {unknown}: {_known()}")


def _known() -> str:
    from vllm import __version__

    return f"found vLLM {__version__}, gymfast knows the API of 0.24 to 0.32: install one"


class GymfastEngine:
    """Keeps the checkpoint in CPU memory; loads what changed of it through vLLM's own loader.

    `failure` says why the model may hold anything: it then refuses to run, until the next update
    has loaded all tensors.
    """

    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: object, first: Any, *others: Any) -> None:
        """An engine for the model of this worker, for any known version of vLLM.

        Raises GymfastError for a vLLM whose API is not known.
        """
        check_api()
        self.config, self.model = config, others[-1]
        self.parallel_config = getattr(first, "parallel_config", first)
        # 0.24 gives no model config; the dtype is all that its reload reads.
        dtype = next(self.model.parameters()).dtype
        model_config = getattr(first, "model_config", SimpleNamespace(dtype=dtype))
        self._reload = LayerwiseReload(self.model, model_config)
        self.failure = ""
        self._copy = CanonicalCopy()
        self._follows = InitRequest()
        self._groups: list[LoadGroup] = []
        self._sample: Sample = {}
        guard(self.model, self._refuse_if_flagged)

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitRequest:
        return InitRequest(**init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateRequest:
        return UpdateRequest(**update_dict)

    def init_transfer_engine(self, init_info: InitRequest) -> None:
        """Follows the run that is named, or none; the next update loads everything.

        A run that it follows already goes on as it is: a trainer may ask before each update.
        """
        if init_info.store and init_info == self._follows:
            return
        copy = init_info.open()
        self._copy.close()
        self._copy, self._follows = copy, init_info

    def start_weight_update(self) -> None:
        self._copy.drop_waiting()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        import torch

        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateRequest, load_weights: object = None) -> None:
        """Brings the copy to the new state, then loads the groups that changed.

        `load_weights` is what vLLM 0.24 passes: the loader of the model, without its modules.
        Raises what the request and vLLM raise, CoverageError for a module that is filled partly,
        ChainError for an engine that sleeps.
        """
        del load_weights
        self._reload.require_awake()
        self._reload.close()  # vLLM 0.24 may have begun one
        try:
            update_info.carry_out(self._copy)
        except BaseException as error:
            if self.parallel_config.world_size > 1:
                self.failure = f"an update failed here, other ranks may have gone on: {error}"
            raise
        if self._copy.num_waiting:
            return
        try:
            self._load(update_info.is_full)
        except BaseException as error:
            self.failure = f"an update failed while it was loaded: {error}"
            self._copy.take_back_bucket()
            self._reload.close()
            raise

    def finish_weight_update(self) -> None:
        """Raises ChainError if the engine is flagged or the last bucket did not come."""
        if self._copy.num_waiting:
            raise ChainError(f"{self._copy.num_waiting} tensors wait for a bucket with is_last")
        self._refuse_if_flagged()

    def reset_weight_update_target(self) -> None:
        return

    def shutdown(self) -> None:
        self.init_transfer_engine(InitRequest())

    def _load(self, is_full: bool) -> None:
        """Loads what changed, in whole groups; everything if it is not known what is live."""
        changed, names, before = self._copy.changed(), self._copy.names, sample_of(self.model)
        known = {name for group in self._groups for name in group.names}
        if self.failure or known != set(names) or before != self._sample:
            is_full = True
        groups = first_groups(names) if is_full else touched(self._groups, changed)
        if groups:
            loaded = self._reload.load(groups, self._copy.tensors, is_all=is_full)
            self._groups = merge(loaded) if is_full else self._groups
        self._sample = sample_of(self.model)
        if lost := moved(before, self._sample):
            raise GymfastError(f"vLLM moved {len(lost)} parameters to other memory: {lost[:3]}")
        self._copy.mark_loaded()
        self.failure = ""
        _log.info(
            "state %s is live: %d of %d tensors differed, %d of %d groups were loaded",
            *(self._copy.root[:16], len(changed), len(names), len(groups), len(self._groups)),
        )

    def _refuse_if_flagged(self) -> None:
        if self.failure:
            raise ChainError(f"the weights are not to be used, update them again: {self.failure}")
