"""Memory, communication and computation of one round (the paper, appendix C, with its units put right).

All results are exact counts of bytes or tokens, for int64 tokens and bfloat16 logits as in the paper's own engine;
b = batch size, MQ = outcomes prepared per sequence, K = lookahead, V = vocabulary.
"""

from __future__ import annotations

from speculator_service.saguaro.domain import check_at_least


def cache_bytes(batch_size: int, num_outcomes: int, lookahead: int, vocab_size: int) -> int:
    """Speculation cache with dense logits: ``b MQ K (8 + 2 V)``.

    >>> cache_bytes(1, 24, 7, 128256), cache_bytes(16, 24, 7, 128256), cache_bytes(16, 8, 7, 128256)
    (43095360, 689525760, 229841920)
    """
    check_at_least(0, batch_size=batch_size, num_outcomes=num_outcomes, lookahead=lookahead, vocab_size=vocab_size)
    return batch_size * num_outcomes * lookahead * (8 + 2 * vocab_size)


def draft_scratch_bytes(batch_size: int, num_outcomes: int, lookahead: int, kv_bytes_per_token: int) -> int:
    """KV cells of a round in the draft, trunk and branches: ``b (K + 1 + K MQ) kv_bytes_per_token``.

    >>> draft_scratch_bytes(2, 24, 7, 100)
    35200
    """
    check_at_least(0, batch_size=batch_size, num_outcomes=num_outcomes, lookahead=lookahead)
    check_at_least(0, kv_bytes_per_token=kv_bytes_per_token)
    return batch_size * (lookahead + 1 + lookahead * num_outcomes) * kv_bytes_per_token


def request_bytes(batch_size: int, block_table_entries: int) -> int:
    """Outcomes with a block table of M entries each, as in the paper's engine: ``32 + 8 b (5 + M)``.

    >>> request_bytes(1, 32)
    328
    """
    check_at_least(0, batch_size=batch_size, block_table_entries=block_table_entries)
    return 32 + 8 * batch_size * (5 + block_table_entries)


def response_bytes(batch_size: int, lookahead: int, vocab_size: int) -> int:
    """Tokens and dense logits of a round's speculations: ``8 b (1 + K) + 2 b K V``.

    >>> response_bytes(1, 7, 128256) - 64, response_bytes(16, 7, 128256) - 1024
    (1795584, 28729344)
    """
    check_at_least(0, batch_size=batch_size, lookahead=lookahead, vocab_size=vocab_size)
    return 8 * batch_size * (1 + lookahead) + 2 * batch_size * lookahead * vocab_size


def sparse_bytes(batch_size: int, lookahead: int, num_kept: int) -> int:
    """Sparse q, int32 id and float32 probability of m tokens per position: ``8 b K m``.

    >>> sparse_bytes(1, 7, 128)
    7168
    """
    check_at_least(0, batch_size=batch_size, lookahead=lookahead, num_kept=num_kept)
    return 8 * batch_size * lookahead * num_kept


def draft_tokens(batch_size: int, num_outcomes: int, lookahead: int, num_missed: int = 0) -> int:
    """Tokens the draft computes in a round: ``b (K + 1)`` trunk, ``b K MQ`` branches, K per row that missed (primary).

    >>> draft_tokens(1, 24, 7), draft_tokens(2, 24, 7, num_missed=1)
    (176, 359)
    """
    check_at_least(0, batch_size=batch_size, num_outcomes=num_outcomes, lookahead=lookahead, num_missed=num_missed)
    return batch_size * (lookahead + 1) + batch_size * lookahead * num_outcomes + num_missed * lookahead


def transfer_seconds(num_bytes: int, bytes_per_second: float) -> float:
    """Time of a transfer without latency.

    >>> round(transfer_seconds(response_bytes(16, 7, 128256), 450e9) * 1e6)
    64
    """
    check_at_least(0, num_bytes=num_bytes)
    check_at_least(1, bytes_per_second=bytes_per_second)
    return num_bytes / bytes_per_second
