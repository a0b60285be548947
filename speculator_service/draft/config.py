"""Settings of the draft engine, and the sizes that follow from them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from speculator_service.draft.token_map import read_token_map
from ssd_proto.errors import ConfigError
from ssd_proto.model_checks import check_context_length, check_model_config, model_vocab_size, read_model_config

MAX_ROWS = 8192
"""Rows of one step, that is ``max_slots * (1 + num_branches)``; each costs one row of SGLang's block table."""

_DEFAULT_TRUNK = 4096
"""Positions per slot that the default pool size counts with; sequences may be longer if others are shorter."""


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """What to load, where, and how large. ``None`` means: choose for me (:meth:`resolved`)."""

    model_path: str
    max_slots: int
    num_branches: int
    """Branches of each slot, G - 1."""
    lookahead: int
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``cuda:N``."""
    dtype: str = "auto"
    """As in SGLang: auto, float32, float16, bfloat16. On a CPU auto is float32, products rounded if that is faster."""
    context_length: int | None = None
    max_total_tokens: int | None = None
    """KV cells in all, for trunks and branches of all slots."""
    attention_backend: str | None = None
    """``shared_trunk`` (CPU only, its default) or a decode backend of SGLang (CUDA default: triton)."""
    revision: str | None = None
    trust_remote_code: bool = False
    lean: bool = True
    """On CPU, use the short forward of ``lean.py`` where it knows the model."""
    token_map: str | None = None
    """File with the tokens that may be drafted (`read_token_map`); None: all. CPU only."""
    num_threads: int | None = None
    """CPU threads; default: OMP_NUM_THREADS, else 1."""

    @property
    def max_rows(self) -> int:
        """Rows of the largest step."""
        return self.max_slots * (1 + self.num_branches)

    @property
    def gpu_id(self) -> int:
        """N of ``cuda:N``; 0 for ``cuda`` and for ``cpu``."""
        return int(self.device.partition(":")[2] or 0)

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.device.partition(":")[0]

    def resolved(self) -> DraftConfig:
        """The same with every choice made and every setting checked against ``config.json``; reads no weights.

        Raises:
            ConfigError: something cannot work; the message says what to change.
        """
        self._check_ranges()
        model = read_model_config(self.model_path, self.revision)
        check_model_config(model, device=self.device_type)
        context = check_context_length(model, self.context_length)
        least = min(context, _DEFAULT_TRUNK) + self.num_branches * self.lookahead
        total = self.max_total_tokens or self.max_slots * least
        if total < least:
            raise ConfigError(
                f"max_total_tokens is {total}, but one sequence with its branches needs {least}; "
                f"choose at least {least} (for all slots: {self.max_slots * least})."
            )
        backend = self.attention_backend or ("shared_trunk" if self.device_type == "cpu" else "triton")
        if backend == "shared_trunk" and self.device_type != "cpu":
            raise ConfigError("The attention backend shared_trunk is for CPU only; use triton, fa3 or flashinfer.")
        if self.token_map is not None:
            if backend != "shared_trunk":
                raise ConfigError("A token map is for drafts on a CPU, with the attention backend shared_trunk.")
            read_token_map(self.token_map, model_vocab_size(model), self.least_logits)
        threads = self.num_threads or _threads_from_environment()
        return replace(
            self, context_length=context, max_total_tokens=total, attention_backend=backend, num_threads=threads
        )

    @property
    def least_logits(self) -> int:
        """Columns of the logits that are needed: a slot may prepare so many bonus tokens at one place."""
        return self.num_branches + 2

    def _check_ranges(self) -> None:
        if re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is None:
            raise ConfigError(f"The device {self.device!r} is not one of cpu, cuda, cuda:N.")
        if self.dtype not in ("auto", "float32", "float16", "bfloat16", "float", "half"):
            raise ConfigError(f"The dtype {self.dtype!r} is not one of auto, float32, float16, bfloat16.")
        for name, least in (("max_slots", 1), ("num_branches", 0), ("lookahead", 1)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} is {value}; choose at least {least}.")
        if self.max_rows > MAX_ROWS:
            raise ConfigError(
                f"{self.max_slots} slots of {1 + self.num_branches} rows are {self.max_rows} rows, "
                f"at most {MAX_ROWS} are allowed; lower max_slots or the fan-out."
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"num_threads is {self.num_threads}; choose at least 1.")


def _threads_from_environment() -> int:
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) > 0 else 1
