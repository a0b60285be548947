"""Suffix backup: continue the text as it went on after the longest suffix that has occurred before.

No model; strong where a request repeats itself or its prompt (code edits, retrieval, agents). Proposals are not
sampled from a known q: they are verified by the target-only rule.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_MAX_LINKS = 32
"""Suffixes refreshed per token. Bounds the cost for texts like a a a a, whose suffixes all repeat."""


class SuffixBackup:
    """Suffix automaton (Blumer et al., 1985) over the tokens of one request, prompt first.

    A state stands for the substrings that end at the same places; ``link`` leads to its longest suffix that ends
    at more places. So the link of the state of the whole text is the longest suffix that occurred before.
    Beside the classic fields each state remembers its latest end, for the proposal is the continuation of the
    latest earlier occurrence (or of an older one, if more than 32 longer repeated suffixes kept it from being
    refreshed).

    Append is amortised O(1) per token, memory at most 2 states and 3 transitions per token. Not thread-safe.

    Args:
        tokens: the prompt.
        min_match: shortest repeated suffix that is worth a proposal, at least 1.

    >>> backup = SuffixBackup([5, 6, 7, 8, 5, 6])
    >>> backup.propose(3).tolist(), backup.match_length
    ([7, 8, 5], 2)
    >>> backup.append([7, 9])
    >>> backup.propose(3).tolist()
    []
    """

    def __init__(self, tokens: Iterable[int] = (), *, min_match: int = 1) -> None:
        if min_match < 1:
            raise ValueError(f"min_match must be at least 1, got {min_match}.")
        self._min_match = min_match
        self._tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [-1]
        """Latest index at which the state's substrings ended, the text's own suffixes apart until the next token."""
        self._last = 0
        self.append(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def match_length(self) -> int:
        """Length of the longest suffix that occurred before; occurrences may overlap."""
        return self._length[self._link[self._last]] if self._last else 0

    def append(self, tokens: Iterable[int]) -> None:
        """Tokens that are committed: none of them can be taken back."""
        for token in tokens:
            self._refresh_ends()
            self._extend(int(token))

    def propose(self, count: int) -> NDArray[np.int32]:
        """The continuation after the latest earlier occurrence of the longest repeated suffix.

        Where it runs into the end of the text it goes on with itself, which continues a period.

        Args:
            count: K >= 0.

        Returns:
            [count], or [0] if the suffix is shorter than ``min_match``.
        """
        if self.match_length < self._min_match:
            return np.empty(0, np.int32)
        start = self._end[self._link[self._last]] + 1
        known = np.array(self._tokens[start : start + count], np.int32)
        return np.resize(known, count)

    def _refresh_ends(self) -> None:
        """Record the end of the text in the states of its suffixes, the longest ones first."""
        end, state = len(self._tokens) - 1, self._last
        for _ in range(_MAX_LINKS):
            if state <= 0:
                return
            self._end[state] = end
            state = self._link[state]

    def _extend(self, token: int) -> None:
        following, link, length = self._next, self._link, self._length
        current = self._add_state(length[self._last] + 1, {}, len(self._tokens))
        self._tokens.append(token)
        state, self._last = self._last, current
        while state >= 0 and token not in following[state]:
            following[state][token] = current
            state = link[state]
        if state < 0:
            link[current] = 0
            return
        target = following[state][token]
        if length[state] + 1 == length[target]:
            link[current] = target
            return
        clone = self._add_state(length[state] + 1, following[target].copy(), self._end[target])
        link[clone], link[target], link[current] = link[target], clone, clone
        while state >= 0 and following[state].get(token) == target:
            following[state][token] = clone
            state = link[state]

    def _add_state(self, length: int, following: dict[int, int], end: int) -> int:
        self._next.append(following)
        self._link.append(0)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1
