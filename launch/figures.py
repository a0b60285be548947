"""Reproduce the paper's figures with a target and a draft on this machine's CPU, and write JSON and PNG.

  fan-out      Figure 3: miss rate against fan-out, with the fitted power law
  temperature  Figure 4: hit rate of the geometric and of the measured allocation against the uniform one
  downweight   Figure 5: acceptance against hit rate along Saguaro's C, and the predicted speedup
  backup       Figure 6: slow against fast backup over batch size, predicted from measured step times,
               and measured on servers (--measured)

Outcomes are counted in rounds run offline, one at a time, with both models in float32; only step times are timed.
Figures 4 and 5 also show a second way of sampling: draft and target share their Gumbel noise.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reproduction.measured import Measured, read_measured
from reproduction.plan import FIGURES, Plan, Setting, all_settings
from reproduction.prompts import read_prompts
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ssd_proto.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from reproduction.pair import Pair
    from reproduction.step_times import StepTimes

MODELS = Path(__file__).resolve().parent.parent / "tests" / "models"
PACKAGES = ("torch", "transformers", "numpy", "matplotlib", "sglang")


def parse_arguments() -> argparse.Namespace:
    plan = Plan()
    parser = argparse.ArgumentParser(
        prog="launch/figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "figures", nargs="*", default=["all"], metavar="FIGURE", help=f"{', '.join(FIGURES)} or all (default)"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for NAME.json and NAME.png")
    parser.add_argument("--prompts", type=Path, help="JSONL with a `prompt` in each line; default: the tests' prompts")
    parser.add_argument(
        "--num-prompts", type=int, default=plan.num_prompts, help="first prompts that are used (%(default)s)"
    )
    parser.add_argument(
        "--num-rounds", type=int, default=plan.num_rounds, help="rounds after each prompt (%(default)s)"
    )
    parser.add_argument("--num-steps", type=int, default=plan.lookahead, help="K (%(default)s)")
    parser.add_argument("--seed", type=int, default=plan.seed, help="of all sampling (%(default)s)")
    parser.add_argument("--model-path", default=str(MODELS / "tiny-target"), help="target")
    parser.add_argument("--draft-model-path", default=str(MODELS / "tiny-draft"), help="draft, same vocabulary")
    parser.add_argument(
        "--measured",
        type=Path,
        nargs="+",
        default=[],
        metavar="JSON",
        help="for the backup figure: what launch/bench --modes ar ssd-primary ssd-suffix ssd-empty --json has written",
    )
    parser.add_argument("--quick", action="store_true", help="few rounds and coarse grids: see that it works")
    return parser.parse_args()


def chosen_figures(names: list[str]) -> list[str]:
    """The figures asked for, in the paper's order.

    Raises:
        ConfigError: there is no such figure.
    """
    unknown = [name for name in names if name not in (*FIGURES, "all")]
    if unknown:
        raise ConfigError(f"There is no figure {unknown[0]!r}: choose from {', '.join(FIGURES)} and all.")
    return [figure for figure in FIGURES if figure in names or "all" in names]


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Sizes from the command line.

    Raises:
        ConfigError: a number is out of range.
    """
    for name, least, most in (("num_prompts", 2, 4096), ("num_rounds", 1, 4096), ("num_steps", 1, 16)):
        if not least <= getattr(arguments, name) <= most:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is {getattr(arguments, name)}: choose a number from {least} to {most}.")
    plan = Plan(
        lookahead=arguments.num_steps,
        num_prompts=arguments.num_prompts,
        num_rounds=arguments.num_rounds,
        seed=arguments.seed,
    )
    return plan.quick() if arguments.quick else plan


def make_folder(folder: Path) -> None:
    """Make the output folder and see that files can be written there.

    Raises:
        ConfigError: they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"Nothing can be written to {folder} ({error.strerror}): name another --output.") from error


def require_matplotlib() -> None:
    """Environments made by hand may lack it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "matplotlib is not installed: pip install 'matplotlib>=3.8', or use the Python of launch/env."
        )


def encoded(pair: Pair, prompts: list[str], plan: Plan) -> list[list[int]]:
    """Token ids of the prompts, cut at the front where they would not leave room for the rounds.

    Raises:
        ConfigError: there is no room for any prompt.
    """
    context = min(model.config.max_position_embeddings for model in (pair.target, pair.draft))
    room = context - 1 - (plan.num_rounds + 1) * (plan.lookahead + 1)
    if room < 1:
        raise ConfigError(
            f"{plan.num_rounds} rounds do not fit in the models' {context} positions: lower --num-rounds."
        )
    return [pair.tokenizer(prompt).input_ids[-room:] for prompt in prompts]


def run(
    figures: list[str], prompts: list[str], measured: list[Measured], plan: Plan, arguments: argparse.Namespace
) -> None:
    """Collect everything the figures need, each run once, and write them.

    Raises:
        ConfigError: the models cannot be loaded or do not fit together.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        loading = progress.add_task("loading the models", total=None)
        import torch
        from reproduction.pair import load_pair, prefill

        torch.set_num_threads(1)
        pair = load_pair(arguments.model_path, arguments.draft_model_path)
        start = prefill(pair, encoded(pair, prompts, plan))
        progress.update(loading, total=1, completed=1)
        counts = collect_all(figures, start, plan, progress)
        times = measure_times(pair, arguments.draft_model_path, plan, progress) if "backup" in figures else None
        for figure in figures:
            write(figure, counts, times, measured, plan, described(prompts, plan, arguments), arguments.output)
    for figure in figures:
        sys.stdout.write(f"{arguments.output / figure}.json\n{arguments.output / figure}.png\n")


def collect_all(figures: list[str], start: Any, plan: Plan, progress: Progress) -> dict[Setting, NDArray[np.int64]]:
    """Counts by setting."""
    from reproduction.counts import count
    from reproduction.rounds import collect

    settings = all_settings(figures, plan)
    task = progress.add_task(f"speculation rounds, {len(settings)} settings", total=len(settings) * plan.num_rounds)
    counts = {}
    for setting in settings:
        rounds = collect(
            start,
            setting,
            lookahead=plan.lookahead,
            num_rounds=plan.num_rounds,
            fan_out=plan.fan_out,
            seed=plan.seed,
            on_round=lambda: progress.advance(task),
        )
        counts[setting] = count(rounds, plan.lookahead)
    return counts


def measure_times(pair: Pair, draft_path: str, plan: Plan, progress: Progress) -> StepTimes:
    """Step times, with the draft engine of the service."""
    task = progress.add_task("step times (SGLang is loaded first)", total=None)
    from reproduction.step_times import measure, num_measurements

    progress.update(task, total=num_measurements(plan))
    return measure(pair.target, draft_path, plan, lambda: progress.advance(task))


def described(prompts: list[str], plan: Plan, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the numbers were made with."""
    digest = hashlib.sha256("\0".join(prompts).encode()).hexdigest()
    return {
        "plan": asdict(plan),
        "models": {"target": Path(arguments.model_path).name, "draft": Path(arguments.draft_model_path).name},
        "prompts": {
            "file": str(arguments.prompts or "tests/support/prompts.json"),
            "used": len(prompts),
            "sha256": digest,
        },
        "arithmetic": "float32, 1 thread, CPU",
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def write(
    figure: str,
    counts: dict[Setting, NDArray[np.int64]],
    times: StepTimes | None,
    measured: list[Measured],
    plan: Plan,
    settings: dict[str, Any],
    folder: Path,
) -> None:
    """FIGURE.json with settings, curves and raw counts, and FIGURE.png."""
    from reproduction import curves, plots

    data = curves.curves_of(figure, counts, plan, times)
    if figure == "backup":
        curves.add_measured(data, measured)
    content: dict[str, Any] = {"figure": figure, "settings": settings, "curves": data}
    if figure == "backup" and times is not None:
        content["step_seconds"] = asdict(times)
    axes = ["fold", "source: prepared, backup", "rejected, all accepted", "k", "rank of the bonus token; last: beyond"]
    runs = [asdict(setting) | {"counts": counts[setting].tolist()} for setting in all_settings([figure], plan)]
    content["counts"] = {"axes": axes, "runs": runs}
    (folder / f"{figure}.json").write_text(json.dumps(content, allow_nan=False))
    plots.save(figure, data, folder / f"{figure}.png")


def quiet() -> None:
    """Keep the libraries' remarks out of the progress display."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def main() -> int:
    arguments = parse_arguments()
    quiet()
    try:
        figures, plan = chosen_figures(arguments.figures), make_plan(arguments)
        prompts = read_prompts(arguments.prompts)[: plan.num_prompts]
        measured = [found for path in arguments.measured for found in read_measured(path)]
        make_folder(arguments.output)
        require_matplotlib()
        run(figures, prompts, measured, plan, arguments)
    except ConfigError as error:
        sys.stderr.write(f"launch/figures: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\nlaunch/figures: interrupted\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
