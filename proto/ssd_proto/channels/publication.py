"""What the speculator publishes, as message frames of the `zmq` channel.

A frame is one call of `SpeculationTable.begin` or `SpeculationTable.write`, little endian:

| field | type | keys | entries |
|---|---|---|---|
| operation | i32 | 1 | 2 |
| n | i32 | rows | entries |
| width | i32 | columns, w | lookahead, K |
| padding | i32 | | |
| keys | i64 | [n, w] | [n] |
| q | i64 | | [n, K, m] if sampled |
| words | i32 | [2, n] slots, rounds | [6, n] slots, generations, rounds, columns, depths, is final; [7, n]: rows of q |
| tokens | i32 | | [n, K] |

Operation 3 is 2 with q.

`apply` trusts nothing: sizes and every index are checked before the table is touched.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ssd_proto.errors import ProtocolError
from ssd_proto.records import DraftProbs, Entries
from ssd_proto.table import SpeculationTable, TableShape

_KEYS, _ENTRIES, _SAMPLED_ENTRIES = 1, 2, 3
_HEADER: Final = struct.Struct("<iii4x")


def keys_frame(slots: NDArray[np.integer], rounds: NDArray[np.integer], keys: NDArray[np.int64]) -> bytes:
    """Frame of ``table.begin(slots, rounds, keys)``; arguments are copied."""
    header = _HEADER.pack(_KEYS, *keys.shape)
    return b"".join((header, keys.astype("<i8").tobytes(), np.stack([slots, rounds]).astype("<i4").tobytes()))


def entries_frame(entries: Entries) -> bytes:
    """Frame of ``table.write(entries)``, which are copied."""
    slots, generations, rounds, columns, keys, depths, is_final, tokens, q = entries
    header = _HEADER.pack(_ENTRIES if q is None else _SAMPLED_ENTRIES, *tokens.shape)
    addresses = [slots, generations, rounds, columns, depths, is_final] + ([] if q is None else [q.rows])
    probs = b"" if q is None else q.words.astype("<i8").tobytes()
    words = np.stack(addresses).astype("<i4")
    return b"".join((header, keys.astype("<i8").tobytes(), probs, words.tobytes(), tokens.astype("<i4").tobytes()))


def apply(frame: bytes, table: SpeculationTable) -> None:
    """Do to ``table`` what ``frame`` says; `ProtocolError` (and nothing done) if it is not a valid frame."""
    if len(frame) < _HEADER.size:
        raise ProtocolError(f"a frame of {len(frame)} bytes means nothing")
    operation, rows, width = _HEADER.unpack_from(frame)
    if operation == _KEYS:
        _apply_keys(frame, rows, width, table)
    elif operation in (_ENTRIES, _SAMPLED_ENTRIES):
        _apply_entries(frame, rows, width, operation == _SAMPLED_ENTRIES, table)
    else:
        raise ProtocolError(f"operation {operation} is not known")


def _apply_keys(frame: bytes, rows: int, width: int, table: SpeculationTable) -> None:
    _require(rows >= 0 and width == table.shape.num_outcomes)
    _require(len(frame) == _HEADER.size + 8 * rows * width + 4 * 2 * rows)
    keys = np.frombuffer(frame, "<i8", rows * width, _HEADER.size).reshape(rows, width)
    slots, rounds = np.frombuffer(frame, "<i4", 2 * rows, _HEADER.size + keys.nbytes).reshape(2, rows)
    _require_rows(slots, rounds, table.shape)
    table.begin(slots, rounds, keys)


def _apply_entries(frame: bytes, rows: int, width: int, is_sampled: bool, table: SpeculationTable) -> None:
    shape = table.shape
    _require(rows >= 0 and width == shape.lookahead)
    num_probs, num_words = (shape.lookahead * shape.num_kept, 7) if is_sampled else (0, 6)
    _require(len(frame) == _HEADER.size + rows * (8 * (1 + num_probs) + 4 * (num_words + width)))
    keys = np.frombuffer(frame, "<i8", rows, _HEADER.size)
    probs = np.frombuffer(frame, "<i8", rows * num_probs, _HEADER.size + keys.nbytes)
    offset = _HEADER.size + keys.nbytes + probs.nbytes
    words = np.frombuffer(frame, "<i4", num_words * rows, offset).reshape(num_words, rows)
    tokens = np.frombuffer(frame, "<i4", rows * width, offset + words.nbytes).reshape(rows, width)
    slots, generations, rounds, columns, depths, is_final = words[:6]
    _require_rows(slots, rounds, shape)
    # Column `num_outcomes` is the reply.
    _require(_within(columns, shape.num_outcomes) and _within(depths, shape.lookahead))
    q = None
    if is_sampled:
        _require(_within(words[6], shape.num_rows - 1))
        q = DraftProbs(words[6], probs.reshape(rows, shape.lookahead, shape.num_kept))
    table.write(Entries(slots, generations, rounds, columns, keys, depths, is_final != 0, tokens, q))


def _require_rows(slots: NDArray[np.int32], rounds: NDArray[np.int32], shape: TableShape) -> None:
    _require(_within(slots, shape.num_slots - 1) and _within(rounds, np.iinfo(np.int32).max))


def _within(values: NDArray[np.int32], last: int) -> bool:
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) <= last)


def _require(valid: bool) -> None:
    if not valid:
        raise ProtocolError("a frame of the speculator has a size or an index out of range")
