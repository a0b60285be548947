"""The compiled passes against PyTorch, for the shapes of Llama-like models with and without shared key heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from speculator_service.draft import kernels

BATCH, ROWS, SIZE, CONTEXT = 3, 5, 16, 40
N = BATCH * ROWS


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3], ids=["beside eps", "common", "large"])
def test_add_and_normalise(size: float) -> None:
    x, delta, weight, out = floats(N, 96) * size, floats(N, 96, seed=1) * size, floats(96, seed=2), torch.empty(N, 96)
    total = x + delta
    kernels.add_and_normalise(x.numpy(), delta.numpy(), weight.numpy(), 1e-5, out.numpy())
    assert torch.equal(x, total)
    torch.testing.assert_close(out, F.rms_norm(total, (96,), weight, 1e-5))


def test_normalise_heads_leaves_the_values_alone() -> None:
    y, weight = floats(N, 6 * SIZE), floats(4, SIZE, seed=1)
    wanted = y.clone().view(N, 6, SIZE)
    wanted[:, :4] = F.rms_norm(wanted[:, :4], (SIZE,), None, 1e-6) * weight
    kernels.normalise_heads(y.numpy(), weight.numpy(), 1e-6)
    torch.testing.assert_close(y, wanted.view(N, -1))


@pytest.mark.parametrize(("key_heads", "repeats"), [(2, 2), (1, 4), (3, 1)])
def test_rotate_and_store(key_heads: int, repeats: int) -> None:
    heads = key_heads * repeats
    y, angles = floats(N, (heads + 2 * key_heads) * SIZE), floats(CONTEXT, SIZE // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    positions, cells = np.arange(N) * 7 % CONTEXT, np.arange(N)[::-1] + 2
    keys, values = floats(N + 2, key_heads, SIZE, seed=2), floats(N + 2, key_heads, SIZE, seed=3)
    untouched = keys[:2].clone()
    query = torch.empty(BATCH, key_heads, ROWS, repeats, SIZE)
    kernels.rotate_and_store(
        y.numpy(),
        cos.numpy(),
        sin.numpy(),
        positions,
        cells.copy(),
        keys.numpy(),
        values.numpy(),
        query.numpy(),
    )
    parts = y.view(N, -1, SIZE)
    both = torch.cat([cos, cos], -1)[positions][:, None], torch.cat([sin, sin], -1)[positions][:, None]
    half = parts[:, : heads + key_heads]
    turned = torch.cat([-half[..., SIZE // 2 :], half[..., : SIZE // 2]], -1)
    rotated = half * both[0] + turned * both[1]
    wanted = rotated[:, :heads].view(BATCH, ROWS, key_heads, repeats, SIZE).transpose(1, 2)
    torch.testing.assert_close(query, wanted)
    torch.testing.assert_close(keys[cells.copy()], rotated[:, heads:])
    assert torch.equal(values[cells.copy()], parts[:, heads + key_heads :])
    assert torch.equal(keys[:2], untouched)


def test_gather_and_by_row() -> None:
    keys, values = floats(30, 2, SIZE), floats(30, 2, SIZE, seed=1)
    cells = np.array([[3, 29, 0, 3], [1, 2, 4, 8]])
    out_keys, out_values = torch.empty(2, 2, 4, SIZE), torch.empty(2, 2, 4, SIZE)
    kernels.gather(keys.numpy(), values.numpy(), cells, out_keys.numpy(), out_values.numpy())
    assert torch.equal(out_keys, keys[cells].transpose(1, 2))
    assert torch.equal(out_values, values[cells].transpose(1, 2))
    mixed, out = floats(BATCH, 2, ROWS, 3, SIZE), torch.empty(N, 6 * SIZE)
    kernels.by_row(mixed.numpy(), out.numpy())
    assert torch.equal(out, mixed.permute(0, 2, 1, 3, 4).reshape(N, -1))


def test_gate_over_the_whole_range() -> None:
    gates = torch.cat([torch.linspace(-120, 120, 4001), floats(95) * 1e-4]).view(1, -1)
    ups, out = floats(*gates.shape), torch.empty_like(gates)
    kernels.gate(torch.cat([gates, ups], 1).numpy(), out.numpy())
    torch.testing.assert_close(out, F.silu(gates) * ups, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("window", [-1, 6])
@pytest.mark.parametrize("size", [0.1, 1.0, 40.0], ids=["flat", "common", "steep"])
@pytest.mark.parametrize("length", [1, 20])
def test_masked_softmax(window: int, size: float, length: int) -> None:
    """What is not seen has no weight at all, however large its score."""
    generator = np.random.default_rng(1)
    scores = floats(BATCH, 2, ROWS, 3, length) * size
    allowed = generator.random((BATCH, ROWS, length)) < 0.6
    allowed[..., 0] = True
    key_positions = generator.integers(0, CONTEXT, (BATCH, length))
    query_positions = generator.integers(0, CONTEXT, (BATCH, ROWS))
    key_positions[:, 0] = query_positions.max()
    sees = allowed if window < 0 else allowed & (key_positions[:, None] >= query_positions[..., None] - window)
    hidden = ~torch.from_numpy(sees)[:, None, :, None].expand(scores.shape)
    scores[hidden] = torch.where(scores[hidden] > 0, 1e30, -1e30)
    wanted = (scores * 0.3).masked_fill(hidden, -torch.inf).softmax(-1)
    kernels.masked_softmax(scores.numpy(), allowed, key_positions, query_positions, window, 0.3)
    torch.testing.assert_close(scores, wanted, rtol=2e-5, atol=1e-30)
    assert not scores[hidden].any()


def test_other_types_are_an_error_and_not_a_compilation() -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        kernels.gate(np.zeros((2, 4)), np.zeros((2, 2)))
