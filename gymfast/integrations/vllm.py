"""The weight transfer engine of vLLM: `--weight-transfer-config '{"backend":"gymfast"}'`.

vLLM finds it by the entry point `vllm.general_plugins`. See docs/integrations/vllm.md.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from gymfast.errors import GymfastError
from gymfast.integrations.canonical import CanonicalCopy
from gymfast.integrations.live_model import Sample, guard, moved, sample_of
from gymfast.integrations.load_groups import LoadGroup, first_groups, merge, touched
from gymfast.integrations.update_request import InitRequest, UpdateRequest
from gymfast.integrations.vllm_ranks import EngineRanks
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

    All ranks of a model apply to their copies, then load; if one cannot follow, none loads. Once a
    load has failed the model refuses to run, until an update has loaded all tensors.
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
        self._ranks = EngineRanks(self.parallel_config)
        self._copy = CanonicalCopy()
        self._follows = InitRequest()
        self._groups: list[LoadGroup] = []
        self._sample: Sample = {}
        guard(self.model, self._ranks.refuse_if_flagged)

    @property
    def failure(self) -> str:
        """Why the model may hold anything; empty if it is sound."""
        return self._ranks.failure

    def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
        return init_dict  # an error of it has to wait until all ranks can agree on it

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateRequest:
        return UpdateRequest(**update_dict)

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Follows the run that is named, or none; the next update loads everything.

        A run that it follows already goes on as it is: a trainer may ask before each update.
        Raises what `InitRequest` and its `open` raise.
        """
        opened: list[tuple[CanonicalCopy, InitRequest]] = []

        def open_run() -> None:
            follow = InitRequest(**init_info)
            if not follow.store or follow != self._follows:
                opened.append((follow.open(), follow))

        error = self._ranks.try_together(open_run)
        if opened and not error:
            self.shutdown()
            self._copy, self._follows = opened[0]
        elif opened:
            opened[0][0].close()
        self._ranks.tell(error)

    def start_weight_update(self) -> None:
        self._copy.drop_waiting()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._update(lambda: self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateRequest, load_weights: object = None) -> None:
        """Carries out one request: what vLLM 0.24 calls, with the loader of the model."""
        del load_weights  # it is without the modules of the model
        self._update(lambda: update_info)

    def finish_weight_update(self) -> None:
        """Raises ChainError if the engine is flagged or the last bucket did not come.

        Ranks do not talk here: vLLM does not call those whose update failed before.
        """
        num = self._copy.num_waiting
        self._ranks.tell(f"{num} tensors wait for a bucket with is_last" if num else self.failure)

    def reset_weight_update_target(self) -> None:
        return

    def shutdown(self) -> None:
        self._copy.close()
        self._copy, self._follows = CanonicalCopy(), InitRequest()

    def _update(self, request: Callable[[], UpdateRequest]) -> None:
        """Brings the copies of all ranks to the new state, then loads the groups that changed.

        Raises what the request raises, ChainError for an engine that sleeps, and then the old state
        is live; ChainError, with the error of the load, for an engine that is flagged.
        """
        is_full = False

        def stage() -> None:
            nonlocal is_full
            self._reload.require_awake()
            self._reload.close()  # vLLM 0.24 may have begun one
            update = request()
            update.carry_out(self._copy)
            is_full = update.is_full

        error = self._ranks.try_together(stage)
        if not error and self._copy.num_waiting:
            return
        if not error:
            error = self._ranks.try_together(lambda: self._load(is_full))
            self._ranks.failure = error and f"an update failed while it was loaded: {error}"
        if error:
            self._copy.fail(error, is_flagged=bool(self.failure))
            self._reload.close()
            self._ranks.tell(error)

    def _load(self, is_full: bool) -> None:
        """Loads what changed, in whole groups; everything if it is not known what is live.

        Raises what vLLM raises, CoverageError for a module that is filled partly.
        """
        import torch

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
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # errors of copies belong to this update
        self._copy.mark_loaded()
        _log.info(
            "state %s is live: %d of %d tensors differed, %d of %d groups were loaded",
            *(self._copy.root[:16], len(changed), len(names), len(groups), len(self._groups)),
        )
