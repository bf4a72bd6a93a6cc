"""The ranks of one vLLM engine: they fail together, and only as many tell as vLLM listens to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymfast.errors import ChainError, GymfastError
from gymfast.integrations.engine_ranks import error_of, first_of, text_of, texts_of_all

FLAGGED = "the weights are not to be used, update them again"
"""How the text of an error says that the engine is flagged; the trainer's side looks for it."""

GROUPS = ("get_tp_group", "get_pcp_group", "get_pp_group")
"""What of vLLM's parallel_state gives the groups of a rank, neighbours first."""


class EngineRanks:
    """This rank and the others that hold parts of the same model.

    Every method is called by all ranks, in one order. `failure` says why the model may hold
    anything; it is that of all ranks.
    """

    def __init__(self, parallel_config: Any) -> None:
        """`parallel_config` is that of vLLM."""
        self.failure = ""
        self._config = parallel_config
        self._last: Exception | None = None

    def try_together(self, work: Callable[[], None]) -> str:
        """Why the work failed on any rank; empty if it did on none."""
        self._last = error_of(work)
        text = text_of(self._last)
        if self._config.world_size == 1:
            return text
        try:
            texts = texts_of_all(text, self._groups())
        except Exception as error:
            self.failure = f"the ranks could not tell each other how it went: {text_of(error)}"
            raise
        if len(texts) != self._config.world_size:
            raise GymfastError(
                f"{self._config.world_size} ranks hold the model, its groups have {len(texts)}: "
                "this sort of parallelism is not known to gymfast"
            )
        return first_of(texts)

    def tell(self, text: str) -> None:
        """Raises what went wrong on any rank, unless it is empty or another rank does.

        vLLM reads the answers of its own workers in order, and stops at the first error: an answer
        that it did not read is taken for that of a later call. So the last rank tells.
        """
        own, self._last = self._last, None
        if not text or not self._is_teller():
            return
        if self.failure:
            now = "" if text in self.failure else f"; now {text}"
            raise ChainError(f"{FLAGGED}: {self.failure}{now}") from own
        if own is not None and self._config.world_size == 1:
            raise own
        raise ChainError(text) from own

    def refuse_if_flagged(self) -> None:
        """Raises ChainError if the model may hold anything, on every rank."""
        if self.failure:
            raise ChainError(f"{FLAGGED}: {self.failure}")

    def _is_teller(self) -> bool:
        if self._config.distributed_executor_backend == "external_launcher":
            return True  # each rank has a caller of its own
        return self._config.world_size == 1 or all(
            group.rank_in_group == group.world_size - 1 for group in self._groups()
        )

    def _groups(self) -> list[Any]:
        from vllm.distributed import parallel_state

        return [getattr(parallel_state, name)() for name in GROUPS]
