"""Reads the fields of section bodies, and the two that have many: TENSOR and block table."""

from __future__ import annotations

from dataclasses import dataclass

from gymfast.delta.geometry import DTYPE_BITS, MAX_BLOCK_UNITS, MAX_TENSOR_BYTES, Geometry
from gymfast.delta.records import Digest, Kind, Mode, TensorRecord
from gymfast.delta.varint import Buffer, decode_varint
from gymfast.errors import FormatError

MAX_NAME_BYTES = 1024
MAX_DIMS = 32
MAX_CLASS_SHIFT = 7
_CUT = 25


class Fields:
    """A cursor over a section body; `where` starts the text of its errors."""

    def __init__(self, body: memoryview, where: str) -> None:
        self.where = where
        self._body = body
        self._at = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole body."""
        return len(self._body)

    def error(self, message: str, number: int) -> FormatError:
        """A FormatError that says where."""
        return FormatError(f"{self.where}: {message}", number)

    def take(self, num_bytes: int) -> bytes:
        """The next num_bytes; raises FormatError 25 if the body is shorter (R10)."""
        if num_bytes > len(self._body) - self._at:
            raise self.error(f"the body ends inside its fields, at byte {len(self._body)}", _CUT)
        self._at += num_bytes
        return bytes(self._body[self._at - num_bytes : self._at])

    def u8(self) -> int:
        """The next byte."""
        return self.take(1)[0]

    def varint(self, name: str) -> int:
        """The next varint."""
        value, self._at = decode_varint(self._body, self._at, what=f"{self.where}: {name}")
        return value

    def digest(self) -> Digest:
        """The next two lanes of a digest."""
        return int.from_bytes(self.take(8), "little"), int.from_bytes(self.take(8), "little")

    def name(self) -> str:
        """The next tensor name.

        Raises FormatError 40 if it is empty, too long, not UTF-8 or has a control character (R13).
        """
        num_bytes = self.varint("name length")
        if not 1 <= num_bytes <= MAX_NAME_BYTES:
            raise self.error(f"a name of {num_bytes} bytes, expected 1..{MAX_NAME_BYTES}", 40)
        raw = self.take(num_bytes)
        try:
            name = raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"name {raw!r} is not UTF-8", 40) from error
        if any(char < " " or char == "\x7f" for char in name):
            raise self.error(f"name {name!r} holds a control character", 40)
        return name

    def rest(self) -> memoryview:
        """Everything that is left, as a slice of the frame."""
        start, self._at = self._at, len(self._body)
        return self._body[start:]

    def finish(self) -> None:
        """Raises FormatError 25 if bytes are left (R10)."""
        if self._at != len(self._body):
            raise self.error(f"{len(self._body) - self._at} bytes follow its fields", _CUT)


def read_tensor(fields: Fields) -> TensorRecord:
    """The record of a TENSOR body.

    Raises FormatError for R10..R13, R15 and R16.
    """
    kind, unit_bytes, class_shift, class_base = fields.take(4)
    if kind > max(Kind):
        raise fields.error(f"kind {kind}, expected 0..4", 25)
    if class_shift > MAX_CLASS_SHIFT:
        raise fields.error(f"class_shift {class_shift}, expected 0..{MAX_CLASS_SHIFT}", 25)
    name = fields.name()
    fields.where += f" {name!r}"
    dtype = fields.take(fields.varint("dtype length")).decode("latin-1")
    if dtype not in DTYPE_BITS:
        raise fields.error(f"dtype {dtype!r} is unknown", 42)
    ndim = fields.varint("ndim")
    if ndim > MAX_DIMS:
        raise fields.error(f"{ndim} dims, limit {MAX_DIMS}", 30)
    shape = tuple(fields.varint("dim") for _ in range(ndim))
    num_bytes = fields.varint("num_bytes")
    _check_size(fields, dtype, shape, num_bytes)
    if unit_bytes not in (1, 2, 4) or num_bytes % unit_bytes:
        raise fields.error(f"units of {unit_bytes} bytes in a tensor of {num_bytes}", 42)
    tiles = (fields.varint("cols"), fields.varint("tile_rows"), fields.varint("tile_cols"))
    geometry = Geometry(num_bytes // unit_bytes, unit_bytes, *tiles)
    _check_geometry(fields, geometry)
    target = fields.name() if kind == Kind.ALIAS else ""
    fields.finish()
    return TensorRecord(Kind(kind), name, dtype, shape, geometry, class_shift, class_base, target)


def _check_size(fields: Fields, dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
    num_bits = 1
    for factor in (*shape, DTYPE_BITS[dtype]):
        num_bits *= factor
        if num_bits >= 2**64:
            raise fields.error(f"the size of {dtype} {shape} overflows 64 bits", 31)
    if num_bytes > MAX_TENSOR_BYTES:
        raise fields.error(f"num_bytes {num_bytes}, limit 2^62", 30)
    if num_bytes != -(-num_bits // 8):
        raise fields.error(f"num_bytes {num_bytes} of {dtype} {shape}: {-(-num_bits // 8)}", 42)


def _check_geometry(fields: Fields, geometry: Geometry) -> None:
    cols, tile_rows, tile_cols = geometry.cols, geometry.tile_rows, geometry.tile_cols
    if geometry.num_units == 0:
        fits = cols == tile_rows == tile_cols == 0
    else:
        fits = cols > 0 and geometry.num_units % cols == 0
        fits = fits and 1 <= tile_rows <= geometry.num_rows and 1 <= tile_cols <= cols
    if not fits:
        raise fields.error(
            f"{geometry.num_units} units in {cols} columns, tiles of {tile_rows} x {tile_cols}", 43
        )
    if tile_rows * tile_cols > MAX_BLOCK_UNITS:
        raise fields.error(f"blocks of {tile_rows} x {tile_cols} units, limit 2^20", 30)
    if geometry.num_blocks > geometry.max_blocks:
        raise fields.error(
            f"{geometry.num_blocks} blocks of {geometry.num_units} units, limit "
            f"{geometry.max_blocks}",
            30,
        )


@dataclass(frozen=True)
class BlockTable:
    """The table at the start of a BLOCKS body; one entry per block in each list."""

    modes: list[Mode]
    payload_bytes: list[int]
    checks: list[int]
    payloads: memoryview


def read_block_table(body: Buffer, num_blocks: int, unit_bytes: int, *, where: str) -> BlockTable:
    """The block table of a BLOCKS body and the payloads behind it.

    Raises FormatError for R10, R21 and R22.
    """
    fields = Fields(memoryview(body), where)
    if num_blocks > fields.size_bytes:
        raise fields.error(f"{num_blocks} blocks in {fields.size_bytes} bytes", _CUT)
    table = BlockTable([], [], [], memoryview(b""))
    for _ in range(num_blocks):
        mode = fields.u8()
        if mode > max(Mode) or (mode == Mode.DENSE and unit_bytes == 1):
            raise fields.error(f"mode {mode} with units of {unit_bytes} bytes", 51)
        table.modes.append(Mode(mode))
        table.payload_bytes.append(fields.varint("payload_bytes") if mode else 0)
        table.checks.append(int.from_bytes(fields.take(4), "little") if mode else 0)
    payloads = fields.rest()
    if sum(table.payload_bytes) != len(payloads):
        raise fields.error(
            f"payloads of {sum(table.payload_bytes)} bytes in all, the body has {len(payloads)}", 52
        )
    return BlockTable(table.modes, table.payload_bytes, table.checks, payloads)
