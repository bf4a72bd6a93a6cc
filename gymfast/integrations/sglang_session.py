"""One update of an SGLang server: how it is paused, made loadable, told, and let go on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from gymfast.errors import ChannelError
from gymfast.integrations.engine_http import EngineHttp
from gymfast.integrations.sglang_messages import LOADER


@dataclass(frozen=True)
class Group:
    """A process group of torch: the trainer is rank 0, the engine joined it under the name."""

    name: str
    process_group: Any


class RefusedError(ChannelError):
    """A server that answered that it cannot make its weights loadable: they are as before."""


class Session:
    """One update of a server; how SGLang wants it depends on its version, which is found out."""

    def __init__(self, http: EngineHttp) -> None:
        """Asks the server what it is. Raises ChannelError for one that cannot be updated."""
        self._http = http
        self._protocol: Literal["session", "post_process", "plain"] = "plain"
        info = http.require("/server_info")
        self._num_ranks = _num_ranks(http.url, info)
        self.has_draft = bool(info.get("speculative_algorithm"))

    @property
    def is_restored(self) -> bool:
        """True if the server unpacked what it had packed."""
        return self._protocol != "plain"

    def open(self, pause: str) -> None:
        """Pauses the server and makes its weights loadable.

        Raises RefusedError for a version that cannot do that; the server then goes on. Raises
        ChannelError if it is not known what the server did; it then stays paused.
        """
        self._http.require("/pause_generation", {"mode": pause})
        try:
            self.begin()
        except RefusedError:
            self._http.require("/continue_generation", {})
            raise

    def begin(self) -> None:
        """Makes the weights of a paused server loadable.

        Raises RefusedError for a version that cannot do that, ChannelError if it does not answer.
        """
        begun = self._http.call("/begin_weight_update", {"selector": "target"})
        if begun.is_success or "already open" in begun.text:  # left open by an update that failed
            self._protocol = "session"
            return
        if begun.code == 404:
            begun = self._http.call("/post_process_weights", _post_process(is_before=True))
            if begun.is_success:
                self._protocol = "post_process"
                return
            if begun.code == 404:  # the loader refuses if there is anything to unpack
                return
        kind = RefusedError if begun.code < 500 else ChannelError  # a proxy: it may be half done
        raise kind(
            f"{self._http.url} cannot make its weights loadable, the answer was {begun.code}: "
            f"{begun.text}; gymfast knows SGLang 0.5.12 to 0.5.23"
        )

    def send(self, payload: bytes, **more: object) -> None:
        """One message to all ranks. Raises ChannelError for an answer of failure."""
        fields: dict[str, object] = {
            "serialized_named_tensors": [payload] * self._num_ranks,
            "load_format": LOADER,
            "flush_cache": False,
        }
        # A draft model has other tensors than the run.
        if self._protocol == "session":
            fields["selector"] = "target"
        else:
            fields["disable_draft_model"] = True
        self._http.require("/update_weights_from_tensor", fields | more)

    def broadcast(self, named: Sequence[tuple[str, Any]], group: Group) -> None:
        """One message to all ranks, over a group of which the trainer is rank 0.

        Raises ChannelError for an answer of failure, and what the group raises.
        """
        import torch

        device = "cuda" if torch.distributed.get_backend(group.process_group) == "nccl" else "cpu"
        tensors = [tensor.to(device) for _, tensor in named]
        fields = {
            "names": [name for name, _ in named],
            "dtypes": ["uint8"] * len(named),
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group.name,
            "flush_cache": False,
            "selector": "target",
        }
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._http.require, "/update_weights_from_distributed", fields)
            works = [
                torch.distributed.broadcast(tensor, src=0, group=group.process_group, async_op=True)
                for tensor in tensors
            ]
            answer.result()  # first: an engine that refused does not receive
        for work in works:
            work.wait()

    def end(self) -> None:
        """Makes the weights usable; the server stays paused. Raises ChannelError."""
        if self._protocol == "session":
            self._http.require("/end_weight_update", {})
        elif self._protocol == "post_process":
            self._http.require("/post_process_weights", _post_process(is_before=False))

    def close(self) -> None:
        """Makes the weights usable and lets the server go on. Raises ChannelError."""
        self.end()
        self._http.require("/continue_generation", {})


def _post_process(*, is_before: bool) -> dict[str, object]:
    return {"restore_weights_before_load": is_before, "post_process_quantization": not is_before}


def _num_ranks(url: str, info: Any) -> int:
    """Ranks that share the model. Raises ChannelError for a server that cannot be updated."""
    try:
        num_ranks, loaders = int(info["tp_size"]), info["custom_weight_loader"] or []
        parallel = {name: int(info[name]) for name in ("dp_size", "pp_size")}
    except (KeyError, TypeError, ValueError) as error:
        raise ChannelError(
            f"{url}/server_info is not that of an SGLang known here: {error!r}; gymfast knows "
            "0.5.12 to 0.5.23"
        ) from error
    if LOADER not in loaders:
        raise ChannelError(f"{url} was started without --custom-weight-loader {LOADER}: add it")
    for name, size in parallel.items():
        if size != 1:
            raise ChannelError(f"{url} has {name} {size}: gymfast updates servers with 1 only")
    return num_ranks
