"""The batch-size workbench on the command line: what each command checks, does and prints."""

import argparse
import gc
import itertools
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from loguru import logger
from rich.console import Console

from grpo.commands import DONE, FAILED, INTERRUPTED
from grpo.config import Config, SettingsError, parse_command_line
from grpo.config.limits import Settings
from grpo.environment import command_hint
from grpo.logs.tables import table
from grpo.workbench.cards import cards_rows, find_card
from grpo.workbench.settings import Calculator, Check, FindMax, new_folder
from grpo.workbench.sweep_settings import Sweep

TRIAL = ("batch_size", "status", "message", "peak_bytes", "allocated_bytes", "reserved_bytes", "steps")
"""The figures of a trial of find-max that JSON holds."""


def find_max(settings: FindMax, console: Console) -> None:
    """Check, try sizes, and print what follows."""
    from grpo.workbench.find_max import check, find, trial_row
    from grpo.workbench.findings import findings, flags_of
    from grpo.workbench.line import first_outlier

    checked = check(settings)
    console.print(table(checked.rows, "Before the first trial"))
    folder = settings.output or new_folder("max-batch")
    trials = find(checked, folder)
    console.print(table([trial_row(trial) for trial in trials], "Trials"))
    result = findings(checked, trials, flags_of(settings.train))
    console.print(table(result.facts(), "What follows"))
    if following := result.next_sizes():
        console.print(table(following, "Next sizes"))
    console.print(table(result.recommended(), "Recommended"))
    content = {
        "maximum": result.maximum,
        "total_bytes": result.total_bytes,
        "margin_bytes": result.margin_bytes,
        "headroom_bytes": result.total_bytes - result.peaks[result.maximum],
        "line": asdict(result.line) if result.line is not None else None,
        "leaves_the_line_at": first_outlier(result.peaks),
        "facts": result.facts(),
        "next": result.next_sizes(),
        "recommended": result.recommended(),
        "trials": [{name: getattr(trial, name) for name in TRIAL} for trial in trials],
    }
    (folder / "max_batch.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    result.draw(folder / "max_batch.png")
    _name(console, folder / "max_batch.json", folder / "max_batch.png")


def calculate(settings: Calculator, console: Console) -> None:
    """Calculate and show, or list the cards."""
    card = find_card(settings.gpu, settings.gpu_memory)
    if card is None:
        console.print(table(cards_rows(), "Cards known here (1 GB is 2**30 bytes)"))
        console.print("Choose one with --gpu, or give any other card's size: --gpu-memory 20GB.")
        return
    from grpo.workbench.calculate import budget_rows, calculate, share_rows, write_profiles

    figures = calculate(settings, card)
    if figures["planned"]:
        console.print(figures["planned"], highlight=False)
    console.print(table(budget_rows(figures), f"Budget of {card.name}, 1 GB is 2**30 bytes"))
    shares = "Shares" if figures["batch_size"] is None else "Largest batch in shares"
    console.print(table(share_rows(figures, settings.accumulate), f"{shares} of {card.name}"))
    for note in figures["notes"]:
        console.print(note, highlight=False, soft_wrap=True)
    if settings.yaml is not None:
        names = write_profiles(settings, figures, settings.yaml)
        console.print(f"{settings.yaml}: profiles {', '.join(names)}", highlight=False)
    if settings.json is not None:
        settings.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def sweep(asked: Sweep, console: Console) -> int:
    """Check, run what has not ended yet, and tabulate."""
    from grpo.workbench.sweep import open_sweep, run_sweep, size_row

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to end the size's process as well
    settings, folder = open_sweep(asked)
    try:
        sizes = run_sweep(settings, folder)
    except KeyboardInterrupt:
        again = sys.argv[1:] if asked.output else [*sys.argv[1:], "--output", str(folder)]
        logger.error(
            "stopped; finished sizes are kept. Go on with: {} {}", command_hint("sweep"), shlex.join(again)
        )
        return INTERRUPTED
    quality = "loss" if settings.objective == "lm" else "reward"
    title = f"{settings.total:,} {settings.unit} at each size; {quality}"
    console.print(table([size_row(size, settings.unit) for size in sizes], title))
    logger.info("for the report: {} {}", command_hint("report"), shlex.quote(str(folder)))
    return FAILED if any(size.status == "failed" for size in sizes) else DONE


def check(settings: Check, console: Console) -> None:
    """Look at the switches, measure, and print both."""
    import torch

    from grpo.logs.starts import device_name
    from grpo.model.target import choose_device, compute_dtype
    from grpo.workbench.check import matmul_rate, switches, training_rates

    device = choose_device(settings.device)
    console.print(table(switches(device, compute_dtype(settings.precision, device)), device_name(device)))
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        rate = matmul_rate(device, dtype) / 1e9
        console.print(f"matrix products in {name}: {rate:,.0f} GFLOP/s", highlight=False)
    title = f"Training {settings.model_name}, {settings.batch_size} windows a step"
    console.print(table(list(training_rates(settings, device)), title))


MONITOR_HELP = """Is memory growing? Train for some steps and watch: `python monitor_memory.py 200 64`.

    python monitor_memory.py STEPS BATCH_SIZE [flags of train_lean.py]
    python monitor_memory.py --attach RUN

Shows memory by phase as it goes, and ends with a verdict: leak or none, bytes a step, which kind, and
which tensors; of a run that is or was trained elsewhere, by what its files say now. The run folder gets
memory.png and leak.json. Exit status 1 means a leak."""


def parse_monitor() -> Config | Path:
    """Read the settings of a run to train, or the folder of a run to judge."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [STEPS [BATCH_SIZE]] [--attach RUN] [flags of train]",
        description=MONITOR_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--attach", type=Path, metavar="RUN", help="judge this run folder instead")
    numbers = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))[:2]
    options, flags = parser.parse_known_args(sys.argv[1 + len(numbers) :])
    if options.attach and flags:
        raise SettingsError(f"attach judges a run as it is: leave out {' '.join(flags)}.")
    steps, batch_size = [*numbers, *("200", "64")[len(numbers) :]]
    quiet = ["--eval-interval", "0", "--checkpoint-interval", "0"]
    config = parse_command_line([*quiet, *flags, "--steps", steps, "--batch-size", batch_size])
    return options.attach or config


def monitor(settings: Config | Path, console: Console) -> int:
    """Train, or read a run's files, and judge whether memory grows."""
    if isinstance(settings, Config):
        print("loading torch and the model", file=sys.stderr)
    from grpo.run.interrupt import stop_on_signal
    from grpo.workbench.memory_watch import PLOT, VERDICT, judge_run, watch_training

    gc.freeze()
    with stop_on_signal() as stop:
        if isinstance(settings, Path):
            verdict, folder = judge_run(settings), settings
        else:
            verdict, folder = watch_training(settings, console, stop)
    console.print(str(verdict), highlight=False)
    _name(console, folder / PLOT, folder / VERDICT)
    return FAILED if verdict.leak else DONE


@dataclass(frozen=True)
class ReportConfig(Settings):
    """Write report.html, which needs nothing else and opens from disk."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """A sweep's or a run's folder, or several of a kind to compare."""
    output: Path | None = None
    """The folder to write to; by default the folder itself, and report/ for several."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if not self.folders:
            yield "no folder is given: give that of a run or of a sweep, or several of a kind"
        for folder in self.folders:
            if not folder.is_dir():
                yield f"{folder} is no folder: give that of a run or of a sweep"


def report(config: ReportConfig, console: Console) -> None:
    """Write the page, and print its path."""
    from grpo.workbench.report import write_report

    _name(console, write_report(config.folders, config.output))


def _name(console: Console, *files: Path) -> None:
    """Print the paths of files, in one line each, to be copied."""
    for file in files:
        console.print(str(file), highlight=False, soft_wrap=True)
