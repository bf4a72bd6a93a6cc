"""TRL: versions of a run instead of an NCCL group between trainer and vLLM servers.

    AsyncGRPOTrainer(..., weight_transfer=WeightTransfer(store, run, ["http://HOST:8000"]))

Versions, and trainers without that argument: docs/integrations/trl.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

from gymfast.errors import ChainError, GymfastError
from gymfast.integrations.rebind import replace_class, require_class
from gymfast.integrations.run_stream import NamedTensors, RunStream, drain
from gymfast.integrations.update_request import InitRequest
from gymfast.integrations.vllm_client import VLLMClient
from gymfast.sync import Publisher

PROTOCOL = {
    **dict.fromkeys(("init_weight_transfer", "pause", "resume", "destroy"), ()),
    "send_weights": ("iterator",),
}
"""Methods of TRL's WeightTransferProtocol, with their parameters."""

CLIENT = {
    "init_communicator": ("device",),
    "update_named_param": ("name", "weights"),
    "update_named_params": ("metadata", "named_params"),
    "close_communicator": (),
}
"""Methods of TRL's VLLMClient that are replaced, with their parameters."""

_GENERATION = "trl.generation.vllm_generation"
_TRAINERS = (
    "trl.experimental.async_grpo.async_grpo_trainer",
    "trl.experimental.async_distillation.async_distillation_trainer",
)


class WeightTransfer:
    """A WeightTransferProtocol of TRL; TRL uses it on its main rank only.

    Versions are those of the run, not those that TRL counts.
    """

    def __init__(
        self,
        store: str,
        run: str,
        servers: Sequence[str],
        *,
        dtype: str | None = None,
        key_file: str | None = None,
        api_key: str | None = None,
        pause: Literal["wait", "abort", "keep"] = "keep",
        timeout_s: float = 300.0,
        ready_timeout_s: float = 240.0,
        make_publisher: Callable[[str, str], Publisher] = Publisher,
    ) -> None:
        """Nothing is opened or sent yet, so that each rank may have one.

        Tensors of floating point are published as `dtype`, as they come if it is None. `key_file`
        holds, for the servers, the key of a run whose records `make_publisher` signs. `api_key`,
        `pause` and `timeout_s` are those of `VLLMClient`; `ready_timeout_s` is how long the servers
        may take to start. Raises ValueError for no servers, an address or a store that no server
        can use, or an unknown dtype.
        """
        if not servers:
            raise ValueError("servers is empty: name the address of each vLLM server")
        self._follow = InitRequest(store=store, run=run, key_file=key_file).require_shared()
        self._clients = [
            VLLMClient(url, api_key=api_key, timeout_s=timeout_s, pause=pause) for url in servers
        ]
        self._dtype = None if dtype is None else _dtype_of(dtype)
        self._ready_timeout_s = ready_timeout_s
        self._open = partial(make_publisher, store, run)
        self._stream: RunStream | None = None

    def init_weight_transfer(self) -> None:
        """Opens the run and has all servers follow it.

        Raises GymfastError for a TRL that is not known, a server that is not there (DeadlineError)
        or cannot follow a run (ChannelError), and what `Publisher` raises.
        """
        check_api()
        for client in self._clients:
            client.wait_until_ready(self._ready_timeout_s)
        self._stream = self._stream or RunStream(self._open())
        for client in self._clients:
            client.follow(self._follow)

    def pause(self) -> None:
        """Nothing: servers go on while a version is made, each is paused by its update alone."""

    def send_weights(self, iterator: NamedTensors) -> None:
        """Publishes what the iterator yields, then has all servers take that version at once.

        The iterator is always read to its end. Raises what `RunStream.publish` raises, and then no
        server was touched; ChainError that names each server that failed, after the others have
        the version. The next call goes on from there.
        """
        tensors = iter(iterator)
        try:
            self._stream = self._stream or RunStream(self._open())
            version = self._stream.publish(self._as_published(tensors)).version
        finally:
            drain(tensors)
        with ThreadPoolExecutor(len(self._clients)) as pool:
            calls = [pool.submit(client.pull, self._follow, version) for client in self._clients]
        failures = [error for call in calls if (error := call.exception()) is not None]
        if failures:
            raise ChainError(
                f"{len(failures)} of {len(calls)} servers did not take version {version} of run "
                f"'{self._follow.run}': {'; '.join(map(str, failures))}"
            ) from failures[0]

    def resume(self) -> None:
        """Nothing, as in `pause`: a server that failed stays paused if it may hold anything."""

    def destroy(self) -> None:
        """Gives the memory of the run back; another call opens it again."""
        self._stream = None

    def _as_published(self, tensors: Iterator[tuple[str, Any]]) -> NamedTensors:
        for name, tensor in tensors:
            is_cast = self._dtype is not None and tensor.is_floating_point()
            yield name, tensor.to(self._dtype) if is_cast else tensor


def install(
    store: str,
    run: str,
    *,
    dtype: str | None = None,
    key_file: str | None = None,
    make_publisher: Callable[[str, str], Publisher] = Publisher,
) -> None:
    """Has trainers whose vLLM is a server (GRPO, RLOO, distillation) publish to a run.

    To be called before the trainer is made. The arguments are those of `WeightTransfer`.
    Raises GymfastError for a TRL that is not known.
    """
    transfer = partial(WeightTransfer, store, run, dtype=dtype, key_file=key_file, pause="wait")
    made = partial(transfer, make_publisher=make_publisher)
    replace_class(_GENERATION, "VLLMClient", CLIENT, partial(_client, made))


def check_api() -> None:
    """Raises GymfastError if the protocol of a trainer that is loaded is not the known one."""
    for name in _TRAINERS:
        if name not in sys.modules:
            continue
        protocol = require_class(name, "WeightTransferProtocol", PROTOCOL)
        methods = {method for method in vars(protocol) if not method.startswith("_")}
        if unknown := sorted(methods - PROTOCOL.keys()):
            raise GymfastError(
                f"WeightTransferProtocol of {name} has the new methods {unknown}: this TRL is not "
                "known to gymfast; see docs/integrations/trl.md for the versions that work"
            )


def _client(transfer: Callable[[Sequence[str]], WeightTransfer], base: Any) -> type:
    class Client(base):  # type: ignore[misc]
        """TRL's client, which generates as before; weights take the way over a run."""

        def init_communicator(self, device: Any = 0) -> None:  # noqa: ARG002 - TRL's
            self._gymfast = transfer([self.base_url])
            self._gymfast.init_weight_transfer()

        def update_named_param(self, name: str, weights: Any) -> None:  # noqa: ARG002
            raise GymfastError(
                f"{name!r} alone is no version of a run: use update_named_params with all tensors"
            )

        def update_named_params(self, metadata: Any, named_params: NamedTensors) -> None:
            del metadata  # of a group of processes
            self._gymfast.send_weights(named_params)

        def close_communicator(self) -> None:
            self._gymfast.destroy()

    return Client


def _dtype_of(name: str) -> Any:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {name!r}, expected a floating point type of torch: 'bfloat16'")
    return dtype
