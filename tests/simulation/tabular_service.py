"""The speculator service with a draft model that needs no weights, as a process: starts in a second or two."""

from __future__ import annotations

import contextlib
import signal
import sys

from speculator_service.__main__ import main
from speculator_service.draft.config import DraftConfig
from speculator_service.draft.tabular import TabularDraft

VOCAB = 2048  # that of the tiny models, whose configuration is read
CONTEXT = 512


def load(config: DraftConfig) -> TabularDraft:
    if "--fail" in sys.argv:
        raise RuntimeError("the engine cannot be made")
    if "--terminated" in sys.argv:
        with contextlib.suppress(SystemExit):  # as in a callback of a library
            signal.raise_signal(signal.SIGTERM)
    return tabular_draft(config.max_slots, config.num_branches, config.lookahead)


def tabular_draft(max_slots: int, num_branches: int, lookahead: int) -> TabularDraft:
    return TabularDraft(max_slots, num_branches, lookahead, CONTEXT, vocab_size=VOCAB, seed=5)


if __name__ == "__main__":
    sys.exit(main([word for word in sys.argv[1:] if word not in ("--fail", "--terminated")], load))
