"""The native codec of gymfast: frames, blocks and digests on the CPU."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy
import numpy.typing
from numpy.typing import NDArray


class NcclLibrary:
    """An NCCL that was found; see load_nccl."""

    @property
    def version(self) -> str: ...

    @property
    def path(self) -> str: ...

    @property
    def features(self) -> list[str]: ...

    @property
    def cuda_path(self) -> str: ...

    @property
    def cuda_problem(self) -> str:
        """Why there is no CUDA runtime; empty if there is one."""

    def unique_id(self) -> bytes:
        """What all ranks of a new communicator need."""

    def device_count(self) -> int: ...

    def driver_version(self) -> int: ...

class NcclMemory:
    """Memory of a GPU that NCCL can register."""

    def __init__(self, library: NcclLibrary, num_bytes: int, device: int) -> None: ...

    @property
    def address(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def is_managed(self) -> bool:
        """Whether the CPU reaches it too."""

class NcclRank:
    """One rank of a communicator of NCCL (csrc/nccl/communicator.h)."""

    def __init__(self, library: NcclLibrary, device: int, depth: int, grace_s: float = 10.0) -> None: ...

    def join(self, unique_id: bytes, num_ranks: int, rank: int, max_ctas: int = 0) -> None:
        """Begins to make a communicator."""

    def shrink(self, excluded: Sequence[int], timeout_s: float) -> NcclRank:
        """Begins to make one of the ranks that are left."""

    def grow(self, num_ranks: int, unique_id: bytes) -> NcclRank:
        """
        Begins to make one with more ranks; the id on the rank that asked for it, else b''.
        """

    def grow_into(self, unique_id: bytes, num_ranks: int, rank: int, max_ctas: int = 0) -> None:
        """As grow, for a rank that is new."""

    def id_to_grow(self) -> bytes:
        """What new ranks need to grow into this one."""

    def wait_until_ready(self, seconds: float) -> bool:
        """Whether the communicator could be used within that time."""

    def register_memory(self, memory: NcclMemory, is_window: bool, seconds: float) -> bool:
        """
        Registers memory once, before the first round; False if not within that time. A window that fails ends the communicator, a buffer changes nothing.
        """

    def deregister(self) -> None:
        """Takes the registration back."""

    def begin(self, slots: Sequence[tuple[int, int, int]], producer: int, seconds: float) -> bool:
        """
        Begins a round of (root, address, bytes) after what the stream `producer` was given; False if the round before was not launched within that time.
        """

    def wait(self, num_left: int, seconds: float) -> bool:
        """Whether at most num_left rounds were under way within that time."""

    def stop(self, is_kept: bool) -> None:
        """Ends all rounds, from any thread."""

    def close(self, seconds: float) -> None:
        """Gives everything back; may be called twice."""

    @property
    def num_under_way(self) -> int: ...

    @property
    def can_shrink(self) -> bool: ...

    @property
    def registration(self) -> str:
        """How NCCL knows the memory of register_memory: window, buffer or none."""

    @property
    def is_usable(self) -> bool: ...

    @property
    def is_stuck(self) -> bool:
        """Whether NCCL may still use the memory of unfinished rounds."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

def load_nccl(path: str, beside: Sequence[str], cuda_path: str, cuda_beside: Sequence[str]) -> NcclLibrary:
    """
    The NCCL that this process has, that at `path`, the first of `beside` (files), or that of the system; the CUDA runtime likewise. Empty paths are none.
    """

class ShmRing:
    """A ring of chunks in memory that processes share; raises ChannelError."""

    @staticmethod
    def create(rank: int, num_ranks: int, chunk_bytes: int, num_chunks: int) -> ShmRing:
        """A new ring, in which this rank writes."""

    @staticmethod
    def open(path: str, rank: int) -> ShmRing:
        """The ring of another process, for this rank to read."""

    def write(self, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], timeout_s: float) -> list[int]:
        """Puts an item in; returns ranks that did not take one in time."""

    def read(self, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], timeout_s: float) -> None:
        """Fills data with the next item, which has to be of its size."""

    def leave(self) -> None:
        """This rank takes part no more."""

    def drop(self, rank: int) -> None:
        """A rank is known to be gone: nobody waits for it."""

    def cancel(self) -> None:
        """Ends waits of this object soon, from any thread."""

    @property
    def fd(self) -> int:
        """The file descriptor of the memory."""

def sim_philox(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, int, int, int]:
    """Philox4x32-10 of a counter of four words and a key of two."""

def sim_draw(seed: int, replication: int, entity: int, attempt: int, purpose: int, index: int = 0) -> tuple[float, float]:
    """Two numbers in (0, 1) for a purpose (docs/simulator.md section 3)."""

def sim_log(x: float) -> float:
    """Natural logarithm, the same bits everywhere."""

def sim_log_each(x: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """The same for each number of an array, into out."""

def sim_exp(x: float) -> float:
    """Exponential, the same bits everywhere."""

def sim_exp_each(x: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """The same for each number of an array, into out."""

def sim_normal_quantile(x: float) -> float:
    """Quantile of the standard normal law, the same bits everywhere."""

def sim_normal_quantile_each(x: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """The same for each number of an array, into out."""

def sim_law_each(program: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], branches: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_starting: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """
    Seconds of a law at places in (0, 1), into out (docs/simulator.md section 5).
    """

def sim_to_ns(seconds: float) -> int:
    """Seconds as whole nanoseconds, half to even, at most 10^18."""

def cpu_targets() -> list[str]:
    """Instruction sets that run here, slowest first."""

def cpu_target() -> str:
    """The instruction set in use: GYMFAST_CPU, a forced one, or the fastest."""

def force_cpu_target(name: str | None) -> None:
    """
    Forces an instruction set for this process; None gives the default back.
    """

def check64(*parts: bytes | bytearray | memoryview) -> int:
    """fold64 of the digest of the concatenation of the parts."""

def class_params(base: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], unit_bytes: int) -> tuple[int, int]:
    """
    class_shift and class_base of a base tensor (docs/wire-format.md section 10).
    """

def parse_frame(buffer: bytes | bytearray | memoryview) -> tuple[int, bytes, bytes, tuple[tuple[Any, ...], ...]]:
    """
    Profile, base_root, new_root and tensors of a frame, after rules R1..R22.
    """

def digest_blocks(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], num_units: int, unit_bytes: int, cols: int, tile_rows: int, tile_cols: int, threads: int, first_block: int = 0, num_blocks: int = -1) -> Annotated[NDArray[numpy.uint64], dict(shape=(None, 2), order='C')]:
    """Partial digests of all blocks or of a range, [num_blocks, 2]."""

def encode_blocks(base: numpy.typing.NDArray[numpy.uint8], new: numpy.typing.NDArray[numpy.uint8], num_units: int, unit_bytes: int, cols: int, tile_rows: int, tile_cols: int, profile: int, class_shift: int, class_base: int, has_base: bool, digests: numpy.typing.NDArray[numpy.uint64], first_block: int, num_blocks: int, update: bool, undo: bool, threads: int) -> tuple[bytes, int, bytes]:
    """
    Body of a BLOCKS section, units changed and the undo log; see backends.Backend.
    """

def rollback_blocks(base: numpy.typing.NDArray[numpy.uint8], undo: bytes | memoryview, num_units: int, unit_bytes: int, cols: int, tile_rows: int, tile_cols: int) -> None:
    """Puts back what base held before the encode_blocks that returned undo."""

def apply_blocks(data: numpy.typing.NDArray[numpy.uint8], body: bytes | bytearray | memoryview, num_units: int, unit_bytes: int, cols: int, tile_rows: int, tile_cols: int, class_shift: int, class_base: int, has_base: bool, digests: numpy.typing.NDArray[numpy.uint64], first_block: int, num_blocks: int, threads: int, found: numpy.typing.NDArray[numpy.uint64] | None = None) -> int:
    """
    Units changed; a block is written only after its check matched. `found` gets the digests of the blocks as they lie in memory afterwards.
    """

def zstd_xor_frame(old: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], new: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], threads: int = 1) -> bytes:
    """A standard zstd frame of old XOR new, made without a match search."""

def list_changes(before: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], after: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], unit_bytes: int) -> tuple[bytes, bytes]:
    """
    u32 numbers of the units that differ, ascending, and their new values; native order.
    """

ZSTD_PART_BYTES: int = 2097152

def zstd_xor_part(old: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], new: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], start: int, end: int, threads: int = 1) -> tuple[bytes, int]:
    """
    What zstd_xor_frame has for the bytes from start to end, multiples of ZSTD_PART_BYTES or the end, and how many of them differ.
    """

def zstd_overwrite_frame(old: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], new: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], threads: int = 1) -> bytes:
    """
    A standard zstd frame of a u32 count of the bytes that differ, their u32 positions and new values.
    """
