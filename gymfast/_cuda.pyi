"""
The CUDA kernels of gymfast on arrays with __dlpack__ or __cuda_array_interface__. Calls return before the device is done: the caller keeps the arrays and orders the streams.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def device_count() -> int:
    """GPUs that the driver reports; 0 without a driver."""

def error_text(number: int) -> str:
    """What the number of an error in a result says."""

def encode_body_capacity(num_units: int, unit_bytes: int, cols: int, tile_rows: int, tile_cols: int, num_blocks: int) -> int:
    """Bytes of body that encode_blocks needs."""

def encode_scratch_bytes(num_units: int, unit_bytes: int, cols: int, tile_rows: int, tile_cols: int, profile: int, num_blocks: int) -> int:
    """Bytes of scratch that encode_blocks needs."""

def apply_scratch_bytes(num_units: int, unit_bytes: int, cols: int, tile_rows: int, tile_cols: int, num_blocks: int) -> int:
    """Bytes of scratch that apply_blocks needs."""

def digest_blocks(data: object, num_units: int, unit_bytes: int, cols: int, tile_rows: int, tile_cols: int, first_block: int, num_blocks: int, digests: object, stream: int) -> None:
    """Partial digests of the blocks into digests, u64[num_blocks, 2]."""

def encode_blocks(base: object, new: object, num_units: int, unit_bytes: int, cols: int, tile_rows: int, tile_cols: int, profile: int, class_shift: int, class_base: int, has_base: bool, digests: object, first_block: int, num_blocks: int, blocks_per_section: int, update: bool, body: object, sections: object, scratch: object, stream: int) -> None:
    """
    Sections of the step from base to new into body, and their rows first_block, num_blocks, offset, size, num_changed into sections, u64[n, 5]. digests become those of new; with update so does base.
    """

def undo_offsets(num_units: int, unit_bytes: int, cols: int, tile_rows: int, tile_cols: int, profile: int, num_blocks: int) -> tuple[int, int, int]:
    """
    Where gather_undo leaves counts u32[num_blocks], index u32[n] and before unit[n], n the sum of counts: bytes from the start of scratch.
    """

def gather_undo(num_units: int, unit_bytes: int, cols: int, tile_rows: int, tile_cols: int, profile: int, num_blocks: int, scratch: object, stream: int) -> None:
    """
    Old values of all units that the encode_blocks before found changed, block by block, in its scratch; index counts from the start of the block.
    """

def rollback_blocks(data: object, num_units: int, unit_bytes: int, cols: int, tile_rows: int, tile_cols: int, first_block: int, num_blocks: int, counts: object, index: object, before: object, stream: int) -> None:
    """
    Puts the values of gather_undo back; counts u32[num_blocks] are of these blocks, and the device adds them up. Writes nothing outside of the blocks, whatever index holds.
    """

def sample_classes(data: object, num_units: int, unit_bytes: int, out: object, stream: int) -> int:
    """
    Class fields of min(num_units, 1024) evenly spread units into out, u8; their number.
    """

def apply_blocks(data: object, body: object, num_units: int, unit_bytes: int, cols: int, tile_rows: int, tile_cols: int, class_shift: int, class_base: int, has_base: bool, digests: object, first_block: int, num_blocks: int, sections: object, result: object, scratch: object, stream: int) -> None:
    """
    Applies the sections to data in place. result, u64[2], becomes block << 8 | error number of the first bad block, or all ones, and the units changed.
    """

def fill_pieces(bucket: object, tensors: Sequence[object], pieces: Sequence[tuple[int, int, int]], is_packing: bool, rows: Annotated[NDArray[numpy.uint64], dict(shape=(None, 5), order='C', device='cpu')]) -> int:
    """
    Checks pieces (offset in the tensor beside it, offset in the bucket, bytes), writes the table of move_pieces to rows, u64[n, 5] in CPU memory, and returns its tiles. Good for as long as the tensors live, for any bucket as large. Without tensors pieces are summed.
    """

def move_pieces(bucket: object, table: object, num_tiles: int, is_packing: bool, digest: object, stream: int) -> None:
    """
    Copies the pieces of a table on the device into the bucket (is_packing) or out of it, and adds their weighted sum of words to digest, u64[1].
    """
