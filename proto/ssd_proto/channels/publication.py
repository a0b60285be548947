"""What the speculator publishes, as message frames of the `zmq` channel.

A frame is one call of `SpeculationTable.add_keys` or `SpeculationTable.write`, little endian:

| field | type | keys | entries |
|---|---|---|---|
| operation | i32 | 1 | 2 |
| n | i32 | rows | entries |
| first | i32 | first column | 0 |
| width | i32 | columns, w | lookahead, K |
| keys | i64 | [n, w] | [n] |
| words | i32 | [2, n] slots, rounds | [5, n] slots, generations, rounds, columns, depths |
| tokens | i32 | | [n, K] |

`apply` trusts nothing: sizes and every index are checked before the table is touched.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ssd_proto.errors import ProtocolError
from ssd_proto.table import SpeculationTable, TableShape

_KEYS, _ENTRIES = 1, 2
_HEADER: Final = struct.Struct("<iiii")


def keys_frame(
    slots: NDArray[np.integer], rounds: NDArray[np.integer], first_column: int, keys: NDArray[np.int64]
) -> bytes:
    """Frame of ``table.add_keys(slots, rounds, first_column, keys)``; arguments are copied."""
    header = _HEADER.pack(_KEYS, len(slots), first_column, keys.shape[1])
    return b"".join((header, keys.astype("<i8").tobytes(), np.stack([slots, rounds]).astype("<i4").tobytes()))


def entries_frame(
    slots: NDArray[np.integer],
    generations: NDArray[np.integer],
    rounds: NDArray[np.integer],
    columns: NDArray[np.integer],
    keys: NDArray[np.int64],
    depths: NDArray[np.integer],
    tokens: NDArray[np.integer],
) -> bytes:
    """Frame of ``table.write(...)`` with the same arguments, which are copied."""
    header = _HEADER.pack(_ENTRIES, len(slots), 0, tokens.shape[1])
    words = np.stack([slots, generations, rounds, columns, depths]).astype("<i4")
    return b"".join((header, keys.astype("<i8").tobytes(), words.tobytes(), tokens.astype("<i4").tobytes()))


def apply(frame: bytes, table: SpeculationTable) -> None:
    """Do to ``table`` what ``frame`` says; `ProtocolError` (and nothing done) if it is not a valid frame."""
    if len(frame) < _HEADER.size:
        raise ProtocolError(f"a frame of {len(frame)} bytes means nothing")
    operation, rows, first, width = _HEADER.unpack_from(frame)
    if operation == _KEYS:
        _apply_keys(frame, rows, first, width, table)
    elif operation == _ENTRIES:
        _apply_entries(frame, rows, width, table)
    else:
        raise ProtocolError(f"operation {operation} is not known")


def _apply_keys(frame: bytes, rows: int, first: int, width: int, table: SpeculationTable) -> None:
    _require(rows >= 0 and first >= 0 and width >= 0 and first + width <= table.shape.num_outcomes)
    _require(len(frame) == _HEADER.size + 8 * rows * width + 4 * 2 * rows)
    keys = np.frombuffer(frame, "<i8", rows * width, _HEADER.size).reshape(rows, width)
    slots, rounds = np.frombuffer(frame, "<i4", 2 * rows, _HEADER.size + keys.nbytes).reshape(2, rows)
    _require_rows(slots, rounds, table.shape)
    table.add_keys(slots, rounds, first, keys)


def _apply_entries(frame: bytes, rows: int, width: int, table: SpeculationTable) -> None:
    shape = table.shape
    _require(rows >= 0 and width == shape.lookahead)
    _require(len(frame) == _HEADER.size + rows * (8 + 4 * (5 + width)))
    keys = np.frombuffer(frame, "<i8", rows, _HEADER.size)
    words = np.frombuffer(frame, "<i4", 5 * rows, _HEADER.size + keys.nbytes).reshape(5, rows)
    tokens = np.frombuffer(frame, "<i4", rows * width, _HEADER.size + keys.nbytes + words.nbytes).reshape(rows, width)
    slots, generations, rounds, columns, depths = words
    _require_rows(slots, rounds, shape)
    # Column `num_outcomes` is the reply.
    _require(_within(columns, shape.num_outcomes) and _within(depths, shape.lookahead))
    table.write(slots, generations, rounds, columns, keys, depths, tokens)


def _require_rows(slots: NDArray[np.int32], rounds: NDArray[np.int32], shape: TableShape) -> None:
    _require(_within(slots, shape.num_slots - 1) and _within(rounds, np.iinfo(np.int32).max))


def _within(values: NDArray[np.int32], last: int) -> bool:
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) <= last)


def _require(valid: bool) -> None:
    if not valid:
        raise ProtocolError("a frame of the speculator has a size or an index out of range")
