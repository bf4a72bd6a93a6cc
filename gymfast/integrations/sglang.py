"""The weight loader of SGLang: `--custom-weight-loader gymfast.integrations.sglang.load`.

It takes messages, not weights. The trainer's side is `gymfast.integrations.sglang_client`. See
docs/integrations/sglang.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gymfast.delta import inspect
from gymfast.errors import ChainError, FormatError
from gymfast.integrations.canonical import CanonicalCopy
from gymfast.integrations.engine_ranks import error_of, first_of, text_of
from gymfast.integrations.rebind import require_class
from gymfast.integrations.sglang_hooks import ModelHooks
from gymfast.integrations.sglang_local import LocalCheckpoint
from gymfast.integrations.sglang_messages import Part, PartFrame, Piece, Status, Update, unpack
from gymfast.integrations.sglang_model import LiveModel, Loaded, Source, of_all_ranks
from gymfast.integrations.sglang_parts import PartsCopy
from gymfast.integrations.update_request import InitRequest, UpdateRequest
from gymfast.sync.chain import EMPTY_ROOT

_TAKES = {"update_weights_from_tensor": ("named_tensors", "load_format")}
_UPDATERS = (
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater"),
    ("sglang.srt.model_executor.model_runner", "ModelRunner"),  # before 0.5.16
)
_log = logging.getLogger(__name__)


def load(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Does what the message in `named_tensors` says; a status, when asked for, tells the outcome.

    Nothing that an update does wrong is raised: SGLang ends the whole server when a loader raises.
    """
    loader = getattr(model, "gymfast_loader", None)
    if loader is None:
        loader = model.gymfast_loader = Loader(model)
    loader.receive(named_tensors)


def check_api() -> None:
    """Raises GymfastError if this SGLang hands tensors to a loader in a way that is not known."""
    from sglang.srt import model_executor

    folders = [Path(folder) for folder in model_executor.__path__]
    is_new = any((folder / "model_runner_components").is_dir() for folder in folders)
    require_class(*_UPDATERS[0 if is_new else 1], _TAKES)


class Loader:
    """Loads what changed of the checkpoint of one model: of copies in CPU memory, or of files.

    Once a load has failed, deltas are refused until all tensors were loaded. Not thread-safe.
    """

    def __init__(self, model: Any) -> None:
        """A loader that holds nothing yet; its status is read as the weights 'gymfast.status'."""
        self.status = Status("")
        self._model = LiveModel(model)
        self._copy = CanonicalCopy()
        self._local = LocalCheckpoint()
        self._parts = PartsCopy()
        self._follows: InitRequest | None = None
        self._pieces = bytearray()
        self._hooks = ModelHooks(model, self.receive, self._somebody_loads, lambda: self.status)

    def receive(self, named_tensors: Sequence[tuple[str, Any]]) -> None:
        """Carries one message out and notes the status."""
        try:
            record, piece = unpack(named_tensors)
        except FormatError as error:
            _log.exception("a message was refused")
            self._refuse([str(error)], is_restored=True)
            self.status = Status("", str(error), bool(self._model.failure))
            return
        action = record.action
        if isinstance(action, Piece):
            error_of(lambda: self._keep(action.offset, piece))  # the update finds too few bytes
        elif isinstance(action, Part | PartFrame):
            self.status = Status(record.update_id)  # until all parts are there
            take = partial(self._parts.take, record.update_id, action, piece, named_tensors)
            failure = error_of(lambda: self._hooks.load_weights(take()))
            self._parts.failure = self._parts.failure or text_of(failure)
        elif isinstance(action, Update):
            self._update(record.update_id, action)
        elif not self.status.update_id:  # a greeting is understood, unlike what came before
            self.status = Status("")

    def _keep(self, offset: int, piece: bytes) -> None:
        if offset == 0:
            self._pieces.clear()
        if offset != len(self._pieces):
            raise FormatError(f"a piece at {offset} came when {len(self._pieces)} bytes were here")
        self._pieces += piece

    def _somebody_loads(self) -> None:
        if not self._parts.is_empty:
            self._parts.clear()
            self.status = Status("")

    def _update(self, update_id: str, update: Update) -> None:
        """Two steps, each ended by all ranks together: if one cannot follow, none loads."""
        parts, loaded = update.parts, Loaded()

        def load_model() -> None:
            nonlocal loaded
            with self._hooks.off():
                if parts is not None and parts.are_loaded:
                    loaded = self._model.adopt(self._parts)
                else:
                    loaded = self._model.load(self._source(update), is_full=update.is_full)

        errors = of_all_ranks(text_of(error_of(lambda: self._stage(update))))
        if not any(errors):
            errors = of_all_ranks(text_of(error_of(load_model)))
            if any(errors):
                self._model.flag(f"an update failed while it was loaded: {first_of(errors)}")
            else:
                self._model.unflag()
        else:
            has_copy = update.local is None and parts is None
            self._refuse(errors, is_restored=update.is_restored, has_copy=has_copy)
        self.status = Status(
            update_id,
            first_of(errors),
            bool(self._model.failure),
            self._source(update).root,
            parts.version if parts is not None and not any(errors) else "",
            **asdict(loaded),
        )
        if any(errors):
            self._copy.fail(first_of(errors), is_flagged=bool(self._model.failure))
        self._pieces.clear()
        self._local.close()

    def _source(self, update: Update) -> Source:
        if update.parts is not None:
            return self._parts
        return self._copy if update.local is None else self._local

    def _refuse(self, errors: Sequence[str], *, is_restored: bool, has_copy: bool = True) -> None:
        """Flags the model if it cannot go on as before; the errors are why nothing is loaded.

        With `has_copy` a rank without an error has a copy that went ahead.
        """
        if has_copy and not all(errors):
            self._model.flag(f"ranks hold different states: {first_of(errors)}")
        elif is_restored and self._model.packing:
            self._model.flag(f"weights were unpacked for a refused update: {first_of(errors)}")

    def _stage(self, update: Update) -> None:
        """Gets the new state ready to be loaded; the model is untouched."""
        if update.parts is None:
            self._parts.clear()
        else:
            self._parts.require(update.parts)
            if update.parts.are_loaded:
                return
        if self._model.packing and not update.is_restored:
            raise ChainError(
                f"{self._model.packing} may have packed the weights, and this SGLang cannot unpack "
                "them: use a version with /begin_weight_update"
            )
        if update.local is None:
            self._local.forget()
        if update.local is None and update.parts is None:
            self._stage_copy(update)
            return
        if update.local is not None:
            self._local.open(update.local)
        if self._follows is not None or self._copy.names:
            self._copy.close()
            self._copy, self._follows = CanonicalCopy(), None

    def _stage_copy(self, update: Update) -> None:
        """Brings the copy to the new state."""
        frame = None if update.frame_bytes is None else bytes(self._pieces)
        if frame is not None and len(frame) != update.frame_bytes:
            raise FormatError(
                f"{len(frame)} of {update.frame_bytes} bytes of the frame are here: a piece was "
                "lost or the engine restarted; send the frame again"
            )
        is_anchor = frame is not None and inspect(frame).base_root.hex() == EMPTY_ROOT
        if self._model.failure and not (update.is_full or is_anchor):
            raise ChainError(
                f"the engine is flagged, send an anchor or a full update: {self._model.failure}"
            )
        if update.follow != self._follows:
            copy = (update.follow or InitRequest()).open()
            self._copy.close()
            self._copy, self._follows = copy, update.follow
        UpdateRequest(version=update.version, frame=frame).carry_out(self._copy)
