"""The draft engine: :class:`DraftModel` on a real model, for CPU and CUDA alike.

The cells are counted on the host (:class:`CellTable`); how a step reaches the model depends on the device and is the
business of one of the two paths below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from speculator_service.draft.aliased_rows import AliasedRows, upload
from speculator_service.draft.base import BranchStep
from speculator_service.draft.cells import CellTable
from speculator_service.draft.config import DraftConfig
from speculator_service.draft.trunk_attention import plan_decode, plan_extend
from ssd_proto.errors import ConfigError

if TYPE_CHECKING:
    from speculator_service.draft.runner import DraftRunner

_WORTH_COMPUTING = 0.75
"""Share of used branches above which computing the dead rows costs less than copying the logits past them."""


def load_engine(config: DraftConfig) -> DraftEngine:
    """Check the configuration, load the model, make the engine. To be called once in a process.

    Raises:
        ConfigError: the configuration cannot work; where possible before weights are read.
    """
    config = config.resolved()
    if config.device_type == "cuda" and config.gpu_id >= torch.cuda.device_count():
        raise ConfigError(
            f"The device {config.device} does not exist: torch sees {torch.cuda.device_count()} CUDA devices; "
            "choose another one, or cpu."
        )
    from speculator_service.draft.runner import load_runner  # imports SGLang: seconds

    try:
        runner = load_runner(config)
    except (ValueError, RuntimeError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"SGLang cannot load the draft model {config.model_path!r} on {config.device} ({reason}); "
            "give another model, device or pool size."
        ) from error
    return DraftEngine(runner, config)


class DraftEngine:
    """Implements :class:`DraftModel`. All calls from one thread.

    Logits are on the model's device and stay valid until the next call; ``step``, ``extend_one`` and ``adopt`` do not
    wait for the device.

    Raises (constructor):
        ConfigError: the model's pool is smaller than the configuration needs.
    """

    def __init__(self, runner: DraftRunner, config: DraftConfig) -> None:
        assert config.context_length is not None, "the configuration is not resolved"
        self.vocab_size, self.token_map = runner.vocab_size, runner.token_map
        self.max_slots = config.max_slots
        self.num_branches = config.num_branches
        self.lookahead = config.lookahead
        self.context_length = config.context_length
        numbers = runner.take_cells()
        least = config.num_branches * config.lookahead + min(64, config.context_length)
        if len(numbers) < least:
            raise ConfigError(
                f"There is memory for {len(numbers)} KV cells of the draft model, one sequence with its branches needs "
                f"at least {least}; free memory on {config.device} or lower the fan-out or K."
            )
        self._cells = CellTable(numbers, config.max_slots, config.num_branches, config.lookahead, config.context_length)
        self._runner = runner
        path = _SharedTrunkPath if config.attention_backend == "shared_trunk" else _RowsPath
        self._path: _ForwardPath = path(runner, self._cells)

    @property
    def free_tokens(self) -> int:
        """KV cells that no slot holds."""
        return self._cells.num_free

    def reserve(self, slot: int, length: int) -> bool:
        """Make room for trunk positions [0, length); see :class:`DraftModel`."""
        return self._cells.reserve(slot, length)

    def release(self, slot: int) -> None:
        """Give back everything the slot holds. Releasing an empty slot does nothing."""
        self._cells.release(slot)
        self._path.released(slot)

    def held_tokens(self, slot: int) -> int:
        """KV cells that the slot holds, those of its branches included."""
        return self._cells.num_held(slot)

    def copy_trunk(self, source: int, slot: int, start: int, stop: int) -> bool:
        """Let positions [start, stop) of the trunk of ``slot`` be those of ``source``. Does not wait for the device.

        False, and nothing changed, if the model's KV is not plain keys and values (MLA, say).
        """
        if stop > min(self._cells.held_by(source), self._cells.held_by(slot)):
            raise ValueError(f"slots {source}, {slot}: positions [{start}, {stop}) are not reserved")
        return self._runner.copy_cells(self._cells.trunk[source, start:stop], self._cells.trunk[slot, start:stop])

    def extend(self, slot: int, start: int, tokens: NDArray[np.integer]) -> torch.Tensor:
        """Compute trunk positions [start, start + len(tokens)); returns the last position's logits [V]."""
        if len(tokens) == 0 or start + len(tokens) > self._cells.held_by(slot):
            raise ValueError(f"slot {slot}: positions [{start}, {start + len(tokens)}) are empty or not reserved")
        return self._path.extend(slot, start, np.asarray(tokens, np.int64))

    def extend_one(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> torch.Tensor:
        """Compute one trunk position of each of b different slots (all arguments [b]); returns logits [b, V]."""
        live, depth = np.ones((len(slots), 1), np.bool_), np.zeros((len(slots), 1), np.int64)
        return self.step(BranchStep(slots, tokens[:, None], positions[:, None], depth, live))[:, 0]

    def extend_each(
        self, slots: NDArray[np.int64], starts: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> torch.Tensor:
        """Compute trunk positions [start, start + count) of each of b different slots; returns logits [b, n, V].

        Raises:
            ValueError: a position is not reserved.
        """
        if (starts + counts > self._cells.held_by(slots)).any():
            raise ValueError("positions of a trunk are not reserved")
        return self._path.extend_each(slots, starts, tokens, counts)

    def step(self, step: BranchStep) -> torch.Tensor:
        """Run one step over all live rows; returns logits [b, G, V] (dead rows: anything finite).

        Raises:
            ValueError: a live row lies beyond the context length, or row 0 beyond the reserved positions.
        """
        trunk = step.prefix[:, 0]
        beyond = (step.live & (step.prefix + step.depth >= self.context_length)).any()
        if beyond or (step.live[:, 0] & (trunk >= self._cells.held_by(step.slots))).any():
            raise ValueError("a row of the step lies beyond the context length or the reserved positions")
        return self._path.step(step)

    def adopt(
        self,
        slots: NDArray[np.int64],
        branches: NDArray[np.int64],
        prefix: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> None:
        """Trunk positions [prefix, prefix + count) become the first ``count`` cells of the branch; all [b]."""
        self._cells.adopt(slots, branches, prefix, counts)
        self._path.adopted(slots, branches, prefix)


class _ForwardPath(Protocol):
    """How steps reach the model."""

    def extend(self, slot: int, start: int, tokens: NDArray[np.int64]) -> torch.Tensor: ...

    def extend_each(
        self, slots: NDArray[np.int64], starts: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> torch.Tensor: ...

    def step(self, step: BranchStep) -> torch.Tensor: ...

    def adopted(self, slots: NDArray[np.int64], branches: NDArray[np.int64], prefix: NDArray[np.int64]) -> None: ...

    def released(self, slot: int) -> None: ...


class _SharedTrunkPath:
    """Uniform [b, G] rows with own attention (CPU)."""

    def __init__(self, runner: DraftRunner, cells: CellTable) -> None:
        self._runner, self._cells = runner, cells

    def extend(self, slot: int, start: int, tokens: NDArray[np.int64]) -> torch.Tensor:
        plan = plan_extend(self._cells, slot, start, len(tokens))
        return self._runner.extend(torch.from_numpy(tokens), plan.written, row=0, start=start, plan=plan)

    def extend_each(
        self, slots: NDArray[np.int64], starts: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> torch.Tensor:
        places = np.arange(tokens.shape[1])
        depth, live = np.zeros_like(tokens), places < counts[:, None]
        return self._uniform(BranchStep(slots, tokens, starts[:, None] + places, depth, live), np.zeros_like(places))

    def step(self, step: BranchStep) -> torch.Tensor:
        used = step.live.any(0)
        if used.mean() > _WORTH_COMPUTING:
            return self._uniform(step, np.arange(used.size))
        # Most branches are dead in every slot, as in the last step of a round: leave them out.
        branches = np.nonzero(used)[0]
        slots, tokens, prefix, depth, live = step
        part = BranchStep(
            slots, tokens.take(branches, 1), prefix.take(branches, 1), depth.take(branches, 1), live.take(branches, 1)
        )
        logits = self._uniform(part, branches)
        out = logits.new_zeros(*live.shape, logits.shape[-1])
        return out.index_copy_(1, torch.from_numpy(branches), logits)

    def _uniform(self, step: BranchStep, branches: NDArray[np.int64]) -> torch.Tensor:
        """``branches`` [G]: which branch each column of the step is, 0 for the trunk."""
        slots, tokens, prefix, depth, live = step
        plan = plan_decode(self._cells, slots, branches, prefix, depth, live)
        inputs = torch.from_numpy(np.where(live, tokens, 0).reshape(-1))
        logits = self._runner.decode_planned(inputs, plan)
        return logits.view(*tokens.shape, -1)

    def adopted(self, slots: NDArray[np.int64], branches: NDArray[np.int64], prefix: NDArray[np.int64]) -> None:
        """Nothing to do: every plan is made from the cell table."""

    def released(self, slot: int) -> None:
        """Nothing to do."""


class _RowsPath:
    """Live rows only, through SGLang's decode backend and its CUDA graphs."""

    def __init__(self, runner: DraftRunner, cells: CellTable) -> None:
        self._runner, self._cells = runner, cells
        shape = cells.own.shape[:2]
        ids = runner.take_rows(shape[0] * shape[1]).reshape(shape)
        self._rows = AliasedRows(cells, runner.block_table, ids)
        self._most = ids.size  # rows of a step

    def extend(self, slot: int, start: int, tokens: NDArray[np.int64]) -> torch.Tensor:
        end = start + len(tokens)
        trunk = np.zeros(1, np.int64)
        self._rows.sync(np.array([slot]), trunk, np.array([end]))
        inputs, cells = upload(self._runner.device, tokens, self._cells.trunk[slot, start:end])
        return self._runner.extend(inputs, cells, row=int(self._rows.row_ids[slot, 0]), start=start)

    def extend_each(
        self, slots: NDArray[np.int64], starts: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> torch.Tensor:
        """Rows of one slot share its line of the block table: each sees as much of it as is its length."""
        self._rows.sync(slots, np.zeros_like(slots), starts + counts)
        b, n = tokens.shape
        width = self._most // b
        parts = [
            self._extend_part(slots, starts, tokens, counts, first, min(first + width, n))
            for first in range(0, n, width)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _extend_part(
        self,
        slots: NDArray[np.int64],
        starts: NDArray[np.int64],
        tokens: NDArray[np.int64],
        counts: NDArray[np.int64],
        first: int,
        stop: int,
    ) -> torch.Tensor:
        """Columns [first, stop) of `extend_each`, not more rows than a step may have."""
        live = np.arange(first, stop) < counts[:, None]
        b, place = np.nonzero(live)
        positions = starts[b] + first + place
        inputs, at, written, rows = upload(
            self._runner.device,
            tokens[b, first + place],
            positions,
            self._cells.trunk[slots[b], positions],
            self._rows.row_ids[slots[b], 0],
        )
        logits = self._runner.decode(inputs, at, written, rows, torch.from_numpy(positions + 1))
        out = logits.new_zeros(live.size, logits.shape[-1])
        (index,) = upload(self._runner.device, np.flatnonzero(live))
        return out.index_copy_(0, index, logits).view(*live.shape, -1)

    def step(self, step: BranchStep) -> torch.Tensor:
        b, branch = np.nonzero(step.live)
        slots = step.slots[b]
        prefix, depth = step.prefix[b, branch], step.depth[b, branch]
        is_trunk = branch == 0
        positions = prefix + depth
        cells = np.where(is_trunk, self._cells.trunk[slots, positions], self._cells.own[slots, branch, depth])
        self._rows.sync(slots, branch, prefix + is_trunk)
        inputs, at, written, rows = upload(
            self._runner.device, step.tokens[b, branch], positions, cells, self._rows.row_ids[slots, branch]
        )
        logits = self._runner.decode(inputs, at, written, rows, torch.from_numpy(positions + 1))
        if step.live.all():
            return logits.view(*step.live.shape, -1)
        out = logits.new_zeros(step.live.size, logits.shape[-1])
        (index,) = upload(self._runner.device, b * step.live.shape[1] + branch)
        return out.index_copy_(0, index, logits).view(*step.live.shape, -1)

    def adopted(self, slots: NDArray[np.int64], branches: NDArray[np.int64], prefix: NDArray[np.int64]) -> None:
        self._rows.adopted(slots, branches, prefix)

    def released(self, slot: int) -> None:
        self._rows.released(slot)
