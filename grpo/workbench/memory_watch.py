"""Watching a run's memory, for monitor_memory.py: a live view, a verdict on leaks, a plot and JSON.

Either a run is trained and watched from within, where tensors can be counted and culprits named, or a
run that somebody else trains is followed through its memory.jsonl.
"""

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loguru import logger
from rich.console import Console
from rich.live import Live
from rich.table import Table

from grpo.config import Config
from grpo.files import shown
from grpo.memory.budget import GB, readable
from grpo.memory.leaks.leak import LeakVerdict, LeakWatch, MemorySample, detect_leak
from grpo.memory.leaks.trend import MIN_STEPS
from grpo.run.folder import LOCK_FILE
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.run.tracking import MEMORY_FILE, METRICS_FILE, NewLines, read_lines
from grpo.trainer import Trainer
from grpo.workbench.pictures import picture

PLOT, VERDICT = "memory.png", "leak.json"
_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_STEPS = 30
_POLL_S = 1.0


def watch_training(config: Config, console: Console, stop: StopRequest) -> tuple[LeakVerdict, Path]:
    """Train, with every step's memory shown and sampled; the verdict and the run folder."""
    if config.steps < MIN_STEPS:
        console.print(
            f"there will be no verdict: a trend needs {MIN_STEPS} steps, and these are {config.steps}",
            highlight=False,
        )
    with open_run(config) as run, LeakWatch(run.device.device) as watch, _view(console) as show:
        logger.info("run folder: {}", shown(run.folder))
        new_lines = NewLines(run.folder / MEMORY_FILE)  # all lines again and again would grow themselves
        tokens_before = 0
        trainer = Trainer(run, stop=stop)
        for step in trainer:
            watch.sample(step.number, tokens=trainer.num_tokens - tokens_before)
            tokens_before = trainer.num_tokens
            show(step.number, config.steps, new_lines())
        verdict = watch.verdict()
        report(verdict, watch.samples, run.folder)
        return verdict, shown(run.folder)


def follow_run(
    folder: Path, console: Console, *, patience_s: float, stop: StopRequest
) -> tuple[LeakVerdict, Path]:
    """Follow a run's memory.jsonl until it has ended, nothing has come for `patience_s` seconds, or Ctrl-C.

    ValueError for a folder without one.
    """
    if not (folder / MEMORY_FILE).is_file():
        raise ValueError(f"attach is {str(folder)!r}, which holds no {MEMORY_FILE}: give a run's folder.")
    lines: list[dict[str, Any]] = []
    last = time.monotonic()
    if (folder / LOCK_FILE).exists():
        console.print(
            f"following {folder} until it ends, or brings no news for {patience_s:g} s", highlight=False
        )
    with _view(console) as show:
        while time.monotonic() - last < patience_s and not stop.requested:
            ended = not (folder / LOCK_FILE).exists()  # first: what was written before is then read
            now = read_lines(folder / MEMORY_FILE)
            if len(now) > len(lines):
                show(now[-1]["step"], None, now[len(lines) :])
                lines, last = now, time.monotonic()
            if ended:
                break
            time.sleep(min(_POLL_S, patience_s))
    samples = samples_of(lines, read_lines(folder / METRICS_FILE))
    verdict = detect_leak(samples)
    report(verdict, samples, folder)
    return verdict, folder


def samples_of(
    lines: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]
) -> list[MemorySample]:
    """What a run's files say of the ends of its steps. On a host nobody counted tensors: what is resident."""
    process = {line["step"]: line["process_bytes"] for line in lines}  # the last phase of each step
    steps = {line["step"]: line for line in metrics if "num_tokens" in line}
    samples = []
    for step, end in sorted(steps.items()):
        before = steps.get(step - 1, {"num_tokens": 0})["num_tokens"]
        tokens = int(end["num_tokens"] - before)
        allocated = int(end["memory/allocated_gb"] * GB)
        if (reserved := end.get("memory/reserved_gb")) is None:
            samples.append(MemorySample(step, allocated, tokens=tokens))
        elif step in process:
            samples.append(MemorySample(step, process[step], allocated, int(reserved * GB), tokens))
    return samples


def report(verdict: LeakVerdict, samples: Sequence[MemorySample], folder: Path) -> None:
    """Write the verdict with its samples, and the plot, into the run folder."""
    content = {**verdict.to_dict(), "samples": [sample.__dict__ for sample in samples]}
    (folder / VERDICT).write_text(json.dumps(content, indent=1) + "\n")
    draw(verdict, samples, read_lines(folder / MEMORY_FILE), folder / PLOT)


def draw(
    verdict: LeakVerdict, samples: Sequence[MemorySample], lines: Sequence[Mapping[str, Any]], file: Path
) -> None:
    """Peaks by phase above what is held between steps."""
    with picture(file, (8, 4.5)) as axes:
        phases: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for line in lines:
            phases[line["phase"]].append((line["step"], line["process_bytes"] / GB))
        for phase, points in phases.items():
            axes.plot(*zip(*points, strict=True), linewidth=1, label=f"peak, {phase}")
        steps = [sample.step for sample in samples]
        axes.plot(steps, [sample.device_used_bytes / GB for sample in samples], "k", label="after the step")
        if all(sample.allocated_bytes is not None for sample in samples):
            held = [(sample.allocated_bytes or 0) / GB for sample in samples]
            axes.plot(steps, held, "k:", label="tensors after the step")
        axes.set(xlabel="step", ylabel="GB (2**30 bytes)", ylim=(0, None))
        axes.set_title(str(verdict).splitlines()[0], loc="left")
        axes.legend(frameon=False, ncols=2)


Show = Callable[[int, int | None, Sequence[Mapping[str, Any]]], None]


@contextmanager
def _view(console: Console) -> Iterator[Show]:
    """Shows memory by phase: a table that lives on a terminal, a line now and then elsewhere."""
    history: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=_SHOWN_STEPS))
    newest: dict[str, Mapping[str, Any]] = {}

    def take(lines: Sequence[Mapping[str, Any]]) -> None:
        for line in lines:
            newest[line["phase"]] = line
            history[line["phase"]].append(line["process_bytes"])

    if not console.is_terminal:

        def print_line(step: int, steps: int | None, lines: Sequence[Mapping[str, Any]]) -> None:
            take(lines)
            if step == 1 or step % 10 == 0 or step == steps:
                peaks = ", ".join(f"{name} {readable(each[-1])}" for name, each in history.items())
                console.print(f"step {step}: {peaks}", highlight=False)

        yield print_line
        return
    with Live(console=console, refresh_per_second=4) as live:

        def update(step: int, steps: int | None, lines: Sequence[Mapping[str, Any]]) -> None:
            take(lines)
            live.update(_table(step, steps, newest, history))

        yield update


def _table(
    step: int, steps: int | None, newest: Mapping[str, Mapping[str, Any]], history: Mapping[str, deque[int]]
) -> Table:
    table = Table(title=f"Memory, step {step}" + (f" of {steps}" if steps else ""), title_justify="left")
    for column in (
        "phase",
        "rows",
        "tensors were to add",
        "process",
        "retries",
        f"last {_SHOWN_STEPS} steps",
    ):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase, line in newest.items():
        sizes = (readable(line[f"{name}_bytes"] or 0) for name in ("predicted", "process"))
        table.add_row(phase, str(line["rows"]), *sizes, str(line["retries"]), _spark(history[phase]))
    return table


def _spark(values: Sequence[int]) -> str:
    """A line of blocks between the least and the largest value."""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
