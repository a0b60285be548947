"""What a SGLang server answers to ``POST /generate``, and how two answers are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Payload = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion."""

    ids: tuple[int, ...]
    text: str
    meta: dict[str, Any]

    @staticmethod
    def of(body: dict[str, Any]) -> Answer:
        """From the JSON of an answer."""
        return Answer(tuple(body["output_ids"]), body["text"], body["meta_info"])

    @property
    def finish(self) -> dict[str, Any]:
        """Why generation ended: ``type`` (length, stop, abort) and details."""
        return self.meta["finish_reason"]

    @property
    def rounds(self) -> int:
        """Verification rounds; 0 without speculation."""
        return int(self.meta.get("spec_verify_ct", 0))

    @property
    def essence(self) -> dict[str, Any]:
        """All that must be the same with and without speculation."""
        return {
            "ids": list(self.ids),
            "text": self.text,
            "finish_reason": self.finish,
            "prompt_tokens": self.meta["prompt_tokens"],
            "completion_tokens": self.meta["completion_tokens"],
        }


def greedy(prompt: str | list[int], max_new_tokens: int = 32, /, **sampling: Any) -> Payload:
    """A greedy request. Keyword arguments are sampling parameters."""
    key = "text" if isinstance(prompt, str) else "input_ids"
    return {key: prompt, "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, **sampling}}
