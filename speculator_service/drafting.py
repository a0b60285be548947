"""Draws draft tokens from the draft model's logits, for each sequence in the way its verifier draws.

* greedy: the most likely token;
* sampled: from q, which the verifier is told (Saguaro sampling: `speculator_service.saguaro.sampling`);
* with shared noise: argmax(log q + noise), where the verifier will take argmax(log p + the same noise).

The candidates for bonus tokens are the next best by the same measure.  Every draw hangs on (seed, position) alone,
so that, up to rounding, a speculation is the same whether it was drafted ahead or just in time, in whatever batch.
The verifier's draws are independent of it: they come from another generator.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from speculator_service.drawn import Drawn
from speculator_service.rows import Rows
from speculator_service.saguaro.draws import seeded_uniforms
from speculator_service.saguaro.outcomes import top_candidates
from speculator_service.saguaro.sampling import SparseDistribution, draft_distribution, sample
from ssd_proto.noise import shared_noise
from ssd_proto.records import pack_probs

_DRAFT_STREAM = 0
_NONE = np.empty(0, np.int64)


class Drafter:
    """Draws for the sequences in ``rows``.

    Args:
        num_kept: m, probabilities kept of a sampled token's distribution; 0: nothing is sampled.
        temperature_factor: the draft's temperature over the request's.
        token_map: [V'] token of each column of the logits; None: columns are tokens.
    """

    def __init__(
        self, rows: Rows, num_kept: int, temperature_factor: float, token_map: NDArray[np.int64] | None = None
    ) -> None:
        self._rows, self._num_kept, self._factor, self._token_map = rows, num_kept, temperature_factor, token_map
        top_candidates(torch.zeros(1, 1), 1)  # compiled now, not within a round

    def draw(
        self,
        logits: torch.Tensor,
        lines: NDArray[np.int64] | None,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        places: NDArray[np.int64],
        fan_out: NDArray[np.int64],
        num_candidates: int,
    ) -> Drawn:
        """Draw a token at ``positions`` [n] of the texts of ``rows`` [n]. Synchronises with the device.

        Args:
            logits: [n', V], in the ``lines`` [n] after the tokens before the positions; None: those are all lines.
            places: [n] of the tokens in their speculations; those before the first or after the last count as these.
            fan_out: [K] F_k by place.
            num_candidates: M, at least 1.
        """
        drawn = self._drawn_among(rows)
        if len(drawn) == len(rows):
            return self._draw(_selected(logits, lines), rows, positions, places, fan_out, num_candidates)
        tokens, candidates, q = self.take_likeliest(logits, lines, num_candidates)
        if len(drawn):
            some = _selected(logits, drawn if lines is None else lines[drawn])
            part = self._draw(some, rows[drawn], positions[drawn], places[drawn], fan_out, num_candidates)
            tokens[drawn], candidates[drawn] = part.tokens, part.candidates
            if part.q is not None:
                q = np.zeros((len(rows), self._num_kept), np.int64)
                q[drawn] = part.q
        return Drawn(tokens, candidates, q)

    def take_likeliest(self, logits: torch.Tensor, lines: NDArray[np.int64] | None, num_candidates: int) -> Drawn:
        """`draw` for rows without temperature."""
        candidates = self._tokens(top_candidates(logits, num_candidates, lines))
        return Drawn(candidates[:, 0].copy(), candidates, None)

    def _tokens(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of columns of the logits, of any shape."""
        return columns if self._token_map is None else self._token_map[columns]

    def _drawn_among(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of ``rows`` that have a temperature."""
        if not self._rows.any_drawn:
            return _NONE
        return (self._rows.temperature[rows] > 0).nonzero()[0]

    def _draw(
        self,
        logits: torch.Tensor,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        places: NDArray[np.int64],
        fan_out: NDArray[np.int64],
        num_candidates: int,
    ) -> Drawn:
        """For rows with a temperature."""
        state, device = self._rows, logits.device
        is_shared = state.shared_noise[rows]
        downweight = np.where(is_shared, 1.0, state.downweight[rows])
        # As many as are sent, and as many as are to be ranked: one search for both.
        num_sampled = np.where(is_shared, logits.shape[-1], self._num_kept)
        found = draft_distribution(
            logits,
            _to(device, state.temperature[rows] * self._factor),
            num_kept=max(self._num_kept, num_candidates),
            num_sampled=_to(device, num_sampled),
            fan_out=_to(device, fan_out[places.clip(0, len(fan_out) - 1)]),
            downweight=_to(device, downweight.astype(np.float32)) if (downweight < 1).any() else 1.0,
            top_k=_unless(0, state.top_k[rows], device),
            top_p=_unless(1, state.top_p[rows], device),
            min_p=_unless(0, state.min_p[rows], device),
        )
        ids = self._tokens(found.ids.to("cpu", torch.int64).numpy())
        candidates = _padded(ids[:, :num_candidates], num_candidates)
        probs = found.probs.to("cpu")
        uniforms = torch.from_numpy(seeded_uniforms(state.seed[rows], positions, _DRAFT_STREAM))
        tokens = sample(SparseDistribution(torch.from_numpy(ids), probs), uniforms).numpy()
        q = _padded_words(pack_probs(ids, probs.numpy())[:, : self._num_kept], self._num_kept)
        if is_shared.any():
            shared = np.flatnonzero(is_shared)
            ranked = _ranked_with_noise(ids[shared], probs.numpy()[shared], state.seed[rows[shared]], positions[shared])
            candidates[shared] = _padded(ranked[:, :num_candidates], num_candidates)
            tokens[shared] = ranked[:, 0]
            q[shared] = 0
        return Drawn(tokens, candidates, q)


def _ranked_with_noise(
    ids: NDArray[np.int64], probs: NDArray[np.float32], seeds: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """``ids`` [n, c] by falling log q + noise; tokens without probability come last."""
    with np.errstate(divide="ignore"):
        scores = np.log(probs.astype(np.float64)) + shared_noise(seeds, positions, ids)
    ranked: NDArray[np.int64] = np.take_along_axis(ids, np.argsort(-scores, axis=1, kind="stable"), 1)
    return ranked


def _selected(logits: torch.Tensor, lines: NDArray[np.int64] | None) -> torch.Tensor:
    if lines is None or len(lines) == len(logits):
        return logits
    return logits.index_select(0, _to(logits.device, lines))


def _padded(candidates: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    missing = count - candidates.shape[1]
    return np.pad(candidates, ((0, 0), (0, missing)), constant_values=-1) if missing > 0 else candidates.copy()


def _padded_words(words: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    missing = count - words.shape[1]
    return np.pad(words, ((0, 0), (0, missing))) if missing > 0 else words.copy()


def _unless(neutral: float, values: NDArray[np.generic], device: torch.device) -> torch.Tensor | None:
    """None where no row asks for anything: that saves some operations."""
    return None if (values == neutral).all() else _to(device, values)


def _to(device: torch.device, values: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(values).to(device)
