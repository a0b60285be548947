"""Draft tokens on the host, as a model step brings them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Drawn(NamedTuple):
    """Draft tokens for n positions. All arrays are C-contiguous."""

    tokens: NDArray[np.int64]
    """[n]"""
    candidates: NDArray[np.int64]
    """[n, M] likeliest tokens, best first; -1 where there are no more."""
    q: NDArray[np.int64] | None
    """[n, m] `ssd_proto.records.pack_probs`, 0 for positions that were not sampled; None if none was."""

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """For compiled functions, which know no None: q is [n, 0] instead."""
        q = self.q if self.q is not None else np.empty((len(self.tokens), 0), np.int64)
        return self.tokens, self.candidates, q

    def pick(self, index: NDArray[np.integer]) -> Drawn:
        """Those at places ``index``."""
        return Drawn(self.tokens[index], self.candidates[index], None if self.q is None else self.q[index])

    def with_candidates(self, index: NDArray[np.integer], candidates: NDArray[np.int64]) -> Drawn:
        """The same, with more ``candidates`` [i, M'] at places ``index`` [i]."""
        wider = np.full((len(self.tokens), candidates.shape[1]), -1, np.int64)
        wider[:, : self.candidates.shape[1]] = self.candidates
        wider[index] = candidates
        return self._replace(candidates=wider)
