"""Where NCCL may lie, and what of it has to be equal on all ranks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from gymfast._core import NcclLibrary, load_nccl

_NCCL = ("nvidia/nccl/lib/libnccl.so.2",)
_CUDA = ("nvidia/cu13/lib/libcudart.so.13", "nvidia/cuda_runtime/lib/libcudart.so.12")
_CUMEM_DRIVER = 12000  # cudaDriverGetVersion
# Settings that may differ: names of this host's devices, addresses and files, and what is logged.
_LOCAL = (
    *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_OOB_NET_IFNAME", "NCCL_HOSTID"),
    *("NCCL_TOPO_", "NCCL_GRAPH_", "NCCL_CONF_FILE", "NCCL_RAS_", "NCCL_NVTX", "NCCL_INSPECTOR_"),
)
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_log = logging.getLogger(__name__)


def load(path: str = "", cuda_path: str = "") -> NcclLibrary:
    """NCCL: the copy in this process, else `path`, that beside torch, or the system's.

    Raises MissingDependencyError, in one sentence, if there is none, it is older than 2.18, or
    it is another than the process has.
    """
    return load_nccl(path, _beside_torch(_NCCL), cuda_path, _beside_torch(_CUDA))


def settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """All variables that NCCL reads, by name."""
    return {name: environment[name] for name in sorted(environment) if name.startswith("NCCL_")}


def environment_of(library: NcclLibrary) -> dict[str, str]:
    """What ranks of one communicator have to have in common, for BucketTransfer and open_nccl.

    Raises ChannelError if there is no CUDA driver.
    """
    found = {n: v for n, v in settings().items() if not n.startswith(_LOCAL)}
    cumem = "on" if _has_cumem(library) else "off"
    ways = ", ".join(registrations_of(library))
    return {"NCCL": library.version, "cuMem of NCCL": cumem, "registration": ways, **found}


def registrations_of(library: NcclLibrary) -> tuple[str, ...]:
    """Ways to register memory with NCCL, the best first: "window", "buffer"; nothing without one.

    Both need memory of NCCL that other processes can map (cuMem).
    """
    if "memory" not in library.features or not _has_cumem(library):
        return ()
    known = {"window": "windows", "buffer": "registration"}
    off = {"window": "NCCL_WIN_ENABLE", "buffer": "NCCL_LOCAL_REGISTER"}
    return tuple(
        way
        for way, feature in known.items()
        if feature in library.features and os.environ.get(off[way]) != "0"
    )


def _has_cumem(library: NcclLibrary) -> bool:
    has_driver = library.driver_version() >= _CUMEM_DRIVER
    return has_driver and os.environ.get("NCCL_CUMEM_ENABLE", "1") != "0"


def warn_of_expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torch allocates in a way that makes NCCL slow; then a warning is logged.

    Source: NIXL #1754 (200 GB/s became 0.3 GB/s with memory of expandable segments).
    """
    for name in _ALLOCATOR:
        if "expandable_segments:true" in environment.get(name, "").lower():
            _log.warning(
                "%s has expandable_segments:True: memory of such segments may be registered "
                "slowly or not at all; if transfers are slow, leave it out",
                name,
            )
            return True
    return False


def _beside_torch(names: tuple[str, ...]) -> list[str]:
    """Files of wheels, those next to torch first."""
    torch = find_spec("torch")
    folders = (
        [Path(place).parent for place in (torch.submodule_search_locations or [])]
        if (torch)
        else []
    )
    folders += [Path(place) for place in sys.path if place]
    files = [folder / name for folder in folders for name in names]
    return list(dict.fromkeys(str(file) for file in files if file.is_file()))
