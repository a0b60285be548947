"""The lines below an answer."""

from __future__ import annotations

from chat.client import Answer


def answer_line(answer: Answer, hits: float | None) -> str:
    """How fast the answer came; ``hits`` is the speculator's hit rate, None if it did not tell.

    >>> answer = Answer(["Yes."], 31, 10, False, 0.25, 1.5)
    >>> answer_line(answer, 0.8)
    '31 tokens, the first after 0.25 s, then 20.0 tok/s; cache hit rate 80%, 3.00 tokens per round'
    """
    words = f"{answer.num_tokens} token{'s' * (answer.num_tokens != 1)}"
    words += " (cut at --max-new-tokens)" if answer.is_cut else ""
    words += f", the first after {answer.first_token_s:.2f} s"
    if answer.tokens_per_second is not None:
        words += f", then {answer.tokens_per_second:.1f} tok/s"
    words += "; the speculator's counts are not to be had" if hits is None else f"; cache hit rate {hits:.0%}"
    if answer.tokens_per_round is not None:
        words += f", {answer.tokens_per_round:.2f} tokens per round"
    return words


def comparison_line(answer: Answer, plain: Answer, temperature: float) -> str:
    """The same question without speculation, beside the ``answer``.

    >>> answer, plain = Answer(["Yes."], 31, 10, False, 0.25, 1.5), Answer(["Yes."], 31, 0, False, 0.2, 3.0)
    >>> comparison_line(answer, plain, 0.0)
    'without speculation: same text, 10.0 tok/s, ratio 2.00'
    """
    words = f"without speculation: {_verdict(answer.text, plain.text, temperature)}"
    if plain.tokens_per_second is not None:
        words += f", {plain.tokens_per_second:.1f} tok/s"
        if answer.tokens_per_second is not None:
            words += f", ratio {answer.tokens_per_second / plain.tokens_per_second:.2f}"
    return words


def _verdict(text: str, plain: str, temperature: float) -> str:
    if text == plain:
        return "same text"
    if temperature > 0:
        return "another text, drawn anew"
    shorter = min(len(text), len(plain))
    first = next((place for place in range(shorter) if text[place] != plain[place]), shorter)
    return f"another text from character {first + 1} on"
