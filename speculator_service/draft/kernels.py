"""What lies between the matrix products of a CPU forward, compiled: each function is one pass over its arrays.

A small model on a CPU spends more time in calling operators than in arithmetic.  All arrays are C-contiguous; integers
are int64, floats float32.  Compiled when this module is first imported (seconds), then kept on disk by Numba.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit
from numpy.typing import NDArray

from speculator_service.compiled import compiled_for

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

_compiled = partial(compiled_for, fastmath={"reassoc", "contract", "arcp", "nsz"})
"""Sums in any order, but infinities stay what they are."""

_ONE, _HALF = np.float32(1), np.float32(0.5)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2 to more than 24 bits
_TAYLOR_2, _TAYLOR_3, _TAYLOR_4, _TAYLOR_5, _TAYLOR_6 = (np.float32(1 / n) for n in (2, 6, 24, 120, 720))
_LARGEST_EXPONENT = np.float32(87)
_UNSEEN = np.float32(-3.4e38)  # below any score
_MINUS_INFINITY = np.float32(-np.inf)


@_compiled("void(float32[:,::1], float32[:,::1], float32[::1], float32, float32[:,::1])")
def add_and_normalise(x: Floats, delta: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """x [n, H] += ``delta`` [n, H]; ``out`` [n, H] becomes its RMS norm with ``weight`` [H]."""
    n, size = x.shape
    for i in range(n):
        total = np.float32(0)
        for j in range(size):
            x[i, j] += delta[i, j]
            total += x[i, j] * x[i, j]
        scale = _ONE / np.sqrt(total / np.float32(size) + eps)
        for j in range(size):
            out[i, j] = x[i, j] * scale * weight[j]


@_compiled("void(float32[:,::1], float32[:,::1], float32)")
def normalise_heads(y: Floats, weight: Floats, eps: float) -> None:
    """RMS norm with ``weight`` [h, D] of each of the first h heads of the rows of ``y`` [n, >= h * D], in place."""
    heads, size = weight.shape
    for i in range(len(y)):
        for h in range(heads):
            total = np.float32(0)
            for j in range(size):
                total += y[i, h * size + j] * y[i, h * size + j]
            scale = _ONE / np.sqrt(total / np.float32(size) + eps)
            for j in range(size):
                y[i, h * size + j] *= scale * weight[h, j]


@_compiled(
    "void(float32[:,::1], float32[:,::1], float32[:,::1], int64[::1], int64[::1], "
    "float32[:,:,::1], float32[:,:,::1], float32[:,:,:,:,::1])"
)
def rotate_and_store(
    y: Floats, cos: Floats, sin: Floats, positions: Ints, cells: Ints, keys: Floats, values: Floats, query: Floats
) -> None:
    """Rotary embedding of projected rows; their keys and values go to the KV cells.

    Args:
        y: [n, (k * r + 2 * k) * D] queries, keys and values of n = b * G rows, k key heads, r query heads for each.
        cos, sin: [context, D / 2].
        positions, cells: [n].
        keys, values: [cells, k, D], written to.
        query: [b, k, G, r, D], written: the order of attention.
    """
    _, key_heads, rows, repeats, size = query.shape
    half = size // 2
    for i in range(len(positions)):
        slot, row, position, cell = i // rows, i % rows, positions[i], cells[i]
        for h in range(key_heads):
            for r in range(repeats):
                at = (h * repeats + r) * size
                for j in range(half):
                    first, second = y[i, at + j], y[i, at + half + j]
                    c, s = cos[position, j], sin[position, j]
                    query[slot, h, row, r, j] = first * c - second * s
                    query[slot, h, row, r, half + j] = second * c + first * s
            at = (key_heads * repeats + h) * size
            for j in range(half):
                first, second = y[i, at + j], y[i, at + half + j]
                c, s = cos[position, j], sin[position, j]
                keys[cell, h, j] = first * c - second * s
                keys[cell, h, half + j] = second * c + first * s
            at = (key_heads * repeats + key_heads + h) * size
            for j in range(size):
                values[cell, h, j] = y[i, at + j]


@_compiled("void(float32[:,:,::1], float32[:,:,::1], int64[:,::1], float32[:,:,:,::1], float32[:,:,:,::1])")
def gather(keys: Floats, values: Floats, cells: Ints, out_keys: Floats, out_values: Floats) -> None:
    """``out_keys`` and ``out_values`` [b, k, S, D] become the ``cells`` [b, S] of ``keys`` and ``values``."""
    batch, key_heads, length, size = out_keys.shape
    for i in range(batch):
        for t in range(length):
            cell = cells[i, t]
            for h in range(key_heads):
                for j in range(size):
                    out_keys[i, h, t, j] = keys[cell, h, j]
                    out_values[i, h, t, j] = values[cell, h, j]


@_compiled("void(float32[:,:,:,:,::1], float32[:,::1])")
def by_row(mixed: Floats, out: Floats) -> None:
    """``out`` [b * G, k * r * D] becomes the attention's output ``mixed`` [b, k, G, r, D]."""
    batch, key_heads, rows, repeats, size = mixed.shape
    for i in range(batch):
        for h in range(key_heads):
            for g in range(rows):
                for r in range(repeats):
                    for j in range(size):
                        out[i * rows + g, (h * repeats + r) * size + j] = mixed[i, h, g, r, j]


@njit(inline="always")
def _exponentials(z: Floats, bits: NDArray[np.int32], out: Floats) -> None:
    """``out`` [n] becomes e**z; ``bits`` [n] is room for powers of two.

    2**w * e**f, f within half of ln 2 by a polynomial: unlike a library call it becomes vector code.
    """
    power = bits.view(np.float32)
    for j in range(len(z)):
        clipped = min(max(z[j], -_LARGEST_EXPONENT), _LARGEST_EXPONENT)
        whole = np.floor(clipped * _LOG2_E + _HALF)
        f = clipped - whole * _LN2_HIGH - whole * _LN2_LOW
        tail = _TAYLOR_3 + f * (_TAYLOR_4 + f * (_TAYLOR_5 + f * _TAYLOR_6))
        out[j] = _ONE + f * (_ONE + f * (_TAYLOR_2 + f * tail))
        bits[j] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    for j in range(len(z)):
        out[j] *= power[j]


@_compiled("void(float32[:,::1], float32[:,::1])")
def gate(both: Floats, out: Floats) -> None:
    """``out`` [n, M] becomes silu(gate) * up, where ``both`` [n, 2 M] is gate beside up."""
    n, size = out.shape
    bits, z, power = np.empty(size, np.int32), np.empty(size, np.float32), np.empty(size, np.float32)
    for i in range(n):
        for j in range(size):
            z[j] = -both[i, j]
        _exponentials(z, bits, power)
        for j in range(size):
            out[i, j] = both[i, j] / (_ONE + power[j]) * both[i, size + j]


@njit(inline="always")
def _ordered(bits: np.int32) -> np.int32:
    """An integer that is ordered as the float32 of these ``bits``, and back; integer maxima become vector code."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@_compiled("void(float32[:,:,:,:,::1], boolean[:,:,::1], int64[:,::1], int64[:,::1], int64, float32)")
def masked_softmax(
    scores: Floats, allowed: Bools, key_positions: Ints, query_positions: Ints, window: int, scale: float
) -> None:
    """Attention's weights, in place: ``scores`` [b, k, G, r, S] become softmax(scores * ``scale``) over the keys seen.

    A row sees what is ``allowed`` [b, G, S] (at least one key) and within ``window`` (-1: any distance); positions
    [b, S], [b, G]. All scores are finite.
    """
    batch, key_heads, rows, repeats, length = scores.shape
    bits, seen, z = np.empty(length, np.int32), np.empty(length, np.float32), np.empty(length, np.float32)
    z_bits, highest_bits = z.view(np.int32), np.empty(1, np.int32)
    highest = highest_bits.view(np.float32)
    for i in range(batch):
        for g in range(rows):
            first = query_positions[i, g] - window if window >= 0 else np.int64(0)
            for t in range(length):
                seen[t] = np.float32(allowed[i, g, t] and key_positions[i, t] >= first)
            for h in range(key_heads):
                for r in range(repeats):
                    row = scores[i, h, g, r]
                    for t in range(length):
                        z[t] = row[t] * scale if seen[t] > 0 else _UNSEEN
                    largest, total = _ordered(z_bits[0]), np.float32(0)
                    for t in range(length):
                        largest = max(largest, _ordered(z_bits[t]))
                    highest_bits[0] = _ordered(largest)
                    for t in range(length):
                        z[t] -= highest[0]
                    _exponentials(z, bits, row)
                    for t in range(length):
                        row[t] *= seen[t]
                        total += row[t]
                    factor = _ONE / total
                    for t in range(length):
                        row[t] *= factor


@_compiled(
    "void(int64[:,::1], int64[:,:,::1], int64[::1], int64[::1], int64[:,::1], int64[:,::1], boolean[:,::1], "
    "int64, int64, int64[:,::1], int64[:,::1], boolean[:,:,::1], int64[:,::1])"
)
def lay_out_step(
    trunk: Ints,
    own: Ints,
    slots: Ints,
    branches: Ints,
    prefix: Ints,
    depth: Ints,
    live: Bools,
    length: int,
    width: int,
    keys: Ints,
    key_positions: Ints,
    allowed: Bools,
    written: Ints,
) -> None:
    """Fill the last four: what :func:`speculator_service.draft.trunk_attention.plan_decode` says of a step.

    Keys of a slot are its trunk [0, ``length``), then ``width`` own cells of each branch among the columns.
    """
    batch, rows = prefix.shape
    allowed[:] = False
    for i in range(batch):
        slot = slots[i]
        for t in range(length):
            keys[i, t], key_positions[i, t] = trunk[slot, t], t
        at = length
        for g in range(rows):
            branch, position = branches[g], prefix[i, g] + depth[i, g]
            is_branch, is_live = branch > 0, live[i, g]
            extent = (prefix[i, g] if is_branch else prefix[i, g] + 1) if is_live else 1
            for t in range(extent):
                allowed[i, g, t] = True
            written[i, g] = 0
            if is_live:
                written[i, g] = own[slot, branch, depth[i, g]] if is_branch else trunk[slot, position]
            if is_branch:
                for w in range(width):
                    keys[i, at + w], key_positions[i, at + w] = own[slot, branch, w], prefix[i, g] + w
                    allowed[i, g, at + w] = is_live and w <= depth[i, g]
                at += width


@_compiled("void(boolean[:,:,::1], int64[:,::1], int64[:,::1], int64, float32[:,:,:,::1])")
def fill_bias(allowed: Bools, key_positions: Ints, query_positions: Ints, window: int, bias: Floats) -> None:
    """``bias`` [b, 1, G * r, S]: 0 where ``allowed`` [b, G, S] and within ``window`` (-1: any distance), else -inf."""
    batch, rows, length = allowed.shape
    repeats = bias.shape[2] // rows
    for i in range(batch):
        for g in range(rows):
            first = query_positions[i, g] - window if window >= 0 else np.int64(0)
            for t in range(length):
                sees = allowed[i, g, t] and key_positions[i, t] >= first
                value = np.float32(0) if sees else _MINUS_INFINITY
                for r in range(repeats):
                    bias[i, 0, g * repeats + r, t] = value
