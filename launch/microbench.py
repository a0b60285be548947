"""How long the parts of a round take, apart from the target's forward: medians in microseconds.

Both ends of a channel run in one process and one thread, with a real draft model and real shared memory:

  verifier    the verifier's own part, from the outcome's being known to the next chain's being staged
  outcomes    the speculator takes a batch of outcomes; hits are answered here
  draft step  one token of an answer to misses, just in time
  fork        a table is begun
  table step  one depth of a table: of it the model, the draws, and what is kept and published

and the look-up of 256 sequences with 32 prepared outcomes each. With --branches N instead: a step of the draft model
with N branches of one sequence beside a step with one, after 512 tokens. With --products: products of a few rows with
weights as PyTorch has them, packed, and packed in bfloat16. Use one core: OMP_NUM_THREADS=1 taskset -c 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import timeit
from pathlib import Path
from typing import NamedTuple

import numpy as np
from both_ends import PROMPT_LENGTH, BothEnds
from branch_cost import CONTEXT, measure_branch_cost
from children import say
from product_cost import measure_product_costs
from rich.console import Console
from rich.table import Table

from speculator_service.draft.base import DraftModel
from speculator_service.draft.config import DraftConfig
from speculator_service.draft.engine import load_engine
from ssd_proto.errors import ConfigError
from ssd_proto.records import Entries, outcome_keys
from ssd_proto.table import SpeculationTable, TableShape

MODELS = Path(__file__).resolve().parent.parent / "tests" / "models"
PARTS = ("verifier", "outcomes", "draft step", "fork", "table step", "model", "draw", "publish")
_WARM_UP_ROUNDS = 20
_LOOKUP = TableShape(num_slots=256, num_outcomes=32, lookahead=4)
_LOOKUP_REPEATS = 200


class Case(NamedTuple):
    """What is measured."""

    batch_size: int
    temperature: float

    def __str__(self) -> str:
        kind = f"T {self.temperature:g}" if self.temperature else "greedy"
        return f"b {self.batch_size}, {kind}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launch/microbench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", default=str(MODELS / "tiny-draft"), help="draft model (default: the tests')")
    parser.add_argument("--device", default="cpu", help="of the draft model (%(default)s)")
    parser.add_argument("--lookahead", type=int, default=4, help="K (%(default)s)")
    parser.add_argument("--fan-out", type=int, default=3, help="F, for every k (%(default)s)")
    parser.add_argument("--num-kept", type=int, default=32, help="m (%(default)s)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32], metavar="B", help="(1 8 32)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="(0 1)")
    parser.add_argument("--rounds", type=int, default=100, help="measured of each case (%(default)s)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--branches", type=int, metavar="N", help="measure what N branches cost, and nothing else")
    instead.add_argument("--products", action="store_true", help="measure products of packed weights, and nothing else")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    arguments = parser.parse_args()
    for name in ("lookahead", "fan_out", "num_kept", "rounds", "branches"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if min(arguments.batch_sizes) < 1 or min(arguments.temperatures) < 0:
        parser.error("batch sizes must be at least 1, temperatures at least 0")
    return arguments


def load(arguments: argparse.Namespace) -> DraftModel:
    """The draft model, with room for the largest batch. Raises `ConfigError`."""
    lookahead, num_branches = arguments.lookahead, arguments.fan_out * (arguments.lookahead + 1)
    slots = max(arguments.batch_sizes)
    context = PROMPT_LENGTH + (max(arguments.rounds, _WARM_UP_ROUNDS) + 4) * (lookahead + 1)
    return load_engine(
        DraftConfig(
            arguments.model_path,
            max_slots=slots,
            num_branches=num_branches,
            lookahead=lookahead,
            device=arguments.device,
            context_length=context,
            max_total_tokens=slots * (context + num_branches * lookahead + 64),
        )
    )


def measure(engine: DraftModel, case: Case, arguments: argparse.Namespace) -> dict[str, float]:
    """Median microseconds by part."""
    ends = BothEnds(engine, arguments.fan_out, case.batch_size, arguments.num_kept, case.temperature)
    try:
        ends.run(_WARM_UP_ROUNDS)
        ends.durations.seconds.clear()
        ends.run(arguments.rounds)
    finally:
        ends.close()
    seconds = ends.durations.seconds
    return {part: 1e6 * float(np.median(seconds[part])) for part in PARTS if seconds[part]}


def measure_lookup() -> float:
    """Median microseconds of looking 256 outcomes up in tables of 32 columns."""
    table = SpeculationTable(_LOOKUP, bytearray(_LOOKUP.nbytes), 1)
    slots, zeros = np.arange(_LOOKUP.num_slots), np.zeros(_LOOKUP.num_slots, np.int64)
    columns = slots % _LOOKUP.num_outcomes
    keys = outcome_keys(np.zeros((_LOOKUP.num_slots, 1), np.int64), np.arange(_LOOKUP.num_outcomes)[None])
    table.begin(slots, zeros, keys)
    tokens = np.ones((_LOOKUP.num_slots, _LOOKUP.lookahead), np.int64)
    asked = slots, zeros, zeros, keys[slots, columns]
    entries = Entries(slots, zeros, zeros, columns, asked[3], zeros + _LOOKUP.lookahead, slots >= 0, tokens)
    table.write(entries)
    assert (table.read(*asked).depth == _LOOKUP.lookahead).all()
    return 1e6 * float(np.median(timeit.repeat(lambda: table.read(*asked), number=1, repeat=_LOOKUP_REPEATS)))


def show(results: dict[str, dict[str, float]], lookup: float) -> None:
    table = Table("part, us", *results)
    for part in PARTS:
        table.add_row(part, *(f"{found[part]:.0f}" if part in found else "" for found in results.values()))
    console = Console(width=max(80, 14 + 14 * len(results)))
    console.print(table)
    console.print(f"look-up of {_LOOKUP.num_slots} sequences: {lookup:.0f} us")


def main() -> int:
    arguments = parse_arguments()
    try:
        if arguments.products:
            measure_products(arguments)
        elif arguments.branches is not None:
            measure_branches(arguments)
        else:
            measure_parts(arguments)
    except ConfigError as error:
        say(f"launch/microbench: {error}")
        return 2
    return 0


def measure_products(arguments: argparse.Namespace) -> None:
    """What packed weights save."""
    table = Table("weight", "rows", "PyTorch, us", "packed", "ratio", "bfloat16", "ratio")
    costs = list(measure_product_costs())
    for (n, k), rows, plain, *others in costs:
        shown = (text for us in others for text in (f"{us:.0f}", f"{us / plain:.2f}"))
        table.add_row(f"{n} x {k}", str(rows), f"{plain:.0f}", *shown)
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"products": [cost._asdict() for cost in costs]}, indent=1) + "\n")


def measure_branches(arguments: argparse.Namespace) -> None:
    """What branches cost. Raises `ConfigError`."""
    one, many = measure_branch_cost(arguments.model_path, arguments.device, arguments.branches)
    times = f"{one * 1e3:.2f} ms with one branch, {many * 1e3:.2f} ms with {arguments.branches}"
    Console().print(f"a step after {CONTEXT} tokens: {times}, {many / one:.2f} times as long")
    if arguments.json:
        arguments.json.write_text(json.dumps({"branches": arguments.branches, "seconds": [one, many]}) + "\n")


def measure_parts(arguments: argparse.Namespace) -> None:
    """The parts of a round. Raises `ConfigError`."""
    engine = load(arguments)
    cases = [Case(size, temperature) for temperature in arguments.temperatures for size in arguments.batch_sizes]
    results = {str(case): measure(engine, case, arguments) for case in cases}
    lookup = measure_lookup()
    show(results, lookup)
    if arguments.json:
        arguments.json.write_text(json.dumps({"us": results, "lookup_us": lookup}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
