from __future__ import annotations

import numpy as np
import pytest
import torch

from speculator_service.saguaro.draws import inverse_cdf, seeded_uniforms


def test_seeded_uniforms_depend_on_seed_position_and_stream_only() -> None:
    seeds, positions = np.array([5, -3, 2**62]), np.array([0, 7, 10**6])
    batch = seeded_uniforms(seeds, positions, 3)
    alone = [seeded_uniforms(seeds[i : i + 1], positions[i : i + 1], 3)[0] for i in range(3)]
    assert batch.tolist() == alone
    assert ((batch >= 0) & (batch < 1)).all()
    changed = [
        seeded_uniforms(seeds + 1, positions, 3),
        seeded_uniforms(seeds, positions + 1, 3),
        seeded_uniforms(seeds, positions, 4),
    ]
    assert all((other != batch).all() for other in changed)


def test_seeded_uniforms_are_uniform_and_independent() -> None:
    """Small consecutive seeds, positions and streams, as they are in practice."""
    draws = np.stack([seeded_uniforms(np.arange(300)[:, None], np.arange(1000), s) for s in range(3)])
    counts = np.bincount((draws * 50).astype(int).ravel())
    assert ((counts - draws.size / 50) ** 2 / (draws.size / 50)).sum() < 49 + 5 * np.sqrt(2 * 49)
    for a, b in [
        (draws[0], draws[1]),
        (draws[1], draws[2]),
        (draws[:, 1:], draws[:, :-1]),
        (draws[..., 1:], draws[..., :-1]),
    ]:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)


def test_inverse_cdf_hits_the_intervals() -> None:
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125])
    uniforms = torch.tensor([0, 0.499, 0.5, 0.749, 0.75, 0.874, 0.875, 0.999], dtype=torch.float64)
    assert inverse_cdf(weights.expand(8, 4), uniforms).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert inverse_cdf(8 * weights.expand(8, 4), uniforms).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_cdf_never_draws_weight_0(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(2000, 9, generator=generator, dtype=dtype)
    weights[torch.rand(2000, 9, generator=generator) < 0.6] = 0
    weights[:, 4] = 1e-30
    just_below_1 = torch.full((2000,), 1 - 2.0**-53, dtype=torch.float64)
    for uniforms in (torch.zeros(2000), just_below_1, torch.rand(2000, generator=generator)):
        assert (weights.gather(1, inverse_cdf(weights, uniforms)[:, None]) > 0).all()
