"""Compare the speed of real servers on the same prompts: AR, STANDALONE, NGRAM, SSD, and SSD with single options.

All servers are up for the whole run; the one that is measured runs, the others are stopped (SIGSTOP), since an idle
SGLang scheduler polls.  A repetition measures every mode once, in turning order, and ratios are made within a
repetition only: absolute speeds drift, ratios of neighbours do not.  On a CPU the target's scheduler has the first core
and one thread in every mode but ar-N-threads, everything else has the other cores.

  ar               plain decoding
  ar-N-threads     the same with N cores for the target: what a plain server makes of the cores that SSD uses
  ar-torch-native  the same with SGLang's own attention on CPUs
  standalone       SGLang's speculation with the same draft model, in turn with the target
  ngram            SGLang's speculation without a model
  ssd              this project; ssd-no-table prepares nothing (drafts just in time), ssd-fan-out-3 always three
                   tokens for every k, ssd-primary, ssd-suffix and ssd-empty have one backup, ssd-shared-noise draws
                   drafts with the target's noise, ssd-float32 rounds nothing of the draft, ssd-no-lean computes it
                   through SGLang's model, and ssd-no-service waits in vain for its service

Exit status: 0; 2 for wrong input; 1 if a server failed, or if SSD's greedy tokens in float32 are not those of ar.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path

from benchmark import files, tables
from benchmark.measurement import Measurements, leave_first_core, measure_all
from benchmark.modes import Mode
from benchmark.prompts import as_messages, read_prompts
from benchmark.rows import PLAIN, Row, make_rows
from benchmark.servers import servers
from benchmark.settings import Cell, Settings, make_settings, parse_arguments
from children import ChildFailed, end_on_signals, say
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ssd_proto.errors import ConfigError


def run(prompts: Sequence[str], settings: Settings) -> list[Measurements]:
    """Start the servers, measure, and end them.

    Raises:
        ConfigError: the memory does not suffice.
        ChildFailed: a server failed.
    """
    with tempfile.TemporaryDirectory(prefix="sglang-ssd-") as folder, servers(settings, Path(folder)) as started:
        leave_first_core(settings)
        with progress_of(settings) as shown:
            return measure_all(started, prompts, settings, shown)


@contextlib.contextmanager
def progress_of(settings: Settings) -> Iterator[Shown]:
    """A bar on stderr, or where that is no terminal a line for each temperature and batch size."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        runs = settings.repeats + settings.latency_repeats
        shown = Shown(progress, len(settings.cells) * len(settings.modes) * runs)
        yield shown
        shown.end()


class Shown:
    """Says what is being measured."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._begun = progress, total, 0
        self._task = progress.add_task("", total=total)
        self._cell: Cell | None = None

    def __call__(self, cell: Cell, mode: str) -> None:
        """A run begins."""
        if self._progress.disable and cell != self._cell:
            say(f"{cell}: run {self._begun + 1} of {self._total}")
        self._progress.update(self._task, description=f"{cell}, {mode}", completed=self._begun)
        self._cell, self._begun = cell, self._begun + 1

    def end(self) -> None:
        """The last run is over."""
        self._progress.update(self._task, description="measured", completed=self._total)


def is_exact(rows: Sequence[Row], modes: Sequence[Mode], settings: Settings) -> bool:
    """Whether SSD's greedy tokens in float32 on a CPU are those of plain decoding (which is the first mode then)."""
    ssd = {mode.name for mode in modes if mode.is_ssd}
    is_comparable = modes[0].name == PLAIN and settings.dtype == "float32" and settings.device == "cpu"
    wrong = [row for row in rows if row["mode"] in ssd and row["temperature"] == 0 and not row["same_tokens"]]
    return not (is_comparable and wrong)


def main() -> int:
    arguments = parse_arguments(__doc__)
    end_on_signals()
    try:
        settings = make_settings(arguments)
        prompts = read_prompts(arguments.prompts, max(settings.num_prompts, settings.max_batch_size))
        if arguments.chat:
            prompts = as_messages(prompts, settings.model_path)
        files.check_places(arguments.output, arguments.json)
        measured = run(prompts, settings)
        rows = make_rows(settings.modes, measured, settings.cells)
        tables.print_all(tables.console(), rows, settings.modes, measured)
        content = files.make_content(arguments, settings, prompts, measured, rows)
        for path in files.write(content, arguments.output, arguments.json):
            say(f"written: {path}")
    except ConfigError as error:
        say(f"launch/bench: {error}")
        return 2
    except (ChildFailed, OSError, HTTPException) as error:
        say(f"launch/bench: {error}")
        return 1
    except KeyboardInterrupt:
        say("\nlaunch/bench: interrupted, everything is ended")
        return 130
    if not is_exact(rows, settings.modes, settings):
        say("launch/bench: SSD's tokens are not those of plain decoding")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
