"""The verifier's record of the sequences that it has opened at the speculator.

All state lives in arrays indexed by slot (SGLang's request-pool index), so that a round touches it with
a few array operations whatever the batch size.  The speculator mirrors what is posted from here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ssd_proto.channel import VerifierChannel
from ssd_proto.records import ProposalKind, Sampling, outcome_dtype

_ROUND, _BONUS, _PROPOSAL = 2, 4, 5
"""Places among the words of an `outcome_dtype` record; what was proposed ends it: kind, number, tokens."""
_NOTHING_PROPOSED = int(ProposalKind.EMPTY)
"""0, for all of these words."""


class Sessions:
    """Sequences by slot, 0..max_slots-1.

    A slot is *tracked* from its first prefill until SGLang frees it, whether or not a speculator is
    there, and *open* while the speculator knows it.  ``length`` counts committed tokens (prompt, output
    and the bonus token whose KV is not written yet); it tells how much of a running round SGLang has
    not put into ``output_ids`` yet.
    """

    def __init__(self, max_slots: int, lookahead: int) -> None:
        self.lookahead = lookahead
        self.is_open = np.zeros(max_slots, bool)
        self.length = np.zeros(max_slots, np.int64)
        self._records = np.zeros(max_slots, outcome_dtype(lookahead))
        self._records["slot"] = np.arange(max_slots)
        # The same as words: to take and to set lines of them is several times as fast as of records.
        self._words = self._records.view("<i4").reshape(max_slots, -1)
        self._rids: list[str | None] = [None] * max_slots
        self._generation = 0

    def outcomes(self, slots: NDArray[np.int64]) -> NDArray[np.void]:
        """Latest outcome of each slot, as it was (or would have been) posted. A copy."""
        records: NDArray[np.void] = self._words.take(slots, 0).view(self._records.dtype)[:, 0]
        return records

    def bonus(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """[n] t* of the latest outcomes."""
        return self._words[slots, _BONUS]

    def track(self, slot: int, rid: str) -> bool:
        """Begin to track ``rid`` in ``slot``; False if it is tracked there already (a later chunk of its prompt)."""
        is_new = self._rids[slot] != rid
        if is_new:
            self._rids[slot] = rid
            self.is_open[slot] = False
        return is_new

    def open(self, channel: VerifierChannel, slot: int, tokens: NDArray[np.int32], sampling: Sampling) -> None:
        """Open ``slot`` with the committed ``tokens``; the next outcome of the slot is its round 0.

        Errors are those of the channel; the slot is closed then.
        """
        self.is_open[slot] = False
        self._generation = (self._generation + 1) & 0x7FFF_FFFF
        record = self._records[slot]
        record["generation"] = self._generation
        record["round"] = -1
        channel.open_sequence(slot, self._generation, tokens, sampling)
        self.is_open[slot] = True

    def close(self, channel: VerifierChannel | None, slots: Sequence[int]) -> None:
        """Stop tracking ``slots``; without a channel there is nobody to tell. Errors: the channel's."""
        for slot in slots:
            self._rids[slot] = None
            if self.is_open[slot]:
                self.is_open[slot] = False
                if channel is not None:
                    channel.close_sequence(slot, int(self._records["generation"][slot]))

    def lose_all(self) -> None:
        """The speculator is gone or out of step: no sequence is open any more."""
        self.is_open[:] = False

    def first_tokens(self, slots: NDArray[np.int64], lengths: NDArray[np.int64], bonus: NDArray[np.int64]) -> None:
        """Record the outcome of prefills: nothing verified, ``bonus`` [n] sampled after ``lengths`` [n] tokens."""
        self.length[slots] = lengths + 1
        self._advance(slots, 0, bonus)
        self._words[slots, _PROPOSAL:] = _NOTHING_PROPOSED

    def proposed(
        self,
        slots: NDArray[np.int64],
        tokens: NDArray[np.int32],
        depth: NDArray[np.int32],
        kind: NDArray[np.int32],
    ) -> None:
        """Record what the running round verifies: ``tokens`` [n, K], of which ``depth`` [n] are the speculator's."""
        words = np.empty((len(slots), 2 + self.lookahead), np.int32)
        words[:, 0], words[:, 1], words[:, 2:] = kind, depth, tokens
        self._words[slots, _PROPOSAL:] = words

    def verified(self, slots: NDArray[np.int64], num_accepted: NDArray[np.int64], bonus: NDArray[np.int64]) -> None:
        """Record the outcome of the round that `proposed` began; arguments [n]."""
        self.length[slots] += num_accepted + 1
        self._advance(slots, num_accepted, bonus)

    def post(self, channel: VerifierChannel, slots: NDArray[np.int64]) -> None:
        """Post the latest outcomes of those ``slots`` that are open. Errors: the channel's."""
        is_open = self.is_open[slots]
        if np.count_nonzero(is_open) < len(slots):
            slots = slots[is_open]
        if len(slots):
            channel.post(self.outcomes(slots))

    def uncommitted_tail(self, slot: int, num_known: int) -> list[int]:
        """The committed tokens of ``slot`` after the first ``num_known``: the end of its latest round's run.

        At most one round's run can be missing, since SGLang processes results at most one round late.
        """
        record = self._records[slot]
        run = [*record["tokens"][: record["num_accepted"]].tolist(), int(record["bonus"])]
        missing = int(self.length[slot]) - num_known
        return run[len(run) - missing :] if missing > 0 else []

    def _advance(
        self, slots: NDArray[np.int64], num_accepted: NDArray[np.int64] | int, bonus: NDArray[np.int64]
    ) -> None:
        words = self._words[slots, _ROUND : _BONUS + 1]
        words[:, 0] += 1
        words[:, 1] = num_accepted
        words[:, 2] = bonus
        self._words[slots, _ROUND : _BONUS + 1] = words
